"""evaluate: what is judged is kept, a resume asks only the rest, two results are compared, choices are scored by the model."""

import errno
import json
import os
import signal
from pathlib import Path

import _common
import evaluate as stage
import pytest
import torch
from _common import run_stage
from lean_harness import PRELUDE, descendants, fake_toolchain, real_toolchain

from align import lean
from align.checkpoint import save
from align.config import ConfigError
from align.data import arithmetic_rows
from align.evals import encode_prompt
from align.model import load
from align.rollout import Sample
from align.tokenizer import Tokenizer

CHECKPOINT = Path(stage.__file__).parent / "assets/arithmetic_sft"
SAMPLED = ("eval.problems=30", "eval.samples=2", "eval.temperature=1", "threads=1")


@pytest.fixture(autouse=True)
def caller(tmp_path, monkeypatch):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    return tmp_path


def start(*words):
    return run_stage("evaluate", stage.EvaluateConfig, stage.evaluate, "", words)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_resume_ends_in_the_same_items_and_asks_only_the_rest(caller, monkeypatch, share):
    assert start("run_dir=whole", *SAMPLED) == 0
    whole = (caller / "whole/items.jsonl").read_bytes()
    assert start("run_dir=half", *SAMPLED) == 0
    half = caller / "half"
    (half / "items.jsonl").unlink()
    (half / "stage_result.json").unlink()
    (half / "items.partial.jsonl").write_bytes(whole[: int(len(whole) * share)])  # torn in the middle of a line
    done = []
    original = stage.judge
    monkeypatch.setattr(stage, "judge", lambda *a, **k: done.append(len(k["done"])) or original(*a, **k))
    assert start("run_dir=half", *SAMPLED, "--resume") == 0
    assert (half / "items.jsonl").read_bytes() == whole and not (half / "items.partial.jsonl").exists()
    assert done == [whole[: int(len(whole) * share)].count(b"\n")]
    results = [json.loads((caller / name / "stage_result.json").read_text())["metrics"] for name in ("whole", "half")]
    assert results[0] == results[1]
    assert "pass_at_2_low" in json.loads((half / "eval.jsonl").read_text().splitlines()[-1])


def test_a_resume_with_other_settings_or_weights_is_refused_by_name(caller, capsys):
    assert start("run_dir=x", "--resume") == 2 and "nothing to resume there" in capsys.readouterr().err
    assert start("--resume") == 2 and "needs run_dir=" in capsys.readouterr().err
    assert start("run_dir=run", *SAMPLED) == 0
    assert start("run_dir=run", *SAMPLED, "seed=4", "--resume") == 2
    assert "seed was 0, is 4" in capsys.readouterr().err
    env = caller / "run/env.json"
    env.write_text(json.dumps({**json.loads(env.read_text()), "weights": "other"}))
    assert start("run_dir=run", *SAMPLED, "--resume") == 2 and "has other weights now" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["eval.temperature=nan"], "eval.temperature is nan"),
        (["eval.max_new_tokens=0"], "eval.max_new_tokens is 0"),
        (["eval.samples=0"], "eval.samples is 0"),
        (["eval.samples=2"], "would all be alike"),
        (["eval.batch=0"], "eval.batch is 0"),
        (["eval.problems=-4"], "eval.problems is -4"),
        (["eval.problems=0"], "eval.problems is 0"),
        (["show=-1"], "show is -1"),
        (["threads=-1"], "threads is -1"),
        (["chat=true"], "has no chat template; ask with bare prompts"),
        (["system=hi"], "system is set without chat=true"),
        (["eval.source=long.jsonl"], "long.jsonl: row 2, '7 7 7"),
    ],
)
def test_what_cannot_be_judged_is_refused_by_name_before_anything_is_written(caller, capsys, words, told):
    rows = [{"prompt": prompt, "answer": "7"} for prompt in ("7", "7 " * 300)]
    (caller / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert start("run_dir=run", *words) == 2
    assert told in capsys.readouterr().err and not (caller / "run").exists()


def test_a_full_disk_is_one_line_and_a_resume_goes_on(caller, monkeypatch, capsys):
    def full(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("items.partial.jsonl"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(_common.os, "fsync", full)
        assert start("run_dir=run", *SAMPLED) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.endswith("items.partial.jsonl: cannot be written (No space left on device); free space there, and go on with --resume")
    assert start("run_dir=run", *SAMPLED, "--resume") == 0


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_is_one_line_and_exit_code_5(caller, monkeypatch, capsys, number, name):
    before = signal.getsignal(number)
    with monkeypatch.context() as patched:
        patched.setattr(stage, "judge", lambda *args, **more: os.kill(os.getpid(), number))
        assert start("run_dir=run", *SAMPLED) == 5
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"evaluate: stopped by {name}; what was written is whole")
    assert signal.getsignal(number) is before and start("run_dir=run", *SAMPLED, "--resume") == 0


def run_of(folder, *steps):
    """A run directory whose checkpoints all hold the checked-in model."""
    model = load(CHECKPOINT)
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "tokenizer_files": CHECKPOINT}
    for step in steps:
        save(folder / "checkpoints", step, **given, trainer_state={}, tensors={}, keep=9)


def test_the_newest_checkpoint_of_a_run_is_judged_and_a_damaged_one_refused_with_the_way_out(caller, capsys):
    run_of(caller / "sft", 999_999, 1_000_000)
    (caller / "sft/checkpoints/step-2000000.bak").mkdir()
    assert start("run_dir=a", "model.path=sft", "eval.problems=3") == 0
    assert json.loads((caller / "a/stage_result.json").read_text())["checkpoint"].endswith("step-1000000")
    weights = caller / "sft/checkpoints/step-1000000/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1  # as a bad disk does: nothing else sees it
    weights.write_bytes(data)
    capsys.readouterr()
    for words in ([], ["--dry-run"]):
        assert start("run_dir=b", "model.path=sft", "eval.problems=3", *words) == 2
        assert capsys.readouterr().err == (
            f"evaluate: model.path sft: {weights.parent} is not whole: model.safetensors has another sha256 than its manifest says; "
            f"the newest whole one is older: model.path={weights.parent.parent / 'step-999999'}\n"
        )
    assert not (caller / "b").exists()
    assert start("run_dir=b", f"model.path={weights.parent.parent / 'step-999999'}", "eval.problems=3") == 0
    with pytest.raises(ConfigError, match=r"^prm\.path sft: .*older: prm\.path="):
        _common.model_directory(Path("sft"), "prm.path")


def test_two_results_are_compared(caller, capsys):
    assert start("run_dir=a", "eval.problems=30") == 0 and start("run_dir=b", "eval.problems=30", "eval.temperature=1") == 0
    assert start("run_dir=c", "eval.problems=27") == 0
    capsys.readouterr()
    assert stage.main(["--compare", "a", "b/items.jsonl"]) == 0
    said = capsys.readouterr().out
    assert "on 30 problems; B - A = -" in said and "B better on" in said and "problem " in said
    for words, wanted in ((["a"], "takes two"), (["a", "nothing"], "can't be read"), (["a", "c"], "compare results on the same rows")):
        assert stage.main(["--compare", *words]) == 2 and wanted in capsys.readouterr().err


def test_choices_are_scored_by_the_model(caller, capsys):
    """Against a forward of each choice on its own; the model knows which answer is right."""
    problems = arithmetic_rows(12, seed=5, held_out=True)
    wrong = [str(int(row["answer"]) + 1) for row in problems]
    rows = [
        {"prompt": row["prompt"], "choices": [f"\\boxed{{{bad}}}", f"\\boxed{{{row['answer']}}}"], "answer": "B"}
        for row, bad in zip(problems, wrong, strict=True)
    ]
    (caller / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert start("run_dir=run", "choices=true", "eval.source=rows.jsonl", "normalise=none") == 0
    assert json.loads((caller / "run/stage_result.json").read_text())["metrics"]["after"]["accuracy"] >= 0.75
    tokenizer, model = Tokenizer.load(CHECKPOINT), load(CHECKPOINT).float()  # in bf16 some CPUs round a row otherwise in another batch
    prompts = [encode_prompt(tokenizer, row) for row in rows]
    continuations = [tokenizer.encode(row["choices"][1]) for row in rows]
    for prompt, ids, value in zip(prompts, continuations, stage.scorer(model, tokenizer)(prompts, continuations), strict=True):
        logits = model.lm_head(model(torch.tensor([prompt + ids[:-1]])))[0, len(prompt) - 1 :]
        exact = torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(ids)[:, None]).sum().item()
        assert value == pytest.approx(exact, abs=1e-4)
    (caller / "rows.jsonl").write_text('{"prompt": "x", "choices": ["a", "b"], "answer": 7}\n')
    capsys.readouterr()
    assert start("run_dir=other", "choices=true", "eval.source=rows.jsonl") == 2 and "rows.jsonl:1: answer 7" in capsys.readouterr().err


class Prover:
    """A sampler that answers the theorem of each prompt by its number: `proof`, a wrong one, sorry, a wrong one."""

    proof = ""

    def __init__(self, model, *, eos_ids, max_batch):
        self.tokenizer = Tokenizer.load(CHECKPOINT)

    def generate(self, prompts_ids, *, n, max_new_tokens, **options):
        number = [int(self.tokenizer.decode(ids, skip_special=True).partition("theorem t")[2].split(" ")[0]) for ids in prompts_ids]
        texts = [[self.proof, "exact uses nothing", "sorry", "exact uses me"][i % 4] for i in number for _ in range(n)]
        return [Sample([], ids, [0.0] * len(ids), [0.0] * len(ids), "stop", 0) for ids in map(self.tokenizer.encode, texts)]


def prove(caller, monkeypatch, toolchain, *, statement, proof, header=""):
    rows = [{"name": f"t{i}", "formal_statement": f"theorem t{i} {statement} := by sorry", "header": header} for i in range(40)]
    (caller / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(lean, "find_toolchain", lambda prefix=None: toolchain)
    monkeypatch.setattr(Prover, "proof", proof)
    monkeypatch.setattr(_common, "NativeSampler", Prover)
    assert start("run_dir=run", "eval.source=lean:rows.jsonl", "eval.problems=40", "threads=1") == 0
    items = [json.loads(line) for line in (caller / "run/items.jsonl").read_text().splitlines()]
    assert [item["correct"] for item in items] == [True, False, False, False] * 10
    assert [item["reason"] for item in items[:3]] == ["accepted", "elaboration", "sorry"] and items[3]["gold"] == f"theorem t3 {statement}"
    metrics = json.loads((caller / "run/stage_result.json").read_text())["metrics"]["after"]
    assert metrics["accuracy"] == 0.25 and metrics["accuracy_low"] < 0.2 < 0.3 < metrics["accuracy_high"]
    assert descendants(os.getpid()) == [], "a child was left"
    return items


def test_lean_statements_are_judged_by_the_kernel_and_a_resume_asks_only_the_rest(caller, monkeypatch, capsys):
    items = prove(caller, monkeypatch, fake_toolchain(), statement=": 1 + 1 = 2", proof="exact rfl")
    assert "95 % interval" in capsys.readouterr().out
    run = caller / "run"
    whole = (run / "items.jsonl").read_bytes()
    (run / "items.partial.jsonl").write_bytes(b"".join(whole.splitlines(True)[:32]))  # stopped after the first 32
    for name in ("items.jsonl", "stage_result.json"):
        (run / name).unlink()
    checked = []
    original = stage.LeanReward.score
    monkeypatch.setattr(stage.LeanReward, "score", lambda self, rows, texts: checked.append(len(rows)) or original(self, rows, texts))
    assert start("run_dir=run", "eval.source=lean:rows.jsonl", "eval.problems=40", "threads=1", "--resume") == 0
    assert checked == [8] and (run / "items.jsonl").read_bytes() == whole and len(items) == 40


def test_without_lean_the_set_up_is_named(caller, monkeypatch, capsys):
    monkeypatch.delenv("ALIGN_LEAN", raising=False)
    (caller / "rows.jsonl").write_text(json.dumps({"name": "t", "formal_statement": "theorem t : True := by sorry"}) + "\n")
    assert start("run_dir=run", "eval.source=lean:rows.jsonl") == 2
    assert "lean_setup.sh" in capsys.readouterr().err


@pytest.mark.slow
def test_lean_statements_on_the_real_kernel(caller, monkeypatch):
    """Lean wants the block after `by` indented, and so the proof is."""
    prove(caller, monkeypatch, real_toolchain(), statement="(p q : Prop) (h : p) : p ∨ q", proof="  exact Or.inl h", header=PRELUDE)
