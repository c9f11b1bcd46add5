"""Multiple choice by log-likelihood: which of the given continuations does the model find the likeliest?"""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from align.evals._accuracy import EvalResult, encode_prompt, summarise
from align.evals._items import EvalError, Item
from align.tokenizer import Tokenizer

Score = Callable[[Sequence[list[int]], Sequence[list[int]]], Sequence[float]]


def choice_accuracy(
    score: Score,
    tokenizer: Tokenizer,
    rows: Sequence[dict[str, Any]],
    *,
    normalise: Literal["none", "tokens", "characters"] = "characters",
    group: str = "level",
    chunk: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> EvalResult:
    """Accuracy of the likeliest choice. Equally likely choices: the first one is taken.

    Args:
        score: the summed log-probability of each continuation after its prompt, both as token ids; it is called with all choices of `chunk`
            rows at a time.
        rows: {"prompt" or "messages", "choices": texts, "answer": an index from 0, a letter from A, or the right choice's own text}.
        normalise: what a sum is divided by before choices are compared: the continuation's tokens, its characters (as the common harnesses'
            normalised accuracy), or nothing.
        group: the row's field that `by_group` counts by. progress(rows done, rows) is called after every chunk.

    A bare prompt and a choice are joined by a space, unless one of them has it already, and encoded together; what follows their common
    beginning with the prompt alone is the continuation, so that a token that spans the border counts to it. With messages the choice is
    encoded alone, after the opened turn.

    Raises:
        EvalError: no rows, a row without choices, with fewer than two, or with an answer that is none of them.
    """
    if not rows:
        raise EvalError("no rows to evaluate; look at the file and at what was filtered out")
    golds = [_gold(row, f"row {index}") for index, row in enumerate(rows)]
    items: list[Item] = []
    for start in range(0, len(rows), chunk):
        part = rows[start : start + chunk]
        pairs = [_split(tokenizer, row, choice) for row in part for choice in row["choices"]]
        scores = iter(score([prompt for prompt, _ in pairs], [ids for _, ids in pairs]))
        lengths = iter([len(ids) for _, ids in pairs])
        for index, row in enumerate(part):
            choices = row["choices"]
            sums, tokens = [next(scores) for _ in choices], [next(lengths) for _ in choices]
            by = {"none": [1] * len(choices), "tokens": tokens, "characters": [max(1, len(c)) for c in choices]}[normalise]
            values = [total / divisor for total, divisor in zip(sums, by, strict=True)]
            best, gold = values.index(max(values)), golds[start + index]
            items.append(
                Item(
                    problem=start + index,
                    sample=0,
                    group=str(row[group]) if row.get(group) is not None else None,
                    prompt=row["prompt"] if "prompt" in row else "\n".join(f"{m['role']}: {m['content']}" for m in row["messages"]),
                    gold=choices[gold],
                    output=choices[best],
                    answer=choices[best],
                    correct=best == gold,
                    reason="likeliest",
                    tokens=tokens[best],
                    finish_reason="stop",
                )
            )
        if progress:
            progress(start + len(part), len(rows))
    return summarise(items)


def choice_rows(path: str | Path) -> list[dict[str, Any]]:
    """Rows with choices from a JSONL file, plain or .gz. Raises EvalError with file and line."""
    path, rows = Path(path), []
    try:
        data = path.read_bytes()
        lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode().split("\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise EvalError(f"{path}: can't be read ({error}); give a JSONL file of rows with choices") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
                json.dumps(row, ensure_ascii=False).encode()  # as its item will be written
            except UnicodeEncodeError:
                raise EvalError(f"{path}:{number}: holds a lone surrogate (\\ud800 to \\udfff), which is no character") from None
            except (ValueError, RecursionError) as error:
                raise EvalError(f"{path}:{number}: not JSON ({error}); a line holds one object") from error
            _gold(row, f"{path}:{number}")
            rows.append(row)
    return rows


def _gold(row: Any, place: str) -> int:
    """The index of the right choice."""
    if not isinstance(row, dict) or not (isinstance(row.get("prompt"), str) or isinstance(row.get("messages"), list)):
        raise EvalError(f"{place}: expected is an object with prompt (text) or messages (a list), choices and answer")
    choices, answer = row.get("choices"), row.get("answer")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise EvalError(f"{place}: choices is {choices!r}; expected is a list of two or more texts")
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    index = ord(answer) - ord("A") if isinstance(answer, str) and len(answer) == 1 and answer.isupper() else answer
    if type(index) is not int or not 0 <= index < len(choices):
        raise EvalError(
            f"{place}: answer {answer!r} is none of {len(choices)} choices; give an index from 0, a letter from A, or a choice's text"
        )
    return index


def _split(tokenizer: Tokenizer, row: dict[str, Any], choice: str) -> tuple[list[int], list[int]]:
    alone = encode_prompt(tokenizer, row)
    if "messages" in row:
        return alone, tokenizer.encode(choice, special="text")
    space = "" if row["prompt"][-1:].isspace() or choice[:1].isspace() else " "
    whole = encode_prompt(tokenizer, {"prompt": row["prompt"] + space + choice})
    shared = 0
    while shared < min(len(alone), len(whole) - 1) and alone[shared] == whole[shared]:
        shared += 1
    if not shared:
        raise EvalError(f"the prompt {row['prompt']!r} and its choice {choice!r} share no token; put a bos token or text in front")
    return whole[:shared], whole[shared:]
