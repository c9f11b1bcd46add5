"""Verdicts, caps and crashes on the real Lean 4.35 kernel, through the pool. The library is tests/prelude, the REPL tests/real_repl.py."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from lean_harness import PRELUDE, real_toolchain

from align.lean import LeanPool, Limits, Policy, StatementError, Verdict, check, inspect
from align.lean._words import HASH_REFUSED, REFUSED, SORRY

DATA = Path(__file__).parent / "data"
LIMITS = Limits(seconds=60, memory_bytes=1 << 30)
# All that the first layer refuses by word, allowed: what is left to judge are the kernel, the statement and the axioms.
WITHOUT_LEXER = Policy(
    allow=frozenset(REFUSED) | SORRY | {"@[", "open private"} | {f"#{word}" for word in HASH_REFUSED},
    options=frozenset({"linter", "maxHeartbeats", "maxRecDepth", "debug.skipKernelTC", "«debug».skipKernelTC", "warn.sorry", "pp.all"})
    | {"debug.proofAsSorry", "pp.privateNames", "pp.fullNames"},
)
LOOP = (
    "noncomputable def f (n : Nat) : Nat :="
    " Nat.rec (motive := fun _ => Nat → Nat) (fun x => Nat.succ x) (fun _ g x => g (g x)) n Nat.zero\n"
)
BIG = "set_option exponentiation.threshold 20000000\ntheorem x : Nat.ble 1 (Nat.pow (Nat.pow 2 16777216) 64) = true := rfl\n"
NO_LIMITS = "set_option maxHeartbeats 0\nset_option maxRecDepth 1000000\n"


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def shared_out(found: list[dict]) -> list:
    """Every fifth row by default, the others with the slow ones: each costs three elaborations."""
    return [pytest.param(row, id=row["id"], marks=[] if k % 5 == 0 else pytest.mark.slow) for k, row in enumerate(found)]


@pytest.fixture(scope="module")
def toolchain():
    return real_toolchain()


@pytest.fixture(scope="module")
def pool(toolchain):
    with LeanPool(toolchain, workers=1, limits=LIMITS) as pool:
        yield pool


def judge(pool: LeanPool, statement: str, submission: str, **more) -> Verdict:
    return check(statement, submission, name=more.pop("name", "t"), header=PRELUDE, pool=pool, **more)


# Shared cases whose twin runs on the prelude, and what the kernel says where the lexer lets them through.
TWINS = {
    "inc_unsolved": "elaboration",
    "inc_parse_tail": "elaboration",
    "inc_redecl": "elaboration",
    "inc_example": "name_missing",
    "ax_ofReduceBool": "elaboration",
    "st_weaker": "statement_mismatch",
    "st_hyp": "statement_mismatch",
    "st_variable": "elaboration",
    "st_universe": "statement_mismatch",
    "st_open_ns_left": "name_missing",
    "st_cyrillic": "elaboration",
    "out_blank_lines": "accepted",
    "ok_comm": "accepted",
    "ok_word_in_comment": "accepted",
    "ok_word_in_ident": "accepted",
    "ok_warning": "accepted",
    "ok_crlf": "accepted",
    "ok_heartbeats": "accepted",
    "ok_defeq_binder": "accepted",
}


@pytest.mark.parametrize("case", [row for row in rows("cases.jsonl") if row["id"] in TWINS], ids=lambda row: row["id"])
def test_shared_cases(pool, case: dict):
    verdict = judge(pool, case["statement"], case["code"], name=case["theorem"])
    assert verdict.reason == TWINS[case["id"]], verdict
    assert verdict.status == case["expected"]
    assert verdict.attempts == 1


@pytest.mark.parametrize("row", shared_out(rows("honest.jsonl")))
def test_honest_proofs_are_accepted(pool, row: dict):
    verdict = judge(pool, row["statement"], row["code"])
    assert verdict.accepted, verdict
    assert verdict.axioms == tuple(row["axioms"])


ATTACKS = rows("attacks.jsonl")
FOR_LEAN = [row for row in ATTACKS if inspect(row["code"], name="t", policy=Policy()) is None]
NAMED = ("at_variable_false", "at_evil_instance", "at_coercion", "at_coercion_plain", "at_open_namespace", "at_skip_kernel")


@pytest.mark.parametrize("row", shared_out(FOR_LEAN))
def test_attacks_are_rejected(pool, row: dict):
    verdict = judge(pool, row["statement"], row["code"])
    assert verdict.status == "reject", verdict


@pytest.mark.parametrize("row", [row for row in ATTACKS if row["id"] in NAMED], ids=lambda row: row["id"])
def test_attacks_that_survive_print_axioms_are_rejected_by_lean(pool, row: dict):
    """An instance or a section variable leaves #print axioms clean; a coercion can feed the variable to the closing theorem."""
    verdict = judge(pool, row["statement"], row["code"], policy=WITHOUT_LEXER)
    assert verdict.status == "reject"
    assert verdict.reason == ("axioms" if row["id"] in ("at_open_namespace", "at_skip_kernel") else "statement_mismatch")


@pytest.mark.slow
@pytest.mark.parametrize("row", ATTACKS, ids=lambda row: row["id"])
def test_no_attack_passes_without_the_lexer(pool, row: dict):
    """at_exit makes the REPL of the tests lose the question: a fault, and no verdict."""
    verdict = judge(pool, row["statement"], row["code"], policy=WITHOUT_LEXER)
    assert verdict.status == ("crash" if row["id"] == "at_exit" else "reject"), verdict


@pytest.mark.slow
@pytest.mark.parametrize("case", [row for row in rows("cases.jsonl") if not row["header"]], ids=lambda row: row["id"])
def test_no_shared_case_passes_without_the_lexer(pool, case: dict):
    if case["expected"] == "accept" or case["id"] == "res_loop":
        return
    try:
        verdict = judge(pool, case["statement"], case["code"], name=case["theorem"], policy=WITHOUT_LEXER)
    except StatementError:
        return  # the prelude has no such statement
    assert not verdict.accepted, verdict


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Policy(), WITHOUT_LEXER], ids=["policy", "without lexer"])
def test_nothing_of_what_was_run_on_lean_435_proves_false(pool, policy: Policy):
    for row in rows("real_lean_4_35.jsonl"):
        code = row["code"].replace("prelude\nimport MiniInit\n", "").replace("#print axioms t", "")
        if "…" in code or "\x00" in code:
            continue
        for statement in ("False", "(1 : Nat) = 2"):
            verdict = judge(pool, statement, code, policy=policy)
            # #exit makes the tests' REPL lose the question; the endless reduction overflows the stack: faults, and no verdict.
            fault = "exit" in row["id"] or row["id"] == "heartbeat0_loop"
            assert verdict.status == "reject" or (fault and verdict.status == "crash"), (row["id"], verdict)


def test_the_callers_statement_is_checked_by_lean(pool):
    with pytest.raises(StatementError, match="does not elaborate"):
        judge(pool, "1 + 1 = nonsense", "theorem t : 1 + 1 = 2 := rfl")
    with pytest.raises(StatementError, match="does not elaborate"):
        judge(pool, "1 + 1", "theorem t : 1 + 1 = 2 := rfl")
    assert judge(pool, "1 + 1 = 2", "theorem t : 1 + 1 = 2 := rfl").accepted


def test_proofs_do_not_see_each_other(pool):
    first = "theorem aux : 1 + 1 = 2 := rfl\ntheorem t : 1 + 1 = 2 := aux"
    order = [(first, True), ("theorem t : 1 + 1 = 2 := aux", False)] * 3
    random.Random(3).shuffle(order)
    for code, accepted in order:
        assert judge(pool, "1 + 1 = 2", code).accepted == accepted


@pytest.mark.parametrize(
    ("code", "limits", "status", "reason"),
    [
        (NO_LIMITS + LOOP + "theorem t : f 24 = f 25 := rfl", {}, "crash", "stack_overflow"),
        ("theorem t : 1 + 1 = 2 := by\n  repeat skip", {"seconds": 1.0}, "timeout", "wall_clock"),
        (BIG + "theorem t : 1 + 1 = 2 := rfl", {"memory_bytes": 150 << 20}, "resource", "memory"),
        ("theorem t : 1 + 1 = 2 := rfl\n" + "#print Nat.rec\n" * 40, {"reply_bytes": 4096}, "resource", "output"),
    ],
    ids=["stack", "loop", "memory", "output"],
)
def test_what_a_proof_uses_up_is_no_rejection(toolchain, pool, code: str, limits: dict, status: str, reason: str):
    with LeanPool(toolchain, workers=1, limits=replace(LIMITS, **limits)) as small:
        verdict = judge(small, "1 + 1 = 2", code)
        assert (verdict.status, verdict.reason) == (status, reason), verdict
    assert judge(pool, "1 + 1 = 2", "theorem t : 1 + 1 = 2 := rfl").accepted
