"""The stages as a user starts them: what they write, what they refuse, what is shipped with them."""

import errno
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from _common import on_ranks, run_stage
from evaluate import EvaluateConfig, evaluate
from sft import SftConfig, sft

from align.config import load as load_configuration
from align.data import arithmetic_tokenizer_config, arithmetic_tokenizer_json
from align.model import ModelConfig, init, load
from align.tracking import read_history
from align.tracking._jsonl import Lines
from align.train import learning_rate, make_optimizer

STAGES = Path(__file__).absolute().parents[1]
SHORT = [
    "train.max_steps=40",
    "data.rows=400",
    "data.held_out=0.1",
    "data.max_length=512",
    "eval.problems=30",
    "eval.every=20",
    "checkpoint.every=20",
]


@pytest.fixture(autouse=True)
def caller(tmp_path, monkeypatch):
    """The person stands in an empty folder."""
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(tmp_path))
    return tmp_path


def start_sft(*words: str) -> int:
    return run_stage("sft", SftConfig, on_ranks(str(STAGES / "sft.py"), sft), "", words)


def start_evaluate(*words: str) -> int:
    return run_stage("evaluate", EvaluateConfig, evaluate, "", words)


def test_a_run_leaves_everything_and_learns(caller, capsys):
    assert start_sft("run_dir=run", *SHORT) == 0
    run = caller / "run"
    assert {path.name for path in run.iterdir()} == {
        "config.toml",
        "env.json",
        "history.jsonl",
        "eval.jsonl",
        "samples.jsonl",
        "report.html",
        "stage_result.json",
        "checkpoints",
    }
    result = json.loads((run / "stage_result.json").read_text())
    assert (result["stage"], result["status"], result["steps"]) == ("sft", "done", 40)
    assert {"accuracy_1", "accuracy_2", "accuracy_3", "held_out_loss"} <= set(result["metrics"]["before"]) & set(result["metrics"]["after"])
    assert result["metrics"]["after"]["held_out_loss"] < 0.5 * result["metrics"]["before"]["held_out_loss"]
    history = read_history(run / "history.jsonl")
    assert [line["step"] for line in history] == list(range(1, 41))
    config = load_configuration(SftConfig, run / "config.toml")
    assert [line["lr"] for line in history] == [learning_rate(config.schedule, config.optimizer.lr, step, 40) for step in range(40)]
    assert [line["step"] for line in read_history(run / "eval.jsonl")] == [0, 20, 40]
    printed = capsys.readouterr().out
    assert "360 rows kept" in printed or "rows kept" in printed
    assert f"next     ./bazelw run //stages:evaluate -- model.path={result['checkpoint']}" in printed

    # The checkpoint is judged as the run judged it.
    assert start_evaluate("run_dir=judged", "model.path=run", "eval.problems=30") == 0
    judged = json.loads((caller / "judged/stage_result.json").read_text())["metrics"]["after"]
    assert {name: judged[name] for name in ("accuracy_1", "accuracy_2", "accuracy_3")} == {
        name: result["metrics"]["after"][name] for name in ("accuracy_1", "accuracy_2", "accuracy_3")
    }
    assert len((caller / "judged/items.jsonl").read_text().splitlines()) == 30


def test_a_killed_run_resumes_to_the_same_bytes(caller):
    words = [
        "train.max_steps=24",
        "schedule.warmup_steps=5",
        "data.rows=300",
        "data.max_length=256",
        "eval.enabled=false",
        "checkpoint.every=8",
    ]
    assert start_sft("run_dir=whole", *words) == 0
    process = subprocess.Popen(
        [sys.executable, STAGES / "sft.py", "run_dir=killed", *words], stderr=subprocess.PIPE, text=True, stdout=subprocess.DEVNULL
    )
    while not (caller / "killed/checkpoints/step-000008").exists() and process.poll() is None:
        pass
    process.kill()
    process.communicate()
    assert start_sft("run_dir=killed", *words, "--resume") == 0
    for name in ("model.safetensors", "optimizer-00000-of-00001.safetensors", "trainer.safetensors"):
        whole, killed = (caller / run / "checkpoints/step-000024" / name for run in ("whole", "killed"))
        assert whole.read_bytes() == killed.read_bytes(), name
    assert [line["step"] for line in read_history(caller / "killed/history.jsonl")] == list(range(1, 25))


def test_a_refused_resume_leaves_the_run_as_it_was(caller, capsys):
    words = ["run_dir=run", *SHORT, "eval.enabled=false"]
    assert start_sft(*words) == 0
    before = {path: path.read_bytes() for path in (caller / "run").rglob("*") if path.is_file()}
    assert start_sft(*words, "--resume", "optimizer.lr=0.001", "data.rows=300") == 2
    told = capsys.readouterr().err
    assert "optimizer.lr was 0.003 and is 0.001" in told and "--allow-change optimizer.lr" in told and "data was" in told
    assert {path: path.read_bytes() for path in (caller / "run").rglob("*") if path.is_file()} == before


def test_resume_without_a_checkpoint_starts_at_step_0_and_says_so(caller, capsys):
    (caller / "run").mkdir()
    (caller / "run/history.jsonl").write_text('{"step": 1, "loss": 9.0}\n{"step": 2, "lo')
    assert start_sft("run_dir=run", *SHORT, "eval.enabled=false", "--resume") == 0
    assert "starting at step 0" in capsys.readouterr().err
    assert [line["step"] for line in read_history(caller / "run/history.jsonl")] == list(range(1, 41))


def test_a_signal_stops_with_a_checkpoint_and_exit_code_5(caller):
    words = ["run_dir=run", *SHORT, "eval.enabled=false", "train.max_steps=4000", "train.log_every=1"]
    process = subprocess.Popen([sys.executable, STAGES / "sft.py", *words], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert "step 1/4000" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    told = process.communicate()[1]
    result = json.loads((caller / "run/stage_result.json").read_text())
    assert process.returncode == 5 and "--resume" in told
    assert result["status"] == "stopped" and result["reason"] == "SIGTERM" and result["checkpoint"].endswith(f"step-{result['steps']:06d}")


def test_a_run_that_breaks_says_so_and_keeps_its_checkpoint(caller, monkeypatch, capsys):
    """The disk fills up in the middle."""
    append = Lines.append

    def full(self, record, **more):
        if record["step"] == 30:
            raise OSError(errno.ENOSPC, "No space left on device", "history.jsonl")
        append(self, record, **more)

    monkeypatch.setattr(Lines, "append", full)
    assert start_sft("run_dir=run", *SHORT, "eval.enabled=false") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert json.loads((caller / "run/stage_result.json").read_text())["status"] == "failed"
    assert [path.name for path in (caller / "run/checkpoints").iterdir()] == ["step-000020"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["optimizer.lrr=1"], "lrr"),
        (["train.max_steps=many"], "train.max_steps"),
        (["train.max_steps=0"], "train.max_steps is 0"),
        (["--config", "absent.toml"], "absent.toml"),
        (["data.source=absent.jsonl"], "absent.jsonl"),
        (["data.source=bad.jsonl"], "bad.jsonl:2"),
        (["data.source=empty.jsonl"], "empty.jsonl"),
        (["model.path=nowhere"], "config.json"),
        (["model.path=small", "model.tokenizer=mistral-7b-v0.3"], "a vocabulary of"),
        (["data.overlong=error", "data.max_length=16"], "max_length 16"),
        (["data.packing=false", "data.source=long.jsonl", "data.overlong=truncate"], "max_position_embeddings"),
        (["run_dir=bad.jsonl/run"], "bad.jsonl"),
        (["train.global_batch=3", "train.micro_batch=2"], "micro_batch"),
        (["schedule.warmup_steps=3000"], "warmup_steps 3000"),
        (["--dry-run", "guard.ignore=everything"], "everything"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(caller, capsys, words, told):
    (caller / "bad.jsonl").write_text('{"prompt": "1+1", "completion": "2"}\n{"prompt": 1+1}\n')
    (caller / "empty.jsonl").write_text("")
    (caller / "long.jsonl").write_text(json.dumps({"prompt": "1", "completion": "2" * 400}) + "\n")
    (caller / "small").mkdir()
    (caller / "small/config.json").write_text((STAGES / "models/arithmetic/config.json").read_text())
    before = sorted(caller.rglob("*"))
    code = start_sft(*(["run_dir=run"] if not any(word.startswith("run_dir") for word in words) else []), *words)
    printed = capsys.readouterr()
    assert code == 2
    assert told in printed.err and printed.err.count("\n") == 1 and printed.err.startswith("sft: ")
    assert sorted(caller.rglob("*")) == before, "something was half-written"


def test_a_run_that_does_not_fit_is_refused_with_3(caller, capsys):
    assert start_sft("run_dir=run", "guard.mem_floor_gb=100000", *SHORT) == 3
    assert "100000" in capsys.readouterr().err and not (caller / "run").exists()


def test_an_existing_run_is_not_written_over(caller, capsys):
    assert start_sft("run_dir=run", *SHORT, "eval.enabled=false", "train.max_steps=30") == 0
    assert start_sft("run_dir=run", *SHORT, "eval.enabled=false", "train.max_steps=30") == 2
    assert "--resume" in capsys.readouterr().err


@pytest.mark.parametrize("name", [path.name for path in sorted((STAGES / "configs").glob("sft_*.toml"))])
def test_a_shipped_configuration_plans_and_takes_a_step(name, capsys):
    path = STAGES / "configs" / name
    if name.startswith("sft_mistral"):
        assert start_sft("--config", str(path), "--dry-run", "data.rows=200") == 0
        told = capsys.readouterr().out
        assert "rows kept" in told and "truncated" in told and "steps    200" in told and "optimizer state (adamw8bit)" in told
        # 7.25B: 2 bytes of bf16 weights, 2 of gradients, 2.004 of state
        assert "13.50 GiB" in told and "13.53 GiB" in told
    config = load_configuration(SftConfig, path)
    model = init(
        ModelConfig(
            vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
        ),
        0,
        torch.bfloat16,
    )
    optimizer = make_optimizer(config.optimizer, model.named_parameters(), seed=0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.lm_head(model(torch.arange(8)[None])).float().logsumexp(-1).sum().backward()
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    assert type(optimizer).__name__ == "AdamW8bit"
    assert any(not torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_the_missing_7b_directory_is_named_with_what_belongs_there(capsys):
    assert start_sft("--config", str(STAGES / "configs/sft_mistral7b.toml")) == 2
    assert "models/Mistral-7B-v0.3" in (told := capsys.readouterr().err) and "*.safetensors" in told and "tokenizer.json" in told


def test_the_shipped_tokenizer_is_the_task_s():
    folder = STAGES / "models/arithmetic"
    assert json.loads((folder / "tokenizer.json").read_text()) == arithmetic_tokenizer_json()
    assert json.loads((folder / "tokenizer_config.json").read_text()) == arithmetic_tokenizer_config()
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == len(arithmetic_tokenizer_json()["model"]["vocab"])


def test_the_checked_in_checkpoint_knows_the_task(caller):
    folder = STAGES / "assets/arithmetic_sft"
    assert (folder / "model.safetensors").stat().st_size < 250_000
    assert next(load(folder).parameters()).dtype == torch.bfloat16
    assert start_evaluate("run_dir=judged", "eval.problems=300") == 0
    judged = json.loads((caller / "judged/stage_result.json").read_text())["metrics"]["after"]
    assert judged["accuracy_1"] >= 0.95 and judged["accuracy_2"] >= 0.95 and judged["accuracy_3"] >= 0.80


def test_a_stage_imports_in_little_more_than_torch(tmp_path):
    """With compiled modules, as every run but the first has them; a sandbox keeps none."""
    program = "from time import process_time as now; a = now(); import torch; b = now(); import sft; c = now(); print((c - b) / (b - a))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(tmp_path)
    run = partial(subprocess.run, [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    shares = [float(run().stdout) for _ in range(3)][1:]
    assert min(shares) <= 0.5 / 1.3  # 0.5 s where torch takes 1.3 s: a ratio, because machines differ


def test_help_names_every_field(capsys):
    with pytest.raises(SystemExit):
        start_sft("--help")
    told = capsys.readouterr().out
    for field in ("train.max_steps", "optimizer.lr", "data.source", "eval.problems", "guard.ignore", "run_dir"):
        assert field in told
