"""The default runs of dpo, grpo and ppo, whole: what their README promises, on three seeds, and collapses that are real."""

import json

import pytest
from rl_stage_cases import start

from align.tracking import read_history

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def caller(tmp_path, monkeypatch):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(tmp_path))
    return tmp_path


def run(caller, stage, seed, *words):
    assert start(stage, f"run_dir={stage}{seed}", f"seed={seed}", *words) == 0
    told = json.loads((caller / f"{stage}{seed}/stage_result.json").read_text())["metrics"]
    return told["before"], told["after"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_reaches_its_target(caller, seed):
    before, after = run(caller, "grpo", seed)
    assert before["sampled_accuracy"] < 0.65 and after["sampled_accuracy"] >= 0.85
    assert after["accuracy_3"] >= before["accuracy_3"] - 0.02


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_dpo_reaches_its_target(caller, seed):
    before, after = run(caller, "dpo", seed)
    assert after["sampled_accuracy"] >= before["sampled_accuracy"] + 0.10
    assert all(after[f"accuracy_{level}"] >= before[f"accuracy_{level}"] - 0.03 for level in (1, 2, 3))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ppo_reaches_its_target(caller, seed):
    before, after = run(caller, "ppo", seed)
    assert after["sampled_accuracy"] >= before["sampled_accuracy"] + 0.30
    judged = json.loads((caller / f"ppo{seed}/prm/stage_result.json").read_text())["metrics"]["after"]
    assert judged["step_auc"] >= 0.75


def test_a_learning_rate_far_too_high_trips_the_wire(caller):
    assert start("grpo", "run_dir=run", "optimizer.lr=0.03", "schedule.warmup_steps=0", "eval.enabled=false") == 4
    wire = json.loads((caller / "run/stage_result.json").read_text())["collapse_tripwire"]
    assert wire["fired"] and wire["alarms"]


def test_reward_hacking_is_stopped(caller):
    """PPO without a KL, at a high rate: the reward model is ever happier, and the verifier is not. The wire looks at the verifier."""
    words = ["policy.kl=0", "policy.kl_in=loss", "rollout.inner_steps=2", "optimizer.lr=0.001", "train.max_steps=80", "eval.enabled=false"]
    assert start("ppo", "run_dir=run", *words) == 4
    told = json.loads((caller / "run/stage_result.json").read_text())
    assert told["reason"].startswith("accuracy_drop")
    history = read_history(caller / "run/history.jsonl")
    peak = max(history, key=lambda line: line["accuracy"])
    assert history[-1]["prm_reward"] > peak["prm_reward"] and history[-1]["accuracy"] < 0.6 * peak["accuracy"]
