"""Byte-pair encoding of one word.

Symbols are token ids. `rows[left]` maps each right-hand id that merges with `left` to the merge's rank, and `made[rank]` is the id of
what it makes. The texts of symbols are needed for offsets and reports alone.
"""

from array import array
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import pairwise, repeat
from operator import add
from sys import byteorder
from typing import Any, NamedTuple

_LONG = 48  # symbols; above, a heap beats scanning
_INFINITE = 1 << 60
_NOTHING: dict[int, int] = {}


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


class Merges(NamedTuple):
    """The merges by ids. rows[-1] is empty: −1 stands after the last symbol of a word."""

    rows: Any  # rows[left].get(right, default)
    made: Any  # made[rank]


def merges_of(vocab: dict[str, int], flat: list[str]) -> Merges:
    """From the tokens left, right, left, right, … in order of rank. A repeated merge keeps its last rank, as in the reference.
    Raises KeyError where a token is not in the vocabulary."""
    made = _ids_of(vocab, list(map(add, flat[::2], flat[1::2])))
    lefts, rights = map(vocab.__getitem__, flat[::2]), map(vocab.__getitem__, flat[1::2])
    rows: Any = _row_table(vocab)
    for rank, (left, right) in enumerate(zip(lefts, rights, strict=True)):
        row = rows[left]
        if row:
            row[right] = rank
        else:
            rows[left] = {right: rank}
    return Merges(rows, made)


def _ids_of(vocab: dict[str, int], products: list[str]) -> list[int]:
    """Most files list the tokens as the merges make them: comparing is quicker than looking each up."""
    tokens = list(vocab)
    start = tokens.index(products[0]) if products and products[0] in vocab else 0
    if tokens[start : start + len(products)] == products:
        return list(vocab.values())[start : start + len(products)]
    return list(map(vocab.__getitem__, products))


def _row_table(vocab: dict[str, int]) -> Any:
    """A list, unless the ids have wide gaps."""
    largest = max(vocab.values(), default=0)
    if largest <= 2 * len(vocab) + 1000:
        return [_NOTHING] * (largest + 2)
    return dict.fromkeys([*vocab.values(), -1], _NOTHING)


class _RankRow:
    """What one token can merge with, where any two neighbours merge that make a token."""

    def __init__(self, left: str, tokens: dict[int, str], ranks: dict[str, int]) -> None:
        self._left, self._tokens, self._ranks = left, tokens, ranks

    def get(self, right: int, default: Any = None) -> Any:
        return self._ranks.get(self._left + self._tokens[right], default) if right >= 0 else default


class _RankRows(dict[int, Any]):
    """The rows of tiktoken-style files, which rank whole tokens; each is made when it is first needed."""

    def __init__(self, vocab: dict[str, int], ranks: dict[str, int]) -> None:
        super().__init__({-1: _NOTHING})
        self._tokens, self._ranks = {i: token for token, i in vocab.items()}, ranks

    def __missing__(self, left: int) -> _RankRow:
        row = self[left] = _RankRow(self._tokens[left], self._tokens, self._ranks)
        return row


def merges_of_ranks(vocab: dict[str, int], ranks: dict[str, int]) -> Merges:
    """Where the ranks are those of whole tokens, and any two neighbours that make one merge (tiktoken's rule)."""
    return Merges(_RankRows(vocab, ranks), dict(zip(ranks.values(), map(vocab.__getitem__, ranks), strict=True)))


class Bpe:
    """The model: `ids(word)`."""

    def __init__(
        self,
        vocab: dict[str, int],
        merges: Merges,
        *,
        unk: str | None,
        fuse_unk: bool,
        byte_fallback: bool,
        ignore_merges: bool,
        byte_level: bool,
        cache_words: int = 150_000,
    ) -> None:
        self.vocab = vocab
        self._rows, self._made = merges.rows, merges.made
        self.unk, self.fuse_unk, self.ignore_merges, self.byte_level = unk, fuse_unk, ignore_merges, byte_level
        self.byte_tokens = [f"<0x{b:02X}>" for b in range(256)] if byte_fallback else None
        self.cache_words = cache_words
        self._last: tuple[str, tuple[int, ...]] = ("", ())  # the last long word, which is asked for several times
        self._tokens: dict[int, str] | None = None
        self.reads_spaces_as(" ")

    def reads_spaces_as(self, space: str) -> None:
        """Sets what a space in a word stands for."""
        self.space = space
        # The id of each byte, or of each character that is a token; None or nothing where there is none.
        self._bytes = [self.vocab.get(char) for char in BYTE_TO_CHAR] if self.byte_level else []
        self._symbols = {char: i for char, i in zip(BYTE_TO_CHAR, self._bytes, strict=False) if i is not None}
        self._quick = self.byte_level and None not in self._bytes[32:127]
        self._chars = {} if self.byte_level else {char: i for char, i in self.vocab.items() if len(char) == 1}
        if space != " ":
            self._chars.pop(" ", None)
            self._chars.update({" ": self._chars[space]} if space in self._chars else {})

    def ids(self, word: str) -> tuple[int, ...]:
        """The ids of a word."""
        if len(word) <= 256:
            return self._ids(word)
        if self._last[0] != word:
            self._last = (word, self._ids(word))
        return self._last[1]

    def coded(self, words: list[str], code: str) -> dict[str, bytes]:
        """For each word its ids as the bytes of an array of type `code`."""
        if not self._quick:
            return {word: array(code, self.ids(word)).tobytes() for word in words}
        # Words of printable ASCII characters, all of which are symbols: what can be done for all at once is.
        plain = [word for word in words if word.isascii() and word.isprintable()]
        texts = "\n".join(plain).replace(" ", BYTE_TO_CHAR[32]).split("\n")
        width = array(code).itemsize
        symbol, merged = self._symbols.__getitem__, self.merged
        tokens: Iterable[int | None] = map(self.vocab.get, texts) if self.ignore_merges else repeat(None)
        out = {}
        for word, text, known in zip(plain, texts, tokens, strict=False):
            if known is not None:
                out[word] = known.to_bytes(width, byteorder)
            elif len(text) <= _LONG:
                out[word] = array(code, merged(list(map(symbol, text)))).tobytes()
        for word in words if len(out) < len(words) else ():
            if word not in out:
                out[word] = array(code, self.ids(word)).tobytes()
        return out

    def _ids(self, word: str) -> tuple[int, ...]:
        if self.ignore_merges:
            known = self.vocab.get(self.written(word))
            if known is not None:
                return (known,)
        parts: list[Any] = list(map(self._bytes.__getitem__, word.encode()) if self.byte_level else map(self._chars.get, word))
        if None in parts:
            parts = list(map(self.vocab.__getitem__, self.first_symbols(self.written(word))))
        return tuple(self.merged(parts) if len(parts) <= _LONG else self.merged_long(parts))

    def written(self, word: str) -> str:
        """The word in the vocabulary's writing."""
        return to_alphabet(word) if self.byte_level else word.replace(" ", self.space)

    def symbols(self, word: str) -> list[str]:
        """The token strings of a word."""
        return list(map(self.token_of, self.ids(word)))

    def token_of(self, token_id: int) -> str:
        if self._tokens is None:
            self._tokens = {i: token for token, i in self.vocab.items()}
        return self._tokens[token_id]

    def first_symbols(self, chars: str) -> list[str]:
        """What a written word is made of before merging: characters that are no token become byte tokens, else the unknown token, else
        nothing."""
        return self.first_parts(chars)[0]

    def first_parts(self, chars: str) -> tuple[list[str], list[int]]:
        """The first symbols, and how many bytes each stands for."""
        parts: list[str] = []
        sizes: list[int] = []
        unk, waiting = self.unk or "", 0  # bytes of an unknown token that is put down with the next known character, as in the reference
        for char in chars:
            size = len(char.encode())
            if char in self.vocab:
                if waiting:
                    parts.append(unk)
                    sizes.append(waiting)
                parts.append(char)
                sizes.append(size)
                waiting = 0
                continue
            if self.byte_tokens:
                tokens = [self.byte_tokens[byte] for byte in char.encode()]
                if all(token in self.vocab for token in tokens):
                    parts += tokens
                    sizes += [1] * len(tokens)
                    continue
            if self.unk is None:
                continue
            if waiting and not self.fuse_unk:
                parts.append(unk)
                sizes.append(waiting)
                waiting = 0
            waiting += size
        if waiting:
            parts.append(unk)
            sizes.append(waiting)
        return parts, sizes

    def merged(self, parts: list[int]) -> list[int]:
        """Merges the pair of lowest rank, leftmost first, until none is left. In place; for short words."""
        if len(parts) < 2:
            return parts
        rows, made = self._rows, self._made
        parts.append(-1)  # with it, found[-1] is always infinite: neither end needs a test
        never = _INFINITE
        found = [rows[left].get(right, never) for left, right in pairwise(parts)]
        while (best := min(found)) != never:
            at = found.index(best)
            parts[at] = token = made[best]
            del parts[at + 1], found[at]
            found[at] = rows[token].get(parts[at + 1], never)
            found[at - 1] = rows[parts[at - 1]].get(token, never)
        del parts[-1]
        return parts

    def merged_long(self, parts: list[int]) -> list[int]:
        """The same with a heap of rank × size + position over a linked list."""
        rows, made, size = self._rows, self._made, len(parts)
        after, before = array("q", range(1, size + 1)), array("q", range(-1, size - 1))
        heap = []
        for at, (left, right) in enumerate(pairwise(parts)):
            rank = rows[left].get(right)
            if rank is not None:
                heap.append(rank * size + at)
        heapify(heap)
        while heap:
            rank, at = divmod(heappop(heap), size)
            left, right_at = parts[at], after[at]  # −1 where it has gone into its left neighbour
            # An entry is stale when either side has changed since: then the pair has another rank, or none.
            if left < 0 or right_at >= size or rows[left].get(parts[right_at]) != rank:
                continue
            token = parts[at] = made[rank]
            parts[right_at] = -1
            after[at] = right_at = after[right_at]
            if right_at < size:
                before[right_at] = at
                rank = rows[token].get(parts[right_at])
                if rank is not None:
                    heappush(heap, rank * size + at)
            left_at = before[at]
            if left_at >= 0:
                rank = rows[parts[left_at]].get(token)
                if rank is not None:
                    heappush(heap, rank * size + left_at)
        return [part for part in parts if part >= 0]


def to_alphabet(word: str) -> str:
    """A word's UTF-8 bytes in GPT-2's byte alphabet."""
    if word.isascii() and word.isprintable():
        return word.replace(" ", "\u0120")
    return "".join(map(BYTE_TO_CHAR.__getitem__, word.encode()))
