"""What was made of each unit and of each word, kept for when they come again.

A unit is a chunk, or a word where no chunks are proved. What is kept of it are bytes, the same number for each token, so that the bytes of
a text are joined, and those of many new units cut apart, in C.
"""

from array import array
from collections.abc import Callable, Iterable

from align.tokenizer._bpe import Bpe
from align.tokenizer._cuts import Cutter
from align.tokenizer._regex import MARK

Pairs = Iterable[tuple[str, bytes]] | dict[str, bytes]

_AT_ONCE = 1 << 15  # units
_MOST_CHARACTERS = 4_000_000  # of the keys of a table
_DIGITS = "0123456789"
_NARROW = 1 << 23  # ids below it take 4 bytes; the highest of these is never 255, as every byte of the mark is


class _Table:
    """A cache. When it is full it is replaced, not emptied: another thread may be reading it."""

    def __init__(self, make: Callable[[list[str]], Pairs], mark: bytes, most: int) -> None:
        self.known = {MARK: mark}
        self._make, self._mark, self._most = make, mark, most
        self._characters = 0

    def of(self, names: list[str]) -> bytes:
        """The bytes of all names, one after the other."""
        try:
            return b"".join(map(self.known.__getitem__, names))
        except KeyError:
            return b"".join(map(self._having(set(names)).__getitem__, names))

    def _having(self, names: set[str]) -> dict[str, bytes]:
        """A dict that has all of these."""
        known = self.known
        missing = list(names.difference(known))
        if not missing:
            return known  # another thread has just made them
        self._characters += sum(map(len, missing))
        if len(known) + len(missing) > self._most or self._characters > _MOST_CHARACTERS:
            known = {MARK: self._mark}
            missing = list(names.difference(known))
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
        if len(units) <= self._at_once:
            return self.units.of(units)
        parts = (units[at : at + self._at_once] for at in range(0, len(units), self._at_once))
        return b"".join(map(self.units.of, parts))

    def _of_chunks(self, chunks: list[str]) -> Pairs:
        assert self._cutter
        plain = list(filter(str.isascii, chunks))
        words = self._cutter.marked(MARK.join(plain))
        if len(plain) < len(chunks):
            others = [chunk for chunk in chunks if not chunk.isascii()]
            for cut in map(self._cutter.words, others):
                words.append(MARK)
                words += cut
            if not plain:
                del words[0]
            plain += others
        return zip(plain, self.words.of(words).split(self._mark), strict=True)


class Ids(Cache):
    """The ids of units, each as `width` bytes."""

    def __init__(self, bpe: Bpe, cutter: Cutter | None) -> None:
        self.code = "i" if max(bpe.vocab.values(), default=0) < _NARROW else "q"
        self.width = array(self.code).itemsize
        super().__init__(self._coded, self.width, cutter, bpe.cache_words)
        self._bpe = bpe
        self._digits: dict[str, bytes] | None = None

    def of(self, units: list[str]) -> list[int]:
        return array(self.code, self.joined(units)).tolist()

    def of_word(self, word: str) -> list[int]:
        return array(self.code, self.words.of([word])).tolist()

    def _coded(self, words: list[str]) -> Pairs:
        if self._cutter is None or not self._cutter.runs:
            return self._bpe.coded(words, self.code)
        # A run of digits is the digits one by one.
        if self._digits is None:
            self._digits = self._bpe.coded(list(_DIGITS), self.code)
        runs = [word for word in words if len(word) > 1 and word.isdigit() and word.isascii()]
        made = {run: b"".join(map(self._digits.__getitem__, run)) for run in runs}
        return made | self._bpe.coded([word for word in words if word not in made] if made else words, self.code)
