"""The benchmark of reinforcement on a GPU, on small shapes: that it runs, and that its numbers add up."""

import json
import subprocess
import sys
from argparse import Namespace

import pytest
from rl_gpu import CASES, TINY, one
from rl_stage_cases import STAGES

PROGRAM = STAGES / "benchmarks/rl_gpu.py"


def small(name, tmp_path):
    return one(name, Namespace(tiny=True, steps=2, minutes=1.0, out=tmp_path, weights=None, sft_steps=1, grpo_steps=1))


def test_grpo_s_shares_add_up_to_the_step(tmp_path):
    row = small("grpo-7.25B-kl", tmp_path)
    assert row["tokens"] == TINY.prompts * TINY.group * (TINY.prompt + TINY.new)
    assert row["tok_s"] == pytest.approx(row["tokens"] / row["step_s"], rel=0.01)
    shares = [value for name, value in row.items() if name.startswith("share_")]
    assert sum(shares) == pytest.approx(1, abs=1e-3) and min(shares) >= 0 and row["share_logprobs"] > 0
    assert row["ratio"] == [1.0, 1.0] and row["kl"] is not None and row["mismatch"] < 1e-5


def test_dpo_counts_real_tokens(tmp_path):
    row = small("dpo-7.25B", tmp_path)
    assert TINY.longest / 4 <= row["mean_length"] <= TINY.longest and row["real_tok_s"] > 0
    assert row["tokens"] <= 2 * TINY.pairs * TINY.longest


@pytest.mark.slow
def test_the_whole_program(tmp_path):
    """A process a case, a row a case; smollm2 runs the stages on the default task here."""
    only = "grpo-1.44B,dpo-1.44B,smollm2"
    command = [sys.executable, PROGRAM, "--tiny", "--only", only, "--out", tmp_path, "--steps", "2", "--minutes", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rl_gpu.jsonl").read_text().splitlines()]
    assert [row["case"] for row in rows] == only.split(",") and set(only.split(",")) <= set(CASES)
    for stage, name in (("sft", "accuracy_1"), ("grpo", "sampled_accuracy")):
        for when in ("before", "after"):
            assert rows[2][stage][when][f"{name}_low"] <= rows[2][stage][when][name] <= rows[2][stage][when][f"{name}_high"]
