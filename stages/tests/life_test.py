"""Signs of life: with a clock that only work moves, no run is silent for more than 30 s in any phase of any stage.

A forward of a model takes ten seconds of this clock, a step of sampling ten more, a file on its way to the disk one; in build_data a
row ten when it is read, when it is looked for among the others and when it is encoded, and a file hashed at one go more than the limit.
"""

import hashlib
import json
import os
import threading
import time

import _life
import _sources
import build_data
import pytest
from _common import on_ranks, run_stage
from evaluate import EvaluateConfig, evaluate
from pretrain import PretrainConfig, pretrain
from rl_stage_cases import DPO, GRPO, PAIRS, PPO, PRM, STAGES, start
from sft import SftConfig, sft

from align.data import SeenRows, arithmetic_demonstrations
from align.model import Decoder
from align.rollout import NativeSampler
from align.tokenizer import Tokenizer
from align.tracking import RunDir

SFT = [
    "train.max_steps=3", "schedule.warmup_steps=1", "data.rows=200", "data.held_out=0.1", "data.max_length=256", "eval.problems=6",
    "eval.every=2", "checkpoint.every=2",
]  # fmt: skip
PRETRAIN = [
    "train.max_steps=3", "data.rows=60", "data.held_out=0.1", "schedule.warmup_steps=1", "schedule.decay_steps=1", "data.max_length=128",
    "eval.every=2", "checkpoint.every=2",
]  # fmt: skip
BUILD = [
    "data.sources=rows.jsonl", "data.format=gsm8k", "data.held_out=0.3", "tests.sets=[]", "tests.words=0",
    f"shards.tokenizer={STAGES / 'models/arithmetic'}",
]  # fmt: skip
FORWARD_S, STEP_S, SYNC_S, ROW_S, LIMIT_S = 10, 10, 1, 10, 30
OTHERS = {
    "sft": lambda *words: run_stage("sft", SftConfig, on_ranks(str(STAGES / "sft.py"), sft), "", words),
    "pretrain": lambda *words: run_stage("pretrain", PretrainConfig, on_ranks(str(STAGES / "pretrain.py"), pretrain), "", words),
    "evaluate": lambda *words: run_stage("evaluate", EvaluateConfig, evaluate, "", words),
    "build_data": lambda *words: run_stage("build_data", build_data.BuildDataConfig, build_data.build_data, "", words),
}


@pytest.fixture(autouse=True)
def caller(tmp_path, monkeypatch):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(tmp_path))
    return tmp_path


class Clock:
    """Only work moves it."""

    def __init__(self):
        self.now, self.lock = 0, threading.Lock()  # a thread writes the checkpoint

    def work(self, seconds):
        with self.lock:
            self.now += seconds

    def taking(self, seconds, call):
        """`call`, after so much work."""
        return lambda *words, **more: (self.work(seconds), call(*words, **more))[1]

    def each(self, call):
        """What `call` gives one after another, each after the work of a row."""

        def given(*words, **more):
            for one in call(*words, **more):
                self.work(ROW_S)
                yield one

        return given


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def silences(monkeypatch, clock):
    """How long the clock ran between two signs of a run, by run directory."""
    last, found = {}, {}

    def sign(run):
        with clock.lock:
            if run.writes:
                found.setdefault(run.path.name, []).append(clock.now - last.get(run.path, clock.now))
                last[run.path] = clock.now

    def signing(name):
        original = getattr(RunDir, name)
        monkeypatch.setattr(RunDir, name, lambda run, *words, **more: (original(run, *words, **more), sign(run))[0])

    generate = NativeSampler.generate

    def sampled(sampler, prompts, *, on_step=None, **options):
        return generate(sampler, prompts, on_step=lambda: (clock.work(STEP_S), on_step and on_step()), **options)

    for name in ("__init__", "alive", "log", "finish"):
        signing(name)
    monkeypatch.setattr(Decoder, "forward", clock.taking(FORWARD_S, Decoder.forward))
    monkeypatch.setattr(NativeSampler, "generate", sampled)
    monkeypatch.setattr(os, "fsync", clock.taking(SYNC_S, os.fsync))
    return found


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("sft", SFT), ("pretrain", PRETRAIN), ("dpo", DPO), ("grpo", [*GRPO, "policy.kl=0.1"]), ("prm", PRM), ("ppo", PPO),
        ("evaluate", ["eval.problems=30", "eval.samples=2", "eval.temperature=1"]), ("reference", [*PAIRS, "train.micro_batch=4"]),
        ("path_bias", ["prompts=8", "train.micro_batch=4"]), ("build_data", BUILD),
    ],
)  # fmt: skip
def test_no_phase_of_a_stage_is_silent(silences, clock, caller, monkeypatch, stage, words):
    if stage == "ppo":
        assert start("prm", "run_dir=rm", *PRM) == 0
        words = [*words, "prm.path=rm", "prm.label_token_ids=[70,71]"]
    if stage == "build_data":
        rows = [{"question": row["prompt"], "answer": row["completion"] + "\n#### 1"} for row in arithmetic_demonstrations(20, seed=0)]
        (caller / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        monkeypatch.setattr(_sources, "read_objects", clock.each(_sources.read_objects))
        monkeypatch.setattr(build_data, "stream_rows", clock.each(build_data.stream_rows))
        for owner, name, seconds in ((SeenRows, "first", ROW_S), (Tokenizer, "encode", ROW_S / 2), (hashlib, "file_digest", 2 * LIMIT_S)):
            monkeypatch.setattr(owner, name, clock.taking(seconds, getattr(owner, name)))
        assert OTHERS[stage]("run_dir=run", *words) == 0  # and again: what is whole is looked over
        os.utime(caller / "rows.jsonl")
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
