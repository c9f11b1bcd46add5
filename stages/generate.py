"""Samples answers to a JSONL file of prompts (or of messages, or a text file with a prompt a line) into a JSONL file, an object a
prompt.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from _common import ModelSection, Sampling, build_model, check_vocabulary, load_tokenizer, model_directory, pick_device, run_stage, say

from align.config import ConfigError, Invocation, caller_path
from align.evals import encode_prompt
from align.model import load_config
from align.rollout import NativeSampler
from align.tokenizer import Tokenizer
from align.tracking import Progress


@dataclass(frozen=True, kw_only=True)
class GenerateModel(ModelSection):
    """Which checkpoint answers."""

    path: Annotated[Path, "checkpoint in HF layout, or a run directory: then its newest checkpoint"] = Path("stages/assets/arithmetic_sft")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """All of the stage's configuration. Only `input` has no default."""

    input: Annotated[Path, 'JSONL of {"prompt"} or {"messages"} with whatever else, or a .txt file with a prompt a line']
    output: Annotated[Path | None, "JSONL that is written; none: input with .samples.jsonl at the end"] = None
    samples: Annotated[int, "answers a prompt"] = 1
    batch: Annotated[int, "answers made at once; what is finished is written after each so many prompts"] = 128
    seed: Annotated[int, "of the sampling"] = 0
    threads: Annotated[int, "CPU threads of torch; 0 leaves torch's own choice"] = 0
    chat: Annotated[bool, "put each prompt into the model's chat template"] = False
    system: Annotated[str | None, "system message, with chat"] = None
    logprobs: Annotated[bool, "write token ids and their log-probabilities too"] = False
    model: GenerateModel = field(default_factory=GenerateModel)
    sampling: Sampling = field(default_factory=Sampling)


def generate(call: Invocation[GenerateConfig]) -> int:
    config = call.config
    if call.allow_change:
        raise ConfigError("generate has no --allow-change; what --resume keeps are the lines that are whole")
    if config.threads:
        torch.set_num_threads(config.threads)
    if config.system is not None and not config.chat:
        raise ConfigError("system is set without chat=true; a bare prompt has no place for it")
    source = caller_path(config.input)
    target = caller_path(config.output) if config.output else source.with_name(f"{source.stem}.samples.jsonl")
    rows = list(read_prompts(source, config))
    done = lines_done(target, rows) if call.resume else 0
    if not call.resume and target.exists():
        raise ConfigError(f"{target} exists; name another output=, remove it, or go on with --resume")
    directory = model_directory(config.model.path)
    model_config = load_config(directory)
    tokenizer = load_tokenizer(config.model, directory)
    check_vocabulary(tokenizer, model_config, config.model)
    say(f"model    {directory}\nprompts  {len(rows)} of {source}, {config.samples} answers each" + (f"; {done} are there" if done else ""))
    if call.dry_run:
        say(f"dry run: nothing was written to {target}")
        return 0
    prompts = [encode_prompt(tokenizer, row) for row in rows]
    model = build_model(config.model, directory, model_config, config.seed, pick_device(config.model, model_config)).eval()
    sampler = NativeSampler(model, eos_ids=[tokenizer.eos_id] if tokenizer.eos_id is not None else [], max_batch=config.batch)
    progress, started, tokens = Progress(len(rows), every=config.batch, stream=sys.stderr), time.perf_counter(), 0
    step = max(1, config.batch // config.samples)
    with target.open("a", encoding="utf-8") as out:
        for first in range(done, len(rows), step):
            some = range(first, min(first + step, len(rows)))
            for index, answers in zip(some, ask(sampler, tokenizer, [prompts[i] for i in some], config, some), strict=True):
                tokens += sum(answer["tokens"] for answer in answers)
                out.write(json.dumps({**rows[index], "samples": answers}, ensure_ascii=False) + "\n")
            out.flush()
            os.fsync(out.fileno())
            progress.update(some[-1] + 1)
    seconds = time.perf_counter() - started
    say(f"output   {target}\n         {len(rows) - done} prompts, {tokens} tokens, {tokens / max(seconds, 1e-9):,.0f} tokens/s")
    return 0


def read_prompts(source: Path, config: GenerateConfig) -> Iterator[dict[str, Any]]:
    """The rows; with chat=true a prompt becomes messages. Raises ConfigError naming file and line."""
    with source.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            row = {"prompt": line.rstrip("\n")} if source.suffix == ".txt" else _row(line, f"{source}:{number}")
            if config.chat and "messages" not in row:
                opening = [{"role": "system", "content": config.system}] if config.system is not None else []
                row = {**row, "messages": [*opening, {"role": "user", "content": row["prompt"]}]}
            yield row


def _row(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: not JSON ({error}); a line holds one object") from None
    if not isinstance(row, dict) or not (isinstance(row.get("prompt"), str) or isinstance(row.get("messages"), list)):
        raise ConfigError(f'{place}: expected is an object with "prompt" (text) or "messages" (a list)')
    return row


def lines_done(target: Path, rows: list[dict[str, Any]]) -> int:
    """How many rows the output holds already; a torn last line is cut away. Raises ConfigError when it belongs to another input."""
    if not target.exists():
        return 0
    whole, count = 0, 0
    with target.open("rb") as out:
        for line in out:
            if not line.endswith(b"\n"):
                break
            old = json.loads(line)
            if count >= len(rows) or {key: value for key, value in old.items() if key != "samples"} != rows[count]:
                raise ConfigError(f"{target}:{count + 1} is not about row {count + 1} of the input; name another output=")
            whole, count = whole + len(line), count + 1
    os.truncate(target, whole)
    return count


def ask(
    sampler: NativeSampler, tokenizer: Tokenizer, prompts: list[list[int]], config: GenerateConfig, rows: range
) -> list[list[dict[str, Any]]]:
    """The answers of some rows; row i is seeded by (seed, i), so that neither batch nor a resume changes a sample."""
    how = config.sampling
    made = sampler.generate(
        prompts,
        n=config.samples,
        max_new_tokens=how.max_new_tokens,
        temperature=how.temperature,
        top_p=how.top_p,
        top_k=how.top_k,
        min_p=how.min_p,
        stop_strings=how.stop,
        tokenizer=tokenizer,
        seeds=[config.seed * 1_000_003 + i for i in rows],
    )
    answers = []
    for sample in made:
        answer = {"text": tokenizer.decode(sample.ids, skip_special=True), "finish_reason": sample.finish_reason, "tokens": len(sample.ids)}
        if config.logprobs:
            answer |= {"ids": sample.ids, "logprobs": sample.logprobs, "raw_logprobs": sample.raw_logprobs}
        answers.append(answer)
    return [answers[i * config.samples : (i + 1) * config.samples] for i in range(len(rows))]


if __name__ == "__main__":
    sys.exit(run_stage("generate", GenerateConfig, generate, __doc__ or "", sys.argv[1:]))
