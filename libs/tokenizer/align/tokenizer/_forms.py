"""NFC, NFD, NFKC, NFKD and lower case from frozen tables (Unicode Standard Annex #15), with alignment.

The tables are those of the reference, whose Unicode version is older than most interpreters': marks that it does not know are not
reordered, and stay out of composition.
"""

import json
import re
from functools import cache
from typing import Any

from align.tokenizer import _unicode as U
from align.tokenizer._normalise import Spans

_beyond_ascii = re.compile("[^\x00-\x7f]+").findall  # no ASCII character ever changes
_L, _V, _T, _S = 0x1100, 0x1161, 0x11A7, 0xAC00  # Hangul is arithmetic: 19 × 21 × 28 syllables


@cache
def _tables() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Combining classes, full canonical and full compatibility decompositions, composition pairs, lower case."""
    raw = json.loads((U.ASSETS / "unicode" / "forms.json").read_text("utf-8"))
    classes = {chr(c): int(k) for k, ranges in raw["ccc"].items() for a, b in ranges for c in range(a, b + 1)}
    compatible = {**raw["canonical"], **raw["compatible"]}
    return classes, raw["canonical"], compatible, raw["compose"], raw["lower"]


def _decomposed(char: str, table: dict[str, str]) -> str:
    index = ord(char) - _S
    if 0 <= index < 11172:
        tail = index % 28
        return chr(_L + index // 588) + chr(_V + index % 588 // 28) + (chr(_T + tail) if tail else "")
    return table.get(char, char)


def _composed(first: str, second: str, pairs: dict[str, Any]) -> str | None:
    a, b = ord(first), ord(second)
    if _L <= a < _L + 19 and _V <= b < _V + 21:
        return chr(_S + ((a - _L) * 21 + b - _V) * 28)
    if _S <= a < _S + 11172 and (a - _S) % 28 == 0 and _T < b < _T + 28:
        return chr(a + b - _T)
    return pairs.get(first + second)


class Form:
    """One normal form. Only the stretches that it can change are looked at."""

    def __init__(self, compatible: bool, compose: bool) -> None:
        self._classes, canonical, compat, self._pairs, _ = _tables()
        self._table = compat if compatible else canonical
        self._compose = compose
        touched = {c for c in self._table if not compose or self._run(c) != [(c, 0)]}
        touched |= self._classes.keys()
        ranges = [(ord(c), ord(c)) for c in touched]
        if compose:
            ranges += [(ord(pair[1]), ord(pair[1])) for pair in self._pairs] + [(_V, _V + 20), (_T + 1, _T + 27)]
        else:
            ranges.append((_S, _S + 11171))
        members = U.from_ranges(ranges)
        # Classes of `re` are quick within the BMP alone. So every astral character is looked at, and those that stay are left out then.
        inside = "".join(f"\\U{a:08x}-\\U{b - 1:08x}" for a, b in zip(members[::2], members[1::2], strict=True) if a < 0x10000)
        self._dirty = re.compile(f"(?s:.?)[{inside}\U00010000-\U0010ffff]+")
        self._touched = members
        self._clean = re.compile(f"[^{inside}\U00010000-\U0010ffff]*")

    def _runs(self, text: str) -> list[tuple[int, int]]:
        """(start, end) of each stretch that may change."""
        if text.isascii() or self._clean.fullmatch("".join(_beyond_ascii(text))):
            return []
        found = (match.span() for match in self._dirty.finditer(text))
        return [(a, b) for a, b in found if any(U.contains(self._touched, ord(char)) for char in text[a:b])]

    def text(self, text: str) -> str:
        runs = self._runs(text)
        if not runs:
            return text
        out, at = [], 0
        for start, end in runs:
            out.append(text[at:start])
            out += [char for char, _ in self._run(text[start:end])]
            at = end
        return "".join([*out, text[at:]])

    def aligned(self, text: str, spans: Spans) -> tuple[str, Spans]:
        out, new_spans, at = [], [], 0
        for start, end in self._runs(text):
            out.append(text[at:start])
            new_spans += spans[at:start]
            chars = self._run(text[start:end])
            out += [char for char, _ in chars]
            new_spans += shifted([change for _, change in chars], spans[start:end])
            at = end
        return "".join([*out, text[at:]]), new_spans + spans[at:]

    def _run(self, text: str) -> list[tuple[str, int]]:
        """The normal form of a stretch: (character, change), where change 1 is an inserted character and −n took n more in."""
        parts: list[tuple[str, int]] = []
        for char in text:
            parts += [(c, int(i > 0)) for i, c in enumerate(_decomposed(char, self._table))]
        self._reorder(parts)
        return self._recomposed(parts) if self._compose else parts

    def _reorder(self, parts: list[tuple[str, int]]) -> None:
        """Sorts each run of marks by combining class, stably, in place."""
        at = 0
        while at < len(parts):
            end = at
            while end < len(parts) and parts[end][0] in self._classes:
                end += 1
            if end > at + 1:
                parts[at:end] = sorted(parts[at:end], key=lambda part: self._classes[part[0]])
            at = max(end, at + 1)

    def _recomposed(self, parts: list[tuple[str, int]]) -> list[tuple[str, int]]:
        out: list[tuple[str, int]] = []
        starter = -1  # index in `out` of what the next mark may join
        blocked = -1  # combining class of the last mark that did not join, −1 where none stands between
        for part in parts:
            char, change = part
            ccc = self._classes.get(char, 0)
            if starter >= 0 and (blocked < 0 or blocked < ccc):
                joined = _composed(out[starter][0], char, self._pairs)
                if joined:
                    out[starter] = (joined, out[starter][1] + change - 1)
                    continue
            if ccc == 0:
                starter, blocked = len(out), -1
            else:
                blocked = ccc
            out.append(part)
        return out


def shifted(changes: list[int], spans: Spans) -> Spans:
    """Spans of the new characters: each takes the span of the old one it replaces, an inserted one that of its neighbour before."""
    out, at = [], 0
    for change in changes:
        if change > 0:
            out.append(spans[at - 1])
            continue
        out.append(spans[at])
        at += 1 - change
    return out


class Lowercase:
    def __init__(self) -> None:
        self._lower = _tables()[4]
        self._map = str.maketrans(self._lower)

    def text(self, text: str) -> str:
        return text.translate(self._map)

    def aligned(self, text: str, spans: Spans) -> tuple[str, Spans]:
        sizes = [len(self._lower.get(char, char)) for char in text]
        return text.translate(self._map), [span for span, size in zip(spans, sizes, strict=False) for _ in range(size)]
