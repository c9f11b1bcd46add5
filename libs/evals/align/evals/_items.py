"""One record a sample: what was asked, what came, how it was judged and why. A result file is these as JSON lines."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


class EvalError(ValueError):
    """Rows, results or files that can't be evaluated: the message names the place, the value and the way out."""

    exit_code = 2


@dataclass(frozen=True)
class Item:
    """A judged sample.

    problem: index of the row; sample: which of its samples. group: the row's group (level, subject), or None.
    prompt, gold: of the row. output: decoded, without special tokens. answer: what the verifier cut out of the output, as text, or None.
    correct: None when the gold can't be read: such an item counts nowhere. reason: the verdict's (equal, different, no_answer, …).
    tokens: sampled ones, the stop token included. finish_reason: "stop" or "length".
    """

    problem: int
    sample: int
    group: str | None
    prompt: str
    gold: str
    output: str
    answer: str | None
    correct: bool | None
    reason: str
    tokens: int
    finish_reason: str


_TYPES: dict[str, tuple[type, ...]] = {
    "problem": (int,),
    "sample": (int,),
    "group": (str, type(None)),
    "prompt": (str,),
    "gold": (str,),
    "output": (str,),
    "answer": (str, type(None)),
    "correct": (bool, type(None)),
    "reason": (str,),
    "tokens": (int,),
    "finish_reason": (str,),
}


def write_items(path: str | Path, items: Iterable[Item]) -> None:
    """Writes a result file: one JSON object a line. It appears whole or not at all. Raises EvalError where it cannot be written."""
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in items)
        unfinished.replace(path)
    except OSError as error:
        raise EvalError(f"{path}: can't be written ({error.strerror}); give a path in a directory that exists and is writable") from error
    finally:
        unfinished.unlink(missing_ok=True)


def read_items(path: str | Path) -> list[Item]:
    """Reads a result file.

    Raises:
        EvalError: a file that can't be read, a line that is no item; the message has file, line and field.
    """
    path, items = Path(path), []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise EvalError(f"{path}: can't be read ({error.strerror}); give a result file of an evaluation") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                items.append(_item(json.loads(line)))
            except (ValueError, RecursionError) as error:  # JSON and Unicode errors are ValueErrors too
                raise EvalError(f"{path}:{number}: {error}; is this a result file of an evaluation?") from error
    return items


def _item(value: Any) -> Item:
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__} instead of an object")
    for name, types in _TYPES.items():
        if name not in value:
            raise ValueError(f"field {name} is missing")
        if not isinstance(value[name], types) or (isinstance(value[name], bool) and bool not in types):
            raise ValueError(f"field {name} is {value[name]!r}")
    return Item(**{field.name: value[field.name] for field in fields(Item)})


def problem_scores(items: Sequence[Item]) -> dict[int, tuple[int, int]]:
    """problem -> (samples judged, samples correct), in order of appearance; problems whose gold can't be read are left out."""
    scores: dict[int, tuple[int, int]] = {}
    for item in items:
        if item.correct is not None:
            judged, correct = scores.get(item.problem, (0, 0))
            scores[item.problem] = (judged + 1, correct + item.correct)
    return scores
