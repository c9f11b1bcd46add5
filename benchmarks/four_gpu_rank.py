"""One rank of benchmarks/four_gpu.py: an action, whose results rank 0 leaves as JSON. Not meant to be started by hand."""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import train_bench as bench

from align.checkpoint import load
from align.model import save
from align.tracking import Progress, RunDir, read_history
from align.train import CheckpointConfig, OptimizerConfig, Ranks, SftModule, TrainConfig, Trainer, TrainerConfig, find_latest, join, leave

ROWS = {"tiny": 2, "1.44B": 8, "7.25B": 4}  # of 4096 tokens, a rank and step


def settings(size: str, rows: int, world: int, steps: int, **changes: Any) -> TrainerConfig:
    """As the seed's table has it: bf16, 8-bit Adam, FSDP2; full recomputation at 7.25B, clipping on."""
    train = TrainConfig(
        max_steps=steps, global_batch=rows * world, micro_batch=rows, log_every=10**6, reshard_after_forward=size == "7.25B",
        checkpointing="full" if size == "7.25B" else "none",
    )  # fmt: skip
    train = replace(train, **{key: value for key, value in changes.items() if hasattr(train, key)})
    keep = CheckpointConfig(every=changes.get("every", 0), keep=9)
    return TrainerConfig(train=train, optimizer=OptimizerConfig(lr=1e-5, weight_decay=0.1, max_grad_norm=1.0), checkpoint=keep)


def trainer_of(config: TrainerConfig, size: str, ranks: Ranks, folder: Path, *, resume: int | None = None) -> tuple[Trainer, RunDir]:
    device = torch.device("cuda" if bench.CUDA else "cpu")
    torch.manual_seed(0)
    run = RunDir.create(folder, config_toml="", env={}, write=ranks.main, resume_step=resume)
    loader = bench.Random(config.train.micro_batch, ranks.rank, ranks.world)
    progress = Progress(config.train.max_steps, every=10**6, stream=None)
    return Trainer(config, SftModule(bench.build(size, device)), loader=loader, run=run, ranks=ranks, progress=progress), run


def watch_host(trainer: Trainer) -> dict[str, float]:
    """Fills in, at the trainer's save, what this rank's process holds; what was reserved for a snapshot beforehand counts as the save's."""
    host = {"reserved_gib": 0.0}
    reserve, write = trainer._saver.reserve, trainer._save

    def reserved(**arguments: Any) -> None:
        before = bench.resident_gib()
        reserve(**arguments)
        host["reserved_gib"] += bench.resident_gib() - before

    def written(numbers: Any) -> None:
        bench.forget_peak()
        host["steady_gib"] = bench.resident_gib() - host["reserved_gib"]
        write(numbers)

    trainer._saver.reserve, trainer._save = reserved, written  # type: ignore[method-assign]
    return host


def sft(size: str, ranks: Ranks, folder: Path, words: list[str]) -> dict[str, Any]:
    """Steps, then a save. words: steps, "files" (an optimizer file a rank), "gather" or "none" (no save)."""
    steps, kind = int(words[0]), words[1]
    config = settings(
        size, ROWS[size], ranks.world, steps, every=steps if kind == "files" else 0, per_rank_optimizer_state=kind != "gather"
    )  # fmt: skip
    trainer, run = trainer_of(config, size, ranks, folder / kind)
    host = watch_host(trainer)
    if kind == "none":
        trainer._save = lambda numbers: setattr(trainer, "_saved", folder)  # type: ignore[method-assign]
    result = trainer.fit()
    peak = bench.resident_gib("VmHWM")
    host = {"steady_gib": host.get("steady_gib", bench.resident_gib()), "save_gib": 0.0} | host
    if kind != "none":
        host["save_gib"] = peak - host["steady_gib"]
    memory = torch.cuda.max_memory_allocated() / 2**30 if bench.CUDA else bench.resident_gib("VmHWM")
    each = ranks.gather({"rank_gib": memory, **host})
    if not ranks.main:
        return {}
    lines = read_history(run.path / "history.jsonl")
    warm = lines[min(3, len(lines) // 2) :]
    step = statistics.median(line["step_s"] for line in warm)
    guard = bench.projection(
        size, ROWS[size], ranks=ranks.world, checkpointing=config.train.checkpointing, compiled=config.train.kernels,
        per_rank_optimizer_state=kind != "gather",
    )  # fmt: skip
    return {
        "step_s": step, "tok_s_gpu": ROWS[size] * bench.LENGTH / step, "mfu": statistics.median(line.get("mfu", 0.0) for line in warm),
        "loss": [lines[0]["loss"], lines[-1]["loss"]], "each": each, "stall_s": result.save_stall_s,
        "guard": {
            "rank_gib": guard.device_peak_gb if bench.CUDA else guard.total_gb / ranks.world,
            "state_gib": guard.device_optimizer_state_gb_per_rank, "host_gib": guard.total_gb,
            "save_gib": guard.checkpoint_save_transient_gb,
        },
        "files": {path.name: path.stat().st_size for path in sorted(result.checkpoint.iterdir())} if kind != "none" else {},
    }  # fmt: skip


def restart(size: str, ranks: Ranks, folder: Path, words: list[str]) -> dict[str, Any]:
    """Goes on from the run in folder/files for a step. words: its steps, when the parent started the ranks (seconds since the epoch)."""
    steps = int(words[0])
    trainer, run = trainer_of(settings(size, ROWS[size], ranks.world, steps + 1), size, ranks, folder / "files", resume=steps)
    trainer._save = lambda numbers: setattr(trainer, "_saved", folder)  # type: ignore[method-assign]
    result = trainer.fit(resume=True)
    assert result.steps == steps + 1
    took = time.time() - float(words[1])
    return {"restart_s": took, "loss": read_history(run.path / "history.jsonl")[-1]["loss"]} if ranks.main else {}


def exact(size: str, ranks: Ranks, folder: Path, words: list[str]) -> dict[str, Any]:
    """Deterministic steps with a save after each. words: a name for the run, its steps, "resume" or "fresh"."""
    name, steps, resume = words[0], int(words[1]), words[2] == "resume"
    config = settings(size, 1, ranks.world, steps, every=1, deterministic=bench.CUDA)
    found = find_latest(folder / name / "checkpoints", ranks) if resume else None
    trainer, _ = trainer_of(config, size, ranks, folder / name, resume=load(found).step if found else None)
    trainer.fit(resume=resume)
    return {}


def reload(size: str, ranks: Ranks, folder: Path, words: list[str]) -> dict[str, Any]:
    """Loads a checkpoint of another number of ranks and saves it again. words: its path, a name for the new run, its ranks."""
    config = settings(size, 1, ranks.world, 100, deterministic=bench.CUDA, global_batch=int(words[2]), every=1)
    trainer, _ = trainer_of(config, size, ranks, folder / words[1], resume=load(Path(words[0])).step)
    trainer._restore(load(Path(words[0])), ("train.max_steps",))
    trainer._save(None)
    trainer._saver.wait()
    return {"path": str(trainer._saved)}


def write_model(size: str, ranks: Ranks, folder: Path, words: list[str]) -> dict[str, Any]:
    """A directory with random weights for the RL stages."""
    save(bench.build(size, torch.device("cuda" if bench.CUDA else "cpu")), folder / "model")
    return {}


ACTIONS = {"sft": sft, "restart": restart, "exact": exact, "reload": reload, "write_model": write_model}


def main() -> None:
    action, size, folder, *words = sys.argv[1:]
    ranks = join("cuda" if bench.CUDA else "cpu")
    told = ACTIONS[action](size, ranks, Path(folder), words)
    if ranks.main:
        Path(folder, "told.json").write_text(json.dumps(told), encoding="utf-8")
    leave(ranks)


if __name__ == "__main__":
    main()
