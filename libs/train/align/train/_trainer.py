"""The loop."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from align.checkpoint import Checkpoint, Saver, load
from align.objectives import normalise
from align.tracking import Progress, RunDir
from align.train._config import TrainerConfig, validate
from align.train._errors import ResumeWarning, TrainError
from align.train._lora import sum_replicated
from align.train._meter import SPIKE_WINDOW, is_spike, memory_gb, peak_flops, step_flops
from align.train._module import TrainModule
from align.train._numbers import Numbers
from align.train._optimizers import apply_gradients, make_optimizer
from align.train._prepare import be_deterministic, blocks_of, prepare, reshard
from align.train._profile import Profile
from align.train._ranks import Ranks
from align.train._resume import OPTIMIZER_STATE, environment, identity, random_state, refuse_changes, restore_random_state
from align.train._schedule import learning_rate
from align.train._state import adapter_of, find_latest, restore_trainer_state, restore_weights, trainer_state
from align.train._stop import StopRequest
from align.train._watchdog import Watchdog, sign_of_life


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
    save_stall_s: float | None  # the longest time that a save kept the run waiting
    deterministic: bool  # whether every kernel gives the same bits each time

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
    losses: list[float] = dataclasses.field(default_factory=list)  # the last ones that were no spikes


class _Parts(NamedTuple):
    """What the micro-batches of a step summed up to on this rank: loss, units, and the metrics by name."""

    numbers: Numbers
    metrics: list[str]


class Trainer:
    """Trains a module on a loader's steps and leaves history, evaluations and checkpoints in a run directory.

    A step draws whole from the loader, knows its trained tokens before the first forward, and divides by them once, so the gradient
    does not depend on how the step is cut into ranks and micro-batches. A step without trained tokens changes nothing: no optimizer step,
    no decay, no schedule. A gradient that is not finite is skipped in the same way, on every rank, and counted.
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
        ranks: Ranks | None = None,
    ) -> None:
        """Prepares the module's model (`prepare`: adapter, recomputation, compilation, sharding) and makes its optimizer.

        Args:
            config: of the stage; its class inherits TrainerConfig.
            loader: gives this rank's micro-batches of a step, and what all ranks' count.
            run: created for step 0, or for the step that `fit` will resume from; on other ranks than 0 with write=False.
            tokenizer_files: a directory whose tokenizer files go into every checkpoint.
            evaluate: called with the step, on every rank, in eval mode and without gradients; numbers by name, of which rank 0's count.
            progress: None prints to stderr, on rank 0.
            may_change: fields of the stage's configuration that a resume need not compare.
            fallback_tokenizer: as in align.checkpoint.save.
            ranks: from `join`; None is one process.

        Raises:
            TrainError: a value of the configuration that no run can have, named.
        """
        validate(config)
        if config.train.threads:
            torch.set_num_threads(config.train.threads)
        if config.train.deterministic:
            be_deterministic()
        self._config, self._module, self._loader, self._run = config, module, loader, run
        self._ranks = ranks or Ranks()
        self._tokenizer_files, self._fallback_tokenizer = tokenizer_files, fallback_tokenizer
        self._evaluate = evaluate if config.eval.enabled else None
        stream = sys.stderr if self._ranks.main else None
        self._progress = progress or Progress(config.train.max_steps, every=config.train.log_every, stream=stream)
        self._may_change = tuple(may_change)
        self._identity = identity(config, module, loader.digest, tokenizer_files)
        prepare(module.model, config, self._ranks)
        self._device = next(module.model.parameters()).device
        # What is not sharded is on every rank: an adapter, a head of the module's own.
        self._replicated = [each for _, each in module.named_parameters() if each.requires_grad and not hasattr(each, "full_tensor")]
        self._optimizer = make_optimizer(
            config.optimizer, module.named_parameters(), seed=config.seed, parts=blocks_of(module.model), ranks=self._ranks
        )
        self._saver = Saver(self._ranks.saver, mode=config.checkpoint.mode, alive=run.alive)
        self._profile = Profile(config.train.profile if self._ranks.main else None, run.path)
        self._peak = peak_flops(self._device, config.train.peak_tflops)
        self._watchdog = Watchdog(self._ranks, config.train.hang_timeout, signs=lambda: sign_of_life(run.path))
        self._now = _Counters()
        self._evals: dict[int, dict[str, float]] = {}
        self._saved: Path | None = None  # the checkpoint of the present step
        self._stall: float | None = None  # what the save before this step cost; logged with it
        self._stalls: list[float] = []
        self._before: dict[str, Any] | None = None  # the environment of the run that is resumed, until it was compared

    def fit(self, resume: bool | Checkpoint = False, *, allow_change: Sequence[str] = ()) -> FitResult:
        """Trains to train.max_steps, or until a signal or train.max_hours asks to stop, on any rank.

        Args:
            resume: True takes the newest whole checkpoint of the run directory and says so where there is none; or a checkpoint.
            allow_change: fields that may differ from the resumed run's, `optimizer.state` for going on with a fresh optimizer.

        Raises:
            TrainError: the checkpoint is of another run (every changed field named), or the loss and the loader count differently.
            CheckpointError: a checkpoint can't be read or written.
        """
        started = time.perf_counter()
        random.seed(self._config.seed + self._ranks.rank)
        torch.manual_seed(self._config.seed + self._ranks.rank)
        checkpoint = self._find() if resume is True else resume or None
        if checkpoint is not None:
            self._restore(checkpoint, allow_change)
        self._module.model.train()
        if self._config.checkpoint.every and self._device.type == "cuda" and self._config.train.per_rank_optimizer_state:
            model = self._module.model
            self._saver.reserve(model=model, optimizer=self._optimizer, adapter=adapter_of(model, self._config.lora))
        reason = None
        with StopRequest() as stop, self._watchdog:
            while self._now.step < self._config.train.max_steps and reason is None:
                self._step()
                self._evaluate_and_save()
                asked = self._ranks.gather(stop.reason or self._out_of_time(started))
                reason = next((one for one in asked if one is not None), None)
            if self._saved is None:
                self._save(None)
            self._watchdog.progress(f"the last save, after step {self._now.step}")
            self._saver.wait()
            self._profile.close()
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
            save_stall_s=max(self._stalls, default=None),
            deterministic=self._device.type == "cpu" or self._config.train.deterministic,
        )

    def _step(self) -> None:
        """Draws a step, computes its gradient, applies it, logs it."""
        started = time.perf_counter()
        now, config = self._now, self._config
        self._profile.before(now.step + 1)
        step = self._loader.next_step()
        lr = learning_rate(config.schedule, config.optimizer.lr, now.applied, config.train.max_steps)
        loss: float | None = None
        norm: float | None = None
        metrics: dict[str, float] = {}
        if step.trained_tokens > 0:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            parts = self._gradient(step)
            norm, applied = apply_gradients(self._optimizer, config.optimizer.max_grad_norm, self._ranks)
            self._optimizer.zero_grad(set_to_none=True)
            loss, metrics = self._sum_up(step, parts)
            if applied:
                now.applied, now.last_applied_lr = now.applied + 1, lr
            else:
                now.skipped += 1
        now.step += 1
        now.tokens += step.tokens
        now.trained_tokens += step.trained_tokens
        now.last_loss = loss
        self._saved = None
        self._log(step, time.perf_counter() - started, loss=loss, lr=lr, grad_norm=norm, metrics=metrics)
        self._watchdog.progress(f"step {now.step}")
        if trace := self._profile.after(now.step):
            self._progress.line(f"profile of the last steps: {trace}")
        if self._before is not None:
            self._compare_environment()

    def _log(
        self, step: Step, seconds: float, *, loss: float | None, lr: float, grad_norm: float | None, metrics: dict[str, float]
    ) -> None:
        now = self._now
        rate = step.tokens / seconds
        fields: dict[str, Any] = {"step_s": round(seconds, 6), "memory_gb": round(memory_gb(self._device), 4)}
        if self._peak is not None:
            fields["mfu"] = round(step_flops(self._module.model, step.micro_batches) / seconds / self._peak, 6)
        if self._stall is not None:
            fields["save_stall_s"], self._stall = round(self._stall, 4), None
        if loss is not None and is_spike(now.losses, loss):
            fields["spike"] = True
            most = max(now.losses, default=math.nan)
            self._progress.line(f"loss spike at step {now.step}: {loss:.4g}; the {len(now.losses)} before it had at most {most:.4g}")
        elif loss is not None:
            now.losses = [*now.losses, loss][-SPIKE_WINDOW:]
        self._run.log(
            now.step, loss=loss, lr=lr, grad_norm=grad_norm, tokens_per_s=round(rate, 1), tokens=step.tokens,
            trained_tokens=step.trained_tokens, total_tokens=now.tokens, total_trained_tokens=now.trained_tokens, epoch=step.epoch,
            skipped=now.skipped, **fields, **metrics,
        )  # fmt: skip
        shown = {"loss": loss} if loss is not None else {}
        self._progress.update(now.step, **shown, lr=lr, tokens_per_s=rate)

    def _gradient(self, step: Step) -> _Parts:
        """Forward and backward of every micro-batch of this rank; what they summed up to, on its way to the host."""
        losses: list[Tensor] = []
        weights: list[Tensor | float] = []
        sums: dict[str, Tensor | float] = {}
        for number, micro_batch in enumerate(step.micro_batches, 1):
            summed, weight, metrics = self._module.loss(to_device(micro_batch, self._device))
            loss = normalise(summed, step.trained_tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            weights.append(weight)
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + (value.detach() if isinstance(value, Tensor) else value)
            self._watchdog.progress(f"micro-batch {number} of step {self._now.step + 1}")
        sum_replicated(self._replicated, self._ranks.world)
        return _Parts(Numbers([sum(losses), sum(weights), *sums.values()]), list(sums))

    def _sum_up(self, step: Step, parts: _Parts) -> tuple[float, dict[str, float]]:
        """The loss and the metrics of the step as means over all ranks. The optimizer's kernel runs meanwhile."""
        loss, units, *metrics = parts.numbers.read()
        told = self._ranks.gather((loss, units, dict(zip(parts.metrics, metrics, strict=True))))
        weighed = sum(weight for _, weight, _ in told)
        if weighed != step.trained_tokens:
            raise TrainError(
                f"the loss of step {self._now.step + 1} weighs {weighed:g} units and the loader counted {step.trained_tokens}; "
                "the mask of the loss and the loader's must be the same"
            )
        names = dict.fromkeys(name for *_, each in told for name in each)
        sums = {name: sum(each.get(name, 0.0) for *_, each in told) for name in names}
        return sum(loss for loss, *_ in told), {name: normalise(value, step.trained_tokens) for name, value in sums.items()}

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
            numbers: dict[str, float] = self._ranks.agree(self._evaluate(step))
        self._module.model.train()
        reshard(self._module.model)
        restore_random_state(python, tensors)
        self._watchdog.progress(f"the evaluation after step {step}")
        self._evals[step] = numbers
        self._run.eval(step, **numbers)
        told = {name: value for name, value in numbers.items() if not name.endswith(("_low", "_high"))}  # intervals are in the report
        self._progress.line(f"eval at step {step}  " + "  ".join(f"{name} {value:.4g}" for name, value in told.items()))
        return numbers

    def _save(self, numbers: Mapping[str, float] | None) -> None:
        keep, model = self._config.checkpoint, self._module.model
        metric = (numbers or {}).get(keep.keep_best or "")
        if metric is not None and keep.keep_best_mode == "min":
            metric = -metric
        state, tensors = trainer_state(self._module, self._ranks)
        state |= {"counters": dataclasses.asdict(self._now), "identity": self._identity, "loader": self._loader.state_dict()}
        self._saved = self._saver.save(
            self._run.checkpoints, self._now.step, model=model, optimizer=self._optimizer, tokenizer_files=self._tokenizer_files,
            trainer_state=state, tensors=tensors, keep=keep.keep, metric=metric,
            per_rank_optimizer_state=self._config.train.per_rank_optimizer_state, fallback_tokenizer=self._fallback_tokenizer,
            adapter=adapter_of(model, self._config.lora),
        )  # fmt: skip
        self._stall = self._saver.last_stall_s
        self._stalls.append(self._stall)
        self._watchdog.progress(f"the save after step {self._now.step}")
        self._run.alive()

    def _find(self) -> Checkpoint | None:
        path = find_latest(self._run.checkpoints, self._ranks)
        if path is None:
            self._progress.line(f"no checkpoint under {self._run.checkpoints}; starting at step 0")
            return None
        return load(path, verify=False)  # latest has compared the digests

    def _restore(self, checkpoint: Checkpoint, allow_change: Sequence[str]) -> None:
        refuse_changes(checkpoint, self._identity, allow_change=allow_change, may_change=self._may_change)
        state, model = checkpoint.trainer_state, self._module.model
        hyper = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")} for group in self._optimizer.param_groups
        ]
        restore_weights(checkpoint, model)
        if checkpoint.has_optimizer_state or OPTIMIZER_STATE not in allow_change:
            checkpoint.load_optimizer(self._optimizer, model)
        for group, values in zip(self._optimizer.param_groups, hyper, strict=True):
            group.update(values)  # the configuration decides; a change of it was refused or admitted above
        if state["identity"]["data"] == self._identity["data"]:
            # train.global_batch is global_batch to the loader
            self._loader.load_state_dict(state["loader"], allow_change=tuple(name.rpartition(".")[2] for name in allow_change))
        else:
            self._progress.line("the data changed as --allow-change admits; it is read from its beginning")
        restore_trainer_state(checkpoint, self._module, self._ranks, self._config.seed)
        self._now = _Counters(**state["counters"])
        self._before = state["environment"]
        self._saved = checkpoint.path
        self._progress.line(f"resumed from {checkpoint.path} after step {self._now.step}")

    def _compare_environment(self) -> None:
        """Once, after the first resumed step: only then the name of the forward is known."""
        now = environment(self._module)
        changed = [f"{name} was {was!r} and is {now.get(name)!r}" for name, was in (self._before or {}).items() if now.get(name) != was]
        self._before = None
        if changed and self._ranks.main:
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
