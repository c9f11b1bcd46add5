"""A split into training and held-out rows that stays the same when rows are added, moved or repeated."""

import hashlib
import json
import unicodedata
from collections.abc import Sequence
from typing import Any

from ._errors import DataError


def split_rows(rows: Sequence[dict[str, Any]], held_out: float, *, salt: str = "") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns (train, held_out), each in the order of `rows`.

    A row's side is decided by the sha256 of its normalised question alone (see `question`), so rows that ask the same, whatever they
    answer, are on one side: nothing that is held out is trained on. `held_out` is the expected share, in [0, 1); a larger share holds
    the smaller one's rows. Another `salt` makes another split.
    """
    train: list[dict[str, Any]] = []
    held: list[dict[str, Any]] = []
    for row in rows:
        (held if is_held_out(row, held_out, salt=salt) else train).append(row)
    return train, held


def is_held_out(row: dict[str, Any], held_out: float, *, salt: str = "") -> bool:
    """The side of one row, as `split_rows` has it."""
    if not 0 <= held_out < 1:
        raise DataError(f"held_out {held_out} must be at least 0 and less than 1; 0.05 holds out one row in twenty")
    key = hashlib.sha256(f"{salt}\0{normalise(question(row))}".encode()).digest()
    return int.from_bytes(key[:8], "big") < int(held_out * 2**64)


def question(row: dict[str, Any]) -> str:
    """What a row asks: its prompt, its messages before the first assistant turn, or its text; the whole row where that is empty."""
    asked: Any = row.get("prompt", row.get("messages", row.get("text", "")))
    if isinstance(asked, list):
        roles = [message["role"] for message in asked]
        first = roles.index("assistant") if "assistant" in roles and "messages" in row else len(roles)
        # A system message alone asks nothing: every row of a file may have the same one.
        asked = "\n".join(m.get("content") or "" for m in asked[:first] if m["role"] not in ("system", "developer"))
    return asked if asked.strip() else json.dumps(row, sort_keys=True, ensure_ascii=False)


def normalise(text: str) -> str:
    """NFKC, case folded, runs of white space as one space: what two copies of a text have in common."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
