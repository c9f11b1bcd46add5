"""Samples answers to a JSONL file of prompts (or of messages, or a text file with a prompt a line) into a JSONL file, an object a
prompt.

Beside it, in <output>.settings.json, stands what the answers were made with; --resume goes on with the same, or not at all.
"""

import fcntl
import io
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TextIO

import _entry
from _common import (
    ModelSection,
    Sampling,
    build_model,
    check_answers,
    check_sampling,
    check_template,
    check_vocabulary,
    flat,
    load_tokenizer,
    model_config_of,
    model_directory,
    pick_device,
    prompt_ids,
    say,
    use_threads,
    weights_digest,
    write_through,
)
from _fields import ANSWERS, check_most, of_field

from align.config import ConfigError, Invocation, caller_path
from align.rollout import NativeSampler
from align.tokenizer import Tokenizer
from align.tracking import Progress

MAY_CHANGE = ("input", "output", "batch", "threads", "model.path", "model.device")  # on a resume; rows and weights are compared themselves


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
    check(config)
    use_threads(config.threads)
    with of_field("input"):
        source = caller_path(config.input)
    with of_field("output" if config.output else "input"):
        target = caller_path(config.output) if config.output else source.parent / f"{source.stem}.samples.jsonl"
        if target.exists() and not call.resume:
            raise ConfigError(f"output {target} exists; name another output=, remove it, or go on with --resume")
    with of_field("input"):
        rows, places = read_prompts(source, config)
    done, _ = lines_done(target, rows, config.samples) if call.resume else (0, 0)
    directory = model_directory(config.model.path)
    model_config = model_config_of(directory)
    tokenizer = load_tokenizer(config.model, directory)
    check_vocabulary(tokenizer, model_config, config.model)
    if config.chat or any("messages" in row for row in rows):
        check_template(tokenizer, "chat=true" if config.chat else f"{source} has rows of messages", directory)
    say(f"model    {directory}\nprompts  {len(rows)} of {source}, {config.samples} answers each" + (f"; {done} are there" if done else ""))
    with of_field("input"):
        prompts = [prompt_ids(tokenizer, row, place, model_config.max_length) for row, place in zip(rows, places, strict=True)]
    step = max(1, config.batch // config.samples)
    longest = min(config.sampling.max_new_tokens, model_config.max_length)
    check_answers("samples", config.samples, prompts=min(step, len(rows)), at_once=step, tokens=longest)
    if call.dry_run:
        say(f"dry run: nothing was written to {target}")
        return 0
    settings = {**{key: value for key, value in flat(config).items() if key not in MAY_CHANGE}, "weights": weights_digest(directory)}
    if done:
        refuse_other(target, settings)
    model = build_model(config.model, directory, model_config, config.seed, pick_device(config.model, model_config)).eval()
    sampler = NativeSampler(model, eos_ids=[tokenizer.eos_id] if tokenizer.eos_id is not None else [], max_batch=config.batch)
    progress, started, tokens = Progress(len(rows), every=config.batch, stream=sys.stderr), time.perf_counter(), 0
    with opened(target, settings, again=done > 0) as out:
        now, size = lines_done(target, rows, config.samples)
        if now != done:
            raise ConfigError(f"{target}: another process wrote answers there meanwhile; look at them, and go on with --resume")
        os.truncate(target, size)  # of a last line that is torn
        for first in range(done, len(rows), step):
            some = range(first, min(first + step, len(rows)))
            made = ask(sampler, tokenizer, [prompts[i] for i in some], config, some)
            tokens += sum(answer["tokens"] for answers in made for answer in answers)
            write_through(out, [{**rows[index], "samples": answers} for index, answers in zip(some, made, strict=True)])
            progress.update(some[-1] + 1)
    seconds = time.perf_counter() - started
    say(f"output   {target}\n         {len(rows) - done} prompts, {tokens} tokens, {tokens / max(seconds, 1e-9):,.0f} tokens/s")
    return 0


def check(config: GenerateConfig) -> None:
    """Raises ConfigError, naming the field, for values that nothing can be sampled with."""
    for name, value in (("samples", config.samples), ("batch", config.batch)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    check_most("samples", config.samples, ANSWERS)
    check_sampling(config.sampling)
    if config.sampling.temperature == 0 and config.samples > 1:
        raise ConfigError(
            f"samples={config.samples} at sampling.temperature=0 would all be alike; take samples=1, or a temperature above 0"
        )
    if config.system is not None and not config.chat:
        raise ConfigError("system is set without chat=true; a bare prompt has no place for it")


def read_prompts(source: Path, config: GenerateConfig) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows, with chat=true a prompt as messages, and the place of each. Raises ConfigError naming file and line."""
    try:
        data = source.read_bytes()
    except OSError as error:
        raise ConfigError(f"input {source}: cannot be read ({error.strerror}); name a JSONL file of prompts, or a .txt file") from None
    try:
        lines = io.StringIO(data.decode("utf-8-sig"), newline=None)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{source}:{line}: byte {data[error.start]:#04x} is not UTF-8; convert the file to UTF-8") from None
    rows, places = list[dict[str, Any]](), list[str]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        places.append(f"{source}:{number}")
        row = {"prompt": line.rstrip("\n")} if source.suffix == ".txt" else _row(line, places[-1])
        if config.chat and "messages" not in row:
            opening = [{"role": "system", "content": config.system}] if config.system is not None else []
            row = {**row, "messages": [*opening, {"role": "user", "content": row["prompt"]}]}
        rows.append(row)
    if not rows:
        raise ConfigError(f"input {source} has no prompts: the file is empty, or has blank lines only")
    return rows, places


def _row(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        rest = {key: value for key, value in row.items() if key != "prompt"} if isinstance(row, dict) else row
        json.dumps(rest, ensure_ascii=False, allow_nan=False).encode()  # as it will be written, with its answers
    except UnicodeEncodeError:
        raise ConfigError(f"{place}: holds a lone surrogate (\\ud800 to \\udfff), which is no character; remove it, or the row") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON ({error}); a line holds one object") from None
    if not isinstance(row, dict) or not (isinstance(row.get("prompt"), str) or "messages" in row):
        raise ConfigError(f'{place}: expected is an object with "prompt" (text) or "messages" (a list)')
    if "messages" in row and not (isinstance(row["messages"], list) and row["messages"]):
        raise ConfigError(f'{place}: "messages" is {str(row["messages"])[:40]!r}; expected is a list of at least one message')
    return row


def lines_done(target: Path, rows: list[dict[str, Any]], samples: int) -> tuple[int, int]:
    """(how many rows the output holds already, in how many bytes), but for a torn last line. Raises ConfigError: it is of another input."""
    if not target.exists():
        return 0, 0
    whole, count = 0, 0
    with target.open("rb") as out:
        for line in out:
            if not line.endswith(b"\n"):
                break
            if count >= len(rows) or not _is_about(line, rows[count], samples):
                raise ConfigError(
                    f"{target}:{count + 1} is not about row {count + 1} of the input with {samples} samples; name another output="
                )
            whole, count = whole + len(line), count + 1
    return count, whole


def _is_about(line: bytes, row: dict[str, Any], samples: int) -> bool:
    try:
        old = json.loads(line)
        answers = old.pop("samples")
        return bool(old == {key: value for key, value in row.items() if key != "samples"}) and len(answers) == samples
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return False


def settings_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.settings.json")


def refuse_other(target: Path, settings: dict[str, Any]) -> None:
    """Raises ConfigError, naming what differs: the answers that are there were made with other settings."""
    path = settings_path(target)
    try:
        old = json.loads(path.read_bytes())
        different = [key for key, value in settings.items() if old[key] != value]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}), so nothing says what {target} was made with; name another output=") from None
    if different:
        shown = "; ".join(f"{key} was {old[key]!r}, is {settings[key]!r}" for key in different)
        raise ConfigError(f"{target}: {shown}; resume with the same settings, or name another output=")


@contextmanager
def opened(target: Path, settings: dict[str, Any], *, again: bool) -> Iterator[TextIO]:
    """The output, to append to, for this process alone, with its settings beside it. Where nothing was written, neither is left behind."""
    path, ours = settings_path(target), False
    try:
        with target.open("a", encoding="utf-8") as out:
            try:
                fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"output {target}: another process writes it; wait until it ends, or name another output=") from None
            except OSError:
                pass  # a file system without locks
            ours = True
            if not again:
                path.write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            yield out
    except OSError as error:
        raise ConfigError(f"output {target}: cannot be written ({error.strerror}); name another output=, or free space") from None
    finally:
        if ours and not target.stat().st_size:
            target.unlink()
            path.unlink(missing_ok=True)


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
    sys.exit(_entry.run_stage("generate", GenerateConfig, generate, __doc__ or "", sys.argv[1:]))
