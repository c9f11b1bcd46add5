"""Supervised fine-tuning. Without arguments: a small model learns generated word problems from scratch, on one CPU thread."""

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
    JudgeSection,
    ModelSection,
    accuracies,
    build_model,
    changes,
    check_fit,
    check_prompts,
    check_vocabulary,
    held_out_loss,
    join_ranks,
    judge,
    judged_rows,
    load_tokenizer,
    on_ranks,
    pick_device,
    project_run,
    run_directory,
    run_shape,
    say,
    start_model,
    use_threads,
)
from _fields import GENERATED, TOKENS, check_most, of_field
from _life import show_forwards

from align.checkpoint import load
from align.config import ConfigError, Invocation, caller_path, dumps
from align.data import (
    Encoded,
    Loader,
    RowSet,
    arithmetic_demonstrations,
    bundled,
    chat_rows,
    encode_rows,
    gsm8k_rows,
    read_rows,
    split_rows,
)
from align.evals import Item
from align.guard import Projection, Refused
from align.model import ModelConfig
from align.tokenizer import Tokenizer
from align.tracking import RunDir, environment, read_history
from align.train import (
    CheckpointConfig,
    EvalConfig,
    OptimizerConfig,
    Ranks,
    ScheduleConfig,
    SftModule,
    TrainConfig,
    Trainer,
    TrainerConfig,
    find_latest,
    identity,
    leave,
    refuse_changes,
    whole,
)

DEFAULT_MODEL = Path("stages/models/arithmetic")
GENERATED_ROWS = 50000
MAY_CHANGE = ("run_dir", "model.path", "guard.")  # on a resume; what they name is compared by its contents


@dataclass(frozen=True, kw_only=True)
class SftModelSection(ModelSection):
    """Which model is trained."""

    path: Annotated[Path, "directory in HF layout: config.json, tokenizer files and, unless from_scratch, weights"] = DEFAULT_MODEL
    from_scratch: Annotated[bool | None, "initialise the weights from the seed; none: only those of the default model"] = None
    plan_config: Annotated[Path | None, "directory whose config.json a dry run plans with while path is not there"] = None


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """What is trained on."""

    source: Annotated[str, "arithmetic (generated), gsm8k_train (bundled), or a JSONL file of messages, prompt and completion, or text"] = (
        "arithmetic"
    )
    rows: Annotated[int | None, "the first so many; none: all of a file, 50000 generated ones"] = None
    mix: Annotated[tuple[float, float, float], "arithmetic: shares of worked and boxed, bare boxed, worked without a box"] = (0.4, 0.4, 0.2)
    chat: Annotated[bool, "put prompt and completion into the model's chat template"] = False
    system: Annotated[str | None, "system message for chat rows that have none"] = None
    template: Annotated[str | None, "chat template (Jinja text) in place of the model's own"] = None
    held_out: Annotated[float, "share of the rows that is kept back for the held-out loss"] = 0.02
    max_length: Annotated[int, "tokens of a row; with packing of a packed row"] = 2048
    overlong: Annotated[Literal["truncate", "drop", "error"], "what becomes of a longer document"] = "truncate"
    packing: Annotated[bool, "fill rows of max_length with whole documents, which never see each other"] = True


@dataclass(frozen=True, kw_only=True)
class SftEvalConfig(EvalConfig, JudgeSection):
    """What is looked at before, during and after training."""

    every: Annotated[int, "steps between evaluations; 0: only before and after"] = 600
    show: Annotated[int, "sample answers printed at the end"] = 3


@dataclass(frozen=True, kw_only=True)
class SftConfig(TrainerConfig):
    """All of the stage's configuration; the defaults are those of the default run."""

    run_dir: Annotated[Path | None, "where the run is written, relative to where you are; none: runs/sft-<time> in the workspace"] = None
    model: SftModelSection = field(default_factory=SftModelSection)
    data: DataSection = field(default_factory=DataSection)
    train: TrainConfig = field(default_factory=lambda: TrainConfig(max_steps=2400, global_batch=1, micro_batch=1, threads=1, log_every=200))
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01))
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(warmup_steps=30, min_lr_ratio=0.05))
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every=600, keep=2))
    eval: SftEvalConfig = field(default_factory=SftEvalConfig)
    guard: GuardSection = field(default_factory=GuardSection)


def sft(call: Invocation[SftConfig]) -> int:
    started, config = time.perf_counter(), call.config
    use_threads(config.train.threads, "train.threads")
    check_most("data.max_length", config.data.max_length, TOKENS)

    # Load: tokenizer, rows, tokens.
    directory, model_config = start_model(config.model, planning=call.dry_run)
    tokenizer = load_tokenizer(config.model, directory)
    check_vocabulary(tokenizer, model_config, config.model)
    rows = training_rows(config.data)
    train_rows, held_rows = split_rows(rows.rows, config.data.held_out)
    say(f"rows     {len(rows.rows)} of {rows.path}, {len(held_rows)} held out")
    encoded = encode(train_rows, rows.kind, tokenizer, config.data)
    held = encode(held_rows, rows.kind, tokenizer, config.data) if held_rows else None
    say(f"         {encoded.summary()}")
    check_window(max(part.lengths.max() for part in (encoded, held) if part is not None), model_config)
    device = pick_device(config.model, model_config, planning=call.dry_run)
    ranks, device = join_ranks(call, device)
    loader = Loader(
        encoded,
        global_batch=config.train.global_batch,
        micro_batch=config.train.micro_batch,
        max_length=config.data.max_length,
        packing=config.data.packing,
        seed=config.seed,
        rank=ranks.rank,
        world=ranks.world,
        pad_id=tokenizer.pad_id or 0,
    )

    # Preflight: does it fit?
    run_dir = run_directory(config.run_dir, "sft", ranks)
    # Packed documents are attended to in rows of their own, where that pads to at most 2.5 times the tokens (align.model).
    padding = min(max(float(encoded.lengths.max() / encoded.lengths.mean()), 1.0), 2.5) if config.data.packing else 1.0
    projection = project_run(
        model_config,
        device=device,
        weight_bytes=2 if config.model.dtype == "bfloat16" else 4,
        length=config.data.max_length,
        trained_share=encoded.trained_tokens / encoded.tokens,
        forward_impl="cpu_per_document" if config.data.packing else "sdpa_causal",
        padding=padding,
        **run_shape(config),
    )
    problems = (
        judged_rows(config.eval, chat=config.data.chat, system=config.data.system) if config.eval.enabled and config.eval.problems else []
    )
    check_prompts(problems, tokenizer, model_config, config.eval)
    if call.dry_run:
        return plan(config, encoded, projection, run_dir)
    ignored = check_fit(projection, config.guard, run_dir)

    # Build.
    from_scratch = config.model.path == DEFAULT_MODEL if config.model.from_scratch is None else config.model.from_scratch
    model = build_model(config.model, None if from_scratch else directory, model_config, config.seed, device)
    module = SftModule(model)
    tokenizer_files = tokenizer.files[0].parent
    checkpoint = None
    if call.resume and (path := find_latest(run_dir / "checkpoints", ranks)):
        checkpoint = load(path, verify=False)  # latest has compared the digests
        # Before the run directory's logs are cut to the checkpoint's step.
        refuse_changes(
            checkpoint, identity(config, module, loader.digest, tokenizer_files), allow_change=call.allow_change, may_change=MAY_CHANGE
        )
    threads = torch.get_num_threads()
    with of_field("run_dir"):
        run = RunDir.create(
            run_dir,
            config_toml=dumps(config),
            env=environment({"stage": "sft", "threads": threads, "device": str(device), "ranks": ranks.world}),
            resume_step=checkpoint.step if checkpoint else 0 if call.resume else None,
            write=ranks.main,
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"model    {parameters:,} parameters, {config.model.dtype}, {device}, {threads} thread{'s' * (threads > 1)}")
    say(f"run      {run.path}")
    if parameters > 10_000_000 and config.optimizer.lr > 1e-3:
        say(f"note     optimizer.lr {config.optimizer.lr:g} suits the default task; this size wants about 1e-5 (see stages/configs)")

    # Train, evaluate before and after.
    show_forwards(run.alive, model)
    evaluation = Evaluation(config, module, tokenizer, problems, held, run, ranks)
    trainer = Trainer(
        config,
        module,
        loader=loader,
        run=run,
        tokenizer_files=tokenizer_files,
        evaluate=evaluation,
        may_change=MAY_CHANGE,
        ranks=ranks,
    )
    try:
        if config.eval.enabled and ranks.agree(0 not in evaluations(run)):
            run.eval(0, **evaluation.without_trace(0))
        result = trainer.fit(resume=checkpoint or call.resume, allow_change=call.allow_change)
    except Exception as error:
        run.finish("failed", stage="sft", reason=f"{type(error).__name__}: {error}", wall_s=time.perf_counter() - started)
        raise
    fields: dict[str, Any] = {"stage": "sft", "steps": result.steps, "checkpoint": str(result.checkpoint), "last_loss": result.last_loss}
    fields |= {"ranks": ranks.world, "deterministic": result.deterministic, "save_stall_s": result.save_stall_s}
    if result.status == "stopped":
        run.finish("stopped", **fields, reason=result.reason, wall_s=time.perf_counter() - started)
        leave(ranks)
        return result.exit_code
    if config.eval.enabled and ranks.agree(result.steps not in evaluations(run)):
        run.eval(result.steps, **evaluation.without_trace(result.steps))

    # Report.
    before, after = (evaluations(run).get(step, {}) for step in (0, result.steps))
    then = f"./bazelw run //stages:evaluate -- model.path={result.checkpoint} eval.temperature=1 eval.samples=4"
    then += (f" eval.source={config.eval.source}" if config.eval.source != "arithmetic" else "") + " chat=true" * config.data.chat
    metrics, wall = {"before": before, "after": after}, time.perf_counter() - started
    run.finish("done", **fields, metrics=metrics, preflight_ignored=ignored, wall_s=wall, next=then)
    report(run, before, after, evaluation.samples, then)
    leave(ranks)
    return 0


def training_rows(section: DataSection) -> RowSet:
    if section.rows is not None and section.rows < 1:
        raise ConfigError(f"data.rows is {section.rows}; it must be at least 1, or none for all")
    if section.source == "arithmetic":
        check_most("data.rows", section.rows or 0, GENERATED)
        made = arithmetic_demonstrations(section.rows or GENERATED_ROWS, seed=0, mix=section.mix)
        return RowSet(made, "completion", Path("arithmetic"), "")
    if section.source == "gsm8k_train":
        found = RowSet(gsm8k_rows(bundled("gsm8k_train")), "completion", Path("gsm8k_train"), "")
    else:
        with of_field("data.source"):
            found = read_rows(caller_path(section.source))
    chosen, kind = found.rows[: section.rows], found.kind
    if section.chat:
        if kind != "completion":
            raise ConfigError(f"data.chat is for rows of prompt and completion, {found.path} has rows of kind {kind}; set data.chat=false")
        chosen, kind = chat_rows(chosen), "messages"
    return RowSet(chosen, kind, found.path, found.digest)


def encode(rows: list[dict], kind: str, tokenizer: Tokenizer, section: DataSection) -> Encoded:
    return encode_rows(
        rows,
        tokenizer,
        kind=kind,
        max_length=section.max_length,
        overlong=section.overlong,
        template=section.template,
        system=section.system,
    )


def check_window(longest: int, model_config: ModelConfig) -> None:
    """Raises ConfigError when a document is longer than the model's window."""
    if longest > model_config.max_length:
        raise ConfigError(
            f"the longest document has {longest} tokens, the model's window {model_config.max_length} (max_position_embeddings); set "
            f"data.max_length={model_config.max_length}, and longer ones are truncated or dropped as data.overlong says"
        )


def plan(config: SftConfig, encoded: Encoded, projection: Projection, run_dir: Path) -> int:
    """What a dry run says. It plans for any machine, so that a run that would be refused on this one is no error."""
    steps, batch = config.train.max_steps, config.train.global_batch
    tokens = batch * (config.data.max_length if config.data.packing else encoded.tokens / encoded.kept)
    say(
        f"steps    {steps} of {batch} row{'s' * (batch > 1)}, about {tokens:,.0f} tokens each: {steps * tokens / encoded.tokens:.2f} epochs"
    )
    say(f"memory\n{indent(projection.table(), '         ')}")
    try:
        check_fit(projection, config.guard, run_dir)
        say("dry run: it fits here; nothing was written")
    except Refused as refusal:
        say(f"dry run: it would be refused here: {refusal}; nothing was written")
    return 0


class Evaluation:
    """Held-out loss and judged accuracy, called by the Trainer with the step."""

    def __init__(
        self,
        config: SftConfig,
        module: SftModule,
        tokenizer: Tokenizer,
        problems: list[dict],
        held: Encoded | None,
        run: RunDir,
        ranks: Ranks,
    ) -> None:
        self._config, self._module, self._tokenizer, self._problems, self._held, self._run = config, module, tokenizer, problems, held, run
        self._ranks = ranks
        self.samples: list[Item] = []

    def without_trace(self, step: int) -> dict[str, float]:
        self._module.model.eval()
        with torch.no_grad():
            return self(step)

    def __call__(self, step: int) -> dict[str, float]:
        numbers: dict[str, float] = {}
        if self._held is not None:
            numbers["held_out_loss"] = held_out_loss(
                self._module, self._held, max_length=self._config.data.max_length, packing=self._config.data.packing, ranks=self._ranks
            )
        model = whole(self._module.model) if self._problems else None
        if model is not None and self._ranks.main:
            judged = judge(
                model,
                self._tokenizer,
                self._problems,
                self._config.eval,
                seed=self._config.seed,
                alive=self._run.alive,
            )
            numbers |= accuracies(judged)
            self.samples = judged.items[: self._config.eval.show]
            for item in self.samples:
                self._run.sample(
                    step,
                    **{"answer" if name == "gold" else "parsed" if name == "answer" else name: value for name, value in vars(item).items()},
                )
        return numbers


def evaluations(run: RunDir) -> dict[int, dict[str, float]]:
    """What eval.jsonl holds, by step; also of the legs before a resume."""
    path = run.path / "eval.jsonl"
    lines = read_history(path) if path.exists() else []
    return {line["step"]: {name: value for name, value in line.items() if name not in ("step", "time")} for line in lines}


def report(run: RunDir, before: dict[str, float], after: dict[str, float], samples: list[Item], then: str) -> None:
    say("")
    for line in changes(before, after):
        say(line)
    for item in samples:
        say(f"\n  {item.prompt}\n  -> {item.output}   [{'right' if item.correct else f'wrong ({item.reason}), wanted {item.gold}'}]")
    say(f"\nreport   {run.path / 'report.html'}")
    say(f"next     {then}")


if __name__ == "__main__":
    sys.exit(_entry.run_stage("sft", SftConfig, on_ranks(__file__, sft), __doc__ or "", sys.argv[1:]))
