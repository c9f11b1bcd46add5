"""Where a text can be cut without changing its ids, and the cache of what lies between.

Two kinds of cut. *Segments* are proved from the merges: no merge can reach across. *Chunks* are larger, about one word between white
spaces with the punctuation around it, and are proved from the segments or from the pre-tokenizer's pattern. A chunk that was seen
before costs one look into a dict, however many words it has; chunks that were not are cut into words.
"""

import re
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

from align.tokenizer import _unicode as U
from align.tokenizer._bpe import Bpe
from align.tokenizer._regex import MARK, RUN, many_at_once

if TYPE_CHECKING:
    from align.tokenizer._regex import Finder

# --- segments

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
# Coarser than each of the patterns above: between a line break and anything else, and before spaces.
_SEGMENT_CHUNKS = "\n++|[{space}]*+[^\n{space}]*+"


def segmenter(bpe: Bpe, flat: list[str]) -> "Segmenter | None":
    """A function that cuts a text where no merge can reach across, or None where no such cut is proved.

    A cut between two characters is lossless when no token that merging can reach holds them side by side: BPE never joins
    across it, and the two sides do not see each other. Every character must be a token or have byte tokens (else it is dropped, which
    moves offsets, or unknown, which waits for others), and these must take no part in merges.
    """
    if bpe.byte_level or not flat or bpe.ignore_merges:
        return None
    parts = set(flat)
    if not bpe.byte_tokens or not all(t in bpe.vocab for t in bpe.byte_tokens) or not parts.isdisjoint([*bpe.byte_tokens, bpe.unk or ""]):
        return None
    raw = bpe.space != " "
    space = " \u2581" if raw else "\u2581"
    for find in (_products, _reachable):
        products = find(bpe, flat)
        also = "".join(sorted({a or b for a, b in _BESIDE_PUNCTUATION.findall("\n".join(products))}))
        for pattern in _SEGMENTS:
            filled = pattern.format(also=re.escape(also), space=space, other="" if raw else " ")
            if all(map(re.compile(filled).fullmatch, products)):
                in_ascii = _ASCII_SEGMENTS if raw and pattern is _SEGMENTS[0] else filled
                return Segmenter(filled, in_ascii, _SEGMENT_CHUNKS.format(space=space))
    return None


class Segmenter:
    """The proved cut; `chunks` is the pattern of its chunks. marked: the cut of an ASCII text with marks in it, each a piece of its own.
    runs: in it, digits that follow each other stay together, up to 16; each is a piece."""

    def __init__(self, pattern: str, ascii_pattern: str, chunks: str) -> None:
        self.chunks = chunks
        self._any, self._ascii = re.compile(pattern).findall, re.compile(ascii_pattern).findall
        self.runs = "|[0-9]|" in ascii_pattern
        marked = ascii_pattern.replace("[^", "[^" + MARK).replace("|[0-9]|", f"|{RUN}|")
        self.marked = re.compile(MARK + "|" + marked).findall

    def words(self, text: str) -> list[str]:
        return self._ascii(text) if text.isascii() else self._any(text)


def _products(bpe: Bpe, flat: list[str]) -> list[str]:
    """All that the merges name: a superset of what merging can make, quicker to have."""
    return list(map(add, flat[::2], flat[1::2]))


def _reachable(bpe: Bpe, flat: list[str]) -> set[str]:
    """The products that merging can make, starting from single characters."""
    known = {token for token in bpe.vocab if len(token) == 1}
    made: set[str] = set()
    waiting = list(zip(flat[::2], flat[1::2], strict=True))
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


# --- chunks of byte-level models

Letters = frozenset[int]  # a class of characters, as the letters of Finder.letters


class _Shape(NamedTuple):
    """The classes that can stand first and last in a match of a part of a pattern, and whether the part can be empty."""

    first: frozenset[Letters]
    last: frozenset[Letters]
    empty: bool


_EMPTY = _Shape(frozenset(), frozenset(), True)


class _Neighbours:
    """Which classes can stand side by side within a match: a superset, the follow sets of Glushkov's automaton."""

    def __init__(self, items: list[Any]) -> None:
        self._items, self._at = items, 0
        self.pairs: set[tuple[Letters, Letters]] = set()
        self.looks: list[tuple[frozenset[Letters], Letters]] = []  # (classes before it, class) of each (?!class)
        self.known = True  # False: the pattern has a look-around of another kind
        self.shape = self._alternation(frozenset())

    def _alternation(self, before: frozenset[Letters]) -> _Shape:
        whole = self._sequence(before)
        while self._at < len(self._items) and self._items[self._at] == "|":
            self._at += 1
            more = self._sequence(before)
            whole = _Shape(whole.first | more.first, whole.last | more.last, whole.empty or more.empty)
        return whole

    def _sequence(self, before: frozenset[Letters]) -> _Shape:
        whole = _EMPTY
        while self._at < len(self._items) and self._items[self._at] not in ("|", ")"):
            item = self._items[self._at]
            self._at += 1
            behind = whole.last | before if whole.empty else whole.last
            if item in ("(?!", "(?=", "(?<=", "(?<!"):
                self._look(item, behind)
                continue
            if isinstance(item, str):  # a group
                part = self._alternation(behind)
                self._at += 1
            else:
                part = _Shape(frozenset([item]), frozenset([item]), False)
            part = self._repeated(part)
            self._join(whole.last, part.first)
            whole = _Shape(
                whole.first | part.first if whole.empty else whole.first,
                whole.last | part.last if part.empty else part.last,
                whole.empty and part.empty,
            )
        return whole

    def _repeated(self, part: _Shape) -> _Shape:
        quantifier = self._items[self._at] if self._at < len(self._items) else ""
        if not isinstance(quantifier, str) or quantifier[:1] not in ("*", "+", "?", "{"):
            return part
        self._at += 1
        if quantifier[0] != "?":
            self._join(part.last, part.first)
        return part._replace(empty=part.empty or quantifier[0] in "*?" or quantifier[:2] in ("{,", "{0"))

    def _join(self, left: frozenset[Letters], right: frozenset[Letters]) -> None:
        self.pairs.update((a, b) for a in left for b in right)

    def _look(self, kind: str, behind: frozenset[Letters]) -> None:
        members = self._items[self._at]
        self.known = self.known and kind == "(?!" and not isinstance(members, str) and self._items[self._at + 1] == ")"
        if self.known:
            self.looks.append((behind, members))
            self._at += 2
        else:
            self._at = len(self._items)


def chunk_pattern(finder: "Finder") -> str | None:
    """A pattern of chunks for a pre-tokenizer that cuts by this one; None where no such cut is proved.

    Let W be white space, N the line breaks in it, X all else. Two kinds of pattern are known.

    1. GPT-2's: no match holds X before W, and no look-ahead after X sees W. Then every W after X begins a piece, and the piece before
       it cannot see it.
    2. Llama-3's, which ends in \\s*[\\r\\n]+|\\s+(?!\\S)|\\s+, and whose other alternatives hold of W one in front (none of N), which
       is not all they match, or line breaks after X. Then every W but a line break after X begins a piece. And so does what follows
       the last line break of a run of W: what a match before has not taken of it, \\s*[\\r\\n]+ takes, before the two after it are asked.
       Where "/" can follow line breaks (GPT-4o's pattern), no cut is made between these.
    """
    space = finder.letters.get(U.property_set("s"))
    if space is None or not finder.covers:
        return None
    lines, other = frozenset((10, 13)), frozenset().union(*finder.letters.values(), range(0x80)) - space
    branches = [[item if isinstance(item, str) else finder.letters[item] for item in branch] for branch in finder.branches]
    found = _Neighbours(_joined(branches))
    if not found.known:
        return None
    w, h = _members(U.property_set("s")), _members(U.minus(U.property_set("s"), (10, 11, 13, 14)))
    if not any(a & other and b & space for a, b in found.pairs) and not any(
        look & space and behind & other for classes, look in found.looks for behind in classes
    ):
        return f"[{w}]*+[^{w}]*+"
    if branches[-3:] != [[space, "*", lines, "+"], [space, "+", "(?!", other, ")"], [space, "+"]]:
        return None
    found = _Neighbours(_joined(branches[:-3]))
    after_line = frozenset().union(*(b & other for a, b in found.pairs if a & lines))
    if (
        found.looks
        or any(b & space - lines for a, b in found.pairs)
        or any(a & space - lines and b & lines for a, b in found.pairs)
        or after_line - {ord("/")}
        or any(a & lines for a in found.shape.first)
        or any(a & space for a in found.shape.first & found.shape.last)
    ):
        return None
    tail = f"(?:[\r\n]+(?:[{h}]+[\r\n]+)*)"
    tail = f"(?:{tail}(?:/[^{w}]*)?)*" if after_line else f"{tail}?"
    return f" ?[^{w}]+{tail}|[{h}]+[^{w}]+{tail}|[{w}]*[\r\n]+|[{w}]+"


def _joined(branches: list[list[Any]]) -> list[Any]:
    return [item for branch in branches for item in ("|", *branch)][1:]


def _members(codes: U.CodeSet) -> str:
    """A set as the inside of a class of `re`."""
    return "".join(f"\\u{a:04x}-\\u{b - 1:04x}" for a, b in zip(codes[::2], codes[1::2], strict=True))


class Cutter:
    """How a text is cut into chunks (`find`), a chunk into the model's words (`words`), and ASCII chunks with marks between them into words
    and marks (`marked`). runs: in the latter, digits that follow each other stay together, each of which is a word."""

    def __init__(self, pattern: str, by: "Finder | Segmenter") -> None:
        self.words, self.marked, self.runs = by.words, by.marked, by.runs
        self.find = many_at_once(pattern, 16) if re.fullmatch(pattern, "") else re.compile(pattern).findall
