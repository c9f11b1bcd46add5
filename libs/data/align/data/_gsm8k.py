"""GSM8K (Cobbe et al. 2021), bundled, and its reader."""

import re
from pathlib import Path
from typing import Any

from ._errors import DataError
from ._rows import Row, parse_objects, read_lines

_ASSETS = Path(__file__).parent / "assets"
_BUNDLED = {"gsm8k_train": "gsm8k/gsm8k_train.jsonl.gz", "gsm8k_test": "gsm8k/gsm8k_test.jsonl.gz"}
_ANNOTATION = re.compile(r"<<[^<>]*>>")


def bundled(name: str) -> Path:
    """The path of a data set that comes with this library: "gsm8k_train" or "gsm8k_test"; raises DataError for another name."""
    if name not in _BUNDLED:
        raise DataError(f"{name!r} is not bundled; {', '.join(_BUNDLED)} are. Give a file's path instead")
    return _ASSETS / _BUNDLED[name]


def gsm8k_rows(path: str | Path) -> list[dict[str, Any]]:
    """Returns {"prompt", "completion", "answer"} a problem, from the published form {"question", "answer"} or the bundled test set's
    {"problem", "solution"}.

    The completion is the worked solution without the calculator's annotations <<48/2=24>>, its last line "#### 72" written \\boxed{72};
    the answer is "72". Raises DataError with file:line.
    """
    rows: list[dict[str, Any]] = []
    for raw, place in parse_objects(read_lines(path), str(path)):
        prompt, solution = raw.get("question", raw.get("problem")), raw.get("solution", raw.get("answer"))
        if not isinstance(prompt, str) or not isinstance(solution, str):
            raise DataError(f"{place}: a GSM8K row has the strings question and answer (or problem and solution), this {', '.join(raw)}")
        steps, marker, answer = solution.rpartition("\n#### ")
        if not marker or not answer.strip():
            raise DataError(f"{place}: the solution does not end with a line '#### answer': ...{solution[-40:]!r}")
        row = Row(prompt=prompt, completion=f"{_ANNOTATION.sub('', steps)}\n\\boxed{{{answer.strip()}}}", answer=answer.strip())
        row.place = place
        rows.append(row)
    return rows
