"""Process reward models. Without arguments: one that judges the steps of the default task's answers."""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import _entry
from _common import GuardSection, build_model, check_fit, on_ranks, say
from _pairs import PairSection, check_pairs, encode, made_here, pair_rows
from _rl import Loaded, StartSection, TrainingRun, load_start, plan, preflight
from _steps import StepSection, check_steps, step_rows

from align.config import ConfigError, Invocation
from align.data import split_rows
from align.evals import encode_prompt
from align.model import Decoder
from align.rl import StepObjective, StepScorer, StepSource, auc, encode_steps, score_steps
from align.train import CheckpointConfig, EvalConfig, OptimizerConfig, ScheduleConfig, TrainConfig, TrainerConfig, TrainModule

ARITHMETIC_LABELS = [70, 71]  # "+" and "-" of the default task's tokenizer


@dataclass(frozen=True, kw_only=True)
class HeadSection:
    """What says how good a step is."""

    head: Annotated[Literal["lm", "value"], "lm: the LM head's good against bad label token; value: a linear head of its own"] = "lm"
    label_token_ids: Annotated[list[int] | None, "lm: the ids of the good and the bad label; none: + and - of the default task"] = None


@dataclass(frozen=True, kw_only=True)
class PrmConfig(TrainerConfig):
    """All of the stage's configuration; the defaults are those of the default run. A row is an answer, or a pair of them."""

    run_dir: Annotated[Path | None, "where the run is written, relative to where you are; none: runs/prm-<time> in the workspace"] = None
    kind: Annotated[
        Literal["step", "outcome", "pairwise"], "step: every step's label; outcome: the last label of a row; pairwise: pairs, Bradley-Terry"
    ] = "step"
    model: StartSection = field(default_factory=StartSection)
    prm: HeadSection = field(default_factory=HeadSection)
    data: StepSection = field(default_factory=StepSection)
    pairs: Annotated[PairSection, "pairwise: in place of data"] = field(default_factory=PairSection)
    train: TrainConfig = field(default_factory=lambda: TrainConfig(max_steps=60, global_batch=96, micro_batch=96, threads=1, log_every=20))
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0))
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(warmup_steps=10))
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every=20, keep=1))
    eval: EvalConfig = field(default_factory=EvalConfig)
    guard: GuardSection = field(default_factory=GuardSection)


class PrmModule(StepObjective, TrainModule):
    """The reward model as the Trainer takes it."""


class Held:
    """AUC, accuracy and base rate on the rows that were kept back; the evaluation of the stage."""

    def __init__(self, model: Decoder, scorer: StepScorer, items: list[Any], labels: list[float] | None, *, micro_batch: int, pad_id: int):
        """labels: of the steps of all items, in order; None for pairs."""
        self._model, self._scorer, self._items, self._labels = model, scorer, items, labels
        self._options = {"micro_batch": micro_batch, "pad_id": pad_id}
        self.run: Any = None
        self.samples: list[Any] = []

    def __call__(self, step: int) -> dict[str, float]:
        if not self._items:
            return {}
        if self._labels is None:
            right = 0
            for pair in self._items:
                chosen, rejected = score_steps(self._model, self._scorer, [pair], **self._options)
                right += chosen > rejected
            return {"pair_accuracy": right / len(self._items)}
        scores = score_steps(self._model, self._scorer, self._items, **self._options)
        accuracy = sum((score > 0) == (label > 0.5) for score, label in zip(scores, self._labels, strict=True)) / len(scores)
        return {"step_auc": auc(scores, self._labels), "step_accuracy": accuracy, "base_rate": sum(self._labels) / len(self._labels)}


def prm(call: Invocation[PrmConfig]) -> int:
    started, config = time.perf_counter(), call.config
    labels = label_ids(config)
    check_steps(config.data)
    if config.kind == "pairwise":
        check_pairs(config.pairs, "pairs")

    # Load.
    loaded = load_start(call, "prm")
    length = config.pairs.max_length if config.kind == "pairwise" else config.data.max_length
    rows = config.train.micro_batch * (2 if config.kind == "pairwise" else 1)
    projection = preflight(config, loaded, length=length, rows=rows, trained_share=0.1)
    made = made_here(config.pairs) if config.kind == "pairwise" else config.data.source == "arithmetic"
    if call.dry_run:
        if not made:
            items(config, loaded, _no_model)
        return plan(projection, config, loaded.run_dir, f"steps    {config.train.max_steps} of {config.train.global_batch} rows")
    ignored = check_fit(projection, config.guard, loaded.run_dir)

    # Build.
    model = build_model(config.model, loaded.directory, loaded.config, config.seed, loaded.device)
    train, digest, held, held_labels = items(config, loaded, lambda: model)
    scorer = StepScorer(model, labels)
    source = StepSource(
        train, digest=digest, global_batch=config.train.global_batch, micro_batch=config.train.micro_batch, seed=config.seed,
        pad_id=loaded.pad_id, rank=loaded.ranks.rank, world=loaded.ranks.world,
    )  # fmt: skip
    module = PrmModule(model, scorer, about=about(config, labels), pairwise=config.kind == "pairwise")
    evaluation = Held(model, scorer, held, held_labels, micro_batch=config.train.micro_batch, pad_id=loaded.pad_id)

    # Train, evaluate before and after, report.
    return TrainingRun(
        stage="prm", call=call, loaded=loaded, module=module, loader=source, evaluation=evaluation, started=started, ignored=ignored,
        fields={"prm": about(config, labels)}, next_command=lambda path: f"./bazelw run //stages:ppo -- prm.path={path}",
    ).run()  # fmt: skip


def items(config: PrmConfig, loaded: Loaded, model: Any) -> tuple[list[Any], str, list[Any], list[float] | None]:
    """(what is trained on, its digest, what is kept back, its labels), split by prompt."""
    if config.kind == "pairwise":
        rows = pair_rows(config.pairs, loaded, model, seed=config.seed, name="pairs")
        train_rows, held_rows = split_rows(rows, config.data.held_out)
        train = encode(config.pairs, loaded, train_rows, "pairs")
        return train.pairs, train.digest, encode(config.pairs, loaded, held_rows, "pairs").pairs if held_rows else [], None
    rows = step_rows(config.data, loaded, model, seed=config.seed)
    train_prompts = {row["prompt"] for row in split_rows([{"prompt": row["prompt"]} for row in rows], config.data.held_out)[0]}
    parts = []
    for wanted in (True, False):
        chosen = [row for row in rows if (row["prompt"] in train_prompts) == wanted]
        parts.append(
            encode_steps(
                chosen, loaded.tokenizer, lambda row: encode_prompt(loaded.tokenizer, row), max_length=config.data.max_length,
                neutral=config.data.neutral, outcome=config.kind == "outcome",
            )
            if chosen else None
        )  # fmt: skip
    train, held = parts
    if train is None:
        raise ConfigError(f"data.held_out {config.data.held_out} keeps every row back; lower it")
    say(
        f"         {len(train.examples)} trained on, {len(held.examples) if held else 0} kept back, {train.base_rate:.3f} of the steps good"
    )
    held_labels = [label for each in held.examples for label in each.labels] if held else []
    return train.examples, train.digest, held.examples if held else [], held_labels


def label_ids(config: PrmConfig) -> list[int] | None:
    """The label tokens of an LM head. Raises ConfigError before any weight is read: none are named, and the task isn't the default one."""
    if config.prm.head == "value":
        if config.prm.label_token_ids is not None:
            raise ConfigError("prm.head is value, which has no label tokens; leave prm.label_token_ids out")
        return None
    if config.prm.label_token_ids is not None:
        return two_labels(config.prm.label_token_ids)
    if config.model.path == StartSection().path:
        return ARITHMETIC_LABELS
    raise ConfigError("prm.head is lm: prm.label_token_ids must name the good and the bad label's token, such as [652, 641]")


def two_labels(ids: list[int]) -> list[int]:
    if len(ids) != 2 or ids[0] == ids[1] or min(ids) < 0:
        raise ConfigError(f"prm.label_token_ids is {ids}; it must be two different ids, the good label's and the bad one's")
    return ids


def about(config: PrmConfig, labels: list[int] | None) -> dict[str, Any]:
    """How the trained model is to be asked; saved with it."""
    answers = config.kind != "step" or config.data.source == "arithmetic"
    return {"head": config.prm.head, "label_token_ids": labels, "kind": config.kind, "answer_labels": answers}


def _no_model() -> Decoder:
    raise ConfigError("a plan makes no answers")


if __name__ == "__main__":
    sys.exit(_entry.run_stage("prm", PrmConfig, on_ranks(__file__, prm), __doc__ or "", sys.argv[1:]))
