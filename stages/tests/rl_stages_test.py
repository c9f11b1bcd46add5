"""The stages dpo, reference, prm, ppo and path_bias as a user starts them, and the configurations that are shipped for them."""

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from rl_stage_cases import DPO, GRPO, PAIRS, PPO, PRM, STAGE, STAGES, START, cut, killed_until_through, result, same_end, start

from align.config import load as load_configuration
from align.model import ModelConfig, init, load, save
from align.tracking import read_history
from align.train import make_optimizer


@pytest.fixture(autouse=True)
def caller(tmp_path, monkeypatch):
    """The person stands in an empty folder."""
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(tmp_path))
    return tmp_path


def reward_model(caller: Path, *words: str) -> list[str]:
    """A small reward model, and the words that name it."""
    assert start("prm", "run_dir=judge", *PRM, "train.max_steps=2", *words) == 0
    return ["prm.path=judge", *(["prm.head=value"] if "prm.head=value" in words else ["prm.label_token_ids=[70,71]"])]


def test_dpo_makes_its_pairs_and_reference_and_learns(caller, capsys):
    assert start("dpo", "run_dir=run", *DPO) == 0
    told, history = result(caller / "run"), read_history(caller / "run/history.jsonl")
    assert told["status"] == "done" and told["pairs"] == len((caller / "run/pairs.jsonl").read_text().splitlines())
    assert history[0]["loss"] == pytest.approx(0.6931472, abs=1e-5) and abs(history[0]["margin"]) < 1e-4
    assert history[-1]["margin"] > 0.05 and "sampled_accuracy" in told["metrics"]["after"]
    assert {"pair_accuracy", "chosen_logprob", "rejected_logprob", "chosen_reward", "rejected_reward"} <= history[0].keys()
    cut(caller / "run", caller / "cut", 2)
    assert start("dpo", "run_dir=cut", *DPO, "--resume") == 0
    same_end(caller / "run", caller / "cut", 4)


def test_a_reference_belongs_to_its_model_arm_and_forward(caller, capsys):
    words = ["data.arm=a", *PAIRS]
    assert start("reference", "run_dir=ref", *words) == 0
    rows = [f"data.source={caller}/ref/pairs.jsonl", "data.arm=a", "data.rows=none", "reference=ref/reference.cache"]
    run = [*(word for word in DPO if not word.startswith("data.")), "eval.enabled=false", "train.max_steps=1"]
    assert start("dpo", "run_dir=one", *run, *rows) == 0
    first = read_history(caller / "one/history.jsonl")[0]
    assert first["loss"] == pytest.approx(0.6931472, abs=1e-5)
    capsys.readouterr()
    save(load(START), caller / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(START / name, caller / "other" / name)
    assert start("dpo", "run_dir=same", *run, *rows, "model.path=other") == 0, "the same weights in another directory are the same"
    changed = load(START)
    with torch.no_grad():
        changed.model.norm.weight[0] += 0.25
    save(changed, caller / "other")
    lines = (caller / "ref/pairs.jsonl").read_text().splitlines()
    (caller / "fewer.jsonl").write_text("\n".join(lines[1:]) + "\n")
    for more, told in (
        (["data.arm=b"], "arm is a there and b here"),
        (["model.path=other"], "weights is"),
        (["model.dtype=bfloat16"], "dtype is"),
        ([f"data.source={caller}/fewer.jsonl"], "rows is"),
        (["data.max_length=200"], "max_length is"),
        (["forward_impl=cpu_per_document"], "forward_impl is sdpa_causal there and cpu_per_document here"),
        (["reference=absent.cache"], "absent.cache"),
        (["preference.loss=simpo"], "no reference"),
    ):
        assert start("dpo", "run_dir=no", *run, *rows, *more) == 2, more
        assert told in capsys.readouterr().err and not (caller / "no").exists()
    content = (caller / "ref/reference.cache").read_bytes()
    (caller / "ref/reference.cache").write_bytes(content[:-8])
    assert start("dpo", "run_dir=no", *run, *rows) == 2 and "not whole" in capsys.readouterr().err


def test_dpo_runs_the_forward_of_its_reference(caller):
    assert start("reference", "run_dir=ref", *PAIRS, "forward_impl=cpu_per_document") == 0
    run = [*(word for word in DPO if not word.startswith("data.")), "eval.enabled=false"]
    rows = [f"data.source={caller}/ref/pairs.jsonl", "reference=ref/reference.cache"]
    assert start("dpo", "run_dir=run", *run, *rows) == 0
    state = json.loads((caller / "run/checkpoints/step-000004/trainer.json").read_text())["state"]
    assert state["environment"]["forward_impl"] == "cpu_per_document"


def test_a_lora_run_has_its_frozen_base_as_reference(caller):
    """R070: no cache, nothing but the adapter is trained, step 0 is exactly ln 2."""
    words = [*DPO, "lora.rank=4", "lora.alpha=8", "eval.enabled=false"]
    assert start("dpo", "run_dir=run", *words) == 0
    history = read_history(caller / "run/history.jsonl")
    assert history[0]["loss"] == pytest.approx(0.6931472, abs=1e-6) and history[0]["margin"] == 0.0 and history[-1]["margin"] > 0
    assert (caller / "run/checkpoints/step-000004/adapter_model.safetensors").exists()
    assert start("grpo", "run_dir=grpo", *GRPO, "lora.rank=4", "policy.kl=0.1") == 0
    lines = read_history(caller / "grpo/history.jsonl")
    assert all(line["kl"] < 0.2 for line in lines if line["trained_tokens"]) and lines[0]["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("more", [[], ["prm.head=value"], ["kind=outcome"]])
def test_prm_learns_and_resumes(caller, more):
    assert start("prm", "run_dir=run", *PRM, *more) == 0
    told = result(caller / "run")
    assert {"step_auc", "step_accuracy", "base_rate"} <= told["metrics"]["after"].keys()
    cut(caller / "run", caller / "cut", 1)
    assert start("prm", "run_dir=cut", *PRM, *more, "--resume") == 0
    same_end(caller / "run", caller / "cut", 4)


def test_prm_on_pairs(caller):
    words = [word.replace("data.", "pairs.") for word in PRM if word.startswith("data.")]
    words += [word for word in PRM if not word.startswith("data.")]
    assert start("prm", "run_dir=run", "kind=pairwise", "prm.head=value", *words) == 0
    assert 0 <= result(caller / "run")["metrics"]["after"]["pair_accuracy"] <= 1


def test_ppo_shows_true_accuracy_beside_the_reward_model_s_and_resumes(caller):
    words = [*PPO, *reward_model(caller), "eval.enabled=false"]
    assert start("ppo", "run_dir=run", *words) == 0
    history = read_history(caller / "run/history.jsonl")
    for line in history:
        assert {"accuracy", "prm_reward", "step_score", "reward_kl", "kl", "value_loss", "explained_variance"} <= line.keys()
        assert "reward" not in line and line["ratio"] == pytest.approx(1, abs=1e-5)
    policy = load(caller / "run/checkpoints/step-000004")  # R145: a plain model; the critic is in the trainer's own file
    assert sorted(policy.state_dict()) == sorted(load(START).state_dict())
    for step in (1, 3):
        cut(caller / "run", caller / f"cut{step}", step)
        assert start("ppo", f"run_dir=cut{step}", *words, "--resume") == 0
        same_end(caller / "run", caller / f"cut{step}", 4)


def test_ppo_learns_from_the_reward_model_alone(caller):
    """All skipped: with every answer cut off and left out nothing moves; the critic neither."""
    words = [*PPO, *reward_model(caller), "eval.enabled=false", "rollout.max_new_tokens=1", "rollout.overlong=mask"]
    assert start("ppo", "run_dir=run", *words, "optimizer.weight_decay=0.1") == 0
    after = load(result(caller / "run")["checkpoint"])
    assert all(torch.equal(a, b) for a, b in zip(load(START, dtype=torch.float32).parameters(), after.parameters(), strict=True))
    state = json.loads((caller / "run/checkpoints/step-000004/trainer.json").read_text())["state"]
    assert state["counters"]["applied"] == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["critic.gamma=0.99"], "critic.gamma is 0.99"),
        (["prm.path=judge"], "label_token_ids"),
        (["model.path=elsewhere"], "prm.path is unset"),
        (["policy.kl=0"], "kl_in is reward"),
        (["--config", "tbd.toml"], "prm.path"),
        (["critic.lam=2"], "critic.lam"),
        (["prm.path=judge", "prm.label_token_ids=[5,5]"], "two different"),
        (["prm.label_token_ids=[5,6]"], "the reward model that is trained here has [70, 71]"),
        (["prm.reward.truncated=nan"], "prm.reward.truncated is nan"),
        (["prm.step_end=zzz"], "no token of the vocabulary ends with 'zzz'"),
    ],
)
def test_ppo_refuses_before_any_weight_is_read(caller, capsys, monkeypatch, words, told):
    (caller / "tbd.toml").write_text('[prm]\npath = "[TBD]"\n')

    def unread(*args, **more):
        raise AssertionError("weights were read")

    for module in ("_rl", "ppo"):
        monkeypatch.setattr(f"{module}.build_model", unread)
    assert start("ppo", "run_dir=run", *PPO, *words) == 2
    assert told in capsys.readouterr().err and not (caller / "run").exists()


def test_a_reward_model_that_was_stopped_is_trained_to_its_end_and_its_signal_ends_ppo_with_5(caller, monkeypatch):
    """The ppo stage went on with what had been trained by then, and ended with 2."""
    calls = []

    def trained(call):
        calls.append(call.resume)
        (call.config.run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        (call.config.run_dir / "history.jsonl").touch()
        (call.config.run_dir / "stage_result.json").write_text('{"status": "stopped", "stage": "prm"}')
        return 5

    monkeypatch.setattr("prm.prm", trained)
    monkeypatch.setattr("ppo.find_latest", lambda folder, ranks: folder if folder.exists() else None)
    assert start("ppo", "run_dir=run", *PPO) == 5 and calls == [False]
    assert start("ppo", "run_dir=run", *PPO, "--resume") == 5 and calls == [False, True]
    (caller / "run/prm/stage_result.json").write_text('{"status": "done", "stage": "prm"}')
    assert start("ppo", "run_dir=run", *PPO, "--resume") == 2 and len(calls) == 2  # there is no model in it


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["temperature=inf"], "temperature is inf"),
        (["temperature=nan"], "temperature is nan"),
        (["prompts=0"], "prompts is 0"),
        (["max_new_tokens=0"], "max_new_tokens is 0"),
        (["implementations=[]"], "implementations is empty"),
        (["train.micro_batch=0"], "train.micro_batch is 0"),
        (["train.threads=-1"], "train.threads is -1"),
    ],
)
def test_path_bias_refuses_before_anything_is_written(caller, capsys, words, told):
    assert start("path_bias", "run_dir=bias", *words) == 2
    assert told in capsys.readouterr().err and not (caller / "bias").exists()


def test_path_bias_is_bound_to_its_checkpoint(caller, capsys):
    assert start("path_bias", "run_dir=bias", "prompts=8", "max_new_tokens=16") == 0
    report = json.loads((caller / "bias/path_bias.json").read_text())
    assert len(report["weights"]) == 64 and report["differences"]["sampler - sdpa_causal"]["mean_size"] < 1e-5
    words = [*PPO, *reward_model(caller), "eval.enabled=false", "train.max_steps=1", "path_bias=bias/path_bias.json"]
    assert start("ppo", "run_dir=run", *words) == 0
    changed = load(START)
    with torch.no_grad():
        changed.model.norm.weight[0] += 0.25
    save(changed, caller / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(START / name, caller / "other" / name)
    assert start("ppo", "run_dir=no", *words, "model.path=other") == 2
    assert "other weights" in capsys.readouterr().err and not (caller / "no").exists()
    assert start("ppo", "run_dir=no", *words, "path_bias_limit=0") == 2


RUNS = {
    "grpo": ("grpo", [*GRPO, "rollout.inner_steps=2", "rollout.dead_retries=2"]),
    "grpo_mixed": (  # of one rank's answers all are trained, of the other's some: both must run as many forwards
        "grpo",
        [
            *GRPO,
            "rollout.inner_steps=2",
            "rollout.dead_retries=1",
            "rollout.group=4",
            "rollout.overlong=penalty",
            "policy.level=gspo",
            "policy.over=sequences",
            "policy.kl=0.1",
            "policy.kl_in=reward",
            "seed=12",
        ],
    ),
    "dpo": ("dpo", DPO),
    "prm": ("prm", PRM),
    "prm_value": ("prm", [*PRM, "prm.head=value"]),
    "ppo": ("ppo", [*PPO, "rollout.inner_steps=2", "optimizer.lr=0.0001"]),  # at 0.001 its KL is in the thousands after a step
}


def words_of(caller: Path, which: str) -> tuple[str, list[str]]:
    """A stage and the words of its short run, which two ranks can take too."""
    stage, words = RUNS[which]
    words = [word for word in words if not word.startswith(("train.micro_batch", "eval."))] + ["train.micro_batch=4", "eval.enabled=false"]
    return stage, [*words, *(reward_model(caller) if stage == "ppo" else [])]


def in_processes(stage: str, *words: str) -> None:
    done = subprocess.run([sys.executable, STAGES / f"{stage}.py", *words], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr


def resumed_at_every_step(run, caller: Path, whole: str) -> None:
    """A run that is cut off after step 1 and resumed, after step 2 and resumed, and after step 3: three legs, the same end."""
    before = whole
    for step in (1, 2, 3):
        cut(caller / before, caller / f"{whole}{step}", step)
        run(f"run_dir={whole}{step}", "--resume")
        same_end(caller / whole, caller / f"{whole}{step}", 4)
        before = f"{whole}{step}"


@pytest.mark.slow
@pytest.mark.parametrize("which", RUNS)
def test_one_rank_and_two_give_the_same_curve_and_resume_at_every_step_to_the_same_bytes(caller, which):
    """Two ranks, FSDP2 over gloo, follow one within fp32 rounding. On one and on two, resumed at steps 1, 2 and 3 in turn: same bytes."""
    stage, words = words_of(caller, which)
    assert start(stage, "run_dir=one", *words) == 0
    resumed_at_every_step(lambda *more: start(stage, *words, *more), caller, "one")
    in_processes(stage, "run_dir=two", *words, "launch.nproc=2")
    one, two = (read_history(caller / run / "history.jsonl") for run in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        assert (a["trained_tokens"], a["tokens"]) == (b["trained_tokens"], b["tokens"])
        for name in {"loss", "value_loss", "prm_reward", "explained_variance", "kl"} & a.keys():
            assert a[name] is b[name] is None or a[name] == pytest.approx(b[name], abs=1e-5, rel=1e-5), name
        assert a["grad_norm"] is b["grad_norm"] is None or a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    assert stage not in ("grpo", "ppo") or two[0]["ratio"] == 1.0, "the first ratio on new answers is exactly 1"
    resumed_at_every_step(lambda *more: in_processes(stage, *words, "launch.nproc=2", *more), caller, "two")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["grpo", "ppo"])
def test_a_window_with_nothing_to_train_is_skipped_on_every_rank(caller, stage):
    """Every answer is cut off and left out: no weight, no schedule, no decay, no critic moves, and both ranks go on."""
    words = [*(GRPO if stage == "grpo" else [*PPO, *reward_model(caller)]), "eval.enabled=false", "rollout.max_new_tokens=1"]
    in_processes(stage, "run_dir=run", *words, "rollout.overlong=mask", "optimizer.weight_decay=0.1", "launch.nproc=2")
    end = result(caller / "run")
    state = json.loads((Path(end["checkpoint"]) / "trainer.json").read_text())["state"]
    assert end["steps"] == 4 and state["counters"]["applied"] == 0
    after = load(end["checkpoint"])
    assert all(torch.equal(a, b) for a, b in zip(load(START, dtype=torch.float32).parameters(), after.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["dpo", "prm", "ppo"])
def test_killed_again_and_again_a_run_goes_on_to_the_same_bytes(caller, which):
    """SIGKILL some tenths of a second after every new checkpoint; GRPO's is in grpo_test."""
    stage, words = words_of(caller, which)
    assert start(stage, "run_dir=whole", *words) == 0
    killed_until_through(stage, caller / "killed", words)
    same_end(caller / "whole", caller / "killed", 4)


CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
FIELDS = {
    "dpo": {
        "seed": "1", "data.rows": "50", "data.samples": "3", "data.per_prompt": "2", "data.max_new_tokens": "12",
        "data.temperature": "0.5", "data.reward": "mine.py:length", "data.max_length": "40", "preference.loss": "hinge",
        "preference.beta": "0.9", "preference.label_smoothing": "0.2", "preference.length_normalised": "true", "preference.margin": "0.5",
        "preference.nll": "0.5", "forward_impl": "cpu_per_document", "data.overlong": "truncate", "data.chat": "true",
        "data.system": "Be brief.", "data.template": "{% for m in messages %}{{ m.content }}={% endfor %}", "data.arm": "other",
        "data.source": "pairs.jsonl", "model.dtype": "bfloat16",
    },
    "prm": {
        "seed": "1", "kind": "outcome", "prm.head": "value", "prm.label_token_ids": "[5,6]", "data.rows": "50", "data.samples": "3",
        "data.max_new_tokens": "12", "data.held_out": "0.5", "data.max_length": "40", "data.neutral": "bad", "data.source": "steps.jsonl",
        "model.dtype": "bfloat16",
    },
    "ppo": {
        "seed": "1", "data.rows": "50", "data.levels": "[1]", "prm.reward.how": "score", "prm.reward.baseline": "0.1",
        "prm.reward.answer": "false", "prm.reward.truncated": "-3", "prm.step_end": "=", "critic.rank": "2", "critic.alpha": "64",
        "critic.targets": "['q_proj']", "critic.clip": "0.001", "critic.coefficient": "5", "critic.lam": "0.1", "critic.whiten": "false",
        "policy.kl": "1.0", "policy.kl_estimator": "k2", "rollout.inner_steps": "2", "data.max_prompt": "24", "data.source": "rows.jsonl",
        "forward_impl": "cpu_per_document", "policy.clip_low": "0.00001", "policy.clip_high": "0.00001", "policy.correction": "truncate",
        "policy.correction_cap": "1.0", "policy.kl_in": "both", "policy.level": "gspo", "policy.over": "sequences", "rollout.group": "2",
        "rollout.max_new_tokens": "12", "rollout.overlong": "mask", "rollout.temperature": "0.7", "rollout.batch": "3",
        "rollout.kv_budget_gb": "0.001", "model.dtype": "bfloat16",
    },
    "reference": {
        "seed": "1", "data.rows": "50", "data.arm": "other", "data.max_length": "200", "forward_impl": "cpu_per_document",
        "model.dtype": "bfloat16", "train.micro_batch": "3", "train.threads": "2",
    },
    "path_bias": {
        "seed": "1", "prompts": "5", "max_new_tokens": "6", "temperature": "0.7", "implementations": "['sdpa_causal']",
        "source": "rows.jsonl", "train.micro_batch": "3", "train.threads": "2",
        "model.dtype": "bfloat16",
    },
}  # fmt: skip
AROUND = {
    "data.per_prompt": ["data.samples=8"],
    "data.overlong": ["data.max_length=40"],
    "preference.margin": ["preference.loss=simpo"],
    "prm.reward.truncated": ["rollout.max_new_tokens=12"],
    "critic.clip": ["rollout.inner_steps=2"],
    "data.neutral": ["data.source=steps.jsonl", "data.held_out=0"],
    "data.system": ["data.source=pairs.jsonl", "data.chat=true", f"data.template={CHAT}"],
    "data.template": ["data.source=pairs.jsonl", "data.chat=true", f"data.template={CHAT}"],
    "data.chat": ["data.source=pairs.jsonl", f"data.template={CHAT}"],
    "policy.clip_low": ["rollout.inner_steps=2"],
    "policy.clip_high": ["rollout.inner_steps=2"],
    "policy.level": ["rollout.inner_steps=2", "policy.clip_low=0.001", "policy.clip_high=0.001"],
    "policy.correction_cap": ["policy.correction=truncate"],
    "rollout.overlong": ["rollout.max_new_tokens=12"],
}
# What only memory or time, or in fp32 on a CPU nothing, depends on.
SAME = {"forward_impl", "rollout.batch", "rollout.kv_budget_gb", "train.micro_batch", "train.threads", "data.arm"}
# Tested elsewhere: sections of the Trainer, of SFT's evaluation, of the tripwire and of the sampler's process in their own tests; what
# names a file, a model or its label tokens above; the pairs of `reference` and of `prm` are DPO's.
ELSEWHERE = ("optimizer.", "schedule.", "checkpoint.", "eval.", "guard.", "launch.", "lora.", "tripwire.", "vllm.", "pairs")
ELSEWHERE += ("train.",)
NAMES = {"run_dir", "reference", "path_bias", "path_bias_limit", "critic.gamma", "prm.head", "prm.label_token_ids", "prm.path"}
NAMES |= {"model.path", "model.tokenizer", "model.plan_config", "model.device", "rollout.sampler"}
PROMPTS = {"data.chat", "data.system"}  # as in GRPO: every shipped configuration of a chat model has them
NONE = {"rollout.dead_retries", "rollout.mask_dead_groups", "rollout.overlong_buffer"}  # refused, as they would do nothing


def own_fields(config_class, prefix=""):
    for each in fields(config_class):
        kind = each.type if isinstance(each.type, type) else None
        if kind is not None and is_dataclass(kind):
            yield from own_fields(kind, f"{prefix}{each.name}.")
        else:
            yield prefix + each.name


@pytest.mark.parametrize("stage", FIELDS)
def test_every_field_of_a_stage_is_in_the_list(stage):
    rest = {name for name in own_fields(STAGE[stage][0]) if not name.startswith(ELSEWHERE)} - set(FIELDS[stage]) - NAMES
    assert rest - ({name for name in rest if name.startswith("data.")} if stage == "reference" else set()) == {"ppo": PROMPTS | NONE}.get(
        stage, set()
    )


@pytest.mark.parametrize(("words", "told"), [
    (["rollout.dead_retries=3"], "rollout.dead_retries"), (["rollout.mask_dead_groups=false"], "rollout.mask_dead_groups"),
    (["rollout.overlong_buffer=3"], "rollout.overlong_buffer"), (["rollout.overlong=penalty"], "prm.reward.truncated"),
])  # fmt: skip
def test_ppo_refuses_what_would_have_no_effect(caller, capsys, words, told):
    assert start("ppo", "run_dir=run", *PPO, *words) == 2
    assert told in capsys.readouterr().err and not (caller / "run").exists()


TOOK: dict[tuple[str, ...], str] = {}  # one unchanged run serves every field that has the same surroundings


def outcome(caller: Path, stage: str, *words: str) -> str:
    """What a run leaves that its settings decide: weights and the critic, the cache, the report."""
    shutil.rmtree(caller / "run", ignore_errors=True)
    code = start(stage, "run_dir=run", *words)
    assert code == 0
    kept = ("*.safetensors", "reference.cache", "path_bias.json")
    files = sorted(path for pattern in kept for path in (caller / "run").rglob(pattern) if not path.name.startswith("optimizer"))
    return "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "field"), [(stage, field) for stage in FIELDS for field in FIELDS[stage]])
def test_every_field_changes_the_run(caller, stage, field):
    """Two short runs that differ in this field alone leave different files."""
    (caller / "mine.py").write_text("def length(prompt, completion, row):\n    return len(completion)\n")
    steps = [{"prompt": f"{i}", "steps": ["7+1=8.", "8+1=9."], "labels": [1, 0]} for i in range(20)]
    (caller / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(20)]
    (caller / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i)} for i in range(20)]
    (caller / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    short = {
        "dpo": [*DPO, "eval.enabled=false", "checkpoint.every=0", "train.max_steps=2"],
        "prm": [*PRM, "checkpoint.every=0", "train.max_steps=2", "eval.enabled=false"],
        "ppo": [*PPO, "eval.enabled=false", "checkpoint.every=0", "train.max_steps=2"],
        "reference": PAIRS,
        "path_bias": ["prompts=4", "max_new_tokens=8"],
    }[stage]
    if stage == "ppo":
        short = [*short, *reward_model(caller)]
    words = [*short, *AROUND.get(field, [])]
    key = (stage, *words)
    if key not in TOOK:
        TOOK[key] = outcome(caller, stage, *words)
    changed = outcome(caller, stage, *words, f"{field}={FIELDS[stage][field]}")
    if field not in SAME or (stage, field) in (("reference", "forward_impl"), ("reference", "data.arm")):
        assert changed != TOOK[key]


@pytest.mark.parametrize("name", sorted(p.name for p in (STAGES / "configs").glob("*.toml") if p.name.startswith(tuple(STAGE))))
def test_a_shipped_configuration_plans_and_takes_a_step(caller, capsys, name):
    """Every one on a tiny model in the place of its own; Mistral's also plan without weights, as a person without them would."""
    stage = name.split("_")[0]
    path = STAGES / "configs" / name
    config_class = STAGE[stage][0]
    config = load_configuration(config_class, path)
    tiny = {"vocab_size": 1500, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = init(ModelConfig(**tiny, num_key_value_heads=1, max_position_embeddings=4096), 0, torch.bfloat16)
    assert type(make_optimizer(config.optimizer, model.named_parameters(), seed=0)).__name__ == "AdamW8bit"
    save(model, caller / "tiny")
    shutil.copy(START / "tokenizer.json", caller / "tiny/tokenizer.json")
    settings = json.loads((START / "tokenizer_config.json").read_text())
    (caller / "tiny/tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHAT}))
    (caller / "data").mkdir()
    turns = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "15"}]
    argilla = {
        "chosen": turns,
        "rejected": [turns[0], {"role": "assistant", "content": "16"}],
        "chosen-rating": 5.0,
        "rejected-rating": 1.0,
    }
    (caller / "data/ultrafeedback_binarized.jsonl").write_text("".join(json.dumps(argilla) + "\n" for _ in range(40)))
    step = {"completions": [{"text": "7+12=19.", "rating": 1}], "chosen_completion": 0, "human_completion": None}
    labelled = [{"question": {"problem": f"How many {i}?"}, "label": {"steps": [step], "finish_reason": "solution"}} for i in range(60)]
    (caller / "data/prm800k_phase2_train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    if "mistral" in name:
        assert start(stage, "--config", str(path), "--dry-run", "data.rows=50") == 0
        assert "13.50 GiB" in (told := capsys.readouterr().out) and "optimizer state (adamw8bit)" in told
    small = ["--config", str(path), "run_dir=run", "model.path=tiny", "model.tokenizer=none", "model.dtype=bfloat16"]
    small += ["train.max_steps=1", "train.global_batch=8", "train.micro_batch=4", "eval.enabled=false", "checkpoint.every=0"]
    small += ["schedule.warmup_steps=0"]
    if stage in ("grpo", "ppo"):
        small += ["rollout.max_new_tokens=8", "data.rows=8", "data.max_prompt=3000"]
    if stage in ("dpo",):
        small += ["data.rows=24", "data.max_length=2048"]
    if stage == "ppo":
        judge = ["run_dir=judge", "prm.label_token_ids=" + str(config.prm.label_token_ids), "model.path=tiny", "model.dtype=bfloat16"]
        labels = [{"prompt": "a", "steps": ["b"], "labels": [1]}]
        (caller / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labels))
        judge += ["data.source=steps.jsonl", "data.held_out=0", "train.max_steps=1", "train.global_batch=1", "train.micro_batch=1"]
        assert start("prm", *judge, "schedule.warmup_steps=0", "eval.enabled=false") == 0
        small += ["prm.path=judge", "prm.step_end=."]
    assert start(stage, *small, "--dry-run") == 0
    assert start(stage, *small) == 0
    line = read_history(caller / "run/history.jsonl")[0]
    assert line["step"] == 1 and (line["loss"] is None or line["grad_norm"] is not None)
