"""A few processes that judge; when one dies, whatever the reason, the waiting for it ends.

Each has a pipe of its own, whose far end the parent closes, so that its death is seen in any state. With concurrent.futures it is not:
before Python 3.11.5 jobs go through a pipe whose far end the parent holds too, and where they are more than the pipe takes (64 KiB) and no
worker is left, the parent writes for ever.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from align.verify._budget import VerifyError

GUARD = (
    'a script file calls grade_batch with processes under `if __name__ == "__main__":`, for workers import it; or give processes=1, which '
    "starts none"
)
EXIT_S = 1.0  # for a worker to end by itself, once its pipe is closed

Judge = Callable[[Any], Any]


def judge_over(judge: Judge, jobs: Sequence[Any], processes: int) -> list[Any]:
    """`judge(job)` of every job, in order. No process is left behind.

    judge: a function of a module. Raises VerifyError when a worker cannot start or dies, and what a worker raised.
    """
    waiting, results = iter(enumerate(jobs)), dict[int, Any]()
    with _started(judge, min(processes, len(jobs))) as workers:
        while len(results) < len(jobs):
            for connection in wait(workers):
                worker = workers[connection]  # type: ignore[index]
                said = worker.receive()
                if worker.at is not None:
                    results[worker.at] = said
                worker.at, job = next(waiting, (-1, None))
                if job is None:
                    del workers[worker.connection]
                else:
                    worker.send(job)
    return [results[at] for at in range(len(jobs))]


@contextmanager
def _started(judge: Judge, count: int) -> Iterator[dict[Connection, "_Worker"]]:
    workers: list[_Worker] = []
    done = False
    try:
        workers += (_Worker(judge, f"worker {at + 1} of {count}") for at in range(count))
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
    """A process, the near end of its pipe, and the number of the job it is at; None before it has said that it is there."""

    def __init__(self, judge: Judge, name: str) -> None:
        context = get_context("spawn")
        self.at: int | None = None
        self._name = f"{name} of grade_batch"
        try:
            self.connection, far = context.Pipe()
        except OSError as error:
            raise self._unstarted(error) from None
        self.process = context.Process(target=_work, args=(far, judge), daemon=True)
        try:
            self.process.start()
        except RuntimeError:  # this process is a worker itself and still imports the script
            self.connection.close()
            raise VerifyError(GUARD) from None
        except OSError as error:
            self.connection.close()
            raise self._unstarted(error) from None
        finally:
            far.close()

    def send(self, job: Any) -> None:
        try:
            self.connection.send(job)
        except OSError:
            raise self._death() from None

    def receive(self) -> Any:
        try:
            said = self.connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(said, Exception):
            raise said
        return said

    def end(self) -> None:
        self.process.join(EXIT_S)
        self.process.kill()
        self.process.join()

    def _unstarted(self, error: OSError) -> VerifyError:
        return VerifyError(f"{self._name} cannot be started ({error}); take fewer processes")

    def _death(self) -> VerifyError:
        self.end()
        code = self.process.exitcode or 0
        how = f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"
        if self.at is None and code >= 0:
            return VerifyError(f"{self._name} {how} at its start: {GUARD}")
        return VerifyError(f"{self._name} {how}; where memory was short, take fewer processes")


def _work(connection: Connection, judge: Judge) -> None:
    """A worker's life: it says that it is there, and answers jobs until the pipe is closed."""
    try:
        connection.send(None)
        while True:
            job = connection.recv()
            try:
                said: Any = judge(job)
            except Exception as error:
                said = error
            connection.send(said)
    except (EOFError, OSError):
        return  # the parent is done, or gone
