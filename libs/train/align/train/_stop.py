"""Signals that end a run in order."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last is what Slurm can be told to send before the end of the time


class StopRequest:
    """While entered, SIGTERM, SIGINT and SIGUSR1 only set `reason`; a second SIGINT (Ctrl-C) does what it did before.

    A second SIGTERM must not: a launcher and a scheduler often both send one, and the checkpoint is being written by then.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, self._before[signal.SIGINT])
