"""Sets of code points and the frozen Unicode tables.

`unicodedata` is never read: ids would change with the interpreter. The tables are those of Hugging Face tokenizers 0.23.3
(assets/unicode/PROVENANCE.md), which is what published tokenizers were trained and are checked with.
"""

import json
from bisect import bisect_right
from functools import cache
from pathlib import Path
from typing import Any

LIMIT = 0x110000
ASSETS = Path(__file__).parent / "assets"

# A set of code points is a sorted tuple of boundaries: members are [b0, b1), [b2, b3), …
CodeSet = tuple[int, ...]


def from_ranges(ranges: Any) -> CodeSet:
    """Inclusive (first, last) pairs, in any order, to a CodeSet."""
    out: list[int] = []
    for first, last in sorted(ranges):
        if out and first <= out[-1]:
            out[-1] = max(out[-1], last + 1)
        else:
            out += [first, last + 1]
    return tuple(out)


def contains(members: CodeSet, code: int) -> bool:
    return bool(bisect_right(members, code) & 1)


def _combine(sets: Any, keep: Any) -> CodeSet:
    """Sweep over the boundaries of `sets`; keep(flags) says whether an interval belongs to the result."""
    edges = sorted({0}.union(*map(set, sets)))
    out: list[int] = []
    inside = False
    for edge in edges:
        now = bool(keep([bisect_right(s, edge) & 1 for s in sets]))
        if now != inside:
            out.append(edge)
            inside = now
    if inside:
        out.append(LIMIT)
    return tuple(out)


def union(*sets: CodeSet) -> CodeSet:
    return _combine(sets, any)


def intersect(*sets: CodeSet) -> CodeSet:
    return _combine(sets, all)


def invert(members: CodeSet) -> CodeSet:
    return _combine([members], lambda flags: not flags[0])


def minus(members: CodeSet, other: CodeSet) -> CodeSet:
    return _combine([members, other], lambda flags: flags[0] and not flags[1])


@cache
def _tables(name: str) -> dict[str, Any]:
    """The raw tables, read once, when a tokenizer first needs them."""
    found: dict[str, Any] = json.loads((ASSETS / "unicode" / name).read_text("utf-8"))
    return found


@cache
def find_set(name: str) -> CodeSet | None:
    """The code points of a class: L, N, Lu, …, s, w, d (Oniguruma's), rust_w, rust_is_numeric, …; None where the tables have none."""
    ranges = _tables("classes.json").get(name) or _tables("classes_more.json").get(name)
    return None if ranges is None else from_ranges(ranges)


def property_set(name: str) -> CodeSet:
    """The code points of a class that the tables have."""
    found = find_set(name)
    if found is None:
        raise KeyError(name)
    return found


class ClassMap(dict[int, int]):
    """A table for str.translate that sends every character beyond ASCII to one letter per class.

    Python's `re` is slow on classes that reach beyond Latin-1. The classes a pattern uses cut the code points into a few
    blocks; each block gets one letter from U+0080 on, so that the pattern runs over Latin-1 text, one letter per character.
    """

    def __init__(self, sets: list[CodeSet]) -> None:
        edges = sorted({0x80}.union(*({e for e in s if 0x80 < e < LIMIT} for s in sets)))
        blocks: dict[tuple[bool, ...], int] = {}
        self._edges = edges
        flags = zip(*([bisect_right(s, e) & 1 == 1 for e in edges] for s in sets), strict=True) if sets else [()] * len(edges)
        self._letters = [0x80 + blocks.setdefault(block, len(blocks)) for block in flags]
        self.blocks = list(blocks)
        super().__init__((code, code) for code in range(0x80))

    def __missing__(self, code: int) -> int:
        if len(self) > 50_000:
            for key in [k for k in self if k >= 0x80]:
                del self[key]
        letter = self._letters[bisect_right(self._edges, code) - 1]
        self[code] = letter
        return letter
