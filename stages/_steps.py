"""Answers in steps with labels, for the process reward model: from a file, from PRM800K, or made here of a model's own answers."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from _common import check_answers, check_numbers, say
from _fields import GENERATED, check_most, of_field
from _rl import Loaded, WholeSampler

from align.config import ConfigError, caller_path
from align.data import arithmetic_rows, prm800k_rows, read_rows
from align.evals import encode_prompt
from align.model import Decoder
from align.verify import grade

GENERATED_PROMPTS = 2000
_SENTENCE = re.compile(r"has (\d+)|(?:buys|finds|gets) (\d+) more|(?:gives away|loses|sells) (\d+)|(doubles)")


@dataclass(frozen=True, kw_only=True)
class StepSection:
    """Answers whose steps are labelled right or wrong."""

    source: Annotated[
        str,
        "arithmetic: answers of model.path, each step checked; prm800k:FILE, its published form; or a JSONL file of prompt, steps, labels",
    ] = "arithmetic"
    rows: Annotated[int | None, "the first so many; of the made ones, prompts; none: all of a file, 2000 generated prompts"] = None
    samples: Annotated[int, "made answers: so many to a prompt"] = 4
    max_new_tokens: Annotated[int, "made answers: longest"] = 64
    neutral: Annotated[Literal["good", "bad", "drop"], "what a label 0 counts as"] = "good"
    held_out: Annotated[float, "share of the prompts that is kept back to measure on"] = 0.1
    max_length: Annotated[int, "tokens of a prompt and its steps; longer rows are left out"] = 256


def check_steps(section: StepSection) -> None:
    """Raises ConfigError, naming the field of [data], for values that give no answers to train on."""
    check_numbers("data", section, {"samples": 1, "max_new_tokens": 1, "max_length": 2})
    if section.rows is not None and section.rows < 1:
        raise ConfigError(f"data.rows is {section.rows}; it must be at least 1, or none for all")
    if section.source == "arithmetic":
        check_most("data.rows", section.rows or 0, GENERATED)
    if not 0 <= section.held_out < 1:
        raise ConfigError(f"data.held_out is {section.held_out}; it must be a share of the prompts, from 0 to below 1")


def step_rows(section: StepSection, loaded: Loaded, model: Callable[[], Decoder], *, seed: int) -> list[dict[str, Any]]:
    """Rows {"prompt", "steps", "labels"}, made ones also with "answer_label"."""
    if section.source == "arithmetic":
        return _made(section, loaded, model, seed)
    if section.source.startswith("prm800k:"):
        with of_field("data.source"):
            found, dropped = prm800k_rows(caller_path(section.source.removeprefix("prm800k:")))
        say(f"rows     {len(found)} of {section.source}; left out: {dict(dropped)}")
        return found[: section.rows]
    with of_field("data.source"):
        found = read_rows(caller_path(section.source), kind="steps").rows
    say(f"rows     {len(found)} of {section.source}")
    return found[: section.rows]


def _made(section: StepSection, loaded: Loaded, model: Callable[[], Decoder], seed: int) -> list[dict[str, Any]]:
    """Sampled answers to word problems, cut after each period; a step is right when it is the one that the problem asks for."""
    with of_field("data.rows"):
        problems = arithmetic_rows(section.rows or GENERATED_PROMPTS, seed=0, held_out=False)
    longest = min(section.max_new_tokens, loaded.config.max_length)
    check_answers("data.samples", section.samples, prompts=len(problems), at_once=len(problems), tokens=longest)
    sampler = WholeSampler(model(), eos_ids=loaded.eos_ids, max_batch=256)
    found = sampler.generate(
        [encode_prompt(loaded.tokenizer, row) for row in problems], n=section.samples, max_new_tokens=section.max_new_tokens,
        temperature=1.0, seeds=[(seed << 32) + index for index in range(len(problems))],
    )  # fmt: skip
    rows = []
    for index, sample in enumerate(found):
        if sample.truncated:
            continue
        problem, text = problems[index // section.samples], loaded.tokenizer.decode(sample.ids, skip_special=True)
        steps = re.findall(r"[^.]*\.|[^.]+$", text)
        wanted = true_steps(problem["prompt"])
        labels = [at < len(wanted) and step.strip() == wanted[at] for at, step in enumerate(steps) if step.endswith(".")]
        tail = [step for step in steps if not step.endswith(".")]
        right = grade(problem["answer"], text, mode="marked").correct is True
        # The answer after the last step is judged at its end; it is no step of its own.
        rows.append({"prompt": problem["prompt"], "steps": steps, "labels": [*labels, *[None] * len(tail)], "answer_label": right})
    say(f"rows     {len(rows)} answers to {len(problems)} problems, steps and ends labelled")
    return rows


def true_steps(prompt: str) -> list[str]:
    """The steps of a generated word problem, as the demonstrations write them: ["7+12=19.", "19-4=15."]."""
    steps, value = [], 0
    for has, gain, loss, double in _SENTENCE.findall(prompt):
        if has:
            value = int(has)
            continue
        operator, number = ("+", int(gain)) if gain else ("-", int(loss)) if loss else ("*", 2)
        result = {"+": value + number, "-": value - number, "*": value * number}[operator]
        steps.append(f"{value}{operator}{number}={result}.")
        value = result if double or gain or loss else value
    return steps
