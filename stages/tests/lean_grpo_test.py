"""GRPO whose reward is the real Lean kernel: generated propositional theorems, a model that has seen right and wrong proofs of others."""

import itertools
import json
import os
import random

import pytest
from _common import run_stage
from lean_harness import PRELUDE, descendants, real_toolchain
from rl_stage_cases import STAGES, cut, result, same_end, start
from sft import SftConfig, sft

from align import lean
from align.data import arithmetic_tokenizer_config, arithmetic_tokenizer_json
from align.tracking import read_history

pytestmark = pytest.mark.slow
FORMS = [  # hypotheses, goal, the proof, proofs that are not
    ("(h : {a})", "{a} ∨ {b}", "Or.inl h", ["Or.inr h", "And.intro h h", "h"]),
    ("(h : {b})", "{a} ∨ {b}", "Or.inr h", ["Or.inl h", "And.intro h h", "h"]),
    ("(h : {a} ∧ {b})", "{a}", "And.left h", ["And.right h", "Or.inl h", "h"]),
    ("(h : {a} ∧ {b})", "{b}", "And.right h", ["And.left h", "Or.inr h", "h"]),
    ("(h : {a}) (k : {b})", "{a} ∧ {b}", "And.intro h k", ["And.intro k h", "Or.inl h", "And.left h"]),
    ("(h : {a}) (k : {b})", "{b} ∧ {a}", "And.intro k h", ["And.intro h k", "Or.inr k", "And.right k"]),
    ("(h : {a} → {b}) (k : {a})", "{b}", "h k", ["k h", "h", "k"]),
]
WORDS = ("prelude", "import", "AlignSyntax", "theorem", "t", "Prop", "exact", "Or", "And", "inl", "inr", "left", "right", "intro", "h", "k")


def problems():
    """Every form under every pair of names, each also with a third proposition that nothing is said of."""
    for (given, goal, right, wrong), (a, b), more in itertools.product(FORMS, itertools.permutations("pqrsuvw", 2), ("", " x", " y")):
        statement = f"theorem t ({a} {b}{more} : Prop) {given} : {goal}".format(a=a, b=b)
        yield statement, f"  exact {right}", [f"  exact {each}" for each in wrong]


def tokenizer_json():
    """The default task's, with the words of these theorems in place of its own."""
    document = arithmetic_tokenizer_json()
    as_bytes = {symbol: "".join(_byte(b) for b in symbol.encode()) for symbol in "∨∧→"}
    specials = [token["content"] for token in document["added_tokens"]]
    characters = [
        *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789ĠĊ.:()=",
        *sorted({c for s in as_bytes.values() for c in s}),
    ]
    words = [w for w in WORDS if len(w) > 1] + [f"Ġ{w}" for w in [*WORDS, "by", *"pqrsuvwxy", "(", ":", ":=", ")", *as_bytes.values()]]
    words += [*as_bytes.values(), ":=", ").", "Ġ).", "Ġ(("]
    document["model"]["vocab"] = {token: index for index, token in enumerate(dict.fromkeys([*specials, *characters, *words]))}
    document["pre_tokenizer"]["pretokenizers"] = document["pre_tokenizer"]["pretokenizers"][1:]
    return document


def _byte(value):
    """GPT-2's printable stand-in of a byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(value) if value in plain else chr(256 + [b for b in range(256) if b not in plain].index(value))


@pytest.fixture
def caller(tmp_path, monkeypatch):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(tmp_path))
    return tmp_path


@pytest.fixture
def kernel(monkeypatch):
    toolchain = real_toolchain()
    monkeypatch.setattr(lean, "find_toolchain", lambda prefix=None: toolchain)
    return toolchain


def prepare(folder):
    draws = random.Random(0)
    rows = list(problems())
    draws.shuffle(rows)
    asked, shown = rows[:300], rows[300:]
    (folder / "lean.jsonl").write_text(
        "".join(json.dumps({"name": "t", "formal_statement": f"{s} := by", "header": PRELUDE}) + "\n" for s, _, _ in asked)
    )
    demonstrations = [
        {"prompt": f"{PRELUDE}\n{s} := by\n", "completion": draws.choice(wrong) if draws.random() < 0.6 else right}
        for s, right, wrong in shown
        for _ in range(6)
    ]
    (folder / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in demonstrations))
    model = folder / "lean_model"
    model.mkdir()
    (model / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (model / "tokenizer_config.json").write_text(json.dumps(arithmetic_tokenizer_config()))
    config = json.loads((STAGES / "models/arithmetic/config.json").read_text())
    config["vocab_size"] = len(tokenizer_json()["model"]["vocab"])
    (model / "config.json").write_text(json.dumps(config))


def test_grpo_learns_to_prove(caller, kernel):
    """Twenty steps: the share of accepted proofs rises, no child is left, a resume gives the same bytes."""
    prepare(caller)
    words = ["model.path=lean_model", "model.from_scratch=true", "data.source=shown.jsonl", "data.max_length=1024", "data.held_out=0.02"]
    words += ["train.max_steps=350", "eval.problems=0", "eval.every=0", "checkpoint.every=0", "optimizer.lr=0.003"]
    assert run_stage("sft", SftConfig, sft, "", ["run_dir=sft", *words]) == 0
    words = ["model.path=sft", "reward=lean", "data.source=lean:lean.jsonl", "train.max_steps=20", "train.global_batch=128"]
    words += [
        "train.micro_batch=128",
        "rollout.group=8",
        "rollout.dead_retries=0",
        "rollout.max_new_tokens=16",
        "eval.problems=0",
        "checkpoint.every=5",
        "checkpoint.keep=9",
    ]
    words += ["optimizer.lr=0.0005", "schedule.warmup_steps=5", "tripwire.flat=none", "tripwire.dead=none"]
    assert start("grpo", "run_dir=run", *words) == 0
    history = read_history(caller / "run/history.jsonl")
    rewards = [line["reward"] for line in history]
    print([round(reward, 2) for reward in rewards], history[-1])
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15
    assert history[0]["reason_accepted"] == pytest.approx(history[0]["reward"])
    assert descendants(os.getpid()) == [], "a child was left"
    cut(caller / "run", caller / "cut", 15)
    assert start("grpo", "run_dir=cut", *words, "--resume") == 0
    same_end(caller / "run", caller / "cut", 20)
    assert result(caller / "run")["status"] == "done"
