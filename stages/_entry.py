"""How every stage begins and ends; without torch, for the stages that need none."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

import _early

from align.config import Invocation, caller_path, parse_cli, workspace_root
from align.tracking import RunDir

T = TypeVar("T")
REPOSITORY = Path(__file__).absolute().parents[1]
STOPS = (signal.SIGTERM, signal.SIGUSR1)  # the latter is what Slurm can be told to send before the end of the time
PATIENCE_S = 5.0  # that a rank which was told to stop may take to end in order


def find(path: str | Path) -> Path:
    """A path of a configuration: absolute, or relative to the caller, else to the workspace, else to this repository's own files."""
    candidates = [caller_path(path), workspace_root() / path, REPOSITORY / path]
    return next((candidate for candidate in candidates if candidate.exists()), candidates[0])


def say(text: str) -> None:
    """Prints a line; of several ranks the first speaks. Raises OutputLost: nothing takes it any more, as with `| head`."""
    if rank() == 0:
        try:
            print(text, flush=True)
        except OSError as error:
            raise OutputLost(error) from None


def rank() -> int:
    """This process among those that a launcher started; 0 without one."""
    return int(os.environ.get("RANK", "0"))


class OutputLost(Exception):
    """Standard output takes nothing more."""

    exit_code = 2

    def __init__(self, error: OSError):
        super().__init__(f"standard output cannot be written ({error.strerror}); look at what reads it, or free space there")


class Life:
    """Shows that a run lives, once it has a run directory: what is built before that is given this."""

    def __init__(self) -> None:
        self.run: RunDir | None = None

    def __call__(self) -> None:
        if self.run is not None:
            self.run.alive()


def keep_freed_memory() -> None:
    """Has glibc keep freed memory instead of giving it back: small models free and fault in the same pages every step.

    Measured on an idle machine: 47 to 39 ms a step of the default size. Without glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


class _Stopped(BaseException):
    """A signal came where nothing saves on it; the argument is its name."""


@contextmanager
def _told_of_signals(name: str) -> Iterator[None]:
    """SIGTERM and SIGUSR1 end a stage as Ctrl-C does, where it has not begun to train: the Trainer saves on them."""
    _early.begun()
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise _Stopped(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in STOPS}
    try:
        with _ended_where_it_waits(name, stop) if "RANK" in os.environ else nullcontext():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _ended_where_it_waits(name: str, stop: Callable[..., object]) -> Iterator[None]:
    """A rank may wait for another one in a call during which no Python runs, its signal handlers neither; a thread ends it then."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    over = threading.Event()

    def watch() -> None:
        while number := os.read(reading, 1):
            if signal.getsignal(number[0]) is stop and not over.wait(PATIENCE_S):
                _say_stopped(name, signal.Signals(number[0]).name)
                os._exit(5)
        os.close(reading)

    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=watch, name="signals", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        os.close(writing)


def _say_stopped(name: str, by: str) -> None:
    """The first rank speaks for all: a launcher hands a signal to every one."""
    if rank() == 0:
        print(f"{name}: stopped by {by}; what was written is whole, and a run goes on with --resume", file=sys.stderr, flush=True)


def run_stage(name: str, config_class: type[T], stage: Callable[[Invocation[T]], int], description: str, argv: Sequence[str]) -> int:
    """Reads the command line, runs the stage, and turns a user's mistake into one line and an exit code (CONTRIBUTING.md lists them)."""
    keep_freed_memory()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a character of an answer ends no run
    try:
        with _told_of_signals(name):
            return stage(parse_cli(config_class, argv, prog=f"./bazelw run //stages:{name} --", description=description))
    except (KeyboardInterrupt, _Stopped) as error:  # where nothing saves on a signal: while data are read or judged, in generate
        _say_stopped(name, str(error) or "Ctrl-C")
        return 5
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if code is None and isinstance(error, OSError) and error.filename is not None:
            code = 2
        if code is None:
            raise
        if rank():
            time.sleep(3)  # what goes wrong on every rank is told by the first, and the launcher ends the others meanwhile
        print(f"{name}: {f'rank {rank()}: ' * (rank() > 0)}{error}", file=sys.stderr, flush=True)
        return int(code)
