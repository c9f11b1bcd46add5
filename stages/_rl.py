"""What the stages after SFT share: configuration sections, the evaluation by samples, how such a run is trained and told."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any

import torch
from _common import (
    JudgeSection,
    ModelSection,
    accuracies,
    build_model,
    changes,
    check_fit,
    check_prompts,
    check_vocabulary,
    join_ranks,
    judge,
    judged_rows,
    load_tokenizer,
    pick_device,
    project_run,
    run_directory,
    run_shape,
    say,
    start_model,
    use_threads,
    with_intervals,
)
from _entry import Life
from _fields import of_field
from _life import LivingSampler, awaited, show_forwards

from align.checkpoint import load
from align.config import ConfigError, Invocation, dumps
from align.evals import EvalResult, Item
from align.guard import Projection, Refused
from align.model import Decoder, ModelConfig
from align.rl import CollapseTripwire, Reward, RolloutConfig, Scored, WatchedRun, forward_of, frozen
from align.rollout import NativeSampler, Sample
from align.tokenizer import Tokenizer
from align.tracking import Progress, environment, read_history
from align.train import (
    EvalConfig,
    LoraLinear,
    Ranks,
    Trainer,
    TrainModule,
    find_latest,
    identity,
    refuse_changes,
    whole,
)

START = Path("stages/assets/arithmetic_sft")
MAY_CHANGE = ("run_dir", "model.path", "guard.", "tripwire.", "vllm.")  # on a resume; what they name is compared by its contents


@dataclass(frozen=True, kw_only=True)
class StartSection(ModelSection):
    """Which checkpoint training starts from."""

    path: Annotated[Path, "checkpoint in HF layout, or a run directory: then its newest checkpoint"] = START
    plan_config: Annotated[Path | None, "directory whose config.json a dry run plans with while path is not there"] = None


@dataclass(frozen=True, kw_only=True)
class SampledEval(EvalConfig, JudgeSection):
    """Answers are sampled at this temperature and judged by align.verify, before, during and after training."""

    every: Annotated[int, "steps between evaluations; 0: only before and after"] = 0
    samples: Annotated[int, "answers a problem"] = 2
    temperature: Annotated[float, "of the sampling, which sampled_accuracy is measured at"] = 1.0
    greedy: Annotated[bool, "also judge the most likely answer, before and after"] = True
    show: Annotated[int, "sample answers printed at the end"] = 3


@dataclass(frozen=True)
class Loaded:
    """What a stage knows before it builds the model."""

    directory: Path | None  # None: a plan for a model that is not here
    config: ModelConfig
    tokenizer: Tokenizer
    device: torch.device
    run_dir: Path
    ranks: Ranks
    alive: Life = field(default_factory=Life)  # of the run, also for the long phases of a step

    @property
    def eos_ids(self) -> list[int]:
        return [] if self.tokenizer.eos_id is None else [self.tokenizer.eos_id]

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_id or 0

    @property
    def tokenizer_files(self) -> Path:
        return self.tokenizer.files[0].parent


def load_start(call: Invocation[Any], stage: str) -> Loaded:
    """The configuration's model directory, tokenizer, device and run directory."""
    config = call.config
    use_threads(config.train.threads, "train.threads")
    if config.train.micro_batch < 1:
        raise ConfigError(f"train.micro_batch is {config.train.micro_batch}; it must be at least 1")
    section = config.model
    directory, model_config = start_model(section, planning=call.dry_run)
    tokenizer = load_tokenizer(section, directory)
    check_vocabulary(tokenizer, model_config, section)
    if tokenizer.eos_id is None:
        raise ConfigError(f"the tokenizer of {section.path} names no eos token, so no answer ends; set eos_token in tokenizer_config.json")
    ranks, device = join_ranks(call, pick_device(section, model_config, planning=call.dry_run))
    return Loaded(directory, model_config, tokenizer, device, run_directory(config.run_dir, stage, ranks), ranks)


class WholeSampler:
    """Samples from the weights that are trained: in place, by one sampler kept, or from a whole copy of a sharded or adapted model, renewed
    at every call."""

    weights_version = 0

    def __init__(
        self, model: Decoder, *, eos_ids: Sequence[int], max_batch: int, alive: Callable[[], None] = lambda: None,
        kv_budget_gb: float | None = None, strict: bool = False,
    ) -> None:  # fmt: skip
        """alive: called every few steps. The others: NativeSampler's."""
        self._model, self._alive = model, alive
        self._options: dict[str, Any] = {"eos_ids": eos_ids, "max_batch": max_batch, "kv_budget_gb": kv_budget_gb, "strict": strict}
        self._kept: NativeSampler | None = None

    def generate(self, prompts_ids: Sequence[Sequence[int]], **options: Any) -> list[Sample]:
        """As NativeSampler.generate; all ranks call it together."""
        model = whole(self._model)
        sampler = self._kept or NativeSampler(model, **self._options)
        self._kept = sampler if model is self._model else None
        sampler.weights_version = self.weights_version
        return LivingSampler(sampler, self._alive).generate(prompts_ids, **options)


class Awaited:
    """A reward (`align.rl.Reward`) that shows life while it judges."""

    def __init__(self, reward: Reward, alive: Callable[[], None]) -> None:
        self._reward, self._alive, self._thread = reward, alive, ThreadPoolExecutor(1)

    def score(self, rows: Sequence[Mapping[str, Any]], completions: Sequence[str]) -> list[Scored]:
        return awaited(lambda: self._reward.score(rows, completions), self._alive, self._thread)

    def close(self) -> None:
        self._thread.shutdown()
        self._reward.close()


@contextmanager
def adapter_off(model: Decoder) -> Iterator[Decoder]:
    """The model without its adapter, for the time of a with statement: the frozen base that a LoRA run has as its reference."""
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    scalings = [layer.scaling for layer in layers]
    for layer in layers:
        layer.scaling = 0.0
    try:
        yield model
    finally:
        for layer, scaling in zip(layers, scalings, strict=True):
            layer.scaling = scaling


def reference_of(config: Any, loaded: Loaded, model: Decoder) -> Callable[[], AbstractContextManager[Decoder]]:
    """The model that training starts from: the base under an adapter, else a frozen copy."""
    if config.lora.rank:
        return lambda: adapter_off(model)
    reference = build_model(config.model, loaded.directory, loaded.config, config.seed, loaded.device)
    show_forwards(loaded.alive, reference)
    return frozen(reference)


def preflight(config: Any, loaded: Loaded, *, length: int, rows: int, trained_share: float, forward_impl: str | None = None) -> Projection:
    """Memory of the training part: `rows` of at most `length` tokens in a forward. forward_impl: where it is not the configuration's."""
    shape = {**run_shape(config), "micro_batch": rows, **sampler_shape(config, length)}
    return project_run(
        loaded.config,
        device=loaded.device,
        weight_bytes=2 if config.model.dtype == "bfloat16" else 4,
        length=length,
        trained_share=trained_share,
        forward_impl=forward_of(forward_impl or getattr(config, "forward_impl", None)),
        **shape,
    )


def sampler_shape(config: Any, length: int) -> dict[str, Any]:
    """What the sampler of the trained weights takes, as fields of RunShape."""
    rollout: RolloutConfig | None = getattr(config, "rollout", None)
    if rollout is None or rollout.sampler != "native":
        return {}
    return {
        "sampler_rows": min(rollout.batch, config.train.global_batch),
        "sampler_length": length,
        "sampler_budget_gb": rollout.kv_budget_gb,
        "sampler_copy": config.launch.nproc > 1 or bool(config.lora.rank),
    }


def plan(projection: Projection, config: Any, run_dir: Path, *lines: str) -> int:
    """What a dry run says. It plans for any machine, so that a run that would be refused on this one is no error."""
    for line in lines:
        say(line)
    say(f"memory\n{indent(projection.table(), '         ')}")
    try:
        check_fit(projection, config.guard, run_dir)
        say("dry run: it fits here; nothing was written")
    except Refused as refusal:
        say(f"dry run: it would be refused here: {refusal}; nothing was written")
    return 0


def prompt_rows(rows: Sequence[Mapping[str, Any]], *, chat: bool, system: str | None) -> list[dict[str, Any]]:
    """Rows of {"prompt", ...}; with chat also "messages", so that they are asked through the chat template."""
    if not chat:
        return [dict(row) for row in rows]
    opening = [{"role": "system", "content": system}] if system is not None else []
    return [{**row, "messages": [*opening, {"role": "user", "content": row["prompt"]}]} for row in rows]


def eval_problems(section: SampledEval, loaded: Loaded, *, chat: bool, system: str | None) -> list[dict[str, Any]]:
    """What evaluations ask: read, and its lengths looked at, before anything is trained. None where they are off."""
    problems = judged_rows(section, chat=chat, system=system) if section.enabled and section.problems else []
    check_prompts(problems, loaded.tokenizer, loaded.config, section)
    return problems


class Evaluation:
    """Sampled and greedy accuracy of a model on `problems`, of `eval_problems`; called with the step."""

    def __init__(
        self, section: SampledEval, model: Decoder, tokenizer: Tokenizer, problems: list[dict[str, Any]], *, seed: int, last_step: int,
        extra: Callable[[], dict[str, float]] | None = None,
    ) -> None:  # fmt: skip
        """extra: further numbers of every evaluation."""
        self._section, self._model, self._tokenizer, self._seed, self._last = section, model, tokenizer, seed, last_step
        self._extra, self._problems = extra, problems
        self.run: WatchedRun | None = None
        self.samples: list[Item] = []

    def __call__(self, step: int) -> dict[str, float]:
        numbers = self._extra() if self._extra is not None else {}
        if not self._problems:
            return numbers
        sampled = self._judge(self._section)
        numbers |= with_intervals({"sampled_accuracy": sampled.interval})
        numbers |= {"answer_tokens": sampled.mean_tokens, "truncated": sampled.truncated}
        if self._section.greedy and step in (0, self._last):
            numbers |= accuracies(self._judge(replace(self._section, temperature=0.0, samples=1)))
        self.samples = sampled.items[: self._section.show]
        for item in self.samples if self.run else []:
            fields = {"answer" if name == "gold" else "parsed" if name == "answer" else name: value for name, value in vars(item).items()}
            self.run.sample(step, **fields)
        return numbers

    def _judge(self, section: JudgeSection) -> EvalResult:
        return judge(
            whole(self._model),
            self._tokenizer,
            self._problems,
            section,
            seed=self._seed,
            alive=self.run.alive if self.run is not None else lambda: None,
        )


@dataclass(kw_only=True)
class TrainingRun:
    """One stage's training, from the run directory to the report."""

    stage: str
    call: Invocation[Any]
    loaded: Loaded
    module: TrainModule
    loader: Any
    evaluation: Evaluation
    started: float
    ignored: list[str]
    tripwire: CollapseTripwire | None = None
    complete: Callable[[], dict[str, Any]] | None = None  # numbers about the step for its line in history.jsonl
    fields: dict[str, Any] = field(default_factory=dict)  # of stage_result.json
    next_command: Callable[[Path | None], str] | None = None
    keep: dict[str, str] = field(default_factory=dict)  # files of the run directory: name to text

    def run(self) -> int:
        call, config = self.call, self.call.config
        checkpoint = None
        ranks = self.loaded.ranks
        if call.resume and (path := find_latest(self.loaded.run_dir / "checkpoints", ranks)):
            checkpoint = load(path, verify=False)  # latest has compared the digests
            # Before the run directory's logs are cut to the checkpoint's step.
            refuse_changes(
                checkpoint,
                identity(config, self.module, self.loader.digest, self.loaded.tokenizer_files),
                allow_change=call.allow_change,
                may_change=MAY_CHANGE,
            )
        threads = torch.get_num_threads()
        with of_field("run_dir"):
            run = WatchedRun.create(
                self.loaded.run_dir,
                config_toml=dumps(config),
                env=environment({"stage": self.stage, "threads": threads, "device": str(self.loaded.device)}),
                resume_step=checkpoint.step if checkpoint else 0 if call.resume else None,
                write=ranks.main,
            )
        assert isinstance(run, WatchedRun)
        run.tripwire, run.complete, self.evaluation.run = self.tripwire, self.complete, run
        self.loaded.alive.run = run
        show_forwards(run.alive, self.module.model)
        for name, text in self.keep.items() if ranks.main else []:
            (run.path / name).write_text(text, encoding="utf-8")
        parameters = sum(parameter.numel() for parameter in self.module.model.parameters())
        say(f"model    {parameters:,} parameters, {config.model.dtype}, {self.loaded.device}, {threads} thread{'s' * (threads > 1)}")
        say(f"run      {run.path}")
        trainer = Trainer(
            config,
            self.module,
            loader=self.loader,
            run=run,
            tokenizer_files=self.loaded.tokenizer_files,
            evaluate=self.evaluation,
            progress=Progress(config.train.max_steps, every=config.train.log_every, stream=sys.stderr) if ranks.main else None,
            may_change=MAY_CHANGE,
            ranks=ranks,
        )
        try:
            if config.eval.enabled and ranks.agree(0 not in evaluations(run)):
                run.eval(0, **self._evaluate(0))
            if checkpoint is not None and self._tripped_before(checkpoint.trainer_state["extra"]):
                return self._finish(run, "stopped", checkpoint.step, checkpoint.path, "tripwire")
            result = trainer.fit(resume=checkpoint or call.resume, allow_change=call.allow_change)
        except Exception as error:
            run.finish("failed", stage=self.stage, reason=f"{type(error).__name__}: {error}", wall_s=self._wall, **self._tripwire_fields())
            raise
        self.fields["last_loss"] = result.last_loss
        return self._finish(run, result.status, result.steps, result.checkpoint, result.reason)

    @property
    def _wall(self) -> float:
        return time.perf_counter() - self.started

    def _tripped_before(self, extra: Mapping[str, Any]) -> bool:
        """Whether the resumed run had been stopped by its wire, and still is to be."""
        if self.tripwire is None or "tripwire" not in extra:
            return False
        self.tripwire.load_state_dict(extra["tripwire"])
        return self.tripwire.fired and self.tripwire.config.action == "stop"

    def _tripwire_fields(self) -> dict[str, Any]:
        return {"collapse_tripwire": self.tripwire.summary()} if self.tripwire is not None else {}

    def _evaluate(self, step: int) -> dict[str, float]:
        self.module.model.eval()
        with torch.no_grad():
            return self.evaluation(step)

    def _finish(self, run: WatchedRun, status: str, steps: int, checkpoint: Path | None, reason: str | None) -> int:
        fields: dict[str, Any] = {
            "stage": self.stage,
            "steps": steps,
            "checkpoint": str(checkpoint),
            **self.fields,
            **self._tripwire_fields(),
        }
        tripped = self.tripwire is not None and self.tripwire.fired and self.tripwire.config.action == "stop"
        if status == "stopped" and not tripped:
            run.finish("stopped", **fields, reason=reason, wall_s=self._wall)
            return 5
        ranks = self.loaded.ranks
        if self.call.config.eval.enabled and ranks.agree(steps not in evaluations(run)) and reason != "tripwire":
            run.eval(steps, **self._evaluate(steps))
        if not ranks.main:
            return 4 if tripped else 0
        told = evaluations(run)
        before, after = told.get(0, {}), told.get(steps, {})
        then = self.next_command(checkpoint) if self.next_command else ""
        fields |= {"metrics": {"before": before, "after": after}, "preflight_ignored": self.ignored, "next": then}
        if tripped and self.tripwire is not None:
            run.finish("tripwire", **fields, reason=self.tripwire.reason, wall_s=self._wall)
            say(f"\nstopped at step {self.tripwire.at_step} by the tripwire: {self.tripwire.reason}")
            say(f"checkpoint {checkpoint}; tripwire.action=warn with --resume goes on all the same")
            return 4
        run.finish("done", **fields, wall_s=self._wall)
        self._report(run, before, after, then)
        return 0

    def _report(self, run: WatchedRun, before: dict[str, float], after: dict[str, float], then: str) -> None:
        say("")
        for line in changes(before, after):
            say(line)
        for item in self.evaluation.samples:
            say(f"\n  {item.prompt}\n  -> {item.output}   [{'right' if item.correct else f'wrong ({item.reason}), wanted {item.gold}'}]")
        for alarm in self.tripwire.alarms if self.tripwire else []:
            say(f"\nalarm    step {alarm['step']}, {alarm['rule']}: {alarm['text']}")
        say(f"\nreport   {run.path / 'report.html'}" + (f"\nnext     {then}" if then else ""))


def evaluations(run: WatchedRun) -> dict[int, dict[str, float]]:
    """What eval.jsonl holds, by step; also of the legs before a resume."""
    path = run.path / "eval.jsonl"
    lines = read_history(path) if path.exists() else []
    return {line["step"]: {name: value for name, value in line.items() if name not in ("step", "time")} for line in lines}
