r"""Math-Verify 0.9 asked again: its frozen answers are what it says, and ours agree with it on labelled outputs."""

import gzip
import json
import subprocess
from pathlib import Path

import pytest
from requires import oracle

from align.verify import grade

pytestmark = pytest.mark.oracle
DATA = Path(__file__).parent / "data"
SCRIPT = Path(__file__).absolute().parents[3] / "third_party" / "oracle" / "verify_oracle.py"


def rows(name):
    with gzip.open(DATA / name, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def asked(pairs):
    told = subprocess.run([oracle(), "-I", SCRIPT], input=json.dumps(pairs), capture_output=True, text=True, check=True).stdout
    answer = json.loads(told)
    assert answer["version"] == "0.9.0"
    return answer["answers"]


def test_labelled_outputs_beside_the_oracle():
    outputs = [(f"gsm-{k}", row) for k, row in enumerate(rows("gsm8k_labelled.jsonl.gz"))]
    outputs += [(row["id"], row) for row in rows("qwen_labelled.jsonl.gz")]
    answers = asked([[row["gold"], row["text"]] for _, row in outputs])
    ours = [grade(row["gold"], row["text"]).correct is True for _, row in outputs]
    assert sum(a == b for a, b in zip(ours, answers, strict=True)) / len(ours) >= 0.9995
    # Frozen on the full outputs; here the GSM8K ones are cut to their last 120 characters, which moves an answer only where none is marked.
    frozen = {row["id"]: row["oracle"] for row in rows("oracle_answers.jsonl.gz")}
    assert sum(frozen[key] == answer for (key, _), answer in zip(outputs, answers, strict=True)) / len(ours) >= 0.999


def test_boxed_cases_are_what_the_oracle_says():
    frozen = {row["id"]: row["oracle"] for row in rows("oracle_answers.jsonl.gz")}
    cases = [row for row in rows("cases.jsonl.gz") if f"boxed:{row['id']}" in frozen]
    answers = asked([[row["gold"], f"\\boxed{{{row['pred']}}}"] for row in cases])
    assert len(cases) == 84
    assert answers == [frozen[f"boxed:{row['id']}"] for row in cases]
