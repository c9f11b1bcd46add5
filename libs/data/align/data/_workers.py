"""A few processes that do jobs; when one dies, whatever the reason, the waiting for it ends.

Each has a pipe of its own, whose far end the parent closes, so that its death is seen in any state. With concurrent.futures it is not: what
a worker is made with goes through a pipe whose far end the parent holds too, and where that is more than the pipe takes (64 KiB; a
vocabulary is) and the worker is dead, the parent writes for ever. Before Python 3.11.5 the jobs go such a way as well.
"""

import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from ._errors import DataError

GUARD = 'a script calls build_shards with processes under `if __name__ == "__main__":`, for workers import the script; or take processes=1'
EXIT_S = 1.0  # for a worker to end by itself, once its pipe is closed
SIGN_S = 1.0  # from one sign of life to the next

Alive = Callable[[], object]
Work = Callable[[Any, Any, Alive], Any]  # (job, tools, alive) -> result


def do_over(work: Work, tools: Any, jobs: Iterator[Any], processes: int, alive: Alive) -> Iterator[Any]:
    """`work(job, tools, alive)` of every job, in order; at most two jobs a process are held at a time. No process is left behind.

    work: a function of a module; its calls of `alive` come through, of each worker one a second at most. Raises DataError when a worker
    dies, and what a worker or the jobs raised.
    """
    with _started(processes, pickle.dumps((work, tools, SIGN_S))) as workers:
        given, results, ended = 0, dict[int, Any](), False
        idle: list[_Worker] = []
        for wanted in count():
            while wanted not in results:
                while idle and not ended and given < wanted + 2 * processes:
                    job = next(jobs, None)
                    if job is None:
                        ended = True
                    else:
                        idle.pop().give(given, job)
                        given += 1
                if ended and wanted == given:
                    return
                for connection in wait(workers):
                    worker = workers[connection]  # type: ignore[index]
                    kind, said = worker.receive()
                    if kind == "alive":
                        alive()
                        continue
                    if worker.at is not None:
                        results[worker.at] = said
                    idle.append(worker)
            yield results.pop(wanted)


@contextmanager
def _started(number: int, needed: bytes) -> Iterator[dict[Connection, "_Worker"]]:
    workers: list[_Worker] = []
    done = False
    try:
        workers += (_Worker(needed) for _ in range(number))
        yield {worker.connection: worker for worker in workers}
        done = True
    finally:
        for worker in workers:
            worker.connection.close()
            if not done:
                worker.process.kill()
        for worker in workers:
            worker.end()


class _Worker:
    """A process, the near end of its pipe, and the number of the last job it was given; None before it has said that it is there."""

    def __init__(self, needed: bytes) -> None:
        context = get_context("spawn")
        self.at: int | None = None
        self._needed = needed
        self.connection, far = context.Pipe()
        self.process = context.Process(target=_work, args=(far,), daemon=True)
        try:
            self.process.start()
        except RuntimeError:  # this process is a worker itself and still imports the script
            self.connection.close()
            raise DataError(GUARD) from None
        finally:
            far.close()

    def give(self, at: int, job: Any) -> None:
        try:
            if self.at is None:
                self.connection.send_bytes(self._needed)
            self.at = at
            self.connection.send(job)
        except OSError:
            raise self._death() from None

    def receive(self) -> tuple[str, Any]:
        """("ready", None), ("alive", None) or ("done", the result); what the work raised is raised."""
        try:
            kind, said = self.connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if kind == "failed":
            raise said
        return kind, said

    def end(self) -> None:
        self.process.join(EXIT_S)
        self.process.kill()
        self.process.join()

    def _death(self) -> DataError:
        self.end()
        code = self.process.exitcode or 0
        how = f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"
        if self.at is None and code >= 0:
            return DataError(f"a worker of build_shards {how} at its start: {GUARD}")
        return DataError(f"a worker of build_shards {how}; where memory was short, take fewer processes, or fewer rows_per_shard")


def _work(connection: Connection) -> None:
    """A worker's life: it says that it is there, gets its work and tools, and does jobs until the pipe is closed."""
    try:
        connection.send(("ready", None))
        work, tools, sign_s = connection.recv()
        signed = time.monotonic()

        def alive() -> None:
            nonlocal signed
            if time.monotonic() - signed >= sign_s:
                signed = time.monotonic()
                connection.send(("alive", None))

        while True:
            job = connection.recv()
            try:
                said = "done", work(job, tools, alive)
            except Exception as error:
                said = "failed", error
            connection.send(said)
    except (EOFError, OSError):
        return  # the parent is done, or gone
