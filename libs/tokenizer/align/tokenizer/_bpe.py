"""Byte-pair encoding of one word.

Symbols are token ids. `rows[left]` maps each right-hand id that merges with `left` to the merge's rank, and `made[rank]` is the id of
what it makes. The texts of symbols are needed for offsets and reports alone.
"""

from array import array
from heapq import heapify, heappop, heappush
from itertools import pairwise
from operator import add
from sys import byteorder
from typing import Any, NamedTuple

from align.tokenizer._regex import MARK

_LONG = 48  # symbols; above, a heap beats scanning
_AT_ONCE = 2000  # words
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


class _PairRanks(dict[int, int]):
    """The rank of two bytes side by side, by the number that an array of type "H" has for them; looked up when first asked for."""

    def __init__(self, known: dict[int, int], rows: Any) -> None:
        super().__init__()
        self._known, self._rows = known, rows

    def __missing__(self, pair: int) -> int:
        left, right = map(self._known.__getitem__, pair.to_bytes(2, byteorder))
        rank: int = self._rows[left].get(right, _INFINITE)
        self[pair] = rank
        return rank


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
        # The id of each byte, or of each character, that is a token; and of what stands between words.
        if self.byte_level:
            ids = map(self.vocab.get, BYTE_TO_CHAR)
            self._known: dict[Any, int] = {byte: i for byte, i in enumerate(ids) if i is not None}
            self._known[0xFF] = -1  # no byte of UTF-8
            self._pair_ranks = _PairRanks(self._known, self._rows)
        else:
            self._known = {char: i for char, i in self.vocab.items() if len(char) == 1}
            if space != " ":
                self._known.pop(" ", None)
                self._known.update({" ": self._known[space]} if space in self._known else {})
            self._known[MARK] = -1

    def ids(self, word: str) -> tuple[int, ...]:
        """The ids of a word."""
        if len(word) <= 256:
            return self._ids(word)
        last = self._last  # read once: another thread may set it
        if last[0] != word:
            last = self._last = (word, self._ids(word))
        return last[1]

    def coded(self, words: list[str], code: str) -> dict[str, bytes]:
        """For each word its ids as the bytes of an array of type `code`."""
        out: dict[str, bytes] = {}
        left, mark = words, array(code, [-1]).tobytes()
        if self.ignore_merges:
            tokens = map(self.vocab.get, map(self.written, words))
            out = {word: i.to_bytes(len(mark), byteorder) for word, i in zip(words, tokens, strict=True) if i is not None}
            left = [word for word in words if word not in out]
        # Short words are merged many at a time; ids are small enough that no other bytes look like the mark.
        short = [word for word in left if len(word) <= 16 or (len(word) <= _LONG and word.isascii())]
        for at in range(0, len(short), _AT_ONCE):
            some, ids = self._merged_short(short[at : at + _AT_ONCE])
            out.update(zip(some, array(code, ids).tobytes().split(mark), strict=False))
        if len(out) < len(words):
            out.update((word, array(code, self.ids(word)).tobytes()) for word in words if word not in out)
        return out

    def _merged_short(self, words: list[str]) -> tuple[list[str], list[int]]:
        """Those of the words whose bytes or characters are all symbols, and the ids of these, with −1 after each word."""
        joined: Any = b"\xff".join([*map(str.encode, words), b""]) if self.byte_level else MARK.join([*words, ""])
        try:
            symbols = list(map(self._known.__getitem__, joined))
        except KeyError:
            unknown = set(joined) - self._known.keys()
            return self._merged_short([word for word in words if unknown.isdisjoint(word.encode() if self.byte_level else word)])
        if not self.byte_level:
            return words, self.merged_words(symbols, self._ranks(symbols))
        ranks = [_INFINITE] * len(joined)
        for first in (0, 1):  # two bytes at a time, from the first and from the second byte on
            pairs = array("H", joined[first : first + (len(joined) - first) // 2 * 2])
            ranks[first : first + 2 * len(pairs) : 2] = map(self._pair_ranks.__getitem__, pairs)
        return words, self.merged_words(symbols, ranks)

    def _ranks(self, symbols: list[int]) -> list[int]:
        """The rank of each symbol with the one after it."""
        rows = self._rows
        return [*(rows[left].get(right, _INFINITE) for left, right in pairwise(symbols)), _INFINITE]

    def _ids(self, word: str) -> tuple[int, ...]:
        if self.ignore_merges:
            known = self.vocab.get(self.written(word))
            if known is not None:
                return (known,)
        symbols: Any = word.encode() if self.byte_level else word
        parts: list[Any] = list(map(self._known.get, symbols))
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
        """Merges the pair of lowest rank, leftmost first, until none is left. For short words."""
        symbols = [*parts, -1]
        return self.merged_words(symbols, self._ranks(symbols))[:-1]

    def merged_words(self, symbols: list[int], ranks: list[int]) -> list[int]:
        """`merged` for many words, with −1 after each; and the rank of each symbol with the one after it."""
        rows, made, never = self._rows, self._made, _INFINITE
        out: list[int] = []
        start, size = 0, len(symbols)
        while start < size:
            end = symbols.index(-1, start) + 1
            parts = symbols[start:end]
            if len(parts) > 2:
                found = ranks[start : end - 1]  # found[-1] is always infinite: neither end needs a test
                while (best := min(found)) != never:
                    at = found.index(best)
                    parts[at] = token = made[best]
                    del parts[at + 1], found[at]
                    row = rows[token]
                    found[at] = row.get(parts[at + 1], never) if row else never
                    if at:
                        found[at - 1] = rows[parts[at - 1]].get(token, never)
            out += parts
            start = end
        return out

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
