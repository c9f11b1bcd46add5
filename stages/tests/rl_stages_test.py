"""The stages after SFT as a user starts them: what they learn from, what they write, what stops them, what they refuse."""

import json
import shutil
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from _common import run_stage
from dpo import DpoConfig, dpo
from grpo import GrpoConfig, grpo
from path_bias import PathBiasConfig, measure
from ppo import PpoConfig, ppo
from prm import PrmConfig, prm
from reference import ReferenceConfig, reference

from align.config import load as load_configuration
from align.model import ModelConfig, init, load, save
from align.tracking import read_history
from align.train import make_optimizer

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


@pytest.fixture(autouse=True)
def caller(tmp_path, monkeypatch):
    """The person stands in an empty folder."""
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(tmp_path))
    return tmp_path


def start_grpo(*words: str) -> int:
    return run_stage("grpo", GrpoConfig, grpo, "", words)


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


@pytest.mark.parametrize("value", ["None", "float('nan')", "float('inf')", "1/0"])
def test_a_reward_that_is_no_number_ends_the_run(caller, capsys, value):
    (caller / "mine.py").write_text(f"def bad(prompt, completion, row):\n    return {value}\n")
    assert start_grpo("run_dir=run", *GRPO, "reward=mine.py:bad", "eval.enabled=false") == 2
    told = capsys.readouterr().err
    assert "mine.py:bad" in told and "on prompt" in told
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
    "rollout.batch": "3", "rollout.inner_steps": "2", "rollout.dead_retries": "3", "rollout.mask_dead_groups": "false",
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
    """Those of train, optimizer, schedule, checkpoint, eval and guard are tested with the Trainer and SFT, tripwire's in its library."""
    own = {
        name
        for name in names(GrpoConfig)
        if not name.startswith(
            ("train.", "optimizer.", "schedule.", "checkpoint.", "eval.", "guard.", "model.", "launch.", "lora.", "tripwire.")
        )
    }
    assert own - set(FIELDS) == {"run_dir", "data.source", "data.chat", "data.system"}


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_changes_the_run(caller, field):
    """Two short runs that differ in this field alone differ in the weights; or, where only memory or time differs, do not."""
    (caller / "mine.py").write_text("def length(prompt, completion, row):\n    return len(completion)\n")
    words = [*GRPO, *BASE.get(field, []), "train.max_steps=2", "eval.enabled=false", "checkpoint.every=0"]
    ends = []
    for name, more in (("a", []), ("b", [f"{field}={FIELDS[field]}"])):
        assert start_grpo(f"run_dir={name}", *words, *more) == 0
        ends.append((caller / name / "checkpoints/step-000002/model.safetensors").read_bytes())
    if field not in ("rollout.batch", "forward_impl"):
        assert ends[0] != ends[1]


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
    ],
)
def test_what_no_run_can_have_is_refused_before_anything_is_written(caller, capsys, words, told):
    assert start_grpo("run_dir=run", *GRPO, *words) == 2
    printed = capsys.readouterr().err
    assert told in printed and printed.count("\n") == 1 and not (caller / "run").exists()


def test_a_dry_run_plans_and_writes_nothing(caller, capsys):
    assert start_grpo(*GRPO, "--dry-run") == 0
    assert "4 prompts × 4 answers" in capsys.readouterr().out and list(caller.iterdir()) == []


PAIRS = ["data.rows=60", "data.samples=4", "data.max_new_tokens=24"]
DPO = [*(word for word in SHORT if not word.startswith("data.rows")), *PAIRS, "optimizer.lr=0.001", "schedule.warmup_steps=0"]
PRM = [
    "train.max_steps=4", "train.global_batch=16", "train.micro_batch=8", "data.rows=60", "data.samples=2", "checkpoint.every=1",
    "checkpoint.keep=9", "schedule.warmup_steps=0",
]  # fmt: skip
PPO = [*SHORT, "rollout.max_new_tokens=24", "optimizer.lr=0.001", "schedule.warmup_steps=0"]


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
        (["launch.nproc=2"], "one process"),
        (["--config", "tbd.toml"], "prm.path"),
        (["critic.lam=2"], "critic.lam"),
        (["prm.path=judge", "prm.label_token_ids=[5,5]"], "two different"),
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


CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


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
        assert start(stage, "--config", str(path), "--dry-run") == 0
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
