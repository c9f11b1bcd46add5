"""Signs of life: with a clock that only work moves, no run is silent for more than 30 s in any phase of any stage.

A forward of a model takes ten seconds of this clock, a step of sampling ten more, a file on its way to the disk one.
"""

import os
import threading
import time

import _life
import pytest
from _common import on_ranks, run_stage
from evaluate import EvaluateConfig, evaluate
from pretrain import PretrainConfig, pretrain
from rl_stage_cases import DPO, GRPO, PAIRS, PPO, PRM, STAGES, start
from sft import SftConfig, sft

from align.model import Decoder
from align.rollout import NativeSampler
from align.tracking import RunDir

SFT = [
    "train.max_steps=3", "schedule.warmup_steps=1", "data.rows=200", "data.held_out=0.1", "data.max_length=256", "eval.problems=6",
    "eval.every=2", "checkpoint.every=2",
]  # fmt: skip
PRETRAIN = [
    "train.max_steps=3", "data.rows=60", "data.held_out=0.1", "schedule.warmup_steps=1", "schedule.decay_steps=1", "data.max_length=128",
    "eval.every=2", "checkpoint.every=2",
]  # fmt: skip
FORWARD_S, STEP_S, SYNC_S, LIMIT_S = 10, 10, 1, 30
OTHERS = {
    "sft": lambda *words: run_stage("sft", SftConfig, on_ranks(str(STAGES / "sft.py"), sft), "", words),
    "pretrain": lambda *words: run_stage("pretrain", PretrainConfig, on_ranks(str(STAGES / "pretrain.py"), pretrain), "", words),
    "evaluate": lambda *words: run_stage("evaluate", EvaluateConfig, evaluate, "", words),
}


@pytest.fixture(autouse=True)
def caller(tmp_path, monkeypatch):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(tmp_path))
    return tmp_path


@pytest.fixture
def silences(monkeypatch):
    """How long the clock ran between two signs of a run, by run directory."""
    now, last, found = [0], {}, {}
    lock = threading.Lock()  # a thread writes the checkpoint

    def work(seconds):
        with lock:
            now[0] += seconds

    def sign(run):
        with lock:
            if run.writes:
                found.setdefault(run.path.name, []).append(now[0] - last.get(run.path, now[0]))
                last[run.path] = now[0]

    def signing(name):
        original = getattr(RunDir, name)
        monkeypatch.setattr(RunDir, name, lambda run, *words, **more: (original(run, *words, **more), sign(run))[0])

    forward, generate, fsync = Decoder.forward, NativeSampler.generate, os.fsync

    def sampled(sampler, prompts, *, on_step=None, **options):
        return generate(sampler, prompts, on_step=lambda: (work(STEP_S), on_step and on_step()), **options)

    for name in ("__init__", "alive", "log", "finish"):
        signing(name)
    monkeypatch.setattr(Decoder, "forward", lambda *words, **more: (work(FORWARD_S), forward(*words, **more))[1])
    monkeypatch.setattr(NativeSampler, "generate", sampled)
    monkeypatch.setattr(os, "fsync", lambda file: (work(SYNC_S), fsync(file))[1])
    return found


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("sft", SFT), ("pretrain", PRETRAIN), ("dpo", DPO), ("grpo", [*GRPO, "policy.kl=0.1"]), ("prm", PRM), ("ppo", PPO),
        ("evaluate", ["eval.problems=30", "eval.samples=2", "eval.temperature=1"]), ("reference", [*PAIRS, "train.micro_batch=4"]),
        ("path_bias", ["prompts=8", "train.micro_batch=4"]),
    ],
)  # fmt: skip
def test_no_phase_of_a_stage_is_silent(silences, stage, words):
    if stage == "ppo":
        assert start("prm", "run_dir=rm", *PRM) == 0
        words = [*words, "prm.path=rm", "prm.label_token_ids=[70,71]"]
    assert OTHERS.get(stage, lambda *more: start(stage, *more))("run_dir=run", *words) == 0
    assert len(silences["run"]) > 10 and max(silences["run"]) <= LIMIT_S, silences["run"]


def test_who_waits_for_a_judge_shows_life(monkeypatch):
    """Every 10 s; here every 10 ms."""
    monkeypatch.setattr(_life, "WAIT_S", 0.01)
    signs = []
    assert _life.awaited(lambda: time.sleep(0.3) or "judged", lambda: signs.append(1)) == "judged" and len(signs) > 3

    def fails():
        raise ValueError("the judge's")

    with pytest.raises(ValueError, match="the judge's"):
        _life.awaited(fails, lambda: None)
