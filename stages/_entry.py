"""How every stage begins and ends; without torch, for the stages that need none."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

from align.config import Invocation, caller_path, parse_cli, workspace_root
from align.tracking import RunDir

T = TypeVar("T")
REPOSITORY = Path(__file__).absolute().parents[1]


def find(path: str | Path) -> Path:
    """A path of a configuration: absolute, or relative to the caller, else to the workspace, else to this repository's own files."""
    candidates = [caller_path(path), workspace_root() / path, REPOSITORY / path]
    return next((candidate for candidate in candidates if candidate.exists()), candidates[0])


def say(text: str) -> None:
    """Prints a line; of several ranks the first speaks."""
    if rank() == 0:
        print(text, flush=True)


def rank() -> int:
    """This process among those that a launcher started; 0 without one."""
    return int(os.environ.get("RANK", "0"))


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


class _Terminated(BaseException):
    """SIGTERM came where nothing saves on it."""


@contextmanager
def _told_of_sigterm() -> Iterator[None]:
    """SIGTERM ends a stage as Ctrl-C does, save in a rank: that may wait for another one, where no Python runs."""
    if "RANK" in os.environ or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_stage(name: str, config_class: type[T], stage: Callable[[Invocation[T]], int], description: str, argv: Sequence[str]) -> int:
    """Reads the command line, runs the stage, and turns a user's mistake into one line and an exit code (CONTRIBUTING.md lists them)."""
    keep_freed_memory()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a character of an answer ends no run
    try:
        with _told_of_sigterm():
            return stage(parse_cli(config_class, argv, prog=f"./bazelw run //stages:{name} --", description=description))
    except (KeyboardInterrupt, _Terminated) as error:  # where nothing saves on a signal: while data are read or judged, in generate
        by = "SIGTERM" if isinstance(error, _Terminated) else "Ctrl-C"
        print(f"{name}: stopped by {by}; what was written is whole, and a run goes on with --resume", file=sys.stderr, flush=True)
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
