"""Byte-pair encoding of one word, and the cache of words.

Symbols are token strings; a merge is looked up as "left<separator>right". With an empty separator the ranks are those of whole tokens,
and any two neighbours that make one merge (tiktoken's rule). With byte-level models a word is first written in
GPT-2's byte alphabet, one printable character per byte.
"""

import itertools
import re
from array import array
from heapq import heapify, heappop, heappush
from typing import Any

_LONG = 48  # symbols; above, a heap beats scanning
_INFINITE = 1 << 60


def _byte_alphabet() -> list[str]:
    """GPT-2's bytes_to_unicode: printable Latin-1 stays, the other 68 bytes go to U+0100 and up."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    out = [""] * 256
    for code in kept:
        out[code] = chr(code)
    for shift, code in enumerate(c for c in range(256) if not out[c]):
        out[code] = chr(256 + shift)
    return out


BYTE_TO_CHAR = _byte_alphabet()
CHAR_TO_BYTE = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}


class Bpe(dict[str, tuple[int, ...]]):
    """The model, as the cache of what it made of each word: `bpe[word]` is the tuple of ids.

    A dict with __missing__ so that `chain.from_iterable(map(bpe.__getitem__, words))` runs in C.
    """

    def __init__(
        self,
        vocab: dict[str, int],
        ranks: dict[str, int],
        separator: str,
        *,
        unk: str | None,
        fuse_unk: bool,
        byte_fallback: bool,
        ignore_merges: bool,
        byte_level: bool,
        cache_words: int = 100_000,
    ) -> None:
        super().__init__()
        self.vocab, self.ranks, self.separator = vocab, ranks, separator
        self.unk, self.fuse_unk, self.ignore_merges, self.byte_level = unk, fuse_unk, ignore_merges, byte_level
        self.byte_tokens = [f"<0x{b:02X}>" for b in range(256)] if byte_fallback else None
        self.cache_words = cache_words
        self._last: tuple[str, list[str]] = ("", [])  # the last long word, which no cache keeps
        self.space = " "  # what a space in a word stands for
        self._pairs = {key[0] + key[-1]: rank for key, rank in ranks.items() if len(key) == 2 + len(separator)}  # of single characters
        self._whole_alphabet = byte_level and all(char in vocab for char in BYTE_TO_CHAR)

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = tuple(map(self.vocab.__getitem__, self.symbols(word)))
        if len(word) <= 256:
            if len(self) >= self.cache_words:
                self.clear()
            self[word] = ids
        return ids

    def written(self, word: str) -> str:
        """The word in the vocabulary's writing."""
        return to_alphabet(word) if self.byte_level else word.replace(" ", self.space)

    def symbols(self, word: str) -> list[str]:
        """The token strings of a word."""
        if len(word) <= 256:
            return self._symbols(self.written(word))
        last = self._last
        if last[0] != word:
            last = self._last = (word, self._symbols(self.written(word)))
        return last[1]

    def _symbols(self, word: str) -> list[str]:
        if self.ignore_merges and word in self.vocab:
            return [word]
        if len(word) <= _LONG and (self._whole_alphabet or all(map(self.vocab.__contains__, word))):
            pair = self._pairs.get
            return self._merge(list(word), [pair(a + b, _INFINITE) for a, b in itertools.pairwise(word)])
        parts = self.first_symbols(word)
        if len(parts) > _LONG:
            return self._merge_long(parts)
        rank, sep = self.ranks.get, self.separator
        return self._merge(parts, [rank(a + sep + b, _INFINITE) for a, b in itertools.pairwise(parts)])

    def first_symbols(self, chars: str) -> list[str]:
        """Characters that are no token become byte tokens, else the unknown token, else nothing."""
        parts: list[str] = []
        unk = self.unk or ""
        waiting = False  # an unknown token that is put down when the next known character comes, as the reference does
        for char in chars:
            if char in self.vocab:
                parts += [unk, char] if waiting else [char]
                waiting = False
                continue
            if self.byte_tokens:
                tokens = [self.byte_tokens[byte] for byte in char.encode()]
                if all(token in self.vocab for token in tokens):
                    parts += tokens
                    continue
            if self.unk is not None:
                if waiting and not self.fuse_unk:
                    parts.append(unk)
                waiting = True
        return [*parts, unk] if waiting else parts

    def _merge(self, parts: list[str], found: list[int]) -> list[str]:
        """Merges the pair of lowest rank, leftmost first, until none is left; `found` holds the rank of each adjacent pair."""
        get, sep = self.ranks.get, self.separator
        while found:
            best = min(found)
            if best == _INFINITE:
                break
            at = found.index(best)
            token = parts[at] = parts[at] + parts.pop(at + 1)
            del found[at]
            if at < len(found):
                found[at] = get(token + sep + parts[at + 1], _INFINITE)
            if at:
                found[at - 1] = get(parts[at - 1] + sep + token, _INFINITE)
        return parts

    def _merge_long(self, parts: list[str]) -> list[str]:
        """The same with a heap of rank × size + position over a linked list."""
        get, sep, size = self.ranks.get, self.separator, len(parts)
        after, before = array("q", range(1, size + 1)), array("q", range(-1, size - 1))
        heap = []
        for at in range(size - 1):
            rank = get(parts[at] + sep + parts[at + 1])
            if rank is not None:
                heap.append(rank * size + at)
        heapify(heap)
        alive = parts
        while heap:
            rank, at = divmod(heappop(heap), size)
            left = alive[at]  # "" where it has gone into its left neighbour
            right_at = after[at]
            # An entry is stale when either side has changed since: then the pair has another rank, or none.
            if not left or right_at >= size or get(left + sep + alive[right_at]) != rank:
                continue
            token = alive[at] = left + alive[right_at]
            alive[right_at] = ""
            nxt = after[at] = after[right_at]
            if nxt < size:
                before[nxt] = at
                rank = get(token + sep + alive[nxt])
                if rank is not None:
                    heappush(heap, rank * size + at)
            prev = before[at]
            if prev >= 0:
                rank = get(alive[prev] + sep + token)
                if rank is not None:
                    heappush(heap, rank * size + prev)
        return [part for part in alive if part]


def to_alphabet(word: str) -> str:
    """A word's UTF-8 bytes in GPT-2's byte alphabet."""
    if word.isascii() and word.isprintable():
        return word.replace(" ", "\u0120")
    return "".join(map(BYTE_TO_CHAR.__getitem__, word.encode()))


# How a text of a SentencePiece-style model may be cut before merging, finest first; {also} are characters beyond ASCII that go with
# ASCII punctuation, all others go with the ASCII letters. {space} is U+2581, and the space where it stands for U+2581. Each pattern
# tiles every text, and whether it cuts between two characters depends on these two alone.
_SEGMENTS = (
    "\n|[0-9]|[{space}]*(?:[^\\x00-@\\[-`{{-\\x7f\u2581{also}]+|[\\x00-\\x09\\x0b-\\x1f{other}!-/:-@\\[-`{{-\\x7f{also}]+)|[{space}]+",
    "\n|[{space}]*[^\n{space}]+|[{space}]+",
    "\n+|[{space}]*[^\n{space}]+|[{space}]+",
)
_ASCII_SEGMENTS = "\n|[0-9]| *(?:[A-Za-z]+|[\\x00-\\x09\\x0b-\\x1f!-/:-@\\[-`{-\\x7f]+)| +"  # the first, for ASCII texts
_BESIDE_PUNCTUATION = re.compile("[!-/:-@\\[-`{-~]([^\\x00-\\x7f\u2581])|([^\\x00-\\x7f\u2581])(?=[!-/:-@\\[-`{-~])")


def segmenter(bpe: Bpe) -> "_Segmenter | None":
    """A function that cuts a text where no merge can reach across, or None where no such cut is proved.

    A cut between two characters is lossless when no token that merging can reach holds them side by side: BPE never joins
    across it, and the two sides do not see each other. Byte and unknown tokens must take no part in merges, and
    unknown characters must not be fused across a cut.
    """
    sep = bpe.separator
    if bpe.byte_level or not bpe.ranks or bpe.ignore_merges:
        return None
    parts = set(sep.join(bpe.ranks).split(sep))
    if bpe.byte_tokens and (not all(t in bpe.vocab for t in bpe.byte_tokens) or not parts.isdisjoint(bpe.byte_tokens)):
        return None
    if (not bpe.byte_tokens and bpe.unk is not None) or bpe.unk in parts:
        return None
    raw = bpe.space != " "
    for find in (_products, _reachable):
        products = find(bpe)
        also = "".join(sorted({a or b for a, b in _BESIDE_PUNCTUATION.findall("\n".join(products))}))
        for pattern in _SEGMENTS:
            filled = pattern.format(also=re.escape(also), space=" \u2581" if raw else "\u2581", other="" if raw else " ")
            if all(map(re.compile(filled).fullmatch, products)):
                return _Segmenter(filled, _ASCII_SEGMENTS if raw and pattern is _SEGMENTS[0] else filled)
    return None


class _Segmenter:
    """The proved cut; a class, so that tokenizers can be pickled."""

    def __init__(self, pattern: str, ascii_pattern: str) -> None:
        self.patterns = pattern, ascii_pattern
        self._any, self._ascii = re.compile(pattern).findall, re.compile(ascii_pattern).findall

    def __reduce__(self) -> tuple[Any, ...]:
        return _Segmenter, self.patterns

    def __call__(self, text: str) -> list[str]:
        return self._ascii(text) if text.isascii() else self._any(text)


def _products(bpe: Bpe) -> list[str]:
    """All that the merges name: a superset of what merging can make, quicker to have."""
    return [merge.replace(bpe.separator, "") for merge in bpe.ranks]


def _reachable(bpe: Bpe) -> set[str]:
    """The products that merging can make, starting from single characters."""
    known = {token for token in bpe.vocab if len(token) == 1}
    made: set[str] = set()
    waiting = [tuple(merge.split(bpe.separator)) for merge in bpe.ranks]
    while True:
        left = []
        for pair in waiting:
            if pair[0] in known and pair[1] in known:
                known.add(pair[0] + pair[1])
                made.add(pair[0] + pair[1])
            else:
                left.append(pair)
        if len(left) == len(waiting):
            return made
        waiting = left
