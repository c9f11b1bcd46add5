"""What the pool costs: a proof through it against the same three requests on a bare child, and k workers against k bare children.

bazel run //libs/lean:pool_bench (the real kernel comes with the target), or with the locked packages:
PYTHONPATH=libs/lean:libs/lean/tests:tools/py python3 libs/lean/benchmarks/pool_bench.py. Bare and pool take turns, the median of the
rounds counts; times are wall clock, CPU is of the children."""

import os
import subprocess
import threading
import time
from pathlib import Path

from lean_harness import PRELUDE, descendants, fake_toolchain, real_toolchain

from align.lean import LeanPool, Limits, Policy, Toolchain, check, inspect
from align.lean._check import _Proof
from align.lean._child import Child

STATEMENT, PROOF = "1 + 1 = 2", "theorem t : 1 + 1 = 2 := rfl"
TICK = os.sysconf("SC_CLK_TCK")


class Bare:
    """A child without pool or supervisor, and the same requests on it."""

    def __init__(self, toolchain: Toolchain, header: str):
        self.process = subprocess.Popen(
            toolchain.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(toolchain.environment), start_new_session=True
        )
        assert self.process.stdin and self.process.stdout
        self.child = Child(0, self.process.pid, os.dup(self.process.stdin.fileno()), os.dup(self.process.stdout.fileno()))
        reply = self.child.request({"cmd": header}, deadline=time.monotonic() + 60, cap=1 << 24)
        self.child.root = reply["env"]

    def prove(self, submission: str) -> None:
        _Proof(self.child, time.monotonic() + 60, 1 << 24, Policy()).run(STATEMENT, submission, "t")

    def close(self) -> None:
        self.child.close()
        self.process.kill()
        self.process.communicate()


def cpu(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15]))
    return total / TICK


def timed(count: int, one, workers: int) -> float:
    """Seconds for `count` calls of one(worker) in each of `workers` threads."""
    gate = threading.Barrier(workers + 1)

    def work(number: int) -> None:
        gate.wait()
        for _ in range(count):
            one(number)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(workers)]
    for thread in threads:
        thread.start()
    gate.wait()
    begin = time.monotonic()
    for thread in threads:
        thread.join()
    return time.monotonic() - begin


def compare(name: str, toolchain: Toolchain, header: str, submission: str, count: int, workers: int, rounds: int) -> None:
    bare = [Bare(toolchain, header) for _ in range(workers)]
    bare_s, pool_s = [], []
    with LeanPool(toolchain, workers=workers, limits=Limits(uses=1 << 30)) as pool:

        def through_pool(_: int) -> None:
            assert check(STATEMENT, submission, name="t", header=header, pool=pool).accepted

        timed(2, through_pool, workers)
        timed(2, lambda k: bare[k].prove(submission), workers)
        repls = [pid for pid in descendants(os.getpid()) if b"_repl.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        repls = [pid for pid in repls if pid not in [b.process.pid for b in bare]]
        used = watched = 0.0
        supervisor = [pid for pid in descendants(os.getpid()) if b"_supervisor.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        for _ in range(rounds):
            bare_s.append(timed(count, lambda k: bare[k].prove(submission), workers))
            before, watch = cpu(repls), cpu(supervisor)
            pool_s.append(timed(count, through_pool, workers))
            used, watched = used + cpu(repls) - before, watched + cpu(supervisor) - watch
    for child in bare:
        child.close()
    b, p = min(bare_s), min(pool_s)
    each = (p - b) / count * 1e3
    print(
        f"{name}, {workers} worker(s): bare {b / count * 1e3:.2f} ms a proof, pool {p / count * 1e3:.2f} ms, overhead {each:+.2f} ms,"
        f" throughput {b / p:.1%} of bare; {workers * count / p:.1f} proofs/s,"
        f" children's CPU {used / (rounds * workers * count) * 1e3:.1f} ms a proof,"
        f" supervisor's {watched / (rounds * workers * count) * 1e3:.2f} ms"
    )


def main() -> None:
    begin = time.process_time()
    for _ in range(2000):
        inspect(PROOF, name="t", policy=Policy())
    print(f"first layer: {(time.process_time() - begin) / 2000 * 1e3:.3f} ms for {len(PROOF)} characters")
    fake, real = fake_toolchain(), real_toolchain()
    compare("scripted REPL", fake, "", PROOF, 100, 1, 60)
    compare("scripted REPL, 20 ms a proof", fake, "", f"-- fake: sleep 0.02\n{PROOF}", 10, 4, 20)
    compare("Lean 4.35", real, PRELUDE, PROOF, 4, 1, 25)
    cores = len(os.sched_getaffinity(0))
    compare("Lean 4.35", real, PRELUDE, PROOF, 4, cores, 25)


if __name__ == "__main__":
    main()
