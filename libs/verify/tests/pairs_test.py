r"""Pairs written after the judge: hand-judged answers and outputs of every class, and expressions beside what sympy makes of them."""

import gzip
import json
from pathlib import Path

import pytest

from align.verify import equivalent, grade

DATA = Path(__file__).parent / "data"


def rows(name):
    with gzip.open(DATA / name, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_hand_judged_pairs_in_both_directions():
    pairs = rows("pairs.jsonl.gz")
    assert len(pairs) > 900
    for row in pairs:
        assert (equivalent(row["gold"], row["pred"]).correct is True) is row["expected"], row
        assert (grade(row["pred"], f"so \\boxed{{{row['gold']}}}").correct is True) is row["expected"], row


def test_hand_judged_outputs():
    outputs = rows("outputs.jsonl.gz")
    assert len(outputs) > 170
    for row in outputs:
        assert (grade(row["gold"], row["text"], mode=row["mode"]).correct is True) is row["expected"], row


def check(pairs):
    for row in pairs:
        verdict = equivalent(row["gold"], row["pred"])
        assert verdict.correct is row["expected"], (row, verdict)


def test_every_tenth_pair_of_sympy():
    check(rows("sympy_pairs.jsonl.gz")[::10])


@pytest.mark.slow
def test_all_pairs_of_sympy():
    pairs = rows("sympy_pairs.jsonl.gz")
    assert len(pairs) > 2_500
    check(pairs)
