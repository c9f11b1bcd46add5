"""Where each token comes from.

Almost every text is its own normal form, and almost every pre-tokenizer only cuts: then a token's place is counted from its
word's. Where a normaliser changed something, each character carries its span of the original.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

from align.tokenizer import _unicode as U
from align.tokenizer._bpe import BYTE_TO_CHAR, CHAR_TO_BYTE, Bpe
from align.tokenizer._cuts import LONGEST

if TYPE_CHECKING:
    from align.tokenizer._added import AddedToken, Skip
    from align.tokenizer._normalise import Spans
    from align.tokenizer._tokenizer import Tokenizer

_UNKNOWN = 1 << 60  # no sum of these is the length of a text
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


Place = tuple[tuple[int, ...], tuple[int, ...], Sequence[int]]


class Places(dict[str, Place]):
    """For each unit (chunk or word): its ids; how many characters further each token ends than the one before; and which tokens begin
    within the last character of the token before them.

    Where the tokens do not tile the unit, because characters were dropped, the steps add up to less than its length.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        super().__init__()
        self._bpe = tokenizer._bpe
        self._ids: dict[str, tuple[int, ...]] = self._bpe if tokenizer._chunks is None else tokenizer._chunks
        self.words: Callable[[str], list[str]] = _alone if tokenizer._chunks is None else tokenizer._chunks.words
        self._chars, self._bytes = _Sizes(self._bpe, False), _Sizes(self._bpe, True)
        self._ranges: dict[str, tuple[tuple[int, int], ...]] = {}

    def __missing__(self, unit: str) -> Place:
        ids = self._ids[unit]
        steps = tuple(map(self._chars.__getitem__, ids))
        place = (ids, steps, ()) if sum(steps) == len(unit) else self._by_bytes(unit, ids)
        if len(unit) <= LONGEST:
            if len(self) >= self._bpe.cache_words:
                self.clear()
            self[unit] = place
        return place

    def _by_bytes(self, unit: str, ids: tuple[int, ...]) -> Place:
        data = unit.encode()
        if sum(map(self._bytes.__getitem__, ids)) != len(data):
            return self._by_words(unit, ids)
        starts = data.translate(_STARTS)
        begun = array("L", accumulate(starts, initial=0))  # characters begun before each byte
        ends = array("L", accumulate(map(self._bytes.__getitem__, ids), initial=0))
        steps = tuple(begun[b] - begun[a] for a, b in pairwise(ends))
        return ids, steps, array("L", (i for i, at in enumerate(ends[:-1]) if not starts[at]))

    def _by_words(self, unit: str, ids: tuple[int, ...]) -> Place:
        steps: list[int] = []
        back = array("L")
        at = end = 0
        for word in self.words(unit):
            for start, stop in self.ranges(word):
                if at + start < end:
                    back.append(len(steps))
                steps.append(at + stop - max(end, at + start))
                end = at + stop
            at += len(word)
        return ids, tuple(steps), back

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


class Walk:
    """One text on its way to ids and offsets."""

    def __init__(self, tokenizer: "Tokenizer", text: str, skip: "Skip", unit: str) -> None:
        self._tokenizer, self._text, self._skip = tokenizer, text, skip
        self.ids: list[int] = []
        self.offsets: list[tuple[int, int]] = []
        self._matched: dict[int, str] = {}  # the text of each added token, with the white space that its flags take
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
                self._matched[len(self.ids)] = text[start:end]
                self._token(token.id, start, end)
            at = end
        if tokenizer._post.trims and unit == "char":
            tokens = list(map(tokenizer._token_of.__getitem__, self.ids))
            for index, matched in self._matched.items():
                tokens[index] = matched
            for add_prefix_space in tokenizer._post.trims:
                self.offsets = trimmed(tokens, self.offsets, add_prefix_space)

    def _token(self, token_id: int, start: int, end: int) -> None:
        self.ids.append(token_id)
        self.offsets.append((self._starts[start], self._starts[end]) if self._starts else (start, end))

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
                    self._tiled(tokenizer._units(part, first), base + at, len(part))
                else:
                    part_spans = spans[at:start] if spans else [(i, i + 1) for i in range(base + at, base + start)]
                    for piece, found in tokenizer._pretokenizer.pieces(part, part_spans, first):
                        self._piece(piece, found or [])
            if token is not None:
                self._matched[len(self.ids)] = text[start:end]
                self._token(token.id, *original(start, end))
            at = end

    def _tiled(self, units: list[str], base: int, size: int) -> None:
        """Units that tile a stretch of `size` characters, the first perhaps with a prefix that the text does not have."""
        ids = self.ids
        steps: list[int] = []
        before, tiled = len(ids), sum(map(len, units))
        start = base - (tiled - size)
        shared = []
        for more, further, back in map(self._places.__getitem__, units):
            if back:
                shared.append((len(ids), back))
            ids += more
            steps += further
        self.offsets += pairwise(accumulate(steps, initial=start))
        if before == len(ids) or self.offsets[-1][1] == start + tiled:
            for at, back in shared:
                for i in back:
                    first, end = self.offsets[at + i]
                    self.offsets[at + i] = (first - 1, end)
        else:  # characters were dropped
            del self.offsets[before:]
            words = list(chain.from_iterable(map(self._places.words, units)))
            word_starts = accumulate(map(len, words), initial=start)
            self.offsets += [(at + a, at + b) for at, word in zip(word_starts, words, strict=False) for a, b in self._places.ranges(word)]
        for i in range(before, len(ids) if start < base else before):
            first, end = self.offsets[i]  # a prefix shares the place of the first character of the text
            if first >= base and end > base:
                break
            self.offsets[i] = (max(first, base), max(end, base + 1))

    def _piece(self, piece: str, spans: "Spans") -> None:
        tokenizer, at = self._tokenizer, 0
        for word in tokenizer._segments(piece) if tokenizer._segments else [piece]:
            self.ids += tokenizer._bpe[word]
            if self._starts is None:
                self.offsets += [(spans[at + a][0], spans[at + b - 1][1]) for a, b in self._places.ranges(word)]
            else:
                self.offsets += self._byte_ranges(word, at, spans)
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


def trimmed(tokens: list[str], offsets: list[tuple[int, int]], add_prefix_space: bool) -> list[tuple[int, int]]:
    """ByteLevel's trim_offsets: spaces at the ends of a token are not part of its place; but the one that encoding put there is."""
    out: list[tuple[int, int]] = []
    for (leading, trailing), (start, end) in zip(map(_margins.__getitem__, tokens), offsets, strict=True):
        if leading and not (leading == 1 and add_prefix_space and (not out or start == 0)):
            start = min(start + leading, end)
        if trailing and end >= trailing:
            end = max(end - trailing, start)
        out.append((start, end))
    return out
