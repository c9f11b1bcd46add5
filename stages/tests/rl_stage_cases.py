"""What the tests of the stages after SFT share: short runs, and how two runs are compared."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from _common import run_stage
from dpo import DpoConfig, dpo
from grpo import GrpoConfig, grpo
from path_bias import PathBiasConfig, measure
from ppo import PpoConfig, ppo
from prm import PrmConfig, prm
from reference import ReferenceConfig, reference

from align.tracking import read_history

STAGES = Path(__file__).absolute().parents[1]
START = STAGES / "assets/arithmetic_sft"
SHORT = [
    "train.max_steps=4",
    "train.global_batch=16",
    "train.micro_batch=8",
    "data.rows=60",
    "eval.problems=6",
    "eval.samples=1",
    "eval.greedy=false",
    "checkpoint.every=1",
    "checkpoint.keep=9",
]
GRPO = [*SHORT, "rollout.group=4", "rollout.max_new_tokens=24", "optimizer.lr=0.001", "schedule.warmup_steps=0"]
UNEQUAL = ("time", "tokens_per_s", "step_s", "memory_gb", "save_stall_s")
PAIRS = ["data.rows=60", "data.samples=4", "data.max_new_tokens=24"]
DPO = [*(word for word in SHORT if not word.startswith("data.rows")), *PAIRS, "optimizer.lr=0.001", "schedule.warmup_steps=0"]
PRM = [
    "train.max_steps=4", "train.global_batch=16", "train.micro_batch=8", "data.rows=60", "data.samples=2", "checkpoint.every=1",
    "checkpoint.keep=9", "schedule.warmup_steps=0",
]  # fmt: skip
PPO = [*SHORT, "rollout.max_new_tokens=24", "optimizer.lr=0.001", "schedule.warmup_steps=0"]


STAGE = {
    "grpo": (GrpoConfig, grpo),
    "dpo": (DpoConfig, dpo),
    "prm": (PrmConfig, prm),
    "ppo": (PpoConfig, ppo),
    "reference": (ReferenceConfig, reference),
    "path_bias": (PathBiasConfig, measure),
}


def start(name: str, *words: str) -> int:
    config_class, stage = STAGE[name]
    return run_stage(name, config_class, stage, "", words)


def result(run: Path) -> dict:
    return json.loads((run / "stage_result.json").read_text())


def cut(run: Path, to: Path, step: int) -> None:
    """A copy of the run as if it had been killed after the checkpoint of this step."""
    shutil.copytree(run, to)
    (to / "stage_result.json").unlink()
    for path in (to / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)


def killed_until_through(stage: str, run: Path, words: list[str]) -> None:
    """Starts the run over and over; each process is killed some hundredths of a second after its first new checkpoint, a little later each
    time, until one gets through."""

    def newest() -> list[Path]:
        return sorted((run / "checkpoints").glob("step-*"))[-1:]

    for attempt in range(60):
        command = [sys.executable, str(STAGES / f"{stage}.py"), f"run_dir={run}", *words, "--resume"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        first, patience = newest(), time.monotonic() + 120
        while process.poll() is None and newest() == first and time.monotonic() < patience:
            time.sleep(0.01)
        time.sleep(0.013 * attempt)
        process.kill()
        if process.wait() == 0:
            return
    raise AssertionError("it never got through")


def same_end(a: Path, b: Path, step: int) -> None:
    one, two = a / f"checkpoints/step-{step:06d}", b / f"checkpoints/step-{step:06d}"
    names = {path.name for path in one.iterdir()}
    assert names == {path.name for path in two.iterdir()}
    for name in names - {"manifest.json", "trainer.json", "config.json"}:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    documents = [json.loads((path / "trainer.json").read_text())["state"] for path in (one, two)]
    for document in documents:
        document["identity"].pop("run_dir", None)
    assert documents[0] == documents[1]
    lines = [[{k: v for k, v in line.items() if k not in UNEQUAL} for line in read_history(run / "history.jsonl")] for run in (a, b)]
    assert lines[0] == lines[1]
