"""Pre-tokenizer patterns (Oniguruma and Rust syntax) as Python regular expressions over class letters.

The subset is what published tokenizers use: alternation, groups, classes, \\p{…}, quantifiers (greedy, lazy, possessive), look-ahead,
look-behind of one character, and (?i:…) on ASCII letters. Anything else raises, with the place in the pattern.
"""

import re
from collections.abc import Callable
from itertools import accumulate, chain, pairwise
from typing import Any, NoReturn

from align.tokenizer import _unicode as U
from align.tokenizer._errors import TokenizerError

_SIMPLE = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b", "0": "\0"}
_GROUPS = (("(?:", ""), ("(?i:", "i"), ("(?=", "="), ("(?!", "!"), ("(?<=", "b"), ("(?<!", "b"), ("(?>", ">"), ("(", ""))
_NO_WORD_IN_BRACKETS = U.from_ranges([(0xB2, 0xB3), (0xB9, 0xB9), (0xBC, 0xBE)])  # ², ³, ¹, ¼, ½, ¾: Oniguruma's own inconsistency
MARK = "\ud800"  # no text has it
RUN = "[0-9]{1,16}+"  # of digits, each of which is a word
_DIGITS = (0x30, 0x3A)
_LOOKS = ("(?=", "(?!", "(?<=", "(?<!")
_ENDLESS = ("*", "+")  # how a repeat without a bound is written, or the possessive form of one


def _folded(members: U.CodeSet, fail: Any) -> U.CodeSet:
    """ASCII-only case folding: what (?i:'s) means to the reference, which does not match U+017F there."""
    ascii_part = U.intersect(members, (0, 0x80))
    if ascii_part != members and members[-1] != U.LIMIT:
        fail("case-insensitive matching beyond ASCII")
    pairs = []
    for low in range(26):
        upper, lower = 65 + low, 97 + low
        if U.contains(members, upper) or U.contains(members, lower):
            pairs += [(upper, upper), (lower, lower)]
    return U.union(members, U.from_ranges(pairs)) if pairs else members


class _Parser:
    """Recursive descent; the result is a list of strings (syntax) and CodeSets (one character each)."""

    def __init__(self, pattern: str, where: str) -> None:
        self.pattern, self.where, self.at = pattern, where, 0
        self.out: list[Any] = []

    def fail(self, what: str) -> NoReturn:
        raise TokenizerError(f"{self.where}: {what} is not supported in a pattern (character {self.at} of {self.pattern!r})")

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def take(self, text: str) -> bool:
        if self.peek(text):
            self.at += len(text)
            return True
        return False

    def next(self) -> str:
        if self.at >= len(self.pattern):
            self.fail("an unfinished expression")
        char = self.pattern[self.at]
        self.at += 1
        return char

    def alternation(self, fold: bool, depth: int) -> int:
        """Parses up to ')' or the end; the smallest length that can match."""
        if depth > 50:
            self.fail("nesting deeper than 50")
        least = self.sequence(fold, depth)
        while self.take("|"):
            self.out.append("|")
            least = min(least, self.sequence(fold, depth))
        return least

    def sequence(self, fold: bool, depth: int) -> int:
        least = 0
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            start = len(self.out)
            length, quantifiable = self.atom(fold, depth)
            least += length * self.quantifier(start, quantifiable)
        return least

    def atom(self, fold: bool, depth: int) -> tuple[int, bool]:
        if self.peek("("):
            return self.group(fold, depth)
        members = self.one_character()
        self.out.append(_folded(members, self.fail) if fold else members)
        return 1, True

    def group(self, fold: bool, depth: int) -> tuple[int, bool]:
        for opening, look in _GROUPS:  # noqa: B007, both are used after the loop
            if self.take(opening):
                break
        if opening == "(" and self.peek("?"):
            self.fail(f"the group ({self.pattern[self.at : self.at + 2]}")
        self.out.append("(?:" if look in ("", "i") else opening)
        start = len(self.out)
        least = self.alternation(fold or look == "i", depth + 1)
        if not self.take(")"):
            self.fail("a group without its end")
        if look == "b" and (len(self.out) != start + 1 or isinstance(self.out[start], str)):
            self.fail("look-behind of more than one character")
        self.out.append(")")
        return (least, True) if look in ("", "i", ">") else (0, False)

    def quantifier(self, start: int, quantifiable: bool) -> int:
        """Emits a quantifier if one follows; the smallest count."""
        match = re.compile(r"([*+?]|\{(\d{1,4})?(,)?(\d{1,4})?\})([?+]?)").match(self.pattern, self.at)
        if not match or (match[1][0] == "{" and not (match[2] or match[4])):
            return 1
        if not quantifiable:
            self.fail("a quantifier after a look-around")
        body, mode = match[1], match[5]
        if body[0] == "{" and mode == "+":
            self.fail("{n,m}+")  # Oniguruma reads it as a greedy repeat of a repeat, Python as possessive
        self.at = match.end()
        if self.pattern[self.at : self.at + 1] in ("*", "+", "?") or re.compile(r"\{\d*,?\d*\}").match(self.pattern, self.at):
            self.fail("a quantifier after a quantifier")
        endless = body in ("*", "+") or (match[3] and not match[4])
        if endless and mode != "+" and self.out[start:] and any(isinstance(p, str) and p[-1:] in _ENDLESS for p in self.out[start:]):
            self.fail("an endless repeat of an endless repeat, which can take for ever,")
        self.out.append(body + mode)
        if body[0] != "{":
            return 1 if body == "+" else 0
        if match[2] and match[4] and int(match[2]) > int(match[4]):
            self.fail("a quantifier whose bounds are turned round")
        return int(match[2] or 0)

    def one_character(self) -> U.CodeSet:
        char = self.next()
        if char == "[":
            return self.bracket(1)
        if char == "\\":
            return self.escape()
        if char == ".":
            return U.invert((10, 11))
        if char in "*+?{}^$)":
            self.at -= 1
            self.fail(repr(char) + " here")
        return (ord(char), ord(char) + 1)

    def escape(self, in_bracket: bool = False) -> U.CodeSet:
        char = self.next()
        if char in _SIMPLE:
            return (ord(_SIMPLE[char]), ord(_SIMPLE[char]) + 1)
        if char in "pP":
            return self.property(char == "P")
        if char in "sSdDwW":
            members = U.find_set(char.lower())
            if members is None:
                self.fail("\\" + char)
            if in_bracket and char in "wW":
                members = U.minus(members, _NO_WORD_IN_BRACKETS)
            return U.invert(members) if char.isupper() else members
        if char in "xu":
            match = re.compile(r"\{([0-9A-Fa-f]{1,6})\}|([0-9A-Fa-f]{2}|[0-9A-Fa-f]{4})").match(self.pattern, self.at)
            size = 2 if char == "x" else 4
            code = int(match[1] or match[2][:size], 16) if match else U.LIMIT
            if not match or code >= U.LIMIT or (match[2] and len(match[2]) < size):
                self.fail("\\" + char)
            self.at += len(match[0]) if match[1] else size
            return (code, code + 1)
        if char.isalnum():
            self.fail("\\" + char)
        return (ord(char), ord(char) + 1)

    def property(self, negated: bool) -> U.CodeSet:
        match = re.compile(r"\{(\^?)(\w+)\}|([A-Z])").match(self.pattern, self.at)
        name = match and (match[2] or match[3])
        members = U.find_set(name) if name and name[0].isupper() else None
        if members is None or match is None:
            self.fail("\\p" + self.pattern[self.at : self.at + 12])
        self.at = match.end()
        return U.invert(members) if negated != bool(match[1]) else members

    def bracket(self, depth: int) -> U.CodeSet:
        if depth > 10:
            self.fail("nesting deeper than 10")
        negated = self.take("^")
        members: U.CodeSet = ()
        first = True
        while first or not self.peek("]"):
            if self.peek("[:") or self.peek("&&"):
                self.fail(repr(self.pattern[self.at : self.at + 2]))
            if self.take("["):
                members = U.union(members, self.bracket(depth + 1))
            else:
                members = U.union(members, self.bracket_item())
            first = False
        self.at += 1
        return U.invert(members) if negated else members

    def bracket_item(self) -> U.CodeSet:
        low = self.escape(True) if self.take("\\") else (lambda c: (ord(c), ord(c) + 1))(self.next())
        if not self.peek("-") or self.pattern[self.at + 1 : self.at + 2] in ("]", ""):
            return low
        self.at += 1
        high = self.escape(True) if self.take("\\") else (lambda c: (ord(c), ord(c) + 1))(self.next())
        if len(low) != 2 or len(high) != 2 or low[1] != low[0] + 1 or high[1] != high[0] + 1 or low[0] > high[0]:
            self.fail("this range")
        return (low[0], high[1])


def parse(pattern: str, where: str) -> list[Any]:
    """The pattern as a list of syntax strings and CodeSets; refuses one that can match the empty text."""
    parser = _Parser(pattern, where)
    least = parser.alternation(False, 0)
    if parser.at < len(pattern):
        parser.fail("an unopened ')'")
    if least < 1:
        parser.at = 0
        parser.fail("a match of the empty text")
    return parser.out


def literal(text: str) -> list[Any]:
    """The pattern that matches exactly this text."""
    return [(ord(c), ord(c) + 1) for c in text]


def digits_first(pattern: list[Any], digits: U.CodeSet) -> list[Any]:
    """One pattern for "split every digit off, then split the rest by `pattern`".

    A piece ends where a digit stands, so inside `pattern` no class may match a digit, and a look-ahead sees the end of the text there.
    """
    return [*(p if isinstance(p, str) else U.minus(p, digits) for p in pattern), "|", digits]


class Finder:
    """Cuts a text into matches and the stretches between them.

    `words(text)` gives adjacent pieces whose concatenation is the text; `pieces(text)` gives (piece, is_match). covers: some match begins
    at every place of every text. branches: the outermost alternatives. letters: each class as the letters that its characters have in
    the form with one letter per class (ASCII characters are their own).

    Python's `re` walks through a class beyond the BMP range by range, which is slow. So there are two forms of the pattern: classes
    cut down to the BMP for texts without astral characters, and one letter per class of characters for the rest and for ASCII.
    """

    def __init__(self, pattern: list[Any], where: str) -> None:
        self._pattern, self._where = pattern, where
        self._sets = list(dict.fromkeys(p for p in pattern if not isinstance(p, str)))
        self._map = U.ClassMap(self._sets)
        if len(self._map.blocks) > 0x80:
            raise TokenizerError(f"{where}: the pattern uses more than 128 classes of characters")
        self._spelled = letters = {s: self._letters(s, i) for i, s in enumerate(self._sets)}
        self.branches = self._alternatives()
        self.letters = {s: frozenset(chain.from_iterable(map(range, x[::2], x[1::2]))) for s, x in letters.items()}
        self._match = self._compile(letters)
        self.covers = self._covered(letters)
        self._tiling = self._tiled(letters)
        self.runs = self._parts_digits()
        self.ascii_words = self._tiling.findall
        self._bmp: re.Pattern[str] | None = None
        self._with_mark: re.Pattern[str] | None = None

    def _compile(self, classes: dict[str, Any], head: str = "", tail: str = "") -> re.Pattern[str]:
        branches = ["".join(p if isinstance(p, str) else _class(classes[p]) for p in branch) for branch in map(_unfolded, self.branches)]
        body = "|".join(branches)
        try:
            return re.compile(head + body + tail.format(body=body))
        except (re.error, OverflowError, RecursionError) as error:
            raise TokenizerError(f"{self._where}: Python cannot compile the pattern: {error}") from None

    def _tiled(self, classes: dict[str, Any]) -> re.Pattern[str]:
        """The pattern, and after it what it leaves over up to its next match, so that findall tiles the text."""
        return self._compile(classes, tail="" if self.covers else "|(?s:(?:(?!{body}).)+)")

    def _alternatives(self) -> list[list[Any]]:
        """The pattern cut at its outermost "|"."""
        branches: list[list[Any]] = [[]]
        depth = 0
        for item in self._pattern:
            depth += item.startswith("(") - (item == ")") if isinstance(item, str) else 0
            if item == "|" and not depth:
                branches.append([])
            else:
                branches[-1].append(item)
        return branches

    def _covered(self, letters: dict[str, Any]) -> bool:
        """Whether some match begins at every place of every text: each letter alone must match an alternative without look-around."""
        plain = [b for b in self.branches if not any(isinstance(i, str) and i[:3] in ("(?=", "(?!", "(?<", "(?>") for i in b)]
        sure = re.compile("|".join("".join(i if isinstance(i, str) else _class(letters[i]) for i in b) for b in plain) if plain else "(?!)")
        return all(sure.fullmatch(chr(code)) for code in range(0x80 + len(self._map.blocks)))

    def _parts_digits(self) -> bool:
        """Whether each ASCII digit is a match of its own: one alternative is a class that has them all, and no other class that is matched
        has any."""
        items = [(before, item) for branch in self.branches for before, item in pairwise(["", *branch])]
        matched = [item for before, item in items if not isinstance(item, str) and before not in _LOOKS]
        having = [members for members in matched if U.intersect(members, _DIGITS)]
        return len(having) == 1 and [having[0]] in self.branches and U.intersect(having[0], _DIGITS) == _DIGITS

    def _letters(self, members: U.CodeSet, index: int) -> U.CodeSet:
        beyond = [(0x80 + i, 0x80 + i) for i, block in enumerate(self._map.blocks) if block[index]]
        return U.union(U.intersect(members, (0, 0x80)), U.from_ranges(beyond))

    def words(self, text: str) -> list[str]:
        if text.isascii():
            return self.ascii_words(text)
        if len(text.encode("utf-16-le", "surrogatepass")) != 2 * len(text):  # astral characters; this is the fastest test
            return cut(text, map(len, self._tiling.findall(text.translate(self._map))))
        if self._bmp is None:
            self._bmp = self._tiled({s: U.intersect(s, (0, 0x10000)) for s in self._sets})
        return self._bmp.findall(text)

    def marked(self, text: str) -> list[str]:
        """The words of an ASCII text with marks in it, each a word of its own; but if `runs`, digits that follow each other stay together,
        up to 16. Only if `covers`, and if the pattern has no look-around but (?!class): no class holds the mark, so what stands before one
        is cut as at the end of a text."""
        if self._with_mark is None:
            self._with_mark = self._compile(self._spelled, f"{MARK}|{RUN}|" if self.runs else f"{MARK}|")
        return self._with_mark.findall(text)

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """Every match and every stretch between two of them, in order."""
        plain = text if text.isascii() else text.translate(self._map)
        out, last = [], 0
        for match in self._match.finditer(plain):
            if match.start() > last:
                out.append((text[last : match.start()], False))
            last = match.end()
            out.append((text[match.start() : last], True))
        if last < len(text):
            out.append((text[last:], False))
        return out


def _unfolded(branch: list[Any]) -> list[Any]:
    """An outermost alternative in the form that `re` is quickest with: x?y as xy|y, of which it sees at once that neither can match here;
    and a repeat at the end, after which nothing can ask for fewer, as a possessive one."""
    if branch and branch[-1] in ("+", "*"):
        branch = [*branch[:-1], branch[-1] + "+"]
    if len(branch) > 2 and branch[1] == "?" and not isinstance(branch[0], str):
        return [branch[0], *branch[2:], "|", *branch[2:]]
    return branch


def _class(members: U.CodeSet) -> str:
    """A set as a class of `re`."""
    if not members:
        return r"[^\x00-\U0010ffff]"
    if len(members) == 2 and members[1] == members[0] + 1:
        return re.escape(chr(members[0]))
    pairs = [(members[i], members[i + 1] - 1) for i in range(0, len(members), 2)]
    return "[" + "".join(f"\\U{a:08x}" if a == b else f"\\U{a:08x}-\\U{b:08x}" for a, b in pairs) + "]"


def many_at_once(pattern: str, count: int, from_length: int = 100) -> Callable[[str], list[str]]:
    """`re.compile(pattern).findall`, less empty matches at the end, for a pattern that tiles every text and has no groups. With `count`
    matches to a round, as the engine spends more on beginning a round than on most matches; those left over at the end are empty."""
    one = re.compile(pattern)
    single = one.findall
    several = re.compile((f"({pattern})" if one.fullmatch("") else f"((?:{pattern}|))") * count).findall

    def find(text: str) -> list[str]:
        found = single(text) if len(text) < from_length else list(chain.from_iterable(several(text)))
        while found and not found[-1]:
            del found[-1]
        return found

    return find


def cut(text: str, lengths: Any) -> list[str]:
    ends = list(accumulate(lengths))
    return list(map(text.__getitem__, map(slice, [0, *ends], ends)))
