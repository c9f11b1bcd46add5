"""Pre-tokenizers: a normalised stretch of text to the pieces that the model sees one by one.

A piece is (text, spans): spans has one (start, end) of the original per character, or is None where nobody asked for offsets.
"""

from typing import Any

from align.tokenizer import _unicode as U
from align.tokenizer._normalise import Spans
from align.tokenizer._regex import Finder

Piece = tuple[str, Spans | None]

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def prefixed(piece: Piece, prefix: str) -> Piece:
    """The piece with `prefix` before it, which takes the span of the first character; an empty piece stays empty."""
    text, spans = piece
    if not text:
        return piece
    return prefix + text, None if spans is None else spans[:1] * len(prefix) + spans


def _merged(parts: list[list[Any]], behaviour: str) -> list[tuple[int, int]]:
    """(start, end, is_match) triples to the spans of the pieces, by the reference's rules for `behavior`."""
    if behaviour == "Isolated":
        return [(a, b) for a, b, _ in parts]
    if behaviour == "Removed":
        return [(a, b) for a, b, hit in parts if not hit]
    out: list[list[int]] = []
    before = False  # was the neighbour a match?
    for a, b, hit in parts if behaviour != "MergedWithNext" else reversed(parts):
        if behaviour == "Contiguous":
            join = bool(out) and hit == before
        else:
            join = bool(out) and hit and not before
        if join and behaviour == "MergedWithNext":
            out[-1][0] = a
        elif join:
            out[-1][1] = b
        else:
            out.append([a, b])
        before = hit
    return [(a, b) for a, b in (reversed(out) if behaviour == "MergedWithNext" else out)]


class Split:
    """Cuts by a pattern. `behaviour` and `invert` as in Hugging Face's Split."""

    def __init__(self, finder: Finder, behaviour: str = "Isolated", invert: bool = False) -> None:
        self.finder, self.behaviour, self.invert = finder, behaviour, invert

    def __call__(self, pieces: list[Piece], first: bool) -> list[Piece]:
        out: list[Piece] = []
        for text, spans in pieces:
            parts, at = [], 0
            for part, hit in self.finder.pieces(text):
                parts.append([at, at + len(part), hit != self.invert])
                at += len(part)
            for a, b in _merged(parts, self.behaviour):
                out.append((text[a:b], None if spans is None else spans[a:b]))
        return out


class PrefixSpace:
    """ByteLevel's add_prefix_space: a space before each piece that does not begin with one."""

    def __call__(self, pieces: list[Piece], first: bool) -> list[Piece]:
        return [piece if piece[0].startswith(" ") else prefixed(piece, " ") for piece in pieces]


class Metaspace:
    """Spaces become `replacement`, one is put before the text, and `splitter` cuts before each. `scheme`: always and never; first, at the
    beginning of the whole text; those where the text does not begin with one; each, before every stretch whatever it begins with."""

    def __init__(self, replacement: str, scheme: str, splitter: Split | None) -> None:
        self.replacement, self.scheme, self.splitter = replacement, scheme, splitter

    def __call__(self, pieces: list[Piece], first: bool) -> list[Piece]:
        out: list[Piece] = []
        for index, (text, spans) in enumerate(pieces):
            piece = (text.replace(" ", self.replacement), spans)
            at_start = first and (index == 0 if spans is None else spans[0][0] == 0)
            wanted = self.scheme == "always" or (self.scheme == "first" and at_start)
            if self.scheme == "each" or (wanted and not piece[0].startswith(self.replacement)):
                piece = prefixed(piece, self.replacement)
            out.append(piece)
        return self.splitter(out, first) if self.splitter else out


class PreTokenizer:
    """The chain of stages, and a short cut for the chains that published tokenizers have.

    `simple` says that the pieces tile the normalised text but for a prefix before it: `tile(prefixed(text, first))` are the pieces.
    Else the stages are gone through one by one. `finder` is then what cuts, or None where nothing does.
    """

    def __init__(self, stages: list[Any]) -> None:
        self.stages = stages
        self.finder: Finder | None = None
        rest = list(stages)
        self._prefix = rest.pop(0) if rest and isinstance(rest[0], (PrefixSpace, Metaspace)) else None
        if rest and isinstance(rest[0], Split) and rest[0].behaviour == "Isolated" and len(rest) == 1:
            self.finder = rest.pop().finder
        split_here = isinstance(self._prefix, Metaspace) and self._prefix.splitter is not None
        self.cuts_anywhere = not any(isinstance(stage, (PrefixSpace, Metaspace)) for stage in stages)  # adds nothing at a beginning
        self.asks_first = any(isinstance(stage, Metaspace) and stage.scheme == "first" for stage in stages)
        self._needs_spans = any(isinstance(stage, Metaspace) and stage.scheme == "first" for stage in stages[1:])
        self.simple = not rest and not split_here
        # Metaspace alone: spaces may stay, if the model reads a space as the replacement.
        self._scheme = self._prefix.scheme if isinstance(self._prefix, Metaspace) else ""
        self.space = self._prefix.replacement if self.simple and not self.finder and isinstance(self._prefix, Metaspace) else None

    def words(self, text: str, first: bool) -> list[str]:
        """The pieces' texts. `first`: the stretch begins where the whole text begins."""
        if self.simple:
            return self.tile(self.prefixed(text, first))
        spans = [(i, i + 1) for i in range(len(text))] if self._needs_spans else None
        return [piece for piece, _ in self.pieces(text, spans, first)]

    def prefixed(self, text: str, first: bool) -> str:
        """A simple chain's text, as its cutting stage sees it."""
        if self.space:
            wanted = self._scheme == "always" or (self._scheme == "first" and first)
            wanted = self._scheme == "each" or (wanted and text[:1] not in (" ", self.space))
            return " " + text if wanted and text else text
        return self._prefix([(text, None)], first)[0][0] if self._prefix else text

    def tile(self, text: str) -> list[str]:
        return self.finder.words(text) if self.finder else [text]

    def pieces(self, text: str, spans: Spans | None, first: bool) -> list[Piece]:
        pieces: list[Piece] = [(text, spans)] if text else []
        for stage in self.stages:
            pieces = [piece for piece in stage(pieces, first) if piece[0]]
        return pieces


def one_of(members: U.CodeSet) -> Finder:
    """Finds single characters of a set."""
    return Finder([members], "pre_tokenizer")
