"""Rows that are there twice, and rows that hold a test's questions."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ._errors import DataError
from ._rows import KINDS
from ._split import normalise, question

SHORTEST = 5  # words; a question of fewer is in too many texts by chance
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Deduped:
    """`rows` without later copies; `copies` holds (index of the copy, index of the first) into the rows given."""

    rows: list[dict[str, Any]]
    copies: list[tuple[int, int]]


def dedupe_rows(rows: Sequence[dict[str, Any]], *, by: Literal["exact", "normalised"] = "normalised") -> Deduped:
    """Keeps the first of the rows that are alike, in order.

    "exact": all fields are equal. "normalised": the fields of the row's kind are, after NFKC, case folding and white space as one
    space; ids and other metadata do not count. Two answers to one question are two rows.
    """
    seen = SeenRows(by=by)
    kept: list[dict[str, Any]] = []
    copies: list[tuple[int, int]] = []
    for index, row in enumerate(rows):
        first = seen.first(row)
        if first is None:
            kept.append(row)
        else:
            copies.append((index, first))
    return Deduped(kept, copies)


class SeenRows:
    """What `dedupe_rows` does, one row at a time: for rows that do not fit into memory. Some 100 bytes a different row are kept."""

    def __init__(self, *, by: Literal["exact", "normalised"] = "normalised"):
        if by not in ("exact", "normalised"):
            raise DataError(f"by {by!r} is not known; it is exact or normalised")
        self._by, self._firsts, self._count = by, dict[bytes, int](), 0

    def first(self, row: dict[str, Any]) -> int | None:
        """The index of the row, among all that were asked about, that this one is a copy of; None where it is the first of its kind."""
        content = json.dumps(row if self._by == "exact" else _normalised(_content(row)), sort_keys=True)
        first = self._firsts.setdefault(hashlib.sha256(content.encode()).digest()[:16], self._count)
        self._count += 1
        return first if first != self._count - 1 else None


@dataclass(frozen=True)
class Hit:
    """A row that holds words of a test's question: where the row is, the test, the question's index in it, the words."""

    row: str
    test: str
    item: int
    words: str


@dataclass(frozen=True)
class Decontaminated:
    """`rows` without those that were hit (one hit a row is kept); `unchecked` counts, by test, questions too short to look for."""

    rows: list[dict[str, Any]]
    hits: list[Hit]
    unchecked: Counter[str]
    n: int

    def report(self, *, examples: int = 5) -> str:
        """Markdown: a line a test, then the first hits with their places."""
        lines = [f"{len(self.hits)} rows removed for {self.n} words in a row in common with a test; {len(self.rows)} kept.", ""]
        lines += ["| test | rows removed | questions found | questions too short to check |", "|---|---|---|---|"]
        for test in self.unchecked:
            found = [hit for hit in self.hits if hit.test == test]
            lines.append(f"| {test} | {len(found)} | {len({hit.item for hit in found})} | {self.unchecked[test]} |")
        lines += ["", *(f"- {hit.row}: {hit.test} {hit.item}: {hit.words}" for hit in self.hits[:examples])]
        return "\n".join(lines).rstrip() + "\n"


def decontaminate(rows: Sequence[dict[str, Any]], tests: Mapping[str, Sequence[dict[str, Any]]], *, n: int = 13) -> Decontaminated:
    """Removes rows that have `n` words in a row in common with a question of a test set (Brown et al. 2020, appendix C: n = 13).

    tests: rows by name of the set; what counts is what they ask. Words are runs of letters and digits, normalised as in
    `dedupe_rows`. A question of fewer than n words is looked for as a whole; one of fewer than 5 is not, and is counted.
    """
    search = Contamination(tests, n=n)
    kept: list[dict[str, Any]] = []
    hits: list[Hit] = []
    for index, row in enumerate(rows):
        hit = search.find(row, place=f"row {index}")
        if hit is None:
            kept.append(row)
        else:
            hits.append(hit)
    return Decontaminated(kept, hits, search.unchecked, n)


class Contamination:
    """What `decontaminate` does, one row at a time. `unchecked` counts, by test, the questions that are too short to look for."""

    def __init__(self, tests: Mapping[str, Sequence[dict[str, Any]]], *, n: int = 13):
        if n < SHORTEST:
            raise DataError(f"n {n} must be at least {SHORTEST}; fewer words in a row are in common by chance")
        self.unchecked: Counter[str] = Counter(dict.fromkeys(tests, 0))
        # By their first words: one look at each word of a row, whatever the lengths that are looked for.
        self._runs: dict[str, dict[str, tuple[str, int]]] = {}
        for test, items in tests.items():
            for item, row in enumerate(items):
                words = _words(question(row))
                size = min(n, len(words))
                if size < SHORTEST:
                    self.unchecked[test] += 1
                    continue
                for start in range(len(words) - size + 1):
                    run = words[start : start + size]
                    self._runs.setdefault(" ".join(run[:SHORTEST]), {}).setdefault(" ".join(run), (test, item))

    def find(self, row: dict[str, Any], *, place: str = "") -> Hit | None:
        """The first run of words that the row has in common with a test's question; `place` stands where the row has none of its own."""
        words = _words(" \n".join(_strings(_content(row))))
        for start in range(len(words) - SHORTEST + 1):
            for run, (test, item) in self._runs.get(" ".join(words[start : start + SHORTEST]), {}).items():
                if words[start : start + run.count(" ") + 1] == run.split(" "):
                    return Hit(getattr(row, "place", place), test, item, run)
        return None


def _content(row: dict[str, Any]) -> dict[str, Any]:
    """The fields of the row's kind; all of them where it is of no kind."""
    fields = next((fields for fields in KINDS.values() if all(field in row for field in fields)), tuple(row))
    return {field: row[field] for field in fields}


def _normalised(value: Any) -> Any:
    if isinstance(value, str):
        return normalise(value)
    if isinstance(value, list):
        return [_normalised(part) for part in value]
    return {key: _normalised(part) for key, part in value.items()} if isinstance(value, dict) else value


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def _words(text: str) -> list[str]:
    return _WORD.findall(normalise(text))
