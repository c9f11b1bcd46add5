"""The shared cases and miniF2F proofs on the pinned Lean v4.9.0-rc1 with Mathlib. Skips, saying how to get it, where ALIGN_LEAN names
none."""

import json
from pathlib import Path

import pytest
import requires

from align.lean import LeanPool, Limits, Problem, StatementError, check, find_toolchain

pytestmark = pytest.mark.slow

DATA = Path(__file__).parent / "data"
HEADER = "import Mathlib\nimport Aesop\n\nset_option maxHeartbeats 400000\n\nopen BigOperators Real Nat Topology Rat\n"
# Written for a later Lean: this one has no such option, tactic or library, and rejects them for that.
LATER = {"ok_word_in_string"}


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def pool():
    toolchain = find_toolchain(requires.lean_toolchain())
    with LeanPool(toolchain, workers=1, limits=Limits(seconds=120, memory_bytes=6 << 30)) as pool:
        yield pool


@pytest.mark.parametrize("case", sorted(rows("cases.jsonl"), key=lambda row: row["header"]), ids=lambda row: row["id"])
def test_shared_cases(pool, case: dict):
    try:
        verdict = check(case["statement"], case["code"], name=case["theorem"], header=case["header"], pool=pool)
    except StatementError:
        assert case["id"] in LATER or "4.9" not in case["lean"]
        return
    assert verdict.accepted == (case["expected"] == "accept"), verdict
    if case["expected"] == "reject":
        assert verdict.status == "reject", verdict


@pytest.mark.parametrize("row", rows("dsp15_minif2f_valid_few_shot.jsonl"), ids=lambda row: row["name"])
def test_proofs_of_minif2f(pool, row: dict):
    problem = Problem.of_theorem(row["formal_statement"], HEADER)
    verdict = check(problem.statement, row["formal_statement"] + row["formal_proof"], name=problem.name, header=problem.header, pool=pool)
    assert verdict.accepted, verdict
