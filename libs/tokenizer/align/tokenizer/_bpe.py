"""Byte-pair encoding of one word, and the cache of words.

Symbols are token strings; a merge is looked up as "left<separator>right". With byte-level models a word is first written in
GPT-2's byte alphabet, one printable character per byte.
"""

import re
from array import array
from heapq import heapify, heappop, heappush

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


class Bpe(dict):
    """The model, as the cache of what it made of each word: `bpe[word]` is the tuple of ids.

    A dict with __missing__ so that `chain.from_iterable(map(bpe.__getitem__, words))` runs in C.
    """

    def __init__(self, vocab, ranks, separator, *, unk, fuse_unk, byte_fallback, ignore_merges, byte_level, cache_words=100_000):
        super().__init__()
        self.vocab, self.ranks, self.separator = vocab, ranks, separator
        self.unk, self.fuse_unk, self.ignore_merges, self.byte_level = unk, fuse_unk, ignore_merges, byte_level
        self.byte_tokens = [f"<0x{b:02X}>" for b in range(256)] if byte_fallback else None
        self.cache_words = cache_words

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = tuple(map(self.vocab.__getitem__, self.symbols(word)))
        if len(word) <= 256:
            if len(self) >= self.cache_words:
                self.clear()
            self[word] = ids
        return ids

    def symbols(self, word: str) -> list[str]:
        """The token strings of a word."""
        if self.byte_level:
            word = to_alphabet(word)
        if self.ignore_merges and word in self.vocab:
            return [word]
        parts = list(word)
        if not all(map(self.vocab.__contains__, parts)):
            parts = self._known(parts)
        return self._merge(parts) if len(parts) <= _LONG else self._merge_long(parts)

    def _known(self, chars: list[str]) -> list[str]:
        """Characters that are no token become byte tokens, else the unknown token, else nothing."""
        parts: list[str] = []
        waiting = False  # an unknown token that is put down when the next known character comes, as the reference does
        for char in chars:
            if char in self.vocab:
                parts += [self.unk, char] if waiting else [char]
                waiting = False
                continue
            if self.byte_tokens:
                tokens = [self.byte_tokens[byte] for byte in char.encode()]
                if all(token in self.vocab for token in tokens):
                    parts += tokens
                    continue
            if self.unk is not None:
                if waiting and not self.fuse_unk:
                    parts.append(self.unk)
                waiting = True
        return [*parts, self.unk] if waiting else parts

    def _merge(self, parts: list[str]) -> list[str]:
        """Merges the pair of lowest rank, leftmost first, until none is left."""
        get, sep = self.ranks.get, self.separator
        found = [get(a + sep + b, _INFINITE) for a, b in zip(parts, parts[1:])]
        while found:
            best = min(found)
            if best == _INFINITE:
                break
            at = found.index(best)
            token = parts[at] + parts.pop(at + 1)
            parts[at] = token
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
        alive: list[str | None] = parts
        while heap:
            rank, at = divmod(heappop(heap), size)
            left = alive[at]
            right_at = after[at]
            # An entry is stale when either side has changed since: then the pair has another rank, or none.
            if left is None or right_at >= size or get(left + sep + alive[right_at]) != rank:
                continue
            token = alive[at] = left + alive[right_at]
            alive[right_at] = None
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
        return [part for part in alive if part is not None]


def to_alphabet(word: str) -> str:
    """A word's UTF-8 bytes in GPT-2's byte alphabet."""
    if word.isascii() and word.isprintable():
        return word.replace(" ", "\u0120")
    return "".join(map(BYTE_TO_CHAR.__getitem__, word.encode()))


# How a text of a SentencePiece-style model may be cut before merging, finest first. "Letters" are A–Z, a–z and everything beyond
# ASCII but U+2581. Each pattern tiles every text, and whether it cuts between two characters depends on these two alone.
_SEGMENTS = (
    "\n|[0-9]|\u2581*(?:[^\\x00-@\\[-`{-\\x7f\u2581]+|[\\x00-\\x09\\x0b-/:-@\\[-`{-\\x7f]+)|\u2581+",
    "\n|\u2581*[^\n\u2581]+|\u2581+",
    "\n+|\u2581*[^\n\u2581]+|\u2581+",
)


def segmenter(bpe: Bpe):
    """A `findall` that cuts a text where no merge can reach across, or None where no such cut is proved.

    A cut between two characters is lossless when no token that merging can reach holds them side by side: BPE never joins
    across it, and the two sides do not see each other. Byte and unknown tokens must take no part in merges, and
    unknown characters must not be fused across a cut.
    """
    sep = bpe.separator
    parts = {part for merge in bpe.ranks for part in merge.split(sep)}
    if bpe.byte_level or not bpe.ranks or bpe.ignore_merges:
        return None
    if bpe.byte_tokens and (not all(t in bpe.vocab for t in bpe.byte_tokens) or not parts.isdisjoint(bpe.byte_tokens)):
        return None
    if not bpe.byte_tokens and bpe.unk is not None:
        return None
    if bpe.unk in parts:
        return None
    for pattern in _SEGMENTS:
        one_word = re.compile(pattern)
        if all(map(one_word.fullmatch, (merge.replace(sep, "") for merge in bpe.ranks))):
            return one_word.findall
    reachable = _reachable(bpe)
    for pattern in _SEGMENTS:
        one_word = re.compile(pattern)
        if all(map(one_word.fullmatch, reachable)):
            return one_word.findall
    return None


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
