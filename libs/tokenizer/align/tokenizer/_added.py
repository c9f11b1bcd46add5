"""Added tokens: found in the text before the model sees it, with the reference's rules for each flag."""

import re
from collections.abc import Callable
from typing import NamedTuple

from align.tokenizer import _unicode as U


class AddedToken(NamedTuple):
    """An entry of tokenizer.json's `added_tokens`: a token that is cut out of the text before the rest is tokenized."""

    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


# Says of a match (token, start, end) that it is to be left as text.
Skip = Callable[[AddedToken, int, int], bool]


def _trie_pattern(words: list[str]) -> str:
    """A pattern for the longest of `words` that begins here, with shared beginnings written once."""
    ends = "" in words
    by_first: dict[str, list[str]] = {}
    for word in words:
        if word:
            by_first.setdefault(word[0], []).append(word[1:])
    branches = []
    for first, tails in by_first.items():
        if len(tails) == 1:
            branches.append(re.escape(first + tails[0]))
        else:
            branches.append(re.escape(first) + _trie_pattern(tails))
    if not branches:
        return ""
    return "(?:" + "|".join(branches) + ")" + ("?" if ends else "")


class Matcher:
    """Finds the tokens of one group (normalised or not) in a text."""

    def __init__(self, by_text: dict[str, AddedToken]) -> None:
        self._by_text = by_text
        # Deep tries would nest the pattern beyond what `re` takes; the plain form is the same language.
        longest_first = sorted(by_text, key=len, reverse=True)
        deep = any(len(text) > 60 for text in by_text)
        pattern = "|".join(map(re.escape, longest_first)) if deep else _trie_pattern(longest_first)
        self._find = re.compile(pattern).finditer if by_text else None
        # `re` is several times quicker in looking for what begins with one character than with one of some, and most texts have no token.
        firsts = {text[:1] for text in by_text}
        heads = sorted({text[:3] for text in by_text}, reverse=True)
        patterns = [_trie_pattern([head for head in heads if head[:1] == first]) for first in firsts if 1 < len(firsts) < 5]
        self._heads = [re.compile(pattern).search for pattern in patterns]
        self._space: U.CodeSet | None = None
        self._word: U.CodeSet = ()
        if any(t.single_word or t.lstrip or t.rstrip for t in by_text.values()):
            self._space, self._word = U.property_set("s"), U.property_set("rust_w")

    def matches(self, text: str, skip: Skip) -> list[tuple[int, int, AddedToken]]:
        """(start, end, token), in order; `skip(token, start, end)` says which to leave as text."""
        if not self._find or (self._heads and not any(search(text) for search in self._heads)):
            return []
        out, last = [], 0
        for match in self._find(text):
            token = self._by_text[match[0]]
            start, end = match.span()
            if skip(token, start, end):
                continue
            if self._space is not None:
                if token.single_word and (self._at(text, start - 1, self._word) or self._at(text, end, self._word)):
                    continue
                while token.lstrip and start > last and self._at(text, start - 1, self._space):
                    start -= 1
                if token.lstrip:
                    start = max(start, last)  # the token before may have taken some of this one's own white space
                while token.rstrip and self._at(text, end, self._space):
                    end += 1
            if start < end:
                out.append((start, end, token))
            last = end
        return out

    @staticmethod
    def _at(text: str, index: int, members: U.CodeSet) -> bool:
        return 0 <= index < len(text) and U.contains(members, ord(text[index]))
