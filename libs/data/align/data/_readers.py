"""Published data sets, as their files are, to rows of our kinds."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ._errors import DataError
from ._rows import Row, RowSet, file_digest, read_objects

Source = str | Path | Iterable[dict[str, Any]]  # a JSON Lines file in the published form, or its objects from anywhere else
_ASSETS = Path(__file__).parent / "assets"
_BUNDLED = {
    "gsm8k_train": "gsm8k/gsm8k_train.jsonl.gz",
    "gsm8k_test": "gsm8k/gsm8k_test.jsonl.gz",
    "gsm8k_solutions": "gsm8k/gsm8k_solutions.jsonl.gz",
    "math500": "math500/math500.jsonl.gz",
}
_ANNOTATION = re.compile(r"<<[^<>]*>>")
_SOLVERS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


def bundled(name: str) -> Path:
    """The path of a data set that comes with this library: "gsm8k_train", "gsm8k_test", "gsm8k_solutions" or "math500"; beside it lies
    its PROVENANCE.md, with the licence. Raises DataError for another name."""
    if name not in _BUNDLED:
        raise DataError(f"{name!r} is not bundled; {', '.join(_BUNDLED)} are. Give a file's path instead")
    return _ASSETS / _BUNDLED[name]


def bundled_rows(name: str) -> RowSet:
    """The rows of a bundled data set, by its reader. "gsm8k_solutions" are answers to the questions of "gsm8k_test"."""
    path = bundled(name)
    if name == "gsm8k_solutions":
        rows, kind = solution_pairs(path)[0], "preference"
    elif name == "math500":
        rows, kind = math500_rows(path), "answer"
    else:
        rows, kind = gsm8k_rows(path), "completion"
    return RowSet(rows, kind, Path(name), file_digest(path))


def gsm8k_rows(source: Source) -> list[dict[str, Any]]:
    """GSM8K (Cobbe et al. 2021): {"prompt", "completion", "answer"} a problem, from the published form {"question", "answer"}, the
    bundled test set's {"problem", "solution"}, or a conversation of one question and one solution {"messages"}.

    The completion is the worked solution without the calculator's annotations <<48/2=24>>, its last line "#### 72" written \\boxed{72};
    the answer is "72". Raises DataError with file:line.
    """
    rows: list[dict[str, Any]] = []
    for raw, place in _objects(source):
        prompt, solution = raw.get("question", raw.get("problem")), raw.get("solution", raw.get("answer"))
        turns = raw.get("messages")
        if isinstance(turns, list) and [isinstance(turn, dict) and turn.get("role") for turn in turns] == ["user", "assistant"]:
            prompt, solution = (turn.get("content") for turn in turns)
        if not isinstance(prompt, str) or not isinstance(solution, str):
            raise DataError(f"{place}: a GSM8K row has the strings question and answer (or problem and solution), this {', '.join(raw)}")
        steps, marker, answer = solution.rpartition("\n#### ")
        if not marker or not answer.strip():
            raise DataError(f"{place}: the solution does not end with a line '#### answer': ...{solution[-40:]!r}")
        completion = f"{_ANNOTATION.sub('', steps)}\n\\boxed{{{answer.strip()}}}"
        rows.append(_row(place, prompt=prompt, completion=completion, answer=answer.strip()))
    return rows


def math500_rows(source: Source) -> list[dict[str, Any]]:
    """MATH-500 (Lightman et al. 2023): {"prompt", "answer"} with "subject", "level" and "id" where the file has them."""
    rows: list[dict[str, Any]] = []
    for raw, place in _objects(source):
        prompt, answer = _texts(raw, place, "MATH-500", "problem", "answer")
        other = {"subject": raw.get("subject"), "level": raw.get("level"), "id": raw.get("unique_id", raw.get("id"))}
        rows.append(_row(place, prompt=prompt, answer=answer, **{key: value for key, value in other.items() if value is not None}))
    return rows


def prm800k_rows(source: Source) -> tuple[list[dict[str, Any]], Counter[str]]:
    """PRM800K (Lightman et al. 2023), either phase: rows {"prompt", "steps", "labels"}, labels -1, 0, 1, and what was dropped, counted.

    The labelled solution is the chosen completion of each step. Where none was chosen it is the human's own step, which is right (1);
    without one it is the first completion, the step at which labelling stopped. A step without a rating ends the solution.
    Dropped: "screening" and "quality_control" questions, "bad_problem" and "give_up", and "unrated" (no rated step).
    """
    rows: list[dict[str, Any]] = []
    dropped: Counter[str] = Counter()
    for raw, place in _objects(source):
        problem, label = raw.get("question"), raw.get("label")
        if not isinstance(problem, dict) or not isinstance(label, dict) or not isinstance(label.get("steps"), list):
            raise DataError(f"{place}: a PRM800K row has the objects question and label, and label.steps; this has {', '.join(raw)}")
        (prompt,) = _texts(problem, place, "PRM800K question", "problem")
        if raw.get("is_initial_screening_question"):
            dropped["screening"] += 1
        elif raw.get("is_quality_control_question"):
            dropped["quality_control"] += 1
        elif label.get("finish_reason") in ("bad_problem", "give_up"):
            dropped[label["finish_reason"]] += 1
        else:
            rated = list(_rated_steps(label["steps"], place))
            if rated:
                rows.append(_row(place, prompt=prompt, steps=[text for text, _ in rated], labels=[rating for _, rating in rated]))
            dropped["unrated"] += not rated
    return rows, +dropped


def preference_rows(source: Source) -> tuple[list[dict[str, Any]], Counter[str]]:
    """UltraFeedback, binarized (Cui et al. 2023; Argilla's and the H4 team's form): rows {"prompt", "chosen", "rejected"}, and what was
    dropped, counted.

    chosen and rejected are strings beside a prompt (a string or messages: our own rows too), or conversations that differ in the last turn;
    then the prompt is what comes before it: a string for one user turn, else the messages. Dropped: "same" (both answers equal), "tie"
    (ratings equal), "empty" (an answer without text).
    """
    rows: list[dict[str, Any]] = []
    dropped: Counter[str] = Counter()
    for raw, place in _objects(source):
        if not all(isinstance(raw.get(side), (str, list)) for side in ("chosen", "rejected")):
            raise DataError(f"{place}: a preference row has chosen and rejected, strings or messages; this has {', '.join(raw)}")
        (before, chosen), (other, rejected) = (_last_turn(raw, side, place) for side in ("chosen", "rejected"))
        if before != other:
            raise DataError(f"{place}: chosen and rejected differ before the last turn; they must answer the same")
        ratings = [raw.get(f"{side}-rating", raw.get(f"score_{side}")) for side in ("chosen", "rejected")]
        if not chosen.strip() or not rejected.strip():
            dropped["empty"] += 1
        elif chosen == rejected:
            dropped["same"] += 1
        elif ratings[0] is not None and ratings[0] == ratings[1]:
            dropped["tie"] += 1
        else:
            rows.append(_row(place, prompt=before, chosen=chosen, rejected=rejected))
    return rows, dropped


def solution_pairs(source: Source) -> tuple[list[dict[str, Any]], Counter[str]]:
    """GSM8K's labelled model solutions (openai/grade-school-math): every right solution of a question over every wrong one, as rows
    {"prompt", "chosen", "rejected"}; and the questions dropped, counted: "all_right", "all_wrong".

    The calculator's annotations are removed, and the last line "A: 18" is written \\boxed{18}.
    """
    rows: list[dict[str, Any]] = []
    dropped: Counter[str] = Counter()
    for raw, place in _objects(source):
        (prompt,) = _texts(raw, place, "labelled solutions", "question")
        sides: dict[bool, list[str]] = {True: [], False: []}
        for name in _SOLVERS:
            solution = raw.get(name)
            if not isinstance(solution, dict) or not isinstance(solution.get("is_correct"), bool):
                raise DataError(f"{place}: {name} must be an object with is_correct and solution")
            text = _ANNOTATION.sub("", _texts(solution, place, name, "solution")[0])
            sides[solution["is_correct"]].append(re.sub(r"\nA: ([^\n]*)$", lambda found: f"\n\\boxed{{{found[1]}}}", text))
        rows += [_row(place, prompt=prompt, chosen=right, rejected=wrong) for right in sides[True] for wrong in sides[False]]
        if not sides[True] or not sides[False]:
            dropped["all_wrong" if sides[False] else "all_right"] += 1
    return rows, dropped


def lean_rows(source: Source) -> list[dict[str, Any]]:
    """Lean 4 statements in the form of DeepSeek-Prover-V1.5 and Goedel-Prover-V2: {"prompt", "answer", "name", "header"}.

    The answer is the statement, "theorem name ... : type" without ":=" and proof (ProofNet has a few `def`s); the header is what comes
    before it (imports, options, open namespaces, definitions), from its own field and from the front of the statement; the prompt is
    header, informal text and statement with " := by", to be gone on with.
    """
    rows: list[dict[str, Any]] = []
    for raw, place in _objects(source):
        name, formal = _texts(raw, place, "Lean", "name", "formal_statement")
        given, informal = (str(raw.get(key) or "").strip("\n") for key in ("header", "informal_prefix"))
        found = _last(r"^(?:theorem|lemma)\b", formal) or _last(r"^(?:noncomputable )?(?:def|abbrev)\b", formal)
        if not found:
            raise DataError(f"{place}: formal_statement has no theorem: {formal[:60]!r}")
        own = formal[: found.start()].replace(informal, "").strip("\n")  # definitions, or the header itself
        header = "\n\n".join(part for part in (given, own) if part)
        statement = re.sub(r"\s*:=\s*(?:by)?\s*(?:sorry)?\s*$", "", formal[found.start() :])
        text = "\n".join(part for part in (informal, f"{statement} := by\n") if part)
        rows.append(_row(place, prompt=f"{header}\n\n{text}".lstrip("\n"), answer=statement, name=name, header=header))
    return rows


def _objects(source: Source) -> Iterator[tuple[dict[str, Any], str]]:
    if isinstance(source, (str, Path)):
        return ((row, row.place) for row in read_objects(source))
    return ((row, getattr(row, "place", f"row {index}")) for index, row in enumerate(source))


def _last(pattern: str, text: str) -> re.Match[str] | None:
    return next(iter([*re.finditer(pattern, text, re.MULTILINE)][::-1]), None)


def _row(place: str, **fields: Any) -> Row:
    row = Row(fields)
    row.place = place
    return row


def _texts(raw: dict[str, Any], place: str, what: str, *names: str) -> list[str]:
    for name in names:
        if not isinstance(raw.get(name), str) or not raw[name].strip():
            raise DataError(f"{place}: {what} needs the string {name}, this has {', '.join(raw)}")
    return [raw[name] for name in names]


def _rated_steps(steps: list[Any], place: str) -> Iterator[tuple[str, int]]:
    for index, step in enumerate(steps):
        try:
            chosen, human = step["chosen_completion"], step.get("human_completion")
            if chosen is None and human is not None:
                text, rating = human["text"], 1
            else:
                completion = step["completions"][chosen or 0]
                text, rating = completion["text"], completion["rating"]
        except (KeyError, TypeError, IndexError, AttributeError):
            raise DataError(f"{place}: label.steps[{index}] has no completion that was chosen; is this PRM800K?") from None
        if rating is None:
            return
        if rating not in (-1, 0, 1) or not isinstance(text, str):
            raise DataError(f"{place}: label.steps[{index}] has rating {rating!r}; it must be -1, 0 or 1, with a text")
        yield text, rating
        if chosen is None and human is None:
            return


def _last_turn(raw: dict[str, Any], side: str, place: str) -> tuple[Any, str]:
    """What comes before the answer, and the answer."""
    turns = raw[side]
    if isinstance(turns, str):
        prompt = raw.get("prompt")
        return _turns(prompt, "prompt", place) if isinstance(prompt, list) else _texts(raw, place, "a preference row", "prompt")[0], turns
    _turns(turns, side, place)
    if len(turns) < 2 or turns[-1]["role"] != "assistant":
        raise DataError(f"{place}: {side} must be a question and end with the assistant's turn")
    before = [{"role": turn["role"], "content": turn["content"]} for turn in turns[:-1]]
    return (before[0]["content"] if len(before) == 1 and before[0]["role"] == "user" else before), turns[-1]["content"]


def _turns(turns: list[Any], field: str, place: str) -> list[Any]:
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str) or not isinstance(turn.get("content"), str):
            raise DataError(f"{place}: {field} must be messages with role and content, strings both")
    return turns
