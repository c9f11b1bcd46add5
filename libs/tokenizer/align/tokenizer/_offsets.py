"""Where each token comes from.

Almost every text is its own normal form, and almost every pre-tokenizer only cuts: then a token's place is counted from its
word's. Where a normaliser changed something, each character carries its span of the original.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, compress, pairwise
from operator import add, sub
from sys import byteorder
from typing import TYPE_CHECKING, Any

from align.tokenizer import _unicode as U
from align.tokenizer._bpe import BYTE_TO_CHAR, CHAR_TO_BYTE, Bpe
from align.tokenizer._regex import MARK
from align.tokenizer._units import Cache

if TYPE_CHECKING:
    from align.tokenizer._added import AddedToken, Skip
    from align.tokenizer._normalise import Spans
    from align.tokenizer._tokenizer import Tokenizer

_UNKNOWN = 1 << 60  # no sum of these is the length of a text
_UNSURE, _SHARED = 0x7F, 0x80  # in the byte of a token's step
_STEPS = bytes(byte & 0x7F for byte in range(256))
_SHARES = bytes(byte & 0x80 for byte in range(256))
_STARTS = bytes(int(not 0x80 <= byte < 0xC0) for byte in range(256))  # 1 where a character begins


class _Sizes(dict[int, int]):
    """How many bytes of text each token stands for, or how many characters; _UNKNOWN where that depends on its neighbours."""

    def __init__(self, bpe: Bpe, in_bytes: bool) -> None:
        super().__init__()
        self._bpe, self._in_bytes = bpe, in_bytes

    def __missing__(self, token_id: int) -> int:
        size = self[token_id] = self._size(self._bpe.token_of(token_id))
        return size

    def _size(self, token: str) -> int:
        bpe = self._bpe
        if token == bpe.unk:
            return _UNKNOWN
        if bpe.byte_level:
            try:
                data = bytes(map(CHAR_TO_BYTE.__getitem__, token))
                return len(data) if self._in_bytes else len(data.decode())
            except (KeyError, UnicodeDecodeError):
                return _UNKNOWN
        if bpe.byte_tokens and token in bpe.byte_tokens:
            return 1 if self._in_bytes or bpe.byte_tokens.index(token) < 0x80 else _UNKNOWN
        return len(token.replace(bpe.space, " ").encode()) if self._in_bytes else len(token)


class _Records(dict[int, bytes]):
    """For each token its id, and a byte each for: how many characters it has (_UNSURE where that depends on its neighbours), how many of
    these at its beginning and at its end are spaces that trimming takes off."""

    def __init__(self, bpe: Bpe, chars: _Sizes, width: int, trims: bool) -> None:
        super().__init__()
        self._bpe, self._chars, self._width, self._trims = bpe, chars, width, trims

    def __missing__(self, token_id: int) -> bytes:
        record = self[token_id] = self.of(token_id, self._chars[token_id])
        return record

    def of(self, token_id: int, step: int, shared: bool = False) -> bytes:
        """shared: the token begins within the last character of the token before it."""
        lead, trail = _margins[self._bpe.token_of(token_id)] if self._trims else (0, 0)
        if step >= _UNSURE:
            step = lead = trail = _UNSURE
        elif lead >= step:
            lead, trail = step, 0
        return token_id.to_bytes(self._width, byteorder) + bytes((step + _SHARED * shared, lead, trail)) + bytes(self._width - 3)


class Places:
    """The ids of units with, for each token, how many characters further it ends than the one before."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._bpe, self._ids = tokenizer._bpe, tokenizer._ids
        self._chars, self._bytes = _Sizes(self._bpe, False), _Sizes(self._bpe, True)
        width = self._width = self._ids.width
        self._records = _Records(self._bpe, self._chars, width, bool(tokenizer._post.trims))
        self._records[-1] = b"\xff" * 2 * width  # the mark
        self._cache = Cache(self._placed, 2 * width, tokenizer._chunks, self._bpe.cache_words)
        self.words: Callable[[str], list[str]] = tokenizer._chunks.words if tokenizer._chunks else _alone
        self._ranges: dict[str, tuple[tuple[int, int], ...]] = {}

    def of(self, units: list[str]) -> tuple[list[int], Callable[[int], bytes]]:
        """The ids; and a byte of each token's record: 0 the step, 1 and 2 the spaces at its beginning and at its end."""
        data, width = self._cache.joined(units), self._width
        return array(self._ids.code, data)[::2].tolist(), lambda place: data[width + place :: 2 * width]

    def _placed(self, words: list[str]) -> Iterator[tuple[str, bytes]]:
        code, width = self._ids.code, self._width
        ids = array(code, self._ids.words.of([name for word in words for name in (word, MARK)]))  # −1 after each word
        records = b"".join(map(self._records.__getitem__, ids)).split(self._records[-1])
        for word, data in zip(words, records, strict=False):
            steps = data[width :: 2 * width]
            sure = sum(steps) == len(word) and _UNSURE not in steps
            yield word, data if sure else self._by_bytes(word, array(code, data)[::2])

    def _by_bytes(self, word: str, ids: Sequence[int]) -> bytes:
        data = word.encode()
        if sum(map(self._bytes.__getitem__, ids)) != len(data):
            return b"".join(self._records.of(i, _UNSURE) for i in ids)  # characters were dropped, or a token is the unknown one
        starts = data.translate(_STARTS)
        begun = array("L", accumulate(starts, initial=0))  # characters begun before each byte
        ends = array("L", accumulate(map(self._bytes.__getitem__, ids), initial=0))
        return b"".join(self._records.of(i, begun[b] - begun[a], not starts[a]) for i, (a, b) in zip(ids, pairwise(ends), strict=True))

    def ranges(self, word: str) -> Iterable[tuple[int, int]]:
        """(first, last + 1) characters of each token of a word."""
        if len(word) > 256:
            return char_ranges(self._bpe, word)
        found = self._ranges.get(word)
        if found is None:
            found = tuple(char_ranges(self._bpe, word))
            if len(self._ranges) >= self._bpe.cache_words:
                self._ranges.clear()
            self._ranges[word] = found
        return found


def _alone(word: str) -> list[str]:
    return [word]


class Offsets(Sequence[tuple[int, int]]):
    """The (start, end) of each token, like a list of pairs; but kept as the arrays `starts` and `ends` (of type "q"), from which a pair is
    made when it is asked for."""

    __slots__ = ("ends", "starts")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self.starts, self.ends = array("q"), array("q")
        self._add(pairs)

    def _add(self, pairs: Iterable[tuple[int, int]]) -> None:
        for start, end in pairs:
            self.starts.append(start)
            self.ends.append(end)

    def _replace(self, at: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Puts `pairs` in place of all from `at` on."""
        del self.starts[at:], self.ends[at:]
        self._add(pairs)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return self.starts[index], self.ends[index]
        out = Offsets()
        out.starts, out.ends = self.starts[index], self.ends[index]
        return out

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.starts, self.ends, strict=True)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Offsets):
            return self.starts == other.starts and self.ends == other.ends
        return list(self) == other if isinstance(other, list) else NotImplemented

    def __repr__(self) -> str:
        return f"Offsets({list(self)})"


class Walk:
    """One text on its way to ids and offsets."""

    def __init__(self, tokenizer: "Tokenizer", text: str, skip: "Skip", unit: str) -> None:
        self._tokenizer, self._text, self._skip = tokenizer, text, skip
        self.ids: list[int] = []
        self.offsets = Offsets()
        self._trims = tokenizer._post.trims if unit == "char" else []
        self._starts: Sequence[int] | None = None
        if tokenizer._places is None:
            tokenizer._places = Places(tokenizer)
        self._places = tokenizer._places
        if unit == "byte" and not text.isascii():  # else they are the same
            self._starts = list(accumulate((len(c.encode()) for c in text), initial=0))
        at = 0
        for start, end, token in [*tokenizer._raw_matcher.matches(text, skip), (len(text), len(text), None)]:
            if start > at:
                self._stretch(text[at:start], at)
            if token is not None:
                self._token(token.id, start, end)
                self._trim(len(self.ids) - 1, [text[start:end]])
            at = end

    def _token(self, token_id: int, start: int, end: int) -> None:
        self.ids.append(token_id)
        self.offsets._add([(self._starts[start], self._starts[end]) if self._starts else (start, end)])

    def _stretch(self, text: str, base: int) -> None:
        """A stretch without raw added tokens, which begins at `base`."""
        tokenizer, spans = self._tokenizer, None
        if tokenizer._changes(text):
            text, spans = tokenizer._normaliser.aligned(text, [(i, i + 1) for i in range(base, base + len(text))])

        def original(start: int, end: int) -> tuple[int, int]:
            return (spans[start][0], spans[end - 1][1]) if spans else (base + start, base + end)

        def skip(token: "AddedToken", start: int, end: int) -> Any:  # self._skip takes places in the whole text
            return self._skip(token, *original(start, end))

        at = 0
        for start, end, token in [*tokenizer._normal_matcher.matches(text, skip), (len(text), len(text), None)]:
            if start > at:
                part, first = text[at:start], base == 0 and at == 0
                if spans is None and tokenizer._pretokenizer.simple and self._starts is None:
                    self._tiled(part, first, base + at)
                else:
                    part_spans = spans[at:start] if spans else [(i, i + 1) for i in range(base + at, base + start)]
                    before = len(self.ids)
                    for piece, found in tokenizer._pretokenizer.pieces(part, part_spans, first):
                        self._piece(piece, found or [])
                    self._trim(before)
            if token is not None:
                self._token(token.id, *original(start, end))
                self._trim(len(self.ids) - 1, [text[start:end]])
            at = end

    def _trim(self, before: int, texts: list[str] | None = None) -> None:
        """Trims the offsets from `before` on; texts: of these tokens, where they are not the model's."""
        for add_prefix_space in self._trims:
            texts = texts or list(map(self._tokenizer._bpe.token_of, self.ids[before:]))
            self.offsets._replace(before, trimmed(texts, self.offsets[before:], add_prefix_space, not before))

    def _tiled(self, text: str, first: bool, base: int) -> None:
        """A stretch whose units tile it, but for a prefix that the text does not have."""
        before = len(self.ids)
        whole = self._tokenizer._pretokenizer.prefixed(text, first)
        units = self._tokenizer._units_of(whole)
        start, stop = base + len(text) - len(whole), base + len(text)
        ids, column = self._places.of(units)
        if self.ids:
            self.ids += ids
        else:
            self.ids = ids  # of most texts these are all
        steps = column(0)
        plain = steps if steps.isascii() else steps.translate(_STEPS)
        counted = list(accumulate(plain, initial=start))
        ends = array("q", counted)
        if b"\x7f" in steps or ends[-1] != stop:  # _UNSURE, or characters were dropped
            words = list(chain.from_iterable(map(self._places.words, units)))
            word_starts = accumulate(map(len, words), initial=start)
            self.offsets._add((at + a, at + b) for at, word in zip(word_starts, words, strict=False) for a, b in self._places.ranges(word))
        elif start == base and len(self._trims) == 1:
            self._trimmed(counted, ends, steps, column(1), column(2))
            return
        else:
            self.offsets.starts += ends[:-1]
            self.offsets.ends += ends[1:]
            self._share(steps, before)
        for i in range(before, len(self.ids) if start < base else before):
            low, high = self.offsets[i]  # a prefix shares the place of the first character of the text
            if low >= base and high > base:
                break
            self.offsets.starts[i], self.offsets.ends[i] = max(low, base), max(high, base + 1)
        self._trim(before)

    def _trimmed(self, counted: list[int], ends: "array[int]", steps: bytes, leads: bytes, trails: bytes) -> None:
        """`trimmed` for tokens that tile, from what is known of each. counted: `ends` as a list, which is quicker to go through."""
        offsets, before = self.offsets, len(self.offsets)
        offsets.starts.fromlist(list(map(add, counted, leads)))
        if trails.strip(b"\0"):
            offsets.ends.fromlist(list(map(sub, counted[1:], trails)))
        else:
            offsets.ends += ends[1:]
        self._share(steps, before)
        if self._trims[0]:  # the space before the first token, and one at the very beginning, stays
            for i in range(before, len(offsets)):
                first = ends[i - before]
                if first and i:
                    break
                if leads[i - before] == 1:
                    offsets.starts[i] = first
                    offsets.ends[i] = first if steps[i - before] == 1 else offsets.ends[i]

    def _share(self, steps: bytes, before: int) -> None:
        """Gives the tokens that begin within a character the whole of it."""
        if not steps.isascii():
            starts = self.offsets.starts
            for i in compress(range(before, len(starts)), steps.translate(_SHARES)):
                starts[i] -= 1

    def _piece(self, piece: str, spans: "Spans") -> None:
        tokenizer, at = self._tokenizer, 0
        for word in tokenizer._segments.words(piece) if tokenizer._segments else [piece]:
            self.ids += tokenizer._ids.of_word(word)
            if self._starts is None:
                self.offsets._add((spans[at + a][0], spans[at + b - 1][1]) for a, b in self._places.ranges(word))
            else:
                self.offsets._add(self._byte_ranges(word, at, spans))
            at += len(word)

    def _byte_ranges(self, word: str, at: int, spans: "Spans") -> list[tuple[int, int]]:
        """In bytes of the text: a token that holds a part of a character gets that part's bytes, where the character is the original's."""
        out, byte_at = [], self._starts or range(0)
        for (a, b), (skipped, taken) in zip(self._places.ranges(word), byte_parts(self._tokenizer._bpe, word), strict=False):
            (start, end), (last, stop) = spans[at + a], spans[at + b - 1]
            low, high = byte_at[start], byte_at[stop]
            if end == start + 1 and self._text[start] == word[a]:
                low += skipped
            if taken and stop == last + 1 and self._text[last] == word[b - 1]:
                high = byte_at[last] + taken
            out.append((low, high))
        return out


def _byte_ends(bpe: Bpe, word: str) -> tuple[str, "array[int]"]:
    """The word as the model sees it, and after how many of its bytes each token ends.

    As in the reference, bytes are counted over the tokens: where characters were dropped because the vocabulary lacks them, what
    follows in the same word sits too far left.
    """
    text = bpe.written(word)
    symbols = bpe.symbols(word)
    parts, sizes = _first_parts(bpe, text)
    ends, size, k = array("L"), 0, 0
    for symbol in symbols:
        taken = 0
        while taken < len(symbol):
            taken += len(parts[k])
            size += sizes[k]
            k += 1
        ends.append(size)
    return text, ends


def char_ranges(bpe: Bpe, word: str) -> Iterator[tuple[int, int]]:
    """(first, last + 1) characters of each token of a word; tokens that share a character both get it."""
    text, ends = _byte_ends(bpe, word)
    char_of = array("L", (i for i, char in enumerate(text) for _ in char.encode()))
    if bpe.byte_level:
        origin = array("L", (i for i, char in enumerate(word) for _ in char.encode()))
        char_of = array("L", map(origin.__getitem__, char_of))
    return ((char_of[a], char_of[b - 1] + 1) for a, b in pairwise(chain((0,), ends)))


def byte_parts(bpe: Bpe, word: str) -> list[tuple[int, int]]:
    """For each token of a word: how many bytes of its first character came before it, and how many bytes of its last character it and
    those before it hold (0 where it holds the whole)."""
    text, ends = _byte_ends(bpe, word)
    where = [(k, len(char.encode())) for char in word for k in range(len(char.encode()))]
    if bpe.byte_level:
        alphabet = list(accumulate((len(c.encode()) for c in text), initial=0))
        if not set(ends) <= set(alphabet):  # dropped characters have moved the count into the middle of one
            return [(0, 0)] * len(ends)
        ends = array("L", map({end: i for i, end in enumerate(alphabet)}.__getitem__, ends))
    out = []
    for a, b in pairwise(chain((0,), ends)):
        k, size = where[b - 1]
        out.append((where[a][0], k + 1 if k + 1 < size else 0))
    return out


def _first_parts(bpe: Bpe, text: str) -> tuple[list[str], list[int]]:
    """What a word is made of before merging, with the bytes of each part."""
    if bpe.ignore_merges and text in bpe.vocab:
        return [text], [len(text.encode())]
    return bpe.first_parts(text)


class _Margins(dict[str, tuple[int, int]]):
    """How many spaces each token's text has at its beginning and at its end."""

    def __missing__(self, token: str) -> tuple[int, int]:
        space = U.property_set("s")
        spaces = [char == BYTE_TO_CHAR[32] or U.contains(space, ord(char)) for char in token]
        all_spaces = False not in spaces
        margins = (len(spaces), len(spaces)) if all_spaces else (spaces.index(False), spaces[::-1].index(False))
        if len(self) < 1 << 18:
            self[token] = margins
        return margins


_margins = _Margins()


def trimmed(tokens: list[str], offsets: Iterable[tuple[int, int]], add_prefix_space: bool, first: bool) -> list[tuple[int, int]]:
    """ByteLevel's trim_offsets: spaces at the ends of a token are not part of its place; but the one that encoding put there is.
    first: the tokens are the first of all."""
    out: list[tuple[int, int]] = []
    for (leading, trailing), (start, end) in zip(map(_margins.__getitem__, tokens), offsets, strict=True):
        if leading and not (leading == 1 and add_prefix_space and ((first and not out) or start == 0)):
            start = min(start + leading, end)
        if trailing and end >= trailing:
            end = max(end - trailing, start)
        out.append((start, end))
    return out
