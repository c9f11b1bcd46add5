"""preflight: refuses a run that does not fit, with the figures and the smallest change that would."""

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace

from align.guard._project import Projection, amount, project
from align.guard._shape import GuardError, RunShape

CHECKS = ("host_memory", "device_memory", "disk", "load", "disk_queue")
_QUEUE_LIMIT = 64
_DEVICE_MARGIN = 1.03  # a projection is never below the truth by more


class Refused(ValueError):
    """The run would not fit, or the machine is too busy. The message is one line: figures, limit, the smallest change that fits."""

    exit_code = 3

    def __init__(self, check: str, message: str):
        super().__init__(message)
        self.check = check  # one of CHECKS, as `ignore` takes it


def preflight(
    projection: Projection,
    *,
    available_host_gb: float,
    available_device_gb: float | None = None,
    free_disk_gb: float | None = None,
    total_host_gb: float | None = None,
    mem_floor_gb: float | None = None,
    load: float | None = None,
    cores: int | None = None,
    disk_queue: int | None = None,
    ignore: Iterable[str] = (),
    settings: Container[str] | None = None,
) -> list[str]:
    """Compares a projection with what the machine has; returns the names of failed checks that `ignore` let pass, for the run's record.

    Host memory must hold the peak and `mem_floor_gb` more (None: the smaller of 45 GiB and 20 % of `total_host_gb`, of the
    available memory where that is not given). `settings` names the ones that the caller's configuration has, such as train.micro_batch: no
    other change is proposed; None: all. Device memory must hold the peak and 3 %. The disk must hold one checkpoint more than are
    kept. A load of twice the cores or 64 requests in the disk's queue is too busy. What is None is not checked.

    Raises:
        Refused: the first check that fails.
        GuardError: `ignore` names no check.
    """
    ignored = set(ignore)
    if unknown := ignored - set(CHECKS):
        raise GuardError(f"no check is named {sorted(unknown)[0]!r}; known: {', '.join(CHECKS)}")
    floor = min(45.0, 0.2 * (total_host_gb or available_host_gb)) if mem_floor_gb is None else mem_floor_gb
    room = free_disk_gb
    refusals = [
        _host_memory(projection, available_host_gb, floor, settings),
        None if available_device_gb is None else _device_memory(projection, available_device_gb, settings),
        None if room is None else _disk(projection, room),
        None if load is None or not cores else _load(load, cores),
        None if disk_queue is None else _queue(disk_queue),
    ]
    failed = [refusal for refusal in refusals if refusal is not None]
    for refusal in failed:
        if refusal.check not in ignored:
            raise refusal
    return [refusal.check for refusal in failed]


def _host_memory(projection: Projection, available: float, floor: float, settings: Container[str] | None) -> Refused | None:
    need = projection.peak_gb + floor
    if need <= available:
        return None
    parts = [
        ("interpreter and libraries", projection.host_base_gb),
        ("optimizer", projection.host_optimizer_gb),
        ("pinned staging", projection.host_staging_gb),
        ("Lean", projection.host_lean_gb),
    ]
    parts.append(("training", projection.host_run_gb))
    parts.append(("saving", projection.peak_gb - projection.total_gb))
    told = " + ".join(f"{name} {value:.1f}" for name, value in parts if value > 0.05)
    change = _smallest_change(
        projection.shape, settings, lambda other: other.peak_gb + floor <= available, lambda other: f"needs {other.peak_gb + floor:.1f}"
    )
    return Refused(
        "host_memory",
        f"host memory: the run peaks at {projection.peak_gb:.1f} GiB ({told}) and {floor:.1f} must stay free, "
        f"{need:.1f} together; {available:.1f} are available; {change}",
    )


def _device_memory(projection: Projection, available: float, settings: Container[str] | None) -> Refused | None:
    need = projection.device_peak_gb * _DEVICE_MARGIN
    if projection.shape.device == "cpu" or need <= available:
        return None
    phase = max(projection.phases, key=lambda name: projection.phases[name])
    told = ", ".join(
        f"{name} {value:.1f}"
        for name, value in (
            ("weights", projection.weights_gb),
            ("gradients", projection.grads_gb),
            ("optimizer state", projection.device_optimizer_state_gb_per_rank),
            ("activations", projection.activations_gb),
            ("logits", projection.logits_gb),
            ("gathered", projection.gathered_gb),
        )
        if value > 0.05
    )
    change = _smallest_change(
        projection.shape,
        settings,
        lambda other: other.device_peak_gb * _DEVICE_MARGIN <= available,
        lambda other: f"peaks at {other.device_peak_gb:.1f}",
    )
    return Refused(
        "device_memory",
        f"device memory: each rank peaks at {projection.device_peak_gb:.1f} GiB in the {phase} ({told}), "
        f"{need:.1f} with a margin of 3 %; {available:.1f} are available; {change}",
    )


def _disk(projection: Projection, free: float) -> Refused | None:
    kept = projection.shape.checkpoints_kept
    need = projection.checkpoint_gb * (kept + 1)
    if need <= free:
        return None
    fitting = int(free / projection.checkpoint_gb) - 1
    change = f"checkpoint.keep={fitting} fits" if fitting >= 1 else "choose a run_dir on another disk"
    return Refused(
        "disk",
        f"disk: {kept} checkpoints kept and one being written, {amount(projection.checkpoint_gb)} each, "
        f"need {amount(need)}; {amount(free)} are free; {change}",
    )


def _load(load: float, cores: int) -> Refused | None:
    if load < 2 * cores:
        return None
    return Refused(
        "load", f"load: {load:.1f} on {cores} cores, the limit is {2 * cores}; wait for the other jobs, or ignore the check load"
    )


def _queue(queue: int) -> Refused | None:
    if queue < _QUEUE_LIMIT:
        return None
    return Refused(
        "disk_queue",
        f"disk queue: {queue} requests in flight, the limit is {_QUEUE_LIMIT}; wait for the other jobs, or ignore the check disk_queue",
    )


def _smallest_change(
    shape: RunShape, settings: Container[str] | None, fits: Callable[[Projection], bool], tell: Callable[[Projection], str]
) -> str:
    """The first change, or pair of changes, in the order of `_changes` after which the run fits, with its figure."""

    def changes(shape: RunShape) -> list[tuple[str, RunShape]]:
        return [change for change in _changes(shape) if settings is None or _setting(change[0]) in settings]

    single = changes(shape)
    pairs = [
        (f"{first} and {second}", changed)
        for first, middle in single
        for second, changed in changes(middle)
        if _setting(first) != _setting(second)
    ]
    for text, changed in single + pairs:
        projection = project(changed)
        if fits(projection):
            return f"with {text} it {tell(projection)}, which fits"
    return "no one or two of the settings that save memory make it fit: take a smaller model or a larger machine"


def _setting(text: str) -> str:
    return text.partition("=")[0]


def _changes(shape: RunShape) -> Iterator[tuple[str, RunShape]]:
    """Settings that take less memory, those that change a run least first; each as it is written on the command line."""
    if not shape.per_rank_optimizer_state and shape.ranks > 1:
        yield "train.per_rank_optimizer_state=true (per-rank files)", replace(shape, per_rank_optimizer_state=True)
    if shape.save_mode == "snapshot" and (shape.snapshot_weights or shape.per_rank_optimizer_state):
        yield "checkpoint.mode=stream", replace(shape, save_mode="stream")
    if shape.checkpointing == "none" and shape.layers:
        yield "train.checkpointing=selective", replace(shape, checkpointing="selective")
    if shape.checkpointing != "full" and shape.layers:
        yield "train.checkpointing=full", replace(shape, checkpointing="full")
    for smaller in range(shape.micro_batch // 2, 0, -1):
        if shape.micro_batch % smaller == 0:  # the global batch stays the same
            more = shape.accumulation * (shape.micro_batch // smaller)
            yield f"train.micro_batch={smaller}", replace(shape, micro_batch=smaller, accumulation=more)
    if shape.optimizer != "adamw8bit":
        yield "optimizer.name=adamw8bit", replace(shape, optimizer="adamw8bit")
    if shape.device == "cuda":
        for ranks in (2 * shape.ranks, 4 * shape.ranks, 8 * shape.ranks):
            if ranks <= 8:
                yield f"launch.nproc={ranks}", replace(shape, ranks=ranks)
