"""The loop."""

from __future__ import annotations

import dataclasses
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from align.checkpoint import Checkpoint, latest, load, save
from align.objectives import normalise
from align.tracking import Progress, RunDir
from align.train._config import TrainerConfig, validate
from align.train._errors import ResumeWarning, TrainError
from align.train._module import TrainModule
from align.train._optimizers import apply_gradients, make_optimizer
from align.train._resume import OPTIMIZER_STATE, environment, identity, random_state, refuse_changes, restore_random_state
from align.train._schedule import learning_rate
from align.train._stop import StopRequest


class Step(Protocol):
    """One optimizer step, as align.data.Loader gives it."""

    micro_batches: Sequence[Any]  # this rank's: dataclasses or dicts of numpy arrays, numbers and None
    trained_tokens: int  # units of all ranks and micro-batches
    tokens: int  # fed, padding not counted
    epoch: float


class StepLoader(Protocol):
    """Where steps come from: align.data.Loader, or a prompt source."""

    @property
    def digest(self) -> str: ...
    def next_step(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], *, allow_change: tuple[str, ...] = ()) -> None: ...


@dataclasses.dataclass(frozen=True)
class FitResult:
    """How a run ended."""

    status: Literal["done", "stopped"]
    steps: int
    checkpoint: Path | None
    wall_s: float
    last_loss: float | None
    reason: str | None  # of a stop: the signal's name or "train.max_hours"
    evals: dict[int, dict[str, float]]  # what `evaluate` returned in this process, by step

    @property
    def exit_code(self) -> int:
        """0, or 5 for a stop with a checkpoint to resume."""
        return 0 if self.status == "done" else 5


@dataclasses.dataclass
class _Counters:
    """Where a run stands; saved."""

    step: int = 0  # optimizer steps drawn from the loader
    applied: int = 0  # of those, the ones that changed the weights: the schedule counts these
    skipped: int = 0  # for a gradient that was not finite
    tokens: int = 0
    trained_tokens: int = 0
    last_applied_lr: float | None = None
    last_loss: float | None = None


class Trainer:
    """Trains a module on a loader's steps and leaves history, evaluations and checkpoints in a run directory.

    A step draws whole from the loader, knows its trained tokens before the first forward, and divides by them once, so the gradient
    does not depend on how the step is cut into micro-batches. A step without trained tokens changes nothing: no optimizer step, no decay,
    no schedule. A gradient that is not finite is skipped in the same way, and counted.
    """

    def __init__(
        self,
        config: TrainerConfig,
        module: TrainModule,
        *,
        loader: StepLoader,
        run: RunDir,
        tokenizer_files: str | os.PathLike[str] | None = None,
        evaluate: Callable[[int], dict[str, float]] | None = None,
        progress: Progress | None = None,
        may_change: Sequence[str] = (),
        fallback_tokenizer: str | os.PathLike[str] | None = None,
    ) -> None:
        """Args:
            config: of the stage; its class inherits TrainerConfig.
            run: created for step 0, or for the step that `fit` will resume from.
            tokenizer_files: a directory whose tokenizer files go into every checkpoint.
            evaluate: called with the step, in eval mode and without gradients; numbers by name.
            progress: None prints to stderr.
            may_change: fields of the stage's configuration that a resume need not compare.
            fallback_tokenizer: as in align.checkpoint.save.

        Raises:
            TrainError: a value of the configuration that no run can have, named.
        """
        validate(config)
        if config.train.threads:
            torch.set_num_threads(config.train.threads)
        self._config, self._module, self._loader, self._run = config, module, loader, run
        self._tokenizer_files, self._fallback_tokenizer = tokenizer_files, fallback_tokenizer
        self._evaluate = evaluate if config.eval.enabled else None
        self._progress = progress or Progress(config.train.max_steps, every=config.train.log_every, stream=sys.stderr)
        self._may_change = tuple(may_change)
        self._identity = identity(config, module, loader.digest, tokenizer_files)
        self._device = next(module.model.parameters()).device
        self._optimizer = make_optimizer(config.optimizer, module.named_parameters(), seed=config.seed)
        self._now = _Counters()
        self._evals: dict[int, dict[str, float]] = {}
        self._saved: Path | None = None  # the checkpoint of the present step
        self._before: dict[str, Any] | None = None  # the environment of the run that is resumed, until it was compared

    def fit(self, resume: bool | Checkpoint = False, *, allow_change: Sequence[str] = ()) -> FitResult:
        """Trains to train.max_steps, or until a signal or train.max_hours asks to stop.

        Args:
            resume: True takes the newest whole checkpoint of the run directory and says so where there is none; or a checkpoint.
            allow_change: fields that may differ from the resumed run's, `optimizer.state` for going on with a fresh optimizer.

        Raises:
            TrainError: the checkpoint is of another run (every changed field named), or the loss and the loader count differently.
            CheckpointError: a checkpoint can't be read or written.
        """
        started = time.perf_counter()
        random.seed(self._config.seed)
        torch.manual_seed(self._config.seed)
        checkpoint = self._find() if resume is True else resume or None
        if checkpoint is not None:
            self._restore(checkpoint, allow_change)
        self._module.model.train()
        reason = None
        with StopRequest() as stop:
            while self._now.step < self._config.train.max_steps and reason is None:
                self._step()
                self._evaluate_and_save()
                reason = stop.reason or self._out_of_time(started)
            if self._saved is None:
                self._save(None)
        stopped = self._now.step < self._config.train.max_steps
        if stopped:
            self._progress.line(f"stopped by {reason} after step {self._now.step}; --resume goes on from {self._saved}")
        return FitResult(
            status="stopped" if stopped else "done",
            steps=self._now.step,
            checkpoint=self._saved,
            wall_s=time.perf_counter() - started,
            last_loss=self._now.last_loss,
            reason=reason if stopped else None,
            evals=self._evals,
        )

    def _step(self) -> None:
        """Draws a step, computes its gradient, applies it, logs it."""
        started = time.perf_counter()
        now, config = self._now, self._config
        step = self._loader.next_step()
        lr = learning_rate(config.schedule, config.optimizer.lr, now.applied, config.train.max_steps)
        loss: float | None = None
        norm: float | None = None
        metrics: dict[str, float] = {}
        if step.trained_tokens > 0:
            loss, metrics = self._gradient(step)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            norm, applied = apply_gradients(self._optimizer, config.optimizer.max_grad_norm)
            if applied:
                now.applied, now.last_applied_lr = now.applied + 1, lr
            else:
                now.skipped += 1
            self._optimizer.zero_grad(set_to_none=True)
        now.step += 1
        now.tokens += step.tokens
        now.trained_tokens += step.trained_tokens
        now.last_loss = loss
        self._saved = None
        rate = step.tokens / (time.perf_counter() - started)
        self._run.log(
            now.step, loss=loss, lr=lr, grad_norm=norm, tokens_per_s=round(rate, 1), tokens=step.tokens, trained_tokens=step.trained_tokens,
            total_tokens=now.tokens, total_trained_tokens=now.trained_tokens, epoch=step.epoch, skipped=now.skipped, **metrics,
        )  # fmt: skip
        shown = {"loss": loss} if loss is not None else {}
        self._progress.update(now.step, **shown, lr=lr, tokens_per_s=rate)
        if self._before is not None:
            self._compare_environment()

    def _gradient(self, step: Step) -> tuple[float, dict[str, float]]:
        """Forward and backward of every micro-batch; the loss and the metrics as means over the step."""
        losses: list[Tensor] = []
        weights: list[Tensor | float] = []
        sums: dict[str, Tensor | float] = {}
        for micro_batch in step.micro_batches:
            summed, weight, metrics = self._module.loss(to_device(micro_batch, self._device))
            loss = normalise(summed, step.trained_tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            weights.append(weight)
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + (value.detach() if isinstance(value, Tensor) else value)
        weighed = float(sum(weights))
        if weighed != step.trained_tokens:
            raise TrainError(
                f"the loss of step {self._now.step + 1} weighs {weighed:g} units and the loader counted {step.trained_tokens}; "
                "the mask of the loss and the loader's must be the same"
            )
        return float(sum(losses)), {name: normalise(float(value), step.trained_tokens) for name, value in sums.items()}

    def _evaluate_and_save(self) -> None:
        """What is due after this step."""
        step, config = self._now.step, self._config
        numbers: dict[str, float] | None = None
        if self._evaluate is not None and config.eval.every and step % config.eval.every == 0:
            numbers = self._evaluation(step)
        if config.checkpoint.every and step % config.checkpoint.every == 0:
            self._save(numbers)

    def _evaluation(self, step: int) -> dict[str, float]:
        """Evaluates without leaving a trace in the training: mode and random numbers are as before."""
        assert self._evaluate is not None
        python, tensors = random_state()
        self._module.model.eval()
        with torch.no_grad():
            numbers = self._evaluate(step)
        self._module.model.train()
        restore_random_state(python, tensors)
        self._evals[step] = numbers
        self._run.eval(step, **numbers)
        self._progress.line(f"eval at step {step}  " + "  ".join(f"{name} {value:.4g}" for name, value in numbers.items()))
        return numbers

    def _save(self, numbers: Mapping[str, float] | None) -> None:
        keep = self._config.checkpoint
        metric = (numbers or {}).get(keep.keep_best or "")
        if metric is not None and keep.keep_best_mode == "min":
            metric = -metric
        python, tensors = random_state()
        extra = self._module.extra_state()
        state = {
            "counters": dataclasses.asdict(self._now),
            "identity": self._identity,
            "environment": environment(self._module),
            "loader": self._loader.state_dict(),
            "random": python,
            "extra": {name: value for name, value in extra.items() if not isinstance(value, Tensor)},
        }
        tensors |= {f"extra.{name}": value for name, value in extra.items() if isinstance(value, Tensor)}
        self._saved = save(
            self._run.checkpoints, self._now.step, model=self._module.model, optimizer=self._optimizer,
            tokenizer_files=self._tokenizer_files, trainer_state=state, tensors=tensors, keep=keep.keep, metric=metric,
            per_rank_optimizer_state=self._config.train.per_rank_optimizer_state, fallback_tokenizer=self._fallback_tokenizer,
        )  # fmt: skip
        self._run.alive()

    def _find(self) -> Checkpoint | None:
        path = latest(self._run.checkpoints)
        if path is None:
            self._progress.line(f"no checkpoint under {self._run.checkpoints}; starting at step 0")
            return None
        return load(path, verify=False)  # latest has compared the digests

    def _restore(self, checkpoint: Checkpoint, allow_change: Sequence[str]) -> None:
        refuse_changes(checkpoint, self._identity, allow_change=allow_change, may_change=self._may_change)
        state = checkpoint.trainer_state
        hyper = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")} for group in self._optimizer.param_groups
        ]
        checkpoint.load_model(self._module.model)
        if checkpoint.has_optimizer_state or OPTIMIZER_STATE not in allow_change:
            checkpoint.load_optimizer(self._optimizer, self._module.model)
        for group, values in zip(self._optimizer.param_groups, hyper, strict=True):
            group.update(values)  # the configuration decides; a change of it was refused or admitted above
        if state["identity"]["data"] == self._identity["data"]:
            # train.global_batch is global_batch to the loader
            self._loader.load_state_dict(state["loader"], allow_change=tuple(name.rpartition(".")[2] for name in allow_change))
        else:
            self._progress.line("the data changed as --allow-change admits; it is read from its beginning")
        extra = {name.removeprefix("extra."): value for name, value in checkpoint.tensors.items() if name.startswith("extra.")}
        self._module.load_extra_state({**state["extra"], **extra})
        restore_random_state(state["random"], checkpoint.tensors)
        self._now = _Counters(**state["counters"])
        self._before = state["environment"]
        self._saved = checkpoint.path
        self._progress.line(f"resumed from {checkpoint.path} after step {self._now.step}")

    def _compare_environment(self) -> None:
        """Once, after the first resumed step: only then the name of the forward is known."""
        now = environment(self._module)
        changed = [f"{name} was {was!r} and is {now.get(name)!r}" for name, was in (self._before or {}).items() if now.get(name) != was]
        self._before = None
        if changed:
            warnings.warn(
                f"resumed with the exact state, but {', '.join(changed)}: the continuation need not be bit-equal",
                ResumeWarning,
                stacklevel=4,
            )

    def _out_of_time(self, started: float) -> str | None:
        hours = self._config.train.max_hours
        return "train.max_hours" if hours is not None and time.perf_counter() - started >= hours * 3600 else None


def to_device(micro_batch: Any, device: torch.device) -> dict[str, Any]:
    """The fields of a micro-batch: arrays as tensors on the device (no copy on the CPU), numbers as they are, None left out."""
    fields = micro_batch if isinstance(micro_batch, Mapping) else vars(micro_batch)
    return {
        name: value if isinstance(value, int | float | str | bool) else torch.as_tensor(value).to(device, non_blocking=True)
        for name, value in fields.items()
        if value is not None
    }
