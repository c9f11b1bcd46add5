"""A few processes that encode; when one dies, whatever the reason, the waiting for it ends.

Each has a pipe of its own, whose far end the parent closes, so that its death is seen in any state. With concurrent.futures it is not: what
a worker is made with goes through a pipe whose far end the parent holds too, and where that is more than the pipe takes (64 KiB; a
vocabulary is) and the worker is dead, the parent writes for ever. Before Python 3.11.5 the jobs go such a way as well.
"""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from align.tokenizer._errors import TokenizerError

if TYPE_CHECKING:
    from align.tokenizer._tokenizer import Tokenizer

GUARD = 'a script calls encode_batch with processes under `if __name__ == "__main__":`, for workers import the script; or take processes=1'
EXIT_S = 1.0  # for a worker to end by itself, once its pipe is closed

Job = tuple[list[str], bool, str]  # texts, add_special_tokens, special


def encode_over(tokenizer: "Tokenizer", jobs: Sequence[Job], processes: int) -> list[list[int]]:
    """The ids of every text of every job, in order. No process is left behind.

    Raises TokenizerError when a worker dies, and what a worker raised."""
    needed, waiting, results = pickle.dumps(tokenizer), iter(enumerate(jobs)), dict[int, list[list[int]]]()
    with _started(min(processes, len(jobs))) as workers:
        while len(results) < len(jobs):
            for connection in wait(workers):
                worker = workers[connection]  # type: ignore[index]
                said = worker.receive()
                if worker.at is None:
                    worker.send(needed)
                else:
                    results[worker.at] = said
                worker.at, job = next(waiting, (-1, None))
                if job is None:
                    del workers[worker.connection]
                else:
                    worker.send(pickle.dumps(job))
    return [ids for at in range(len(jobs)) for ids in results[at]]


@contextmanager
def _started(count: int) -> Iterator[dict[Connection, "_Worker"]]:
    workers: list[_Worker] = []
    done = False
    try:
        workers += (_Worker() for _ in range(count))
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

    def __init__(self) -> None:
        context = get_context("spawn")
        self.at: int | None = None
        self.connection, far = context.Pipe()
        self.process = context.Process(target=_work, args=(far,), daemon=True)
        try:
            self.process.start()
        except RuntimeError:  # this process is a worker itself and still imports the script
            self.connection.close()
            raise TokenizerError(GUARD) from None
        finally:
            far.close()

    def send(self, message: bytes) -> None:
        try:
            self.connection.send_bytes(message)
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

    def _death(self) -> TokenizerError:
        self.end()
        code = self.process.exitcode or 0
        how = f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"
        if self.at is None and code >= 0:
            return TokenizerError(f"a worker of encode_batch {how} at its start: {GUARD}")
        return TokenizerError(f"a worker of encode_batch {how}; where memory was short, take fewer processes")


def _work(connection: Connection) -> None:
    """A worker's life: it says that it is there, gets the tokenizer, and answers jobs until the pipe is closed."""
    try:
        connection.send(None)
        tokenizer = connection.recv()
        while True:
            texts, add_special_tokens, special = connection.recv()
            try:
                said: Any = [tokenizer.encode(text, add_special_tokens=add_special_tokens, special=special) for text in texts]
            except Exception as error:
                said = error
            connection.send(said)
    except (EOFError, OSError):
        return  # the parent is done, or gone
