"""What a training run can be told. A stage's own configuration inherits TrainerConfig and adds its fields."""

import os
from dataclasses import dataclass, field
from typing import Annotated, Literal

from align.train._errors import TrainError
from align.train._profile import parse_range


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, and in which portions."""

    max_steps: Annotated[int, "optimizer steps of the whole run; the schedule ends here"] = 100
    global_batch: Annotated[int, "rows an optimizer step, over all ranks and micro-batches"] = 8
    micro_batch: Annotated[int, "rows a forward and backward; smaller takes less memory and gives the same gradient"] = 8
    max_hours: Annotated[float | None, "stop with a checkpoint (exit code 5) after so many hours; none: no limit"] = None
    threads: Annotated[int, "CPU threads of torch; 0 leaves torch's own choice. 1 is fastest for models below a million parameters"] = 0
    log_every: Annotated[int, "steps between progress lines where the output is no terminal; history.jsonl has every step"] = 50
    per_rank_optimizer_state: Annotated[bool, "one optimizer file a rank; false gathers all into one file"] = True
    checkpointing: Annotated[
        Literal["none", "selective", "full"],
        "activations that the backward computes again instead of keeping them: of no block, of every second, of every block",
    ] = "none"
    kernels: Annotated[
        bool, "on a GPU: norms, rotation and activation by align.kernels, one product for weights that read the same input; false: torch's"
    ] = True
    compile: Annotated[bool, "compile each block with torch.compile; the first step takes longer"] = False
    deterministic: Annotated[bool, "only kernels that give the same bits every time; slower on a GPU, a CPU always does"] = False
    reduce_dtype: Annotated[
        Literal["parameters", "float32"], "several ranks: gradients are summed in the parameters' own dtype, or in fp32, twice the traffic"
    ] = "parameters"
    reshard_after_forward: Annotated[
        bool, "several ranks: give up a block's gathered weights between forward and backward; false is faster and holds all weights"
    ] = True
    hang_timeout: Annotated[float | None, "seconds without progress after which the run ends and names the rank; none: never"] = 1800.0
    profile: Annotated[str | None, "steps to profile, such as 10:13 (the last included); a trace for chrome://tracing in run_dir"] = None
    peak_tflops: Annotated[float | None, "what MFU is counted against; none: the data sheet of a known GPU, no MFU elsewhere"] = None


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Which optimizer, how large its steps."""

    name: Annotated[
        Literal["adamw8bit", "adamw", "offload_adamw"],
        "adamw8bit: 8-bit states, 2 bytes a parameter; adamw: fp32 states, fp32 master of bf16 weights; offload_adamw: that on the host",
    ] = "adamw8bit"
    lr: Annotated[float, "peak learning rate"] = 3e-4
    betas: Annotated[tuple[float, float], "decay of the first and second moment"] = (0.9, 0.95)
    eps: Annotated[float, "added to the root of the second moment"] = 1e-8
    weight_decay: Annotated[float, "decoupled decay; 1-D parameters (norms, biases) have none"] = 0.01
    max_grad_norm: Annotated[float | None, "clip the global gradient norm to this; none: no clipping"] = 1.0
    pinned_staging_gb: Annotated[float, "offload_adamw: pinned host memory that gradients and weights pass through, at most, GiB"] = 1.0
    in_backward: Annotated[
        bool, "step each block as soon as its gradients are there, and free them: least memory; no clipping, no accumulation"
    ] = False


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the run."""

    name: Annotated[Literal["constant", "linear", "cosine", "wsd"], "shape after the warm-up; wsd: stable, then linear decay"] = "cosine"
    warmup_steps: Annotated[int, "steps of linear rise, the first of which has lr / warmup_steps; 0: none"] = 0
    min_lr_ratio: Annotated[float, "floor of linear, cosine and wsd, as a share of lr; the last step has exactly this"] = 0.1
    decay_steps: Annotated[int | None, "wsd only: steps of decay at the end; none: a fifth of max_steps"] = None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, what to keep. The end of a run and a stop always save."""

    every: Annotated[int, "steps between checkpoints; 0: only at the end and at a stop"] = 0
    keep: Annotated[int, "how many of the newest checkpoints stay"] = 2
    keep_best: Annotated[str | None, "an eval number, such as accuracy; the checkpoint where it was best stays too"] = None
    keep_best_mode: Annotated[Literal["max", "min"], "whether the best is the highest or the lowest"] = "max"
    mode: Annotated[
        Literal["snapshot", "stream"],
        "snapshot: the run waits for a copy on the host, which is written beside it; stream: it waits for the disk, the host keeps nothing",
    ] = "snapshot"


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """On how many processes. The program starts itself again through torch's elastic launcher."""

    nproc: Annotated[int, "processes on this machine, one a GPU"] = 1
    nnodes: Annotated[int, "machines; the same command is started on each"] = 1
    rdzv: Annotated[str | None, "several machines: host:port of the first"] = None


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters on frozen weights, in place of training all of them."""

    rank: Annotated[int, "of the additions; 0: no adapter, all weights are trained"] = 0
    alpha: Annotated[float, "the additions are scaled by alpha / rank"] = 32.0
    targets: Annotated[list[str], "which linear layers, by their last name"] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    base_name: Annotated[str, "what the adapter's own files name as their base: a directory or a hub name"] = ""
    save_merged: Annotated[bool, "checkpoints hold the merged weights beside the adapter; false: the adapter alone"] = True


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation during training."""

    enabled: Annotated[bool, "evaluate at all"] = True
    every: Annotated[int, "steps between evaluations; 0: none during training"] = 0


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """All that the Trainer reads."""

    seed: Annotated[int, "of the order of the data, dropout, stochastic rounding"] = 0
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)


def validate(config: TrainerConfig) -> None:
    """Refuses values that no run can have.

    Raises:
        TrainError: names the field.
    """
    train, optimizer, schedule, keep = config.train, config.optimizer, config.schedule, config.checkpoint
    for name, value, most in (  # what is made for them at once, rows of a step or processes, would not end or not fit
        ("train.global_batch", train.global_batch, 2**20),
        ("train.micro_batch", train.micro_batch, 2**20),
        ("train.threads", train.threads, 1024),
        ("lora.rank", config.lora.rank, 2**16),
        ("launch.nproc", config.launch.nproc, 1024),
        ("launch.nnodes", config.launch.nnodes, 2**16),
    ):
        if value > most:
            raise TrainError(f"{name} is {value}; it must be at most {most}")
    for name, value, least in (
        ("train.max_steps", train.max_steps, 1),
        ("train.global_batch", train.global_batch, 1),
        ("train.micro_batch", train.micro_batch, 1),
        ("train.threads", train.threads, 0),
        ("train.log_every", train.log_every, 1),
        ("schedule.warmup_steps", schedule.warmup_steps, 0),
        ("checkpoint.every", keep.every, 0),
        ("checkpoint.keep", keep.keep, 1),
        ("eval.every", config.eval.every, 0),
        ("lora.rank", config.lora.rank, 0),
        ("launch.nproc", config.launch.nproc, 1),
        ("launch.nnodes", config.launch.nnodes, 1),
    ):
        if value < least:
            raise TrainError(f"{name} is {value}; it must be at least {least}")
    for name, number, fits, range_ in (
        ("seed", config.seed, -(2**63) <= config.seed < 2**63, "an integer of 64 bits, from -2**63 to 2**63 - 1"),
        ("optimizer.lr", optimizer.lr, 0 < optimizer.lr < float("inf"), "above 0"),
        ("optimizer.eps", optimizer.eps, optimizer.eps > 0, "above 0"),
        ("optimizer.weight_decay", optimizer.weight_decay, 0 <= optimizer.weight_decay < float("inf"), "at least 0, and finite"),
        ("optimizer.betas", optimizer.betas, all(0 <= beta < 1 for beta in optimizer.betas), "two numbers from 0 to below 1"),
        ("optimizer.max_grad_norm", optimizer.max_grad_norm, optimizer.max_grad_norm is None or optimizer.max_grad_norm > 0,
         "above 0, or none for no clipping"),
        ("optimizer.pinned_staging_gb", optimizer.pinned_staging_gb, optimizer.pinned_staging_gb > 0, "above 0"),
        ("lora.alpha", config.lora.alpha, config.lora.alpha > 0, "above 0"),
        ("lora.targets", config.lora.targets, bool(config.lora.targets), "at least one name"),
        ("schedule.min_lr_ratio", schedule.min_lr_ratio, 0 <= schedule.min_lr_ratio <= 1, "from 0 to 1"),
        ("train.hang_timeout", train.hang_timeout, train.hang_timeout is None or train.hang_timeout > 0, "above 0, or none: no watchdog"),
        ("train.peak_tflops", train.peak_tflops, train.peak_tflops is None or train.peak_tflops > 0, "above 0, or none"),
        ("train.max_hours", train.max_hours, train.max_hours is None or train.max_hours > 0, "above 0, or none for no limit"),
    ):  # fmt: skip
        if not fits:
            raise TrainError(f"{name} is {number}; it must be {range_}")
    if train.profile is not None:
        parse_range(train.profile)
    _validate_in_backward(config)
    _validate_schedule(schedule, train.max_steps)


def _validate_in_backward(config: TrainerConfig) -> None:
    """A step that is taken while the backward runs knows neither the whole gradient nor another micro-batch's."""
    optimizer, train = config.optimizer, config.train
    if not optimizer.in_backward:
        return
    ranks = max(config.launch.nproc * config.launch.nnodes, int(os.environ.get("WORLD_SIZE", "1")))
    if config.lora.rank and ranks > 1:
        raise TrainError(
            f"optimizer.in_backward steps an adapter before its gradients are summed over {ranks} ranks; set optimizer.in_backward=false"
        )
    if optimizer.name == "offload_adamw":
        raise TrainError("optimizer.in_backward is for adamw8bit and adamw; offload_adamw keeps its states on the host: set one of the two")
    if optimizer.max_grad_norm is not None:
        raise TrainError(
            f"optimizer.in_backward can't clip to optimizer.max_grad_norm {optimizer.max_grad_norm:g}, the norm being known only after the "
            "backward; set optimizer.max_grad_norm=none"
        )
    if train.global_batch != train.micro_batch * ranks:
        raise TrainError(
            f"optimizer.in_backward can't accumulate: train.global_batch is {train.global_batch}, train.micro_batch {train.micro_batch} on "
            f"{ranks} rank{'s' * (ranks > 1)}; set train.global_batch={train.micro_batch * ranks}"
        )


def _validate_schedule(schedule: ScheduleConfig, max_steps: int) -> None:
    if schedule.decay_steps is not None:
        if schedule.name != "wsd":
            raise TrainError(
                f"schedule.decay_steps is {schedule.decay_steps}, but only wsd has a decay phase; schedule.name is {schedule.name}"
            )
        if schedule.decay_steps < 0:
            raise TrainError(f"schedule.decay_steps is {schedule.decay_steps}; it must be at least 0")
    taken = schedule.warmup_steps + (schedule.decay_steps or 0)
    if taken > max_steps:
        raise TrainError(
            f"schedule.warmup_steps {schedule.warmup_steps} + decay_steps {schedule.decay_steps or 0} is more than "
            f"train.max_steps {max_steps}; lower them or train longer"
        )
