"""Prompts with answers for the stages that sample."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from _common import check_template, say
from _fields import GENERATED, check_most, of_field
from _rl import Loaded, prompt_rows

from align.config import ConfigError, caller_path
from align.data import arithmetic_rows, bundled, gsm8k_rows, lean_rows, read_rows
from align.evals import encode_prompt
from align.rl import readable

GENERATED_ROWS = 8000


@dataclass(frozen=True, kw_only=True)
class PromptSection:
    """What is asked."""

    source: Annotated[str, "arithmetic (generated), gsm8k_train (bundled), lean:FILE, or a JSONL file of {prompt, answer}"] = "arithmetic"
    rows: Annotated[int | None, "the first so many; none: all of a file, 8000 generated ones"] = None
    levels: Annotated[list[int], "arithmetic: the levels in turn, so their shares"] = field(default_factory=lambda: [1, 2, 2, 3, 3])
    chat: Annotated[bool, "ask through the model's chat template"] = False
    system: Annotated[str | None, "system message, with chat"] = None
    max_prompt: Annotated[int, "prompts of more tokens are left out"] = 512


def asked(section: PromptSection, loaded: Loaded, *, max_new_tokens: int, verifier: bool) -> list[tuple[dict[str, Any], list[int]]]:
    """(row, prompt's ids) of every row that is asked. With `verifier` those are left out whose gold answer it can't read.

    Raises ConfigError: a prompt and its answer don't fit the model's window, or nothing is left.
    """
    if section.rows is not None and section.rows < 1:
        raise ConfigError(f"data.rows is {section.rows}; it must be at least 1, or none for all")
    if section.system is not None and not section.chat:
        raise ConfigError("data.system is set without data.chat=true; a bare prompt has no place for it")
    if section.chat:
        check_template(loaded.tokenizer, "data.chat=true", loaded.directory or loaded.tokenizer_files)
    rows = _rows(section)
    fit = [row for row in rows if readable(row)] if verifier and section.source != "arithmetic" else rows
    if len(fit) < len(rows):
        say(f"prompts  {len(rows) - len(fit)} left out: the verifier can't read their answers")
    encoded = [(row, encode_prompt(loaded.tokenizer, row)) for row in prompt_rows(fit, chat=section.chat, system=section.system)]
    kept = [(row, ids) for row, ids in encoded if len(ids) <= section.max_prompt]
    say(f"prompts  {len(kept)} of {section.source}, {len(encoded) - len(kept)} longer than data.max_prompt left out")
    if not kept:
        raise ConfigError(f"no prompt has at most data.max_prompt {section.max_prompt} tokens; raise it")
    longest = max(len(ids) for _, ids in kept) + max_new_tokens
    if longest > loaded.config.max_length:
        raise ConfigError(
            f"a prompt and rollout.max_new_tokens {max_new_tokens} make {longest} tokens, the model's window is "
            f"{loaded.config.max_length}; lower rollout.max_new_tokens or data.max_prompt"
        )
    return kept


def _rows(section: PromptSection) -> list[dict[str, Any]]:
    if section.source == "arithmetic":
        check_most("data.rows", section.rows or 0, GENERATED)
        with of_field("data.rows, data.levels"):
            return list(arithmetic_rows(section.rows or GENERATED_ROWS, levels=section.levels, seed=0, held_out=False))
    if section.source == "gsm8k_train":
        return list(gsm8k_rows(bundled("gsm8k_train"))[: section.rows])
    with of_field("data.source"):
        if section.source.startswith("lean:"):
            return list(lean_rows(caller_path(section.source.removeprefix("lean:")))[: section.rows])
        return list(read_rows(caller_path(section.source), kind="answer").rows[: section.rows])
