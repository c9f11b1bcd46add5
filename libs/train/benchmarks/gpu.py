"""Full training steps on a GPU through align.train's own Trainer, beside a peer in the same run.

PYTHONPATH=libs/... python3 libs/train/benchmarks/gpu.py [--only NAME,...] [--peer COMMAND] [--steps N]

Every case is a process of its own: bf16, 4096 tokens a row, random ids, adamw8bit with stochastic rounding and clipping, one optimizer step
a micro-batch, the step as history.jsonl has it (from drawing the batch to the logged loss). The line of a case gives the median over the
steps after the warm-up; what the last checkpoint cost is `save`. Rows go to $OUT/trainer_gpu.jsonl as they are made. `--peer` is a shell
command that is run after the cases, its output into $OUT/peer.txt. On several GPUs: launch.nproc of a case, which torch's launcher starts.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from align.model import Decoder, ModelConfig
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

LENGTH, VOCABULARY = (4096, 32768) if torch.cuda.is_available() else (64, 512)  # on a CPU only to see that it runs
SIZES = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512},
    "1.44B": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 7168},
    "7.25B": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    },
}
FULL = {"checkpointing": "full"}
CASES: dict[str, dict[str, Any]] = {
    "1.44B-8": {"size": "1.44B", "rows": 8},
    "7.25B-4": {"size": "7.25B", "rows": 4},
    "7.25B-2": {"size": "7.25B", "rows": 2},
    "7.25B-4-full": {"size": "7.25B", "rows": 4, **FULL},
    "7.25B-4-backward": {"size": "7.25B", "rows": 4, "in_backward": True, **FULL},
    "7.25B-2-backward": {"size": "7.25B", "rows": 2, "in_backward": True, **FULL},
    "1.44B-4-packed2": {"size": "1.44B", "rows": 4, "documents": [2, 2, 2, 2]},
    "1.44B-4-packed124": {"size": "1.44B", "rows": 4, "documents": [1, 2, 4, 4]},
    "1.44B-4": {"size": "1.44B", "rows": 4},
    "1.44B-4-eager": {"size": "1.44B", "rows": 4, "compile": False},
    "1.44B-4-deterministic": {"size": "1.44B", "rows": 4, "deterministic": True},
    "1.44B-4-offload": {"size": "1.44B", "rows": 4, "optimizer": "offload_adamw", "steps": 4},
    "7.25B-4-save": {"size": "7.25B", "rows": 4, "save": True, "steps": 6, **FULL},
    "7.25B-4-stream": {"size": "7.25B", "rows": 4, "save": True, "mode": "stream", "steps": 6, **FULL},
    "1.44B-4x2": {"size": "1.44B", "rows": 4, "nproc": 2},
    "1.44B-8x2": {"size": "1.44B", "rows": 8, "nproc": 2},
    "7.25B-4x2": {"size": "7.25B", "rows": 4, "nproc": 2, **FULL},
    "7.25B-4x1": {"size": "7.25B", "rows": 4, **FULL},
}
ONE_GPU = ["1.44B-8", "7.25B-4", "7.25B-4-full", "7.25B-4-backward", "1.44B-4", "1.44B-4-packed124"]


@dataclass
class Step:
    micro_batches: list[dict[str, Any]]
    trained_tokens: int
    tokens: int
    epoch: float


class Random:
    """A loader of random ids: `rows` a rank and step, every token trained; documents[r] of equal length in row r."""

    digest = "random"

    def __init__(self, rows: int, rank: int, world: int, documents: list[int] | None) -> None:
        self._rows, self._world, self._documents = rows, world, documents
        self._random = torch.Generator().manual_seed(rank)

    def next_step(self) -> Step:
        ids = torch.randint(VOCABULARY, (self._rows, LENGTH + 1), generator=self._random)
        trained = torch.ones(ids[:, 1:].shape, dtype=torch.bool).numpy()
        batch: dict[str, Any] = {"input_ids": ids[:, :-1].numpy(), "targets": ids[:, 1:].numpy(), "loss_mask": trained}
        if self._documents:
            ends, positions = [0], []
            for count in self._documents:
                for _ in range(count):
                    ends.append(ends[-1] + LENGTH // count)
                    positions.append(torch.arange(LENGTH // count))
            batch["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32).numpy()
            batch["position_ids"] = torch.cat(positions).view(self._rows, LENGTH).numpy()
            batch["max_seqlen"] = LENGTH
        tokens = self._rows * LENGTH * self._world
        return Step([batch], tokens, tokens, 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any, *, allow_change: tuple[str, ...] = ()) -> None:
        pass


def build(size: str, device: torch.device) -> Decoder:
    config = ModelConfig(vocab_size=VOCABULARY, max_position_embeddings=32768, rope_theta=1e6, **SIZES[size])
    with torch.device(device):
        model = Decoder(config, torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1.0)
    return model


def one(name: str, steps: int) -> None:
    case = CASES[name] if torch.cuda.is_available() else {**CASES[name], "size": "tiny", "rows": 1, "documents": None, "compile": False}
    nproc, steps = case.get("nproc", 1), case.get("steps", steps)
    config = TrainerConfig(
        train=TrainConfig(
            max_steps=steps, global_batch=case["rows"] * nproc, micro_batch=case["rows"], log_every=10**6,
            checkpointing=case.get("checkpointing", "none"), compile=case.get("compile", True),
            deterministic=case.get("deterministic", False), reshard_after_forward=case["size"] == "7.25B",
        ),
        optimizer=OptimizerConfig(
            name=case.get("optimizer", "adamw8bit"), lr=1e-5, max_grad_norm=None if case.get("in_backward") else 1.0,
            in_backward=case.get("in_backward", False),
        ),
        checkpoint=CheckpointConfig(every=3 if case.get("save") else 0, keep=1, mode=case.get("mode", "snapshot")),
        launch=LaunchConfig(nproc=nproc),
    )  # fmt: skip
    if (code := launch(config.launch, __file__, sys.argv[1:])) is not None:
        sys.exit(code)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranks = join(device.type)
    started()
    folder = Path(ranks.agree(tempfile.mkdtemp(prefix="trainer-gpu-")))
    run = RunDir.create(folder / "run", config_toml="", env={}, write=ranks.main)
    torch.manual_seed(0)
    model = build(case["size"], device)
    loader = Random(case["rows"], ranks.rank, ranks.world, case.get("documents"))
    trainer = Trainer(
        config, SftModule(model), loader=loader, run=run, ranks=ranks, progress=Progress(steps, every=10**6, stream=None)
    )  # fmt: skip
    if not case.get("save"):
        trainer._save = lambda numbers: setattr(trainer, "_saved", folder)  # only the steps are measured here
    began = time.perf_counter()
    result = trainer.fit()
    wall = time.perf_counter() - began
    if ranks.main:
        report(name, case, run, wall, steps, result.save_stall_s, ranks.world)
    leave(ranks)
    shutil.rmtree(folder, ignore_errors=True)
    sys.exit(finished(0))


def report(name: str, case: dict[str, Any], run: RunDir, wall: float, steps: int, stall: float | None, world: int) -> None:
    lines = read_history(run.path / "history.jsonl")
    warm = lines[min(5, len(lines) // 2) :]
    step = statistics.median(line["step_s"] for line in warm)
    row = {
        "case": name, "tok_s_gpu": round(case["rows"] * LENGTH / step), "step_ms": round(1e3 * step, 1),
        "fastest_ms": round(1e3 * min(line["step_s"] for line in warm), 1), "mfu": statistics.median(line.get("mfu", 0) for line in warm),
        "peak_gib": lines[-1]["memory_gb"], "first_step_s": round(lines[0]["step_s"], 1), "steps": len(lines), "ranks": world,
        "loss": [lines[0]["loss"], lines[-1]["loss"]], "wall_s": round(wall, 1), "save_stall_s": stall,
        "save_stalls_s": [line["save_stall_s"] for line in lines if "save_stall_s" in line],
        "torch": torch.__version__, "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    with open(Path(os.environ.get("OUT", "."), "trainer_gpu.jsonl"), "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ONE_GPU), help=f"cases: {', '.join(CASES)}")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--peer", help="a shell command that measures a peer")
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds a case may take")
    asked = parser.parse_args()
    if asked.one:
        one(asked.one, asked.steps)
    for name in asked.only.split(","):
        command = [sys.executable, __file__, "--one", name, "--steps", str(asked.steps)]
        try:
            code = subprocess.run(command, timeout=asked.limit, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
        if code:
            print(json.dumps({"case": name, "failed": code}), flush=True)
    if asked.peer:
        with open(Path(os.environ.get("OUT", "."), "peer.txt"), "w", encoding="utf-8") as file:
            subprocess.run(asked.peer, shell=True, stdout=file, stderr=subprocess.STDOUT, check=False)
        print(Path(os.environ.get("OUT", "."), "peer.txt").read_text(encoding="utf-8"), flush=True)


if __name__ == "__main__":
    main()
