"""The pretraining stage, and training stages on several processes, as a user starts them."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from _common import on_ranks, run_stage
from pretrain import PretrainConfig, pretrain

from align.config import load as load_configuration
from align.data import bundled_rows
from align.model import ModelConfig, init, load
from align.tracking import read_history
from align.train import make_optimizer

STAGES = Path(__file__).absolute().parents[1]
SHORT = ["train.max_steps=6", "data.rows=120", "data.held_out=0.1", "data.max_length=256", "eval.every=3", "checkpoint.every=3"]
SCHEDULE = ["schedule.warmup_steps=2", "schedule.decay_steps=2"]


@pytest.fixture(autouse=True)
def caller(tmp_path, monkeypatch):
    """The person stands in an empty folder."""
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(tmp_path))
    return tmp_path


def start(*words: str) -> int:
    return run_stage("pretrain", PretrainConfig, on_ranks(str(STAGES / "pretrain.py"), pretrain), "", words)


def test_a_run_learns_and_leaves_a_checkpoint(caller):
    assert start("run_dir=run", *SHORT, *SCHEDULE) == 0
    result = json.loads((caller / "run/stage_result.json").read_text())
    assert (result["stage"], result["status"], result["steps"], result["deterministic"]) == ("pretrain", "done", 6, True)
    assert result["uniform_loss"] == pytest.approx(math.log(259))
    before, after = (result["metrics"][when]["held_out_loss"] for when in ("before", "after"))
    assert before == pytest.approx(math.log(259), rel=0.1) and after < before - 0.3
    lines = read_history(caller / "run/history.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 7)) and all(line["memory_gb"] > 0 for line in lines)
    assert len(read_history(caller / "run/eval.jsonl")) == 3
    assert torch.isfinite(load(Path(result["checkpoint"]))(torch.arange(9)[None])).all()


def test_a_file_of_texts_and_its_own_held_out_file(caller, capsys):
    texts = [f"{row['prompt']} {row['completion']}" for row in bundled_rows("gsm8k_train").rows[:30]]
    for name, part in (("train.jsonl", texts[:20]), ("held.jsonl", texts[20:])):
        (caller / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    words = ["data.source=train.jsonl", "data.held_out_source=held.jsonl", "train.max_steps=2", "schedule.warmup_steps=1"]
    assert start("run_dir=run", *words, "schedule.decay_steps=1", "data.max_length=128", "eval.every=0", "checkpoint.every=0") == 0
    assert "20 rows of train.jsonl, 0 held out" in capsys.readouterr().out
    assert set(json.loads((caller / "run/stage_result.json").read_text())["metrics"]["after"]) == {"held_out_loss"}
    (caller / "chat.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    assert start("data.source=chat.jsonl", "run_dir=other") == 2
    assert "rows of kind completion; pretraining wants rows of text, or shards" in capsys.readouterr().err


def test_what_cannot_be_is_refused_before_anything_is_written(caller, capsys):
    for words, message in (
        (["train.profile=9:2", *SHORT, *SCHEDULE], "train.profile is '9:2'"),
        (["launch.nproc=0"], "launch.nproc is 0"),
        (["launch.nnodes=2"], "launch.rdzv must name the first machine"),
        (["data.max_length=4096"], "the longest document has"),
        (["schedule.warmup_steps=200"], "schedule.warmup_steps 200"),
    ):
        assert start("run_dir=run", *words) == 2
        assert message in capsys.readouterr().err
    assert not (caller / "run").exists()


@pytest.mark.parametrize("name", ["pretrain_mistral7b.toml", "pretrain_smollm2.toml"])
def test_a_shipped_configuration_plans_and_takes_a_step(name, capsys):
    config = load_configuration(PretrainConfig, STAGES / "configs" / name)
    if "mistral" in name:
        words = ["data.source=gsm8k_train", "data.rows=50", "launch.nproc=1"]
        assert start("--config", str(STAGES / "configs" / name), "--dry-run", *words) == 0
        told = capsys.readouterr().out
        assert "steps    20000 of 256 rows, 1,048,576 tokens each" in told and "13.50 GiB" in told and "13.53 GiB" in told
    shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = init(ModelConfig(num_key_value_heads=1, **shape), 0, torch.bfloat16)
    optimizer = make_optimizer(config.optimizer, model.named_parameters(), seed=0)
    before = model.output_weight.clone()
    model.lm_head(model(torch.arange(8)[None])).float().logsumexp(-1).sum().backward()
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    assert not torch.equal(before, model.output_weight)


@pytest.mark.slow
def test_the_default_run_learns_from_ln_v_to_sixty_percent_of_it(caller):
    began = time.process_time()
    assert start("run_dir=run") == 0
    assert time.process_time() - began < 90
    result = json.loads((caller / "run/stage_result.json").read_text())
    assert result["metrics"]["after"]["held_out_loss"] <= 0.6 * math.log(259)


def program(stage: str, *words: str) -> subprocess.Popen:
    command = [sys.executable, str(STAGES / f"{stage}.py"), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_two_processes_stop_at_a_signal_and_go_on(caller):
    """The launcher hands SIGTERM on; the ranks save and exit in order; the launcher's exit code is theirs."""
    words = ["run_dir=run", "launch.nproc=2", "train.micro_batch=1", "train.max_steps=40", "data.rows=120", "data.max_length=256"]
    first = program("pretrain", *words, *SCHEDULE, "eval.enabled=false")
    history = caller / "run/history.jsonl"
    while not (history.exists() and history.stat().st_size):
        assert first.poll() is None, first.stdout.read()
        time.sleep(0.1)
    os.kill(first.pid, signal.SIGTERM)
    told, _ = first.communicate(timeout=120)
    assert first.returncode == 5, told
    stopped = json.loads((caller / "run/stage_result.json").read_text())
    assert (stopped["status"], stopped["reason"], stopped["ranks"]) == ("stopped", "SIGTERM", 2) and stopped["steps"] < 40
    second = program("pretrain", *words, *SCHEDULE, "eval.enabled=false", "--resume")
    told, _ = second.communicate(timeout=240)
    assert second.returncode == 0 and told.count("resumed from") == 1, told
    assert [line["step"] for line in read_history(history)] == list(range(1, 41))
    third = program("pretrain", *words, *SCHEDULE)
    told, _ = third.communicate(timeout=120)
    assert third.returncode == 2 and "holds a run already" in told, told


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_and_the_run_ends(caller):
    """SIGSTOP of one rank; 40 s of silence are what the watchdog waits for."""
    words = ["run_dir=run", "launch.nproc=2", "train.micro_batch=1", "train.max_steps=100000", "data.rows=120", "data.max_length=256"]
    run = program("pretrain", *words, *SCHEDULE, "eval.enabled=false")
    history = caller / "run/history.jsonl"
    while not (history.exists() and history.stat().st_size > 2000):
        assert run.poll() is None, run.stdout.read()
        time.sleep(0.1)
    children = [int(line) for line in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
    ranks = {Path(f"/proc/{pid}/environ").read_bytes().split(b"\0RANK=")[1][:1]: pid for pid in children}
    os.kill(ranks[b"1"], signal.SIGSTOP)
    began = time.monotonic()
    try:
        told, _ = run.communicate(timeout=150)
    finally:
        os.kill(ranks[b"1"], signal.SIGKILL) if run.poll() is None else None
    assert run.returncode == 1 and "watchdog: rank 1 has not been heard of" in told and "it was at" in told, told
    assert time.monotonic() - began < 110  # 40 s, and the launcher's 30 for a rank that does not answer
