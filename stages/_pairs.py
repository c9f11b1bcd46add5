"""Preference rows for the stages that use them: from a file, from a bundled set, or made here of the model's own answers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from _common import check_answers, check_numbers, find, say
from _fields import GENERATED, check_most, of_field
from _rl import Loaded, WholeSampler, prompt_rows

from align.config import ConfigError, caller_path
from align.data import EncodedPairs, arithmetic_rows, bundled, encode_preferences, gsm8k_rows, preference_rows, read_objects, solution_pairs
from align.evals import encode_prompt
from align.model import Decoder
from align.rl import make_reward, readable, verified_pairs
from align.tokenizer import Tokenizer

GENERATED_PROMPTS = 1500
MADE_HERE = ("arithmetic", "gsm8k_train")


@dataclass(frozen=True, kw_only=True)
class PairSection:
    """Pairs of answers, one better than the other."""

    arm: Annotated[str, "a name for these rows; a reference made for one arm is refused by another"] = "default"
    source: Annotated[
        str,
        "arithmetic, gsm8k_train: answers of model.path, judged by reward; gsm8k_solutions: bundled; or a JSONL file of prompt, chosen, "
        "rejected (strings, or conversations as in UltraFeedback)",
    ] = "arithmetic"
    rows: Annotated[int | None, "the first so many pairs; of the made ones, prompts; none: all of a file, 1500 generated prompts"] = None
    samples: Annotated[int, "made pairs: answers to a prompt"] = 8
    per_prompt: Annotated[int, "made pairs: at most so many of a prompt"] = 1
    max_new_tokens: Annotated[int, "made pairs: longest answer"] = 64
    temperature: Annotated[float, "made pairs: of the sampling"] = 1.0
    reward: Annotated[str, "made pairs: verify, or path/file.py:function"] = "verify"
    chat: Annotated[bool, "put string prompts into the model's chat template"] = False
    system: Annotated[str | None, "system message for chat rows that have none"] = None
    template: Annotated[str | None, "chat template (Jinja text) in place of the model's own"] = None
    max_length: Annotated[int, "tokens of a prompt and an answer"] = 256
    overlong: Annotated[Literal["truncate", "drop", "error"], "what becomes of a longer side"] = "drop"


def made_here(section: PairSection) -> bool:
    """Whether the pairs are answers of the model itself, which a plan can't know."""
    return section.source in MADE_HERE


def check_pairs(section: PairSection, name: str = "data") -> None:
    """Raises ConfigError, naming the field of [name], for values that give no pairs."""
    made = {"samples": 2, "per_prompt": 1, "max_new_tokens": 1} if made_here(section) else {}
    check_numbers(name, section, {"max_length": 2, **made})
    if section.rows is not None and section.rows < 1:
        raise ConfigError(f"{name}.rows is {section.rows}; it must be at least 1, or none for all")
    if section.source == "arithmetic":
        check_most(f"{name}.rows", section.rows or 0, GENERATED)
    if section.temperature == 0 and made_here(section):
        raise ConfigError(f"{name}.temperature is 0, at which all answers to a prompt are alike and make no pair; raise it")


def pair_rows(
    section: PairSection, loaded: Loaded, model: Callable[[], Decoder], *, seed: int, kept: Path | None = None, name: str = "data"
) -> list[dict[str, Any]]:
    """The rows {"prompt", "chosen", "rejected"}, told about. kept: a file of made pairs from an earlier leg of the run; name: of the
    section. Raises ConfigError naming the field."""
    if made_here(section):
        if kept is not None and kept.exists():
            rows: list[dict[str, Any]] = list(read_objects(kept))
            say(f"pairs    {len(rows)} of {kept}")
            return rows
        return _made(section, loaded, model, seed, name)
    with of_field(f"{name}.source"):
        own = section.source != "gsm8k_solutions"
        rows, dropped = preference_rows(caller_path(section.source)) if own else solution_pairs(bundled("gsm8k_solutions"))
    say(f"pairs    {len(rows)} of {section.source}" + (f"; left out: {dict(dropped)}" if dropped else ""))
    return rows[: section.rows]


def encode(section: PairSection, loaded: Loaded, rows: list[dict[str, Any]], name: str = "data") -> EncodedPairs:
    """Raises ConfigError: max_length is beyond the model's window. name: the section's."""
    if section.max_length > loaded.config.max_length:
        raise ConfigError(f"{name}.max_length {section.max_length} is beyond the model's window {loaded.config.max_length}; lower it")
    encoded = encode_preferences(
        rows, loaded.tokenizer, max_length=section.max_length, overlong=section.overlong, chat=section.chat, system=section.system,
        template=section.template,
    )  # fmt: skip
    say(f"         {encoded.summary()}")
    return encoded


def _asked(section: PairSection, tokenizer: Tokenizer, row: dict[str, Any]) -> list[int]:
    """What a prompt is asked with: as it stands before the answers that are trained."""
    if section.chat:
        return list(tokenizer.render_chat(row["messages"], add_generation_prompt=True, template=section.template).ids)
    return encode_prompt(tokenizer, row)


def _made(section: PairSection, loaded: Loaded, model: Callable[[], Decoder], seed: int, name: str) -> list[dict[str, Any]]:
    count = section.rows or GENERATED_PROMPTS
    if section.source == "arithmetic":
        with of_field(f"{name}.rows"):
            found: list[dict[str, Any]] = arithmetic_rows(count, seed=0, held_out=False)
    else:
        found = gsm8k_rows(bundled(section.source))[:count]
    longest = min(section.max_new_tokens, loaded.config.max_length)
    check_answers(f"{name}.samples", section.samples, prompts=len(found), at_once=len(found), tokens=longest)
    rows = prompt_rows([row for row in found if readable(row)], chat=section.chat, system=section.system)
    with of_field(f"{name}.reward"):
        reward = make_reward(section.reward, locate=find)
    try:
        pairs, dropped = verified_pairs(
            rows, [_asked(section, loaded.tokenizer, row) for row in rows],
            WholeSampler(model(), eos_ids=loaded.eos_ids, max_batch=256), loaded.tokenizer, reward, samples=section.samples,
            per_prompt=section.per_prompt, max_new_tokens=section.max_new_tokens, temperature=section.temperature, seed=seed,
        )  # fmt: skip
    finally:
        reward.close()
    say(f"pairs    {len(pairs)} made of {section.samples} answers to each of {len(rows)} prompts; no pair: {dropped}")
    if not pairs:
        raise ConfigError(f"no pairs could be made of {len(rows)} prompts ({dropped}); ask more prompts, or take data.source from a file")
    return pairs
