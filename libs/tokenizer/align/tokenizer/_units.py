"""What was made of each unit and of each word, kept for when they come again.

A unit is a chunk, or a word where no chunks are proved. What is kept of it are bytes, the same number for each token, so that the bytes of
a text are joined, and those of many new units cut apart, in C.
"""

from array import array
from collections.abc import Callable, Iterable
from itertools import chain, filterfalse

from align.tokenizer._bpe import Bpe
from align.tokenizer._cuts import Cutter
from align.tokenizer._regex import MARK

Pairs = Iterable[tuple[str, bytes]] | dict[str, bytes]

_AT_ONCE = 1 << 15  # units
_MOST_CHARACTERS = 4_000_000  # of the keys of a table
_NARROW = 1 << 23  # ids below it take 4 bytes; the highest of these is never 255, as every byte of the mark is


class _Table:
    """A cache. When it is full it is replaced, not emptied: another thread may be reading it."""

    def __init__(self, make: Callable[[list[str]], Pairs], mark: bytes, most: int) -> None:
        self.known = {MARK: mark}
        self._make, self._mark, self._most = make, mark, most
        self._characters = 0

    def having(self, names: list[str]) -> dict[str, bytes]:
        """A dict that has all of these."""
        known = self.known
        missing = list(set(filterfalse(known.__contains__, names)))
        if not missing:
            return known
        self._characters += sum(map(len, missing))
        if len(known) + len(missing) > self._most or self._characters > _MOST_CHARACTERS:
            known = {MARK: self._mark}
            missing = list(set(filterfalse(known.__contains__, names)))
            self._characters = sum(map(len, missing))
        known.update(self._make(missing))
        self.known = known
        return known


class Cache:
    """The bytes of units. `of_words` gives those of words, `width` for each token."""

    def __init__(self, of_words: Callable[[list[str]], Pairs], width: int, cutter: Cutter | None, most: int) -> None:
        self._mark, self._cutter = b"\xff" * width, cutter
        self.words = _Table(of_words, self._mark, most)
        self.units = _Table(self._of_chunks, self._mark, most) if cutter else self.words
        self._at_once = min(_AT_ONCE, most - 1)

    def joined(self, units: list[str]) -> bytes:
        """The bytes of all units, one after the other."""
        try:
            return b"".join(map(self.units.known.__getitem__, units))
        except KeyError:
            parts = (units[at : at + self._at_once] for at in range(0, len(units), self._at_once))
            return b"".join([b"".join(map(self.units.having(part).__getitem__, part)) for part in parts])

    def _of_chunks(self, chunks: list[str]) -> Pairs:
        assert self._cutter
        plain = [chunk for chunk in chunks if chunk.isascii()]
        pairs: list[Iterable[tuple[str, bytes]]] = []
        if plain:
            words = self._cutter.marked(MARK.join(plain))
            known = self.words.having(words)
            pairs.append(zip(plain, b"".join(map(known.__getitem__, words)).split(self._mark), strict=True))
        if len(plain) < len(chunks):
            others = [chunk for chunk in chunks if not chunk.isascii()]
            cut = list(map(self._cutter.words, others))
            known = self.words.having(list(chain.from_iterable(cut)))
            pairs.append([(chunk, b"".join(map(known.__getitem__, words))) for chunk, words in zip(others, cut, strict=True)])
        return chain.from_iterable(pairs)


class Ids(Cache):
    """The ids of units, each as `width` bytes."""

    def __init__(self, bpe: Bpe, cutter: Cutter | None) -> None:
        self.code = "i" if max(bpe.vocab.values(), default=0) < _NARROW else "q"
        self.width = array(self.code).itemsize
        super().__init__(self._coded, self.width, cutter, bpe.cache_words)
        self._bpe = bpe

    def of(self, units: list[str]) -> list[int]:
        return array(self.code, self.joined(units)).tolist()

    def of_word(self, word: str) -> list[int]:
        return array(self.code, self.words.having([word])[word]).tolist()

    def _coded(self, words: list[str]) -> Pairs:
        return self._bpe.coded(words, self.code)
