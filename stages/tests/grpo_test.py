"""The GRPO stage as a user starts it: what it leaves, what stops it, what it refuses, and that a resume goes on to the same bytes."""

import json
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from _common import on_ranks, run_stage
from grpo import GrpoConfig, grpo
from rl_stage_cases import GRPO, START, cut, killed_until_through, result, same_end, start

from align.model import load
from align.tracking import read_history


@pytest.fixture(autouse=True)
def caller(tmp_path, monkeypatch):
    """The person stands in an empty folder."""
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(tmp_path))
    return tmp_path


def start_grpo(*words: str) -> int:
    return start("grpo", *words)


def test_a_grpo_run_leaves_everything(caller, capsys):
    assert start_grpo("run_dir=run", *GRPO, "eval.greedy=true") == 0
    told = result(caller / "run")
    assert (told["stage"], told["status"], told["steps"]) == ("grpo", "done", 4)
    assert told["collapse_tripwire"] == {"fired": False, "at_step": None, "reason": None, "alarms": []}
    for when in ("before", "after"):
        assert 0 <= told["metrics"][when]["sampled_accuracy"] <= 1 and "accuracy_1" in told["metrics"][when]
    history = read_history(caller / "run/history.jsonl")
    for line in history:
        assert {"reward", "dead_groups", "answer_tokens", "truncated", "grad_norm", "ratio", "mismatch", "lr"} <= line.keys()
        assert sum(value for name, value in line.items() if name.startswith("reason_")) == pytest.approx(1)
        if line["trained_tokens"]:
            assert line["ratio"] == pytest.approx(1, abs=1e-6) and line["mismatch"] < 1e-4
    assert (caller / "run/report.html").exists() and "//stages:evaluate" in capsys.readouterr().out
    before, after = load(START, dtype=torch.float32), load(told["checkpoint"])
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


@pytest.mark.parametrize("steps", [[2], pytest.param([0, 1, 2, 3], marks=pytest.mark.slow)])
@pytest.mark.parametrize("inner", [1, 2])
def test_grpo_resumes_to_the_same_bytes(caller, steps, inner):
    """Weights, optimizer, generators, prompt cursor, draws of dead groups, answers between inner steps, tripwire, history."""
    words = [*GRPO, f"rollout.inner_steps={inner}", "rollout.dead_retries=2", "eval.enabled=false"]
    assert start_grpo("run_dir=whole", *words) == 0
    for step in steps:
        cut(caller / "whole", caller / f"cut{step}", step)
        assert start_grpo(f"run_dir=cut{step}", *words, "--resume") == 0
        same_end(caller / "whole", caller / f"cut{step}", 4)
    cut(caller / "whole", caller / "legs", 1)  # three legs
    assert start_grpo("run_dir=legs", *words, "--resume", "train.max_steps=2") == 0
    (caller / "legs/stage_result.json").unlink()
    if inner == 1:  # a schedule that is constant does not know the number of steps
        assert start_grpo("run_dir=legs", *words, "--resume") == 0
        same_end(caller / "whole", caller / "legs", 4)


def test_an_all_dead_batch_moves_nothing_at_all(caller):
    """R147: constant reward, weight decay 0.1, three steps: no weight moves, no schedule step is taken, the prompts go on."""
    (caller / "mine.py").write_text("def same(prompt, completion, row):\n    return 0.5\n")
    words = [*GRPO, "reward=mine.py:same", "optimizer.weight_decay=0.1", "eval.enabled=false", "rollout.dead_retries=1"]
    assert start_grpo("run_dir=run", *words) == 0
    told = result(caller / "run")
    before, after = load(START, dtype=torch.float32), load(told["checkpoint"])
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    state = json.loads((Path(told["checkpoint"]) / "trainer.json").read_text())["state"]
    assert state["counters"]["applied"] == 0 and state["loader"]["draws"] == 4 * 2 * 4
    assert [line["loss"] for line in read_history(caller / "run/history.jsonl")] == [None] * 4


@pytest.mark.parametrize("value", ["None", "float('nan')", "float('inf')", "1/0", "'1'"])
def test_a_reward_that_is_no_number_ends_the_run(caller, capsys, value):
    (caller / "mine.py").write_text(f"def bad(prompt, completion, row):\n    return {value}\n")
    assert start_grpo("run_dir=run", *GRPO, "reward=mine.py:bad", "eval.enabled=false") == 2
    told = capsys.readouterr().err
    assert "mine.py:bad" in told and "on prompt" in told and ("gave '1' on" in told or value != "'1'")
    assert result(caller / "run")["status"] == "failed"


def test_a_tripped_wire_stops_with_a_checkpoint_and_stays_tripped(caller, capsys):
    """The reward is good at first and nothing afterwards."""
    (caller / "mine.py").write_text(
        "import pathlib\n"
        "def fading(prompt, completion, row):\n"
        "    file = pathlib.Path(__file__).with_name('calls')\n"
        "    calls = int(file.read_text()) + 1 if file.exists() else 1\n"
        "    file.write_text(str(calls))\n"
        "    return (1.0 if calls <= 16 * 3 else 0.1) + (calls % 2) * 0.01\n"
    )
    words = [*GRPO, "reward=mine.py:fading", "train.max_steps=9", "tripwire.window=2", "tripwire.flat=none", "rollout.dead_retries=0"]
    assert start_grpo("run_dir=run", *words) == 4
    told = result(caller / "run")
    wire = told["collapse_tripwire"]
    assert told["status"] == "tripwire" and wire["fired"] and wire["at_step"] == told["steps"] <= 5
    assert told["reason"].startswith("reward_drop") and wire["alarms"][0]["rule"] == "reward_drop"
    assert Path(told["checkpoint"]).name == f"step-{told['steps']:06d}"
    assert any("tripwire" in str(line.get("event")) for line in read_history(caller / "run/history.jsonl"))
    assert start_grpo("run_dir=run", *words, "--resume") == 4
    assert result(caller / "run")["collapse_tripwire"] == wire, "a restored latched tripwire shows its alarms"
    assert start_grpo("run_dir=run", *words, "--resume", "tripwire.action=warn") == 0
    after = result(caller / "run")
    assert (
        after["status"] == "done" and after["steps"] == 9 and after["collapse_tripwire"]["alarms"][: len(wire["alarms"])] == wire["alarms"]
    )
    assert "reward_drop" in capsys.readouterr().out


FIELDS = {
    "seed": "1", "data.rows": "50", "data.levels": "[1]", "data.max_prompt": "24", "reward": "mine.py:length", "advantages": "none",
    "forward_impl": "cpu_per_document", "rollout.group": "8", "rollout.max_new_tokens": "12", "rollout.temperature": "0.7",
    "rollout.batch": "3", "rollout.kv_budget_gb": "0.001", "rollout.inner_steps": "2", "rollout.dead_retries": "3",
    "rollout.mask_dead_groups": "false",
    "rollout.overlong": "mask", "rollout.overlong_buffer": "20", "policy.clip_low": "0.00001", "policy.clip_high": "0.00001",
    "policy.level": "gspo", "policy.over": "sequences", "policy.correction": "truncate", "policy.correction_cap": "1.0",
    "policy.kl": "0.5", "policy.kl_estimator": "k2", "policy.kl_in": "reward",
}  # fmt: skip
BASE = {
    "policy.clip_low": ["rollout.inner_steps=2"],
    "policy.clip_high": ["rollout.inner_steps=2"],
    "policy.level": ["rollout.inner_steps=2", "policy.clip_low=0.001", "policy.clip_high=0.001"],
    "policy.correction_cap": ["policy.correction=truncate"],
    "policy.kl_estimator": ["policy.kl=0.5"],
    "policy.kl_in": ["policy.kl=0.5"],
    "rollout.overlong": ["rollout.max_new_tokens=12"],
    "rollout.overlong_buffer": ["rollout.max_new_tokens=22", "rollout.overlong=penalty"],
    "rollout.dead_retries": ["rollout.dead_retries=0"],
    "rollout.mask_dead_groups": ["rollout.dead_retries=0"],
}


def names(config_class, prefix=""):
    for field in fields(config_class):
        kind = field.type if isinstance(field.type, type) else None
        if kind is not None and is_dataclass(kind):
            yield from names(kind, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def test_every_field_of_grpo_s_own_is_in_the_list():
    """Those of train, optimizer, schedule, checkpoint, eval and guard are tested with the Trainer and SFT, tripwire's in its library, the
    sampler's in external_test."""
    own = {
        name
        for name in names(GrpoConfig)
        if not name.startswith(
            ("train.", "optimizer.", "schedule.", "checkpoint.", "eval.", "guard.", "model.", "launch.", "lora.", "tripwire.", "vllm.")
        )
    }
    assert own - set(FIELDS) == {"run_dir", "data.source", "data.chat", "data.system", "rollout.sampler"}


UNCHANGED: dict[tuple[str, ...], bytes] = {}


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_changes_the_run(caller, field):
    """Two short runs that differ in this field alone differ in the weights; or, where only memory or time differs, do not."""
    (caller / "mine.py").write_text("def length(prompt, completion, row):\n    return len(completion)\n")
    words = [*GRPO, *BASE.get(field, []), "train.max_steps=2", "eval.enabled=false", "checkpoint.every=0"]
    made = "checkpoints/step-000002/model.safetensors"
    if tuple(words) not in UNCHANGED:
        assert start_grpo("run_dir=a", *words) == 0
        UNCHANGED[tuple(words)] = (caller / "a" / made).read_bytes()
    assert start_grpo("run_dir=b", *words, f"{field}={FIELDS[field]}") == 0
    if field not in ("rollout.batch", "rollout.kv_budget_gb", "forward_impl"):
        assert (caller / "b" / made).read_bytes() != UNCHANGED[tuple(words)]


def test_strict_sampling_and_a_budget_that_is_too_small(caller, capsys):
    """forward_impl=invariant: the sampler's log-probabilities are the trainer's (on the CPU to rounding)."""
    words = [*GRPO, "train.max_steps=2", "eval.enabled=false", "checkpoint.every=0"]
    assert start_grpo("run_dir=run", *words, "forward_impl=invariant") == 0
    steps = [line for line in read_history(caller / "run/history.jsonl") if "mismatch" in line]
    assert len(steps) == 2 and all(abs(step["mismatch"]) < 1e-5 for step in steps)
    assert start_grpo("run_dir=small", *words, "rollout.kv_budget_gb=0.0001") == 2
    assert "above the kv_budget_gb of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["rollout.group=1"], "rollout.group is 1"),
        (["rollout.group=3"], "not a multiple of rollout.group 3"),
        (["rollout.temperature=0"], "rollout.temperature"),
        (["policy.kl_in=reward"], "policy.kl is 0"),
        (["policy.clip_low=1.5"], "policy.clip_low"),
        (["reward=mine"], "path/file.py:function"),
        (["reward=absent.py:f"], "absent.py"),
        (["data.source=absent.jsonl"], "absent.jsonl"),
        (["data.levels=[4]"], "levels"),
        (["rollout.max_new_tokens=400"], "window"),
        (["model.path=nowhere"], "config.json"),
        (["train.global_batch=24", "train.micro_batch=16"], "micro_batch 16"),
        (["tripwire.window=0"], "tripwire.window"),
        (["train.micro_batch=0"], "train.micro_batch is 0"),
        (["train.log_every=0"], "train.log_every is 0"),
        (["train.profile=zzz"], "train.profile is 'zzz'"),
        (["optimizer.lr=0"], "optimizer.lr is 0.0"),
        (["optimizer.weight_decay=inf"], "optimizer.weight_decay is inf"),
        (["schedule.warmup_steps=9"], "schedule.warmup_steps 9"),
        (["checkpoint.keep=-1"], "checkpoint.keep is -1"),
        (["lora.rank=-1"], "lora.rank is -1"),
        (["rollout.kv_budget_gb=inf"], "rollout.kv_budget_gb is inf"),
        (["policy.clip_high=1e300"], "policy.clip_high is 1e+300"),
        (["eval.temperature=nan"], "eval.temperature is nan"),
        (["eval.problems=-6"], "eval.problems is -6"),
        (["eval.show=-1"], "eval.show is -1"),
        (["eval.source=long.jsonl"], "long.jsonl: row 1, '7 7 7"),
        (["data.system=hi"], "data.system is set without data.chat=true"),
        (["data.chat=true"], "has no chat template; ask with bare prompts"),
        (["seed=99999999999999999999"], "seed must be int, got the integer 99999999999999999999 of more than 64 bits"),
    ],
)
def test_what_no_run_can_have_is_refused_before_anything_is_written(caller, capsys, words, told):
    (caller / "long.jsonl").write_text(json.dumps({"prompt": "7 " * 300, "answer": "7"}) + "\n")
    assert run_stage("grpo", GrpoConfig, on_ranks("grpo.py", grpo), "", ["run_dir=run", *GRPO, *words]) == 2
    printed = capsys.readouterr().err
    assert told in printed and printed.count("\n") == 1 and not (caller / "run").exists()


@pytest.mark.parametrize(
    ("stage", "words", "told"),
    [
        ("dpo", ["data.max_length=0"], "data.max_length is 0; it must be at least 2"),
        ("dpo", ["data.per_prompt=0"], "data.per_prompt is 0"),
        ("dpo", ["data.samples=1"], "data.samples is 1; it must be at least 2"),
        ("dpo", ["data.max_new_tokens=0"], "data.max_new_tokens is 0"),
        ("dpo", ["data.temperature=0"], "data.temperature is 0, at which all answers"),
        ("dpo", ["data.temperature=nan"], "data.temperature is nan"),
        ("reference", ["data.samples=0"], "data.samples is 0"),
        ("prm", ["kind=pairwise", "pairs.samples=0"], "pairs.samples is 0"),
        ("prm", ["data.held_out=nan"], "data.held_out is nan"),
        ("prm", ["data.held_out=1"], "data.held_out is 1"),
        ("prm", ["data.samples=0"], "data.samples is 0"),
    ],
)
def test_rows_that_cannot_be_made_are_refused_before_any_weight_is_read(caller, capsys, monkeypatch, stage, words, told):
    def unread(*args, **more):
        raise AssertionError("weights were read")

    monkeypatch.setattr(f"{stage}.build_model", unread)
    assert start(stage, "run_dir=run", *words) == 2
    assert told in capsys.readouterr().err and not (caller / "run").exists()


@pytest.mark.parametrize("name", ["stage_result.json", "env.json"])  # that of a killed run is the latter
def test_another_stage_s_run_is_not_gone_on_with(caller, capsys, name):
    (caller / "run").mkdir()
    (caller / f"run/{name}").write_text('{"status": "done", "stage": "evaluate"}')
    (caller / "run/history.jsonl").write_text('{"step": 3}\n')
    before = {path.name: path.read_bytes() for path in (caller / "run").iterdir()}
    assert start_grpo("run_dir=run", *GRPO, "--resume") == 2
    assert "holds a run of //stages:evaluate; choose another" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (caller / "run").iterdir()} == before


def test_a_dry_run_plans_and_writes_nothing(caller, capsys):
    assert start_grpo(*GRPO, "--dry-run") == 0
    assert "4 prompts × 4 answers" in capsys.readouterr().out and list(caller.iterdir()) == []


@pytest.mark.slow
def test_killed_at_any_moment_a_run_goes_on_to_the_same_bytes(caller):
    """SIGKILL after some tenths of a second, again and again, until the run is through."""
    words = [*GRPO, "train.max_steps=12", "eval.enabled=false", "rollout.inner_steps=2", "checkpoint.keep=2"]
    words += ["tripwire.drop=none", "tripwire.dead=none", "tripwire.grad_norm=none"]
    assert start("grpo", "run_dir=whole", *words) == 0
    killed_until_through("grpo", caller / "killed", words)
    same_end(caller / "whole", caller / "killed", 12)
