r"""Every row of the case files: labelled outputs, peers' suites, adversarial inputs, synthetic pairs, ceilings, the oracle's answers."""

import gzip
import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from align.verify import equivalent, grade, parse

DATA = Path(__file__).parent / "data"

# Rows where the contract of the README and the expected verdict part; each with its reason. All are policy rows.
DEVIATIONS = {
    "case-0094": "x = 5+5+1 = 7 = 11 contradicts itself, as 3 = 5 does; no side of it is an answer",
    "case-0521": "the same: x = 3 = 5",
    "case-0205": "the box of the gold is not closed: unreadable gold, no verdict",
    "case-0255": "a letter in running prose is no answer",
    "case-0264": "a gold of two words is text; A is one choice letter",
    "case-0265": "prose is no bare answer (nor is French)",
    "case-0268": "prose is no bare answer",
    "case-0271": "prose is no bare answer; grade() finds the number in it",
    "case-0274": "prose is no bare answer; grade() finds the number in it",
    "case-0275": "prose is no bare answer; grade() finds the number in it",
    "case-0283": "prose is no bare answer",
    "case-0284": "prose is no bare answer; grade() finds the number in it",
    "case-0285": "prose is no bare answer; grade() finds the number in it",
    "case-0280": "without a marker the last number counts, and that is 12 (months)",
    "adv-238": "5.3823323 is the correct rounding at eight significant digits, which passes from six on",
}


def rows(name):
    with gzip.open(DATA / name, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def judged(row):
    text = row["pred"] if row.get("pred") is not None else "".join(piece * count for piece, count in row["pred_parts"])
    return (equivalent if row.get("form") == "answer" else grade)(row["gold"], text)


@pytest.mark.parametrize("name", ["cases.jsonl.gz", "adversarial.jsonl.gz", "synth_pos.jsonl.gz", "synth_neg.jsonl.gz"])
def test_expected_verdicts(name):
    wrong = {row["id"]: row for row in rows(name) if (judged(row).correct is True) is not row["expected"]}
    assert {key for key in wrong if key not in DEVIATIONS} == set()
    assert not [key for key, row in wrong.items() if row["cls"] == "clear"] if "cls" in next(iter(wrong.values()), {}) else not wrong


def test_every_deviation_is_still_one():
    known = {row["id"]: row for name in ("cases.jsonl.gz", "adversarial.jsonl.gz") for row in rows(name)}
    for key in DEVIATIONS:
        assert (judged(known[key]).correct is True) is not known[key]["expected"], key


@pytest.mark.parametrize(
    ("name", "count"), [("gsm8k_labelled.jsonl.gz", 5276), ("gpt3_labelled.jsonl.gz", 2591), ("qwen_labelled.jsonl.gz", 388)]
)
def test_labelled_outputs(name, count):
    outputs = rows(name)
    assert len(outputs) == count
    assert [row for row in outputs if grade(row["gold"], row["text"]).correct is not row["label"]] == []


@pytest.mark.parametrize(("name", "texts"), [("gsm8k_test.jsonl.gz", 0), ("math500.jsonl.gz", 8)])
def test_ceiling(name, texts):
    kinds = Counter()
    for row in rows(name):
        gold = row["gold"]
        kinds[parse(gold).kind] += 1
        for verdict in (equivalent(gold, gold), grade(gold, f"\\boxed{{{gold}}}"), grade(gold, row["solution"], mode="marked")):
            assert verdict.correct, (row["id"], verdict)
    assert kinds["raw"] == 0 and kinds["text"] <= texts, kinds


def test_symmetry_on_every_case():
    for name in ("cases.jsonl.gz", "adversarial.jsonl.gz", "synth_pos.jsonl.gz"):
        for row in rows(name):
            answer = row.get("pred")
            if answer is None:
                continue
            if name == "synth_pos.jsonl.gz":
                answer = answer.removeprefix("\\boxed{").removesuffix("}")
            forward, back = equivalent(row["gold"], answer), equivalent(answer, row["gold"])
            assert (forward.correct is True) == (back.correct is True), row["id"]


def test_agreement_with_the_oracle_on_labelled_outputs():
    frozen = {row["id"]: row["oracle"] for row in rows("oracle_answers.jsonl.gz")}
    outputs = [(f"gsm-{k}", row) for k, row in enumerate(rows("gsm8k_labelled.jsonl.gz"))]
    outputs += [(row["id"], row) for row in rows("qwen_labelled.jsonl.gz")]
    differs = [key for key, row in outputs if (grade(row["gold"], row["text"]).correct is True) is not frozen[key]]
    assert len(outputs) == 5664
    assert 1 - len(differs) / len(outputs) >= 0.9995, differs
    assert set(differs) <= {row["id"] for row in rows("oracle_disagreements.jsonl.gz")}


def test_every_disagreement_with_the_oracle_is_adjudicated():
    settled = {row["id"]: row for row in rows("oracle_disagreements.jsonl.gz")}
    frozen = {row["id"]: row["oracle"] for row in rows("oracle_answers.jsonl.gz")}
    found = set()
    for name in ("cases.jsonl.gz", "adversarial.jsonl.gz", "synth_pos.jsonl.gz", "synth_neg.jsonl.gz"):
        for row in rows(name):
            oracle = frozen.get("boxed:" + row["id"], row.get("mv_0_9_0"))
            if oracle is not None and oracle is not (judged(row).correct is True):
                found.add(row["id"])
    assert found == {key for key in settled if settled[key]["set"] != "outputs"}
    assert all(row["reason"] for row in settled.values())
    assert sum(row["right"] == "ours" for row in settled.values()) / len(settled) >= 0.95


def test_every_data_file_is_the_one_of_the_provenance():
    table = (DATA / "PROVENANCE.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `([\w.]+)` .*`([0-9a-f]{64})` \|$", table, re.MULTILINE))
    assert listed == {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in DATA.glob("*.gz")}
