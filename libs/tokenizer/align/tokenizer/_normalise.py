"""Normalisers. Each maps a text to a text; `aligned` also carries, for each character, the span of the original it comes from."""

from typing import TYPE_CHECKING, Any

from align.tokenizer import _unicode as U

if TYPE_CHECKING:
    from align.tokenizer._regex import Finder

Spans = list[tuple[int, int]]


class Prepend:
    """Puts `text` before a text that is not empty."""

    def __init__(self, text: str) -> None:
        self._prefix = text

    def text(self, text: str) -> str:
        return self._prefix + text if text else text

    def aligned(self, text: str, spans: Spans) -> tuple[str, Spans]:
        if not text:
            return text, spans
        return self._prefix + text, spans[:1] * len(self._prefix) + spans


class Replace:
    """Replaces each match; what comes in takes the span of the last character that goes out."""

    def __init__(self, finder: "Finder", old: str | None, new: str) -> None:
        self._finder, self._old, self._new = finder, old, new

    def text(self, text: str) -> str:
        if self._old is not None:
            return text.replace(self._old, self._new)
        return "".join(self._new if hit else piece for piece, hit in self._finder.pieces(text))

    def aligned(self, text: str, spans: Spans) -> tuple[str, Spans]:
        out, new_spans, at = [], [], 0
        for piece, hit in self._finder.pieces(text):
            end = at + len(piece)
            out.append(self._new if hit else piece)
            new_spans += [spans[end - 1]] * len(self._new) if hit else spans[at:end]
            at = end
        return "".join(out), new_spans


class Strip:
    """Drops white space (Unicode White_Space) at the ends."""

    def __init__(self, left: bool, right: bool) -> None:
        self._left, self._right = left, right
        self._space = U.property_set("s")

    def _bounds(self, text: str) -> tuple[int, int]:
        start, end = 0, len(text)
        while self._left and start < end and U.contains(self._space, ord(text[start])):
            start += 1
        while self._right and end > start and U.contains(self._space, ord(text[end - 1])):
            end -= 1
        return start, end

    def text(self, text: str) -> str:
        start, end = self._bounds(text)
        return text[start:end]

    def aligned(self, text: str, spans: Spans) -> tuple[str, Spans]:
        start, end = self._bounds(text)
        return text[start:end], spans[start:end]


class Sequence:
    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts

    def space_mark(self) -> str | None:
        """The mark, if this is what SentencePiece-style models do: a mark in front, and one for every space."""
        if [type(part) for part in self._parts] != [Prepend, Replace]:
            return None
        prepend, replace = self._parts
        return prepend._prefix if len(prepend._prefix) == 1 and (replace._old, replace._new) == (" ", prepend._prefix) else None

    def text(self, text: str) -> str:
        for part in self._parts:
            text = part.text(text)
        return text

    def changes(self, text: str) -> bool:
        """Whether some part changes the text, be it that a later one changes it back."""
        for part in self._parts:
            now = part.text(text)
            if now != text or (isinstance(part, Sequence) and part.changes(text)):
                return True
        return False

    def aligned(self, text: str, spans: Spans) -> tuple[str, Spans]:
        for part in self._parts:
            text, spans = part.aligned(text, spans)
        return text, spans
