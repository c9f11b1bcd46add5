"""Pretraining on text or on shards. Without arguments: a small model of bytes learns the bundled text from scratch, on one CPU thread."""

import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any, Literal

import _entry
import torch
from _common import (
    GuardSection,
    ModelSection,
    build_model,
    check_fit,
    check_vocabulary,
    find,
    held_out_loss,
    join_ranks,
    load_tokenizer,
    model_config_of,
    model_directory,
    on_ranks,
    pick_device,
    project_run,
    run_directory,
    run_shape,
    say,
    use_threads,
)
from _fields import TOKENS, check_most, of_field
from _life import show_forwards

from align.checkpoint import load
from align.config import ConfigError, Invocation, caller_path, dumps
from align.data import Encoded, Loader, Shards, bundled_rows, encode_rows, open_shards, read_rows, split_rows
from align.guard import Projection, Refused
from align.model import ModelConfig
from align.tokenizer import Tokenizer
from align.tracking import RunDir, environment, read_history
from align.train import (
    CheckpointConfig,
    EvalConfig,
    OptimizerConfig,
    ScheduleConfig,
    SftModule,
    TrainConfig,
    Trainer,
    TrainerConfig,
    find_latest,
    identity,
    leave,
    refuse_changes,
)

DEFAULT_MODEL = Path("stages/models/bytes")
MAY_CHANGE = ("run_dir", "model.path", "guard.", "data.source", "data.held_out_source")  # on a resume; the digest of the data is compared


@dataclass(frozen=True, kw_only=True)
class PretrainModelSection(ModelSection):
    """Which model is trained."""

    path: Annotated[Path, "directory with config.json and the tokenizer; with weights where training goes on from them"] = DEFAULT_MODEL
    from_scratch: Annotated[bool, "initialise the weights from the seed; false: begin with the directory's"] = True


@dataclass(frozen=True, kw_only=True)
class PretrainDataSection:
    """What is trained on."""

    source: Annotated[str, "gsm8k_train (bundled text), a directory of shards (//stages:build_data), or a JSONL file"] = "gsm8k_train"
    rows: Annotated[int | None, "of text: the first so many; none: all"] = None
    held_out: Annotated[float, "of text: the share of rows that is kept back for the held-out loss"] = 0.02
    held_out_source: Annotated[str | None, "shards or text for the held-out loss; none: a share of the text, none of shards"] = None
    max_length: Annotated[int, "tokens of a row, which is filled with whole documents; a longer text is cut into several"] = 1024
    overlong: Annotated[Literal["split", "truncate", "drop", "error"], "what becomes of a longer text"] = "split"


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(TrainerConfig):
    """All of the stage's configuration; the defaults are those of the default run."""

    run_dir: Annotated[Path | None, "where the run is written, relative to where you are; none: runs/pretrain-<time>"] = None
    model: PretrainModelSection = field(default_factory=PretrainModelSection)
    data: PretrainDataSection = field(default_factory=PretrainDataSection)
    train: TrainConfig = field(default_factory=lambda: TrainConfig(max_steps=150, global_batch=2, micro_batch=2, threads=1, log_every=25))
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1))
    schedule: ScheduleConfig = field(
        default_factory=lambda: ScheduleConfig(name="wsd", warmup_steps=15, decay_steps=50, min_lr_ratio=0.1)
    )  # fmt: skip
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every=75, keep=2))
    eval: EvalConfig = field(default_factory=lambda: EvalConfig(every=75))
    guard: GuardSection = field(default_factory=GuardSection)


def pretrain(call: Invocation[PretrainConfig]) -> int:
    started, config = time.perf_counter(), call.config
    use_threads(config.train.threads, "train.threads")
    check_most("data.max_length", config.data.max_length, TOKENS)

    # Load: tokenizer, documents.
    directory = model_directory(config.model.path)
    model_config = model_config_of(directory)
    tokenizer = load_tokenizer(config.model, directory)
    check_vocabulary(tokenizer, model_config, config.model)
    train, held = documents(config.data, tokenizer)
    check_window(train, held, model_config)
    device = pick_device(config.model, model_config, planning=call.dry_run)
    ranks, device = join_ranks(call, device)
    loader = Loader(
        train,
        global_batch=config.train.global_batch,
        micro_batch=config.train.micro_batch,
        max_length=config.data.max_length,
        packing=True,
        seed=config.seed,
        rank=ranks.rank,
        world=ranks.world,
        pad_id=tokenizer.pad_id or 0,
    )

    # Preflight: does it fit?
    run_dir = run_directory(config.run_dir, "pretrain", ranks)
    projection = project_run(
        model_config,
        device=device,
        weight_bytes=2 if config.model.dtype == "bfloat16" else 4,
        length=config.data.max_length,
        forward_impl="varlen" if device.type == "cuda" else "cpu_per_document",
        padding=1.0 if device.type == "cuda" else min(max(float(train.lengths.max() / train.lengths.mean()), 1.0), 2.5),
        **run_shape(config),
    )
    if call.dry_run:
        return plan(config, train, projection, run_dir)
    ignored = check_fit(projection, config.guard, run_dir)

    # Build.
    model = build_model(config.model, None if config.model.from_scratch else directory, model_config, config.seed, device)
    module = SftModule(model)
    tokenizer_files = tokenizer.files[0].parent
    checkpoint = None
    if call.resume and (path := find_latest(run_dir / "checkpoints", ranks)):
        checkpoint = load(path, verify=False)  # the digests have been compared
        refuse_changes(
            checkpoint, identity(config, module, loader.digest, tokenizer_files), allow_change=call.allow_change, may_change=MAY_CHANGE
        )
    with of_field("run_dir"):
        run = RunDir.create(
            run_dir,
            config_toml=dumps(config),
            env=environment({"stage": "pretrain", "threads": torch.get_num_threads(), "device": str(device), "ranks": ranks.world}),
            resume_step=checkpoint.step if checkpoint else 0 if call.resume else None,
            write=ranks.main,
        )
    say(f"model    {sum(parameter.numel() for parameter in model.parameters()):,} parameters, {config.model.dtype}, {device}")
    say(f"run      {run.path}")

    # Train, with the held-out loss before, on the way and after.
    show_forwards(run.alive, model)

    def evaluate(step: int) -> dict[str, float]:
        if held is None:
            return {}
        return {"held_out_loss": held_out_loss(module, held, max_length=config.data.max_length, packing=True, ranks=ranks)}

    def evaluate_once(step: int) -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            numbers = evaluate(step)
        run.eval(step, **numbers)
        return numbers

    if config.eval.enabled and ranks.agree(0 not in evaluations(run)):
        evaluate_once(0)
    trainer = Trainer(
        config, module, loader=loader, run=run, tokenizer_files=tokenizer_files, evaluate=evaluate, may_change=MAY_CHANGE, ranks=ranks
    )
    try:
        result = trainer.fit(resume=checkpoint or call.resume, allow_change=call.allow_change)
    except Exception as error:
        run.finish("failed", stage="pretrain", reason=f"{type(error).__name__}: {error}", wall_s=time.perf_counter() - started)
        raise
    fields: dict[str, Any] = {
        "stage": "pretrain", "steps": result.steps, "checkpoint": str(result.checkpoint), "last_loss": result.last_loss,
        "uniform_loss": math.log(model_config.vocab_size), "ranks": ranks.world, "deterministic": result.deterministic,
        "save_stall_s": result.save_stall_s,
    }  # fmt: skip
    if result.status == "stopped":
        run.finish("stopped", **fields, reason=result.reason, wall_s=time.perf_counter() - started)
        leave(ranks)
        return result.exit_code
    if config.eval.enabled and ranks.agree(result.steps not in evaluations(run)):
        evaluate_once(result.steps)

    # Report.
    before, after = (evaluations(run).get(step, {}) for step in (0, result.steps))
    then = f"./bazelw run //stages:sft -- model.path={result.checkpoint} model.from_scratch=false"
    metrics, wall = {"before": before, "after": after}, time.perf_counter() - started
    run.finish("done", **fields, metrics=metrics, preflight_ignored=ignored, wall_s=wall, next=then)
    say(f"\n  ln V             {math.log(model_config.vocab_size):8.3f}")
    for name in after:
        say(f"  {name:<16} {before.get(name, float('nan')):8.3f}  ->  {after[name]:8.3f}")
    say(f"\nreport   {run.path / 'report.html'}\nnext     {then}")
    leave(ranks)
    return 0


def documents(section: PretrainDataSection, tokenizer: Tokenizer) -> tuple[Encoded | Shards, Encoded | Shards | None]:
    """(what is trained on, what the held-out loss is of)."""
    with of_field("data.source"):
        source = find(section.source)
        shards = open_shards(source, fingerprint=tokenizer.fingerprint) if source.is_dir() else None
    if shards is not None:
        train: Encoded | Shards = shards
        if section.rows is not None:
            raise ConfigError(f"data.rows is {section.rows}, but {section.source} holds shards; choose rows when they are built")
        held_rows: list[dict[str, Any]] = []
    else:
        rows = text_rows(section.source, "data.source")[: section.rows]
        share = 0.0 if section.held_out_source else section.held_out
        train_rows, held_rows = split_rows(rows, share) if share else (rows, [])
        train = encode(train_rows, section, tokenizer)
        say(f"text     {len(rows)} rows of {section.source}, {len(held_rows)} held out")
    held: Encoded | Shards | None = encode(held_rows, section, tokenizer) if held_rows else None
    if section.held_out_source:
        with of_field("data.held_out_source"):
            other = find(section.held_out_source)
            if other.is_dir():
                held = open_shards(other, fingerprint=tokenizer.fingerprint)
        if held is None:
            held = encode(text_rows(section.held_out_source, "data.held_out_source"), section, tokenizer)
    say(f"         {len(train.lengths):,} documents, {int(train.lengths.sum()):,} tokens")
    return train, held


def text_rows(source: str, name: str) -> list[dict[str, Any]]:
    """Rows of kind text; `name` is the field that names the source. The bundled set's problems are joined with their solutions."""
    if source == "gsm8k_train":
        return [{"text": f"{row['prompt']}\n{row['completion']}"} for row in bundled_rows(source).rows]
    with of_field(name):
        found = read_rows(caller_path(source))
    if found.kind != "text":
        raise ConfigError(f"{name} {source} has rows of kind {found.kind}; pretraining wants rows of text, or shards")
    return found.rows


def encode(rows: list[dict[str, Any]], section: PretrainDataSection, tokenizer: Tokenizer) -> Encoded:
    return encode_rows(rows, tokenizer, kind="text", max_length=section.max_length, overlong=section.overlong)


def check_window(train: Encoded | Shards, held: Encoded | Shards | None, model_config: ModelConfig) -> None:
    """Raises ConfigError when a document is longer than the model's window."""
    longest = max(int(part.lengths.max()) for part in (train, held) if part is not None)
    if longest > model_config.max_length:
        raise ConfigError(
            f"the longest document has {longest} tokens, the model's window {model_config.max_length} (max_position_embeddings); set "
            f"data.max_length={model_config.max_length}"
        )


def plan(config: PretrainConfig, train: Encoded | Shards, projection: Projection, run_dir: Path) -> int:
    """What a dry run says. It plans for any machine, so that a run that would be refused on this one is no error."""
    tokens = config.train.global_batch * config.data.max_length
    share = config.train.max_steps * tokens / int(train.lengths.sum())
    say(f"steps    {config.train.max_steps} of {config.train.global_batch} rows, {tokens:,} tokens each: {share:.2f} epochs")
    say(f"memory\n{indent(projection.table(), '         ')}")
    try:
        check_fit(projection, config.guard, run_dir)
        say("dry run: it fits here; nothing was written")
    except Refused as refusal:
        say(f"dry run: it would be refused here: {refusal}; nothing was written")
    return 0


def evaluations(run: RunDir) -> dict[int, dict[str, float]]:
    """What eval.jsonl holds, by step; also of the legs before a resume."""
    path = run.path / "eval.jsonl"
    lines = read_history(path) if path.exists() else []
    return {line["step"]: {name: value for name, value in line.items() if name not in ("step", "time")} for line in lines}


if __name__ == "__main__":
    sys.exit(_entry.run_stage("pretrain", PretrainConfig, on_ranks(__file__, pretrain), __doc__ or "", sys.argv[1:]))
