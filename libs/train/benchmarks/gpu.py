"""Full training steps on a GPU through align.train's own Trainer, beside a peer in the same run.

PYTHONPATH=libs/...:libs/train/benchmarks python3 libs/train/benchmarks/gpu.py [--only NAME,...] [--peer COMMAND] [--steps N]

Every case is a process of its own: bf16, 4096 tokens a row, random ids, adamw8bit with stochastic rounding and clipping, one optimizer step
a micro-batch, the step as history.jsonl has it (from drawing the batch to the logged loss). The line of a case gives the median over the
steps after the warm-up, and beside the measured memory what align.guard projects. `-torch` is with torch's operations, compiled, instead of
align.kernels'; `-compiled` with both. A name `peer:NAME` in --only runs the command of `--peer` with NAME and the number of steps, so that
ours and the peer's alternate; the JSON lines that it prints are rows as well. Rows go to $OUT/trainer_gpu.jsonl as they are made. On
several GPUs: launch.nproc of a case, which torch's launcher starts.
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import train_bench as bench

from align.tracking import Progress, RunDir, read_history
from align.train import (
    CheckpointConfig,
    LaunchConfig,
    OptimizerConfig,
    SftModule,
    TrainConfig,
    Trainer,
    TrainerConfig,
    finished,
    join,
    launch,
    leave,
    started,
)

FULL = {"checkpointing": "full"}
TORCH, COMPILED = {"kernels": False, "compile": True}, {"compile": True}
CASES: dict[str, dict[str, Any]] = {
    "1.44B-8": {"size": "1.44B", "rows": 8},
    "1.44B-8-compiled": {"size": "1.44B", "rows": 8, **COMPILED},
    "1.44B-8-torch": {"size": "1.44B", "rows": 8, **TORCH},
    "7.25B-4": {"size": "7.25B", "rows": 4},
    "7.25B-4-compiled": {"size": "7.25B", "rows": 4, **COMPILED},
    "7.25B-4-torch": {"size": "7.25B", "rows": 4, **TORCH},
    "7.25B-2": {"size": "7.25B", "rows": 2},
    "7.25B-4-full": {"size": "7.25B", "rows": 4, **FULL},
    "7.25B-2-full": {"size": "7.25B", "rows": 2, **FULL},
    "7.25B-4-backward": {"size": "7.25B", "rows": 4, "in_backward": True, **FULL},
    "7.25B-2-backward": {"size": "7.25B", "rows": 2, "in_backward": True, **FULL},
    "1.44B-4-packed2": {"size": "1.44B", "rows": 4, "documents": [2, 2, 2, 2]},
    "1.44B-4-packed124": {"size": "1.44B", "rows": 4, "documents": [1, 2, 4, 4]},
    "1.44B-4": {"size": "1.44B", "rows": 4},
    "1.44B-4-selective": {"size": "1.44B", "rows": 4, "checkpointing": "selective"},
    "1.44B-4-eager": {"size": "1.44B", "rows": 4, "kernels": False},
    "1.44B-4-deterministic": {"size": "1.44B", "rows": 4, "deterministic": True},
    "1.44B-4-offload": {"size": "1.44B", "rows": 4, "optimizer": "offload_adamw", "steps": 4},
    "7.25B-4-save": {"size": "7.25B", "rows": 4, "save": 4, "steps": 4, "restart": True, **FULL},
    "7.25B-4-stream": {"size": "7.25B", "rows": 4, "save": 4, "steps": 4, "mode": "stream", **FULL},
    "1.44B-8-save": {"size": "1.44B", "rows": 8, "save": 4, "steps": 8, "restart": True},
    "1.44B-8-stream": {"size": "1.44B", "rows": 8, "save": 4, "steps": 8, "mode": "stream"},
    "1.44B-4x2": {"size": "1.44B", "rows": 4, "nproc": 2},
    "1.44B-8x2": {"size": "1.44B", "rows": 8, "nproc": 2},
    "7.25B-4x2": {"size": "7.25B", "rows": 4, "nproc": 2, **FULL},
}
ONE_GPU = ["1.44B-8", "7.25B-4", "7.25B-4-full", "7.25B-4-backward", "1.44B-4", "1.44B-4-packed124"]


def settings(case: dict[str, Any], steps: int) -> TrainerConfig:
    nproc = case.get("nproc", 1)
    return TrainerConfig(
        train=TrainConfig(
            max_steps=steps, global_batch=case["rows"] * nproc, micro_batch=case["rows"], log_every=10**6,
            checkpointing=case.get("checkpointing", "none"), compile=case.get("compile", False), kernels=case.get("kernels", True),
            deterministic=case.get("deterministic", False), reshard_after_forward=case["size"] == "7.25B",
        ),
        optimizer=OptimizerConfig(
            name=case.get("optimizer", "adamw8bit"), lr=1e-5, max_grad_norm=None if case.get("in_backward") else 1.0,
            in_backward=case.get("in_backward", False),
        ),
        checkpoint=CheckpointConfig(every=case.get("save", 0), keep=1, mode=case.get("mode", "snapshot")),
        launch=LaunchConfig(nproc=nproc),
    )  # fmt: skip


def projected(case: dict[str, Any], ranks: int) -> Any:
    return bench.projection(
        case["size"], case["rows"], ranks=ranks, checkpointing=case.get("checkpointing", "none"),
        compiled=case.get("compile", False) or case.get("kernels", True), in_backward=case.get("in_backward", False),
        optimizer=case.get("optimizer", "adamw8bit"), save_mode=case.get("mode", "snapshot"), forward_impl=(
            "sdpa_causal" if not case.get("documents") else "varlen"
        ), pinned_staging_gb=1.0 if case.get("optimizer") == "offload_adamw" else 0.0,
    )  # fmt: skip


def one(name: str, steps: int, resume: Path | None, began: float) -> None:
    """Runs a case in this process; with `resume` goes on from that run's checkpoint for a step."""
    case = CASES[name] if bench.CUDA else {**CASES[name], "size": "tiny", "rows": 1, "documents": None, "compile": False}
    steps = case.get("steps", steps) + (resume is not None)
    config = settings(case, steps)
    if (code := launch(config.launch, __file__, sys.argv[1:])) is not None:
        sys.exit(code)
    device = torch.device("cuda" if bench.CUDA else "cpu")
    ranks = join(device.type)
    started()
    folder = resume or Path(ranks.agree(tempfile.mkdtemp(prefix="trainer-gpu-")))
    run = RunDir.create(
        folder / "run", config_toml="", env={}, write=ranks.main, resume_step=case.get("steps", 0) if resume is not None else None
    )  # fmt: skip
    torch.manual_seed(0)
    loader = bench.Random(case["rows"], ranks.rank, ranks.world, case.get("documents"))
    trainer = Trainer(
        config, SftModule(bench.build(case["size"], device)), loader=loader,
        run=run, ranks=ranks, progress=Progress(steps, every=10**6, stream=None),
    )  # fmt: skip
    host: dict[str, float] = {}
    if case.get("save") and resume is None:
        save = trainer._save

        def watched(numbers: Any) -> None:
            bench.forget_peak()
            host["host_before_save_gib"] = bench.resident_gib()
            save(numbers)

        trainer._save = watched  # type: ignore[method-assign]
    else:
        trainer._save = lambda numbers: setattr(trainer, "_saved", folder)  # type: ignore[method-assign]  # only the steps are measured here
    fit_began = time.perf_counter()
    result = trainer.fit(resume=resume is not None)
    if "host_before_save_gib" in host:
        host["host_save_peak_gib"] = bench.resident_gib("VmHWM")
    if ranks.main:
        more = (
            {"restart_s": round(time.time() - began, 1)}
            if resume is not None
            else {**host, "wall_s": round(time.perf_counter() - fit_began, 1)}
        )
        report(name, case, run, ranks.world, {**more, "save_stall_s": result.save_stall_s, "host_gib": bench.resident_gib()})
    leave(ranks)
    if not case.get("restart") or resume is not None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"kept {folder}", file=sys.stderr)
    sys.exit(finished(0))


def report(name: str, case: dict[str, Any], run: RunDir, world: int, more: dict[str, Any]) -> None:
    lines = read_history(run.path / "history.jsonl")
    warm = lines[min(5, len(lines) // 2) :]
    step = statistics.median(line["step_s"] for line in warm)
    guard = projected(case, world)
    peak = lines[-1]["memory_gb"]
    emit({
        "case": name, "tok_s_gpu": round(case["rows"] * bench.LENGTH / step), "step_ms": round(1e3 * step, 1),
        "fastest_ms": round(1e3 * min(line["step_s"] for line in warm), 1), "mfu": statistics.median(line.get("mfu", 0) for line in warm),
        "peak_gib": peak, "guard_peak_gib": round(guard.device_peak_gb, 2), "guard_over": round(guard.device_peak_gb / peak - 1, 4),
        "guard_host_gib": [round(x, 2) for x in (guard.total_gb, guard.checkpoint_save_transient_gb, guard.peak_gb)],
        "first_step_s": round(lines[0]["step_s"], 1), "steps": len(lines), "ranks": world, "loss": [lines[0]["loss"], lines[-1]["loss"]],
        **{key: round(value, 3) if isinstance(value, float) else value for key, value in more.items()},
        "torch": torch.__version__, "gpu": torch.cuda.get_device_name() if bench.CUDA else "cpu",
    })  # fmt: skip


def emit(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)
    with open(Path(os.environ.get("OUT", "."), "trainer_gpu.jsonl"), "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def call(command: list[str], limit: float) -> tuple[int, str, str]:
    """(exit code, -1 at the limit; stdout; stderr)."""
    try:
        done = subprocess.run(command, timeout=limit, check=False, capture_output=True, text=True)
    except subprocess.TimeoutExpired as late:
        return -1, (late.stdout or b"").decode(errors="replace"), (late.stderr or b"").decode(errors="replace")
    return done.returncode, done.stdout, done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ONE_GPU), help=f"cases: {', '.join(CASES)}; peer:NAME")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--resume", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--peer", default="", help="a command that measures a peer; the case and the number of steps are added to it")
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds a case may take")
    parser.add_argument("--minutes", type=float, default=60.0, help="no case begins after this")
    asked = parser.parse_args()
    if asked.one:
        one(asked.one, asked.steps, asked.resume, asked.began)
    end = time.monotonic() + 60 * asked.minutes
    for name in asked.only.split(","):
        if time.monotonic() > end:
            print(json.dumps({"case": name, "not_run": f"after {asked.minutes} minutes"}), flush=True)
            continue
        if name.startswith("peer:"):
            code, out, error = call([*shlex.split(asked.peer), name.removeprefix("peer:"), str(asked.steps)], asked.limit)
            for line in out.splitlines():
                if line.startswith("{"):
                    emit(json.loads(line))
        else:
            own = [sys.executable, __file__, "--steps", str(asked.steps), "--one", name]
            code, out, error = call(own, asked.limit)
            print(out, end="", flush=True)
            kept = [line.removeprefix("kept ") for line in error.splitlines() if line.startswith("kept ")]
            if kept:
                code, out, error = call([*own, "--resume", kept[0], "--began", str(time.time())], asked.limit)
                print(out, end="", flush=True)
        if code:
            print(error[-2000:], file=sys.stderr, flush=True)
            emit({"case": name, "failed": code})


if __name__ == "__main__":
    main()
