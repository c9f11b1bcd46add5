"""Accuracy on rows with answers: sample, judge, count."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from align.evals._items import EvalError, Item, problem_scores
from align.evals._statistics import Estimate, mean_interval, pass_at_k
from align.tokenizer import Tokenizer
from align.verify import extract, grade


class _Sample(Protocol):
    ids: list[int]
    finish_reason: str


class _Sampler(Protocol):
    """What is asked of a sampler; `align.rollout.Sampler` has it."""

    def generate(
        self, prompts_ids: Sequence[Sequence[int]], *, n: int, max_new_tokens: int, temperature: float, seeds: Sequence[int]
    ) -> Sequence[_Sample]: ...


class Judgement(NamedTuple):
    """What a judge says of an output: the answer found in it, whether it is right (None: it can't be told), and why in a word."""

    answer: str | None
    correct: bool | None
    reason: str


Judge = Callable[[Sequence[dict[str, Any]], Sequence[str]], Sequence[Judgement]]  # rows and outputs, in pairs


@dataclass(frozen=True)
class EvalResult:
    """accuracy: the mean over problems of the share of right samples. by_group: the same for each group, in order of appearance.

    items: every sample, problem by problem. Problems whose gold the verifier can't read count nowhere (`unreadable` of them).
    """

    accuracy: float
    by_group: dict[str, float]
    items: list[Item]

    @property
    def counts(self) -> list[tuple[int, int]]:
        """(samples, right ones) of each judged problem."""
        return list(problem_scores(self.items).values())

    @property
    def unreadable(self) -> int:
        return len({item.problem for item in self.items if item.correct is None})

    @property
    def truncated(self) -> float:
        """Share of samples that were cut off by a limit."""
        return sum(item.finish_reason == "length" for item in self.items) / len(self.items)

    @property
    def mean_tokens(self) -> float:
        return sum(item.tokens for item in self.items) / len(self.items)

    @cached_property
    def interval(self) -> Estimate:
        """The accuracy with its 95 % interval over problems; NaN where none could be judged."""
        return _interval(self.items)

    @cached_property
    def group_intervals(self) -> dict[str, Estimate]:
        """`by_group` with the 95 % interval of each group's accuracy."""
        return {name: _interval([item for item in self.items if item.group == name]) for name in self.by_group}

    def pass_at_k(self, k: int) -> Estimate:
        """Unbiased pass@k with its 95 % interval; k at most the number of samples."""
        return pass_at_k(self.counts, k)


def encode_prompt(tokenizer: Tokenizer, row: dict[str, Any]) -> list[int]:
    """The ids a model is asked with: the row's `messages` in the chat template, opened for the answer; else its `prompt` after the bos, if
    the tokenizer's own rule puts one in front of a text, once. The same as in front of a trained completion.
    """
    if "messages" in row:
        return list(tokenizer.render_chat(row["messages"], add_generation_prompt=True).ids)
    bos = [token for token in tokenizer.encode("", add_special_tokens=True) if token != tokenizer.eos_id]
    ids = tokenizer.encode(row["prompt"])
    return ids if ids[: len(bos)] == bos else bos + ids


def accuracy(
    sampler: _Sampler,
    tokenizer: Tokenizer,
    rows: Sequence[dict[str, Any]],
    *,
    samples: int = 1,
    temperature: float,
    max_new_tokens: int,
    seed: int = 0,
    mode: str = "marked",
    group: str = "level",
    encode: Callable[[Tokenizer, dict[str, Any]], list[int]] = encode_prompt,
    judge: Judge | None = None,
    chunk: int = 256,
    progress: Callable[[int, int], None] | None = None,
    done: Sequence[Item] = (),
    keep: Callable[[list[Item]], None] | None = None,
) -> EvalResult:
    """Asks every row `samples` times and judges the outputs by `align.verify.grade`.

    rows: with `prompt` (or `messages`) and `answer`; their field `group`, where they have it, names what `by_group` counts by.
    temperature: 0 is greedy, once is then enough. seed: row i is asked with a seed made of (seed, i), so that fewer rows sample the same.
    mode: "marked" wants an explicit answer, "final" takes the last number where there is none. encode: row to prompt ids.
    judge: judges a chunk's outputs in place of the verifier; a row's answer is then what that judge reads, such as a Lean statement.
    chunk, progress: after every `chunk` rows progress(rows done, rows) is called, to show that the evaluation lives.
    done, keep: an evaluation that can be resumed. keep(items) gets each chunk's items as they are judged; given back as `done`, all samples
    of the first rows, they are not asked again, and the result is the same.

    Raises:
        EvalError: no rows, a row without prompt or answer, samples below 1, several greedy samples, `done` items of other rows.
    """
    if not rows:
        raise EvalError("no rows to evaluate; look at the file and at what was filtered out")
    if samples < 1:
        raise EvalError(f"samples {samples} must be at least 1")
    if temperature == 0 and samples > 1:
        raise EvalError(f"samples {samples} at temperature 0 would all be alike; take samples 1 or a temperature above 0")
    for index, row in enumerate(rows):
        if ("prompt" not in row and "messages" not in row) or not isinstance(row.get("answer"), str):
            raise EvalError(f"row {index} has no prompt (or messages) or no answer as text: {sorted(row)}")
    items = _checked_done(done, rows, samples)
    for start in range(len(items) // samples, len(rows), chunk):
        part = rows[start : start + chunk]
        outputs = sampler.generate(
            [encode(tokenizer, row) for row in part],
            n=samples,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seeds=[(seed << 32) + start + index for index in range(len(part))],
        )
        asked = [row for row in part for _ in range(samples)]
        texts = [tokenizer.decode(output.ids, skip_special=True) for output in outputs]
        verdicts = judge(asked, texts) if judge else [_verified(row, text, mode) for row, text in zip(asked, texts, strict=True)]
        for index, (row, output, text, verdict) in enumerate(zip(asked, outputs, texts, verdicts, strict=True)):
            items.append(_item(row, start + index // samples, index % samples, output, text, verdict, group))
        if keep:
            keep(items[start * samples :])
        if progress:
            progress(start + len(part), len(rows))
    return summarise(items)


def _checked_done(done: Sequence[Item], rows: Sequence[dict[str, Any]], samples: int) -> list[Item]:
    """The items of whole problems; a problem whose samples are not all there is asked again."""
    kept = list(done[: len(done) // samples * samples])
    for place, item in enumerate(kept):
        problem, sample = divmod(place, samples)
        if (item.problem, item.sample) != (problem, sample) or problem >= len(rows) or item.gold != rows[problem]["answer"]:
            raise EvalError(f"item {place} of the earlier part is sample {item.sample} of problem {item.problem}, answer {item.gold!r}, "
                            f"which these rows do not have there; start the evaluation anew")  # fmt: skip
    return kept


def summarise(items: Sequence[Item]) -> EvalResult:
    """The result of these items."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        if item.group is not None:
            groups.setdefault(item.group, []).append(item)
    return EvalResult(_mean(items), {name: _mean(members) for name, members in groups.items()}, list(items))


def _mean(items: Sequence[Item]) -> float:
    """Mean over problems of the share of right samples; NaN where none could be judged."""
    scores = problem_scores(items).values()
    return sum(right / samples for samples, right in scores) / len(scores) if scores else float("nan")


def _interval(items: Sequence[Item]) -> Estimate:
    scores = [right / samples for samples, right in problem_scores(items).values()]
    return mean_interval(scores) if scores else Estimate(float("nan"), float("nan"), float("nan"))


def _verified(row: dict[str, Any], text: str, mode: str) -> Judgement:
    verdict, found = grade(row["answer"], text, mode=mode), extract(text, mode=mode)
    return Judgement(found.answer if found else None, verdict.correct, verdict.reason)


def _item(row: dict[str, Any], problem: int, sample: int, output: _Sample, text: str, verdict: Judgement, group: str) -> Item:
    return Item(
        problem=problem,
        sample=sample,
        group=str(row[group]) if row.get(group) is not None else None,
        prompt=row["prompt"] if "prompt" in row else "\n".join(f"{message['role']}: {message['content']}" for message in row["messages"]),
        gold=row["answer"],
        output=text,
        answer=verdict.answer,
        correct=verdict.correct,
        reason=verdict.reason,
        tokens=len(output.ids),
        finish_reason=output.finish_reason,
    )
