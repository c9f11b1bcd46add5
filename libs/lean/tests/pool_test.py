"""The pool and the verdict's protocol on a scripted REPL: framing, faults at every point, caps, nothing left behind."""

import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from lean_harness import ENVIRONMENT, alive, command_line, descendants, fake_toolchain, python_path

from align.lean import HeaderError, LeanError, LeanPool, LeanReward, Limits, Policy, Problem, StatementError, Toolchain, check

GOOD = "theorem t : 1 = 1 := rfl"
LIMITS = Limits(seconds=60, memory_bytes=200 << 20)  # no test may depend on how busy the machine is


@pytest.fixture(scope="module")
def pool():
    with LeanPool(fake_toolchain(), workers=1, limits=LIMITS) as pool:
        yield pool


def judge(pool: LeanPool, submission: str, statement: str = "1 = 1", **more):
    return check(statement, submission, name="t", pool=pool, **more)


def fake(what: str) -> str:
    return f"-- fake: {what}\n{GOOD}"


def test_verdicts(pool):
    verdict = judge(pool, GOOD)
    assert (verdict.status, verdict.reason, verdict.axioms, verdict.attempts) == ("accept", "accepted", (), 1)
    assert verdict.detail == "accepted under Lean fake"
    assert verdict.pins == {"lean": {"version": "fake"}}
    assert verdict.seconds > 0
    assert verdict.rss_bytes > 1 << 20
    assert judge(pool, fake("axiom propext\n-- fake: axiom Quot.sound")).axioms == ("propext", "Quot.sound")


@pytest.mark.parametrize(
    ("submission", "reason"),
    [
        ("theorem t : 1 = 2 := rfl", "statement_mismatch"),
        ("theorem u : 1 = 1 := rfl", "name_missing"),
        ("theorem t : 1 = 1 := wrong", "elaboration"),
        ("theorem t : 1 = 1 := sorry", "sorry"),
        (fake("axiom cheat"), "axioms"),
        (fake("axiom propext\n-- fake: axiom A.propext"), "axioms"),
        (fake("axiom «propext,x»"), "axioms"),
        (fake("axiom sorryAx"), "sorry"),
        ("axiom t : 1 = 1", "forbidden"),
    ],
)
def test_rejections(pool, submission: str, reason: str):
    policy = Policy(allow=frozenset({"sorry"})) if "sorry" in submission else None
    verdict = judge(pool, submission, policy=policy)
    assert (verdict.status, verdict.reason) == ("reject", reason)


def test_the_allowed_axioms_are_the_policys(pool):
    assert judge(pool, fake("axiom cheat"), policy=Policy(axioms=frozenset({"cheat"}))).accepted
    assert judge(pool, fake("axiom propext"), policy=Policy(axioms=frozenset())).reason == "axioms"


@pytest.mark.parametrize("wording", ["declaration uses 'sorry'", "declaration uses `sorry`"])
def test_both_wordings_of_sorry(pool, wording: str):
    reply = json.dumps({"env": 0, "messages": [{"severity": "warning", "data": wording}]})
    assert judge(pool, fake(f"raw {json.dumps(reply)}")).reason == "sorry"


@pytest.mark.parametrize(
    ("what", "status", "reason"),
    [
        ("kill", "crash", "process_died"),
        ("exit 0", "crash", "process_died"),
        ("abort", "crash", "stack_overflow"),
        ("threads", "resource", "address_space"),
        ("half", "crash", "process_died"),
        ("cut 0", "crash", "process_died"),
        ("behind", "crash", "bad_reply"),
        ("later", "crash", "bad_reply"),
        ("garbage 20", "crash", "bad_reply"),
        ("error", "crash", "bad_reply"),
        ("big 17000000", "resource", "output"),
        ("flood", "resource", "output"),
        ("memory", "resource", "memory"),
        ("file written 3000000", "crash", "process_died"),
        ("slowly", "accept", "accepted"),
        ("big 1000000", "reject", "statement_mismatch"),
        ("stderr 30", "accept", "accepted"),
        ("children 4", "accept", "accepted"),
    ],
)
def test_faults(pool, what: str, status: str, reason: str, tmp_path: Path):
    verdict = judge(pool, fake(what.replace("written", str(tmp_path / "written"))))
    if what.startswith("file"):
        assert verdict.status in ("resource", "crash")
        assert not (tmp_path / "written").exists() or (tmp_path / "written").stat().st_size <= LIMITS.file_bytes
    elif what == "big 1000000":  # env 0 is the header's: the theorem is not in it
        assert (verdict.status, verdict.reason) == ("reject", "name_missing")
    else:
        assert (verdict.status, verdict.reason) == (status, reason)
    assert judge(pool, GOOD).accepted  # and the next one is not disturbed


@pytest.mark.parametrize(
    "reply",
    [
        "[]",
        "1",
        "null",
        '{"env": true}',
        '{"env": "0"}',
        '{"env": 1.5}',
        "{}",
        '{"env": 0, "messages": 1}',
        '{"env": 0, "messages": [{"severity": "odd", "data": ""}]}',
        '{"env": 0, "messages": [1]}',
        "[" * 5000,
    ],
)
def test_replies_that_are_none_are_never_a_verdict(pool, reply: str):
    verdict = judge(pool, fake(f"raw {json.dumps(reply)}"))
    assert (verdict.status, verdict.reason) == ("crash", "bad_reply")


def test_timeout(pool):
    with LeanPool(fake_toolchain(), workers=1, limits=replace(LIMITS, seconds=0.4)) as hasty:
        begin = time.monotonic()
        verdict = judge(hasty, fake("hang"))
        assert (verdict.status, verdict.reason, verdict.attempts) == ("timeout", "wall_clock", 1)
        assert 0.4 <= time.monotonic() - begin < 30
        assert hasty.counts["killed"] == 1
    assert judge(pool, fake("sleep 0.6")).accepted


def test_death_at_every_byte_of_a_reply(pool):
    """A reply cut anywhere is a crash, never a verdict."""
    for at in range(0, 14, 3):
        assert judge(pool, fake(f"cut {at}")).status == "crash"


def test_a_forged_answer_does_not_pass(pool):
    forged = "'final_0' does not depend on any axioms"
    assert judge(pool, fake(f"axiom cheat\n-- fake: say {forged}")).reason == "axioms"


def test_no_state_between_proofs(pool):
    order = [(f"theorem h{k} : 1 = 1 := rfl\n{GOOD}", True) for k in range(5)] + [(f"-- uses h{k}\n{GOOD}", False) for k in range(5)]
    random.Random(1).shuffle(order)
    for submission, accepted in order * 2:
        assert judge(pool, submission).accepted == accepted


def test_one_import_a_child_and_one_header_a_child():
    with LeanPool(fake_toolchain(), workers=1, limits=LIMITS) as pool:
        for _ in range(10):
            assert judge(pool, GOOD, header="import A").accepted
        assert pool.counts["starts"] == 1
        assert pool.counts["header hits"] == 9
        assert judge(pool, f"-- uses h\n{GOOD}", header="theorem h : 1 = 1 := rfl").accepted
        assert judge(pool, f"-- uses h\n{GOOD}", header="").reason == "elaboration"
        assert pool.counts["starts"] == 3


def test_children_are_recycled_by_use_and_by_memory():
    with LeanPool(fake_toolchain(), workers=1, limits=replace(LIMITS, uses=3)) as pool:
        assert all(judge(pool, GOOD).accepted for _ in range(7))
        assert pool.counts["starts"] == 3
    with LeanPool(fake_toolchain(), workers=1, limits=replace(LIMITS, recycle_bytes=1 << 20)) as pool:
        assert all(judge(pool, GOOD).accepted for _ in range(3))
        assert pool.counts["starts"] == 3


def test_mistakes_of_the_caller_are_errors(pool):
    with pytest.raises(StatementError):
        judge(pool, GOOD, statement="1 = 1) (")
    with pytest.raises(LeanError, match="identifier"):
        check("1 = 1", GOOD, name="a b", pool=pool)
    with pytest.raises(HeaderError, match="type mismatch"):
        judge(pool, GOOD, header="theorem x : 1 = 1 := wrong")
    with pytest.raises(LeanError, match="workers is 0"):
        LeanPool(fake_toolchain(), workers=0)
    with pytest.raises(LeanError, match=r"limits\.seconds"):
        Limits(seconds=0)
    with pytest.raises(LeanError, match="HOME"):
        Toolchain(("/bin/true",), {"HOME": "/"})
    closed = LeanPool(fake_toolchain(), workers=1)
    closed.close()
    with pytest.raises(LeanError, match="closed"):
        judge(closed, GOOD)
    assert judge(pool, GOOD).accepted


def test_a_program_that_cannot_start_is_a_crash():
    with LeanPool(Toolchain(("/nonexistent/repl",), ENVIRONMENT), workers=1, limits=LIMITS) as pool:
        verdict = judge(pool, GOOD)
        assert (verdict.status, verdict.reason) == ("crash", "unavailable")
        assert "/nonexistent/repl" in verdict.detail or "No such file" in verdict.detail


def test_a_childs_environment_is_four_names_and_its_limits_hold():
    others = set(descendants(os.getpid()))
    with LeanPool(fake_toolchain(), workers=1, limits=LIMITS) as pool:
        judge(pool, GOOD)
        supervisor, child = sorted(set(descendants(os.getpid())) - others)
        names = {entry.partition(b"=")[0].decode() for entry in Path(f"/proc/{child}/environ").read_bytes().split(b"\0") if entry}
        assert names == {"PATH", "LEAN_PATH", "LD_LIBRARY_PATH", "LEAN_SYSROOT"}
        limits = Path(f"/proc/{child}/limits").read_text()
        for line in ("Max address space         12884901888", "Max file size             1048576", "Max core file size        0"):
            assert line in limits
        assert "NoNewPrivs:\t1" in Path(f"/proc/{child}/status").read_text()
        assert os.getsid(child) == child
        assert os.getsid(supervisor) == supervisor
        assert sorted(os.listdir(f"/proc/{child}/fd")) == ["0", "1", "2"]
        assert not any(os.readlink(link).startswith("socket:") for link in Path(f"/proc/{child}/fd").iterdir())


def test_a_child_may_change_nothing_and_reach_nobody(pool, tmp_path: Path):
    version = ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    kept = tmp_path / "kept"
    kept.write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        verdict = judge(pool, fake(f"escape {tmp_path}/made {kept} {os.getpid()} {port}"))
    assert verdict.status == "crash"
    outcomes = verdict.detail.split()[-7:]
    for since, outcome, wanted in zip((1, 1, 1, 3, 6, 1, 4), outcomes, ("EACCES",) * 4 + ("EPERM", "EACCES", "EACCES"), strict=True):
        assert outcome == wanted or version < since or (wanted == "EACCES" and outcome == "EPERM"), outcomes
    assert version < 3 or (kept.read_text() == "kept" and sorted(os.listdir(tmp_path)) == ["kept"])


def test_memory_stops_within_the_overshoot():
    cap = 300 << 20
    with LeanPool(fake_toolchain(), workers=1, limits=replace(LIMITS, memory_bytes=cap)) as pool:
        verdict = judge(pool, fake("memory"))
        assert (verdict.status, verdict.reason) == ("resource", "memory")
        assert cap < verdict.rss_bytes <= cap + max(cap // 10, 64 << 20) + (16 << 20)  # the interpreter's own file-backed pages


def leaves_nothing(before: set[int], within: float = 1.0) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end:
        if not [pid for pid in before if alive(pid)]:
            return True
        time.sleep(0.02)
    return False


def test_close_leaves_nothing():
    pool = LeanPool(fake_toolchain(), workers=2, limits=LIMITS)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: judge(pool, fake("sleep 0.1")), range(2)))
    mine = set(descendants(os.getpid()))
    assert len(mine) >= 3
    pool.close()
    pool.close()
    assert leaves_nothing(mine - set(descendants(os.getpid())))


PARENT = """
import sys
from lean_harness import fake_toolchain
from align.lean import LeanPool, Limits, check
from concurrent.futures import ThreadPoolExecutor
pool = LeanPool(fake_toolchain(), workers=3, limits=Limits(seconds=30))
jobs = ["-- fake: children 3\\n-- fake: hang", "-- fake: hang", "theorem t : 1 = 1 := rfl"]
if len(sys.argv) > 1:
    import os
    if not os.fork():
        os.close(1)
        os.dup2(0, 1)
        import time
        time.sleep(600)
with ThreadPoolExecutor(3) as threads:
    done = threads.map(lambda job: check("1 = 1", job, name="t", pool=pool), jobs)
    print("started", flush=True)
    list(done)
"""


@pytest.mark.parametrize("forked", [False, True], ids=["alone", "with a fork that holds the socket"])
def test_sigkill_of_the_parent_leaves_nothing(forked: bool):
    arguments = [sys.executable, "-c", PARENT] + (["fork"] if forked else [])
    with subprocess.Popen(
        arguments, env={**os.environ, "PYTHONPATH": python_path()}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout
        parent.stdout.readline()
        end = time.monotonic() + 10
        while len(descendants(parent.pid)) < 1 + 3 + 3 and time.monotonic() < end:
            time.sleep(0.05)
        below = descendants(parent.pid)
        fork = [pid for pid in below if b"-c" in command_line(pid).split(b"\0")]
        parent.kill()
        parent.wait()
        try:
            assert len(below) >= 7
            assert leaves_nothing(set(below) - set(fork), within=1.0)
        finally:
            for pid in fork:
                os.kill(pid, signal.SIGKILL)


def test_the_supervisors_death_is_a_crash_and_the_next_check_has_another():
    others = set(descendants(os.getpid()))
    with LeanPool(fake_toolchain(), workers=1, limits=LIMITS) as pool:
        judge(pool, GOOD)
        below = set(descendants(os.getpid())) - others
        supervisor = next(pid for pid in below if b"_supervisor" in command_line(pid))
        threading.Timer(0.2, os.kill, (supervisor, signal.SIGKILL)).start()
        verdict = judge(pool, fake("sleep 0.5"))
        assert verdict.accepted
        assert verdict.attempts == 2
        assert judge(pool, GOOD).accepted
        assert pool.counts["supervisors"] == 2


def test_a_fork_may_not_use_the_pool(pool):
    judge(pool, GOOD)
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            judge(pool, GOOD)
        except LeanError as mistake:
            os.write(write, str(mistake).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    assert b"after a fork" in os.read(read, 1000)
    os.close(read)
    assert judge(pool, GOOD).accepted


def test_rewards_of_a_batch():
    problems = [
        Problem("1 = 1", "t"),
        Problem("1 = 2", "t", "import B"),
        Problem("1 = 1) (", "t"),
        Problem("1 = 1", "t", "theorem x : y := wrong"),
    ]
    with LeanPool(fake_toolchain(), workers=2, limits=LIMITS) as pool:
        reward = LeanReward(pool)
        batch = [
            (problems[0], f"Thus:\n```lean4\n{GOOD}\n```"),
            (problems[1], f"```lean4\nimport B\n{GOOD}\n```"),
            (problems[0], fake("kill")),
            (problems[2], GOOD),
            (problems[3], GOOD),
            (problems[0], "no code"),
        ]
        verdicts = reward(batch)
        assert [v.status for v in verdicts] == ["accept", "reject", "crash", "crash", "crash", "reject"]
        assert [reward.score(v) for v in verdicts] == [1.0, 0.0, None, None, None, 0.0]
        assert reward.counts == {
            "accept: accepted": 1,
            "reject: statement_mismatch": 1,
            "crash: process_died": 1,
            "crash: bad_statement": 1,
            "crash: bad_header": 1,
            "reject: name_missing": 1,
        }
