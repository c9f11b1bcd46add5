"""Thousands of checks with faults among them: no wrong verdict, nothing left behind, memory flat. Minutes: slow."""

import gc
import os
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from lean_harness import PRELUDE, alive, descendants, fake_toolchain, real_toolchain

from align.lean import LeanPool, Limits, Toolchain, check

pytestmark = pytest.mark.slow

GOOD = "theorem t : 1 = 1 := rfl"
FAKE_FAULTS = {  # what the comment makes of the child: the only statuses that may come of it
    "kill": {"crash"},
    "abort": {"crash"},
    "half": {"crash"},
    "behind": {"crash"},
    "garbage 50": {"crash"},
    "error": {"crash"},
    "flood": {"resource"},
    "memory": {"resource"},
    "hang": {"timeout"},
    "children 3": {"accept"},
    "stderr 20": {"accept"},
    "slowly": {"accept"},
}
BIG = "set_option exponentiation.threshold 20000000\ntheorem x : Nat.ble 1 (Nat.pow (Nat.pow 2 16777216) 64) = true := rfl\n"
REAL_FAULTS = {
    "-- fault: kill": {"crash"},
    "-- fault: hang": {"timeout"},
    "-- fault: garbage": {"crash"},
    BIG: {"resource"},
    "#print Nat.rec\n" * 60: {"resource"},
}


class Assassin:
    """Kills a random child of the pool at every so many checks, as the kernel's out-of-memory killer would."""

    def __init__(self, word: bytes, every: int):
        self.word, self.every, self.killed, self.seen = word, every, 0, 0
        self.random, self.lock = random.Random(0), threading.Lock()

    def look(self) -> None:
        with self.lock:
            self.seen += 1
            if self.seen % self.every:
                return
            victims = []
            for pid in descendants(os.getpid()):
                with suppress(OSError):
                    if self.word in Path(f"/proc/{pid}/cmdline").read_bytes():
                        victims.append(pid)
            if victims:
                with suppress(OSError):
                    os.kill(self.random.choice(victims), signal.SIGKILL)
                self.killed += 1


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(toolchain: Toolchain, header: str, jobs: list[tuple[str, set[str]]], limits: Limits, workers: int, assassin: Assassin) -> Counter:
    """Runs all jobs, asserts each verdict and that nothing stays. Returns the counts."""
    before = set(descendants(os.getpid()))
    counts: Counter[str] = Counter()
    marks: list[int] = []
    begin = time.monotonic()
    with LeanPool(toolchain, workers=workers, limits=limits) as pool, ThreadPoolExecutor(workers) as threads:

        def one(job: tuple[str, set[str]]) -> None:
            assassin.look()
            verdict = check("1 = 1", job[0], name="t", header=header, pool=pool)
            assert verdict.status in job[1], (job[0][:60], verdict)
            counts[verdict.status] += 1

        for done, _ in enumerate(threads.map(one, jobs), 1):
            if done % (len(jobs) // 10) == 0:
                gc.collect()
                marks.append(resident())
        below = set(descendants(os.getpid())) - before
        assert len(below) <= 1 + workers * (2 if header else 1), "more processes than the supervisor and its children"
        counts += pool.counts
    time.sleep(0.2)
    assert [pid for pid in below if alive(pid)] == []
    assert set(descendants(os.getpid())) <= before
    assert max(marks[5:]) - max(marks[:5]) < 16 << 20, f"the trainer grew: {marks} bytes"
    print(f"\n{len(jobs)} checks in {time.monotonic() - begin:.1f} s, {assassin.killed} children shot, memory {marks}: {dict(counts)}")
    return counts


def mixture(count: int, share: float, faults: dict[str, set[str]], prefix: str, seed: int) -> list[tuple[str, set[str]]]:
    """`count` jobs, `share` of them faults, each with the statuses it may get. A child that is shot twice is a crash, never a rejection."""
    random_ = random.Random(seed)
    jobs = []
    for _ in range(count):
        if random_.random() < share:
            fault = random_.choice(list(faults))
            jobs.append((f"{prefix}{fault}\n{GOOD}", faults[fault] | {"crash"}))
        elif random_.random() < 0.5:
            jobs.append((GOOD, {"accept", "crash"}))
        else:
            jobs.append(("theorem t : 1 = 2 := rfl", {"reject", "crash"}))
    return jobs


def test_ten_thousand_checks_on_the_scripted_repl():
    jobs = mixture(10_000, 0.03, FAKE_FAULTS, "-- fake: ", seed=11)
    limits = Limits(seconds=4, memory_bytes=150 << 20, reply_bytes=2 << 20)
    counts = soak(fake_toolchain(), "", jobs, limits, 4, Assassin(b"fake_repl", 100))
    wanted = sum("accept" in statuses for _, statuses in jobs)
    assert wanted - counts["accept"] <= 10  # shot twice in a row
    assert counts["accept"] + counts["reject"] + counts["crash"] + counts["timeout"] + counts["resource"] == 10_000


def test_five_hundred_checks_on_the_real_kernel():
    jobs = mixture(500, 0.08, REAL_FAULTS, "", seed=12)
    limits = Limits(seconds=15, memory_bytes=150 << 20, reply_bytes=6000)
    counts = soak(real_toolchain(), PRELUDE, jobs, limits, 2, Assassin(b"real_repl", 15))
    wanted = sum("accept" in statuses for _, statuses in jobs)
    assert wanted - counts["accept"] <= 5
    assert counts["accept"] + counts["reject"] + counts["crash"] + counts["timeout"] + counts["resource"] == 500
