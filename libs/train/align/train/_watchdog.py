"""Ends a run that stands still, and says which rank it waits for."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from align.train._ranks import Ranks

BEAT_S = 1.0
SILENT_S = 40.0  # a process whose thread has not said anything for so long is stopped, gone or cut off
EXIT_CODE = 1


class Store(Protocol):
    """What ranks write their beats to: torch.distributed's store."""

    def set(self, key: str, value: str) -> Any: ...
    def get(self, key: str) -> Any: ...
    def check(self, keys: list[str]) -> bool: ...


class Watchdog:
    """A thread in each rank. It tells the others that the process lives and how far it is, and looks at what they tell.

    The run ends when a rank has been silent for `silent` seconds (stopped, killed, cut off), or when no rank has made progress for
    `timeout` seconds. The message names the ranks that the others wait for and the step; then the process ends, whatever its main thread
    waits in.
    """

    def __init__(
        self,
        ranks: Ranks,
        timeout: float | None,
        *,
        store: Store | None = None,
        silent: float = SILENT_S,
        end: Callable[[str], None] | None = None,
        signs: Callable[[], Any] = lambda: None,
    ) -> None:
        """store: None takes torch.distributed's. signs: changes while this process makes progress that nobody tells by `progress`."""
        self._ranks, self._timeout, self._silent, self._store = ranks, timeout, silent, store
        self._end, self._signs = end or _end, signs
        self._told = (0, "the start")  # (how often progress was made, where)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._seen: dict[int, tuple[Any, float]] = {}  # what a rank said last, and when it was first seen saying it
        self._moved = time.monotonic()

    def __enter__(self) -> Watchdog:
        if self._timeout is not None:
            if self._store is None and self._ranks.world > 1:
                from torch.distributed.distributed_c10d import _get_default_store

                self._store = _get_default_store()
            self._moved = time.monotonic()
            self._tell(0)  # at once: of a rank that stops before its thread first speaks, the others would know nothing
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * BEAT_S)

    def progress(self, where: str) -> None:
        """The main thread got to `where`."""
        self._told = (self._told[0] + 1, where)

    def _watch(self) -> None:
        beats = 0
        while not self._stop.wait(BEAT_S):
            beats += 1
            try:
                said = self._exchange(beats)
            except Exception as error:
                if not self._stop.is_set():
                    self._end(f"rank {self._ranks.rank} at {self._told[1]}: the ranks' store does not answer ({error})")
                return
            if (message := self._judge(said)) and not self._stop.is_set():
                self._end(message)
                return

    def _tell(self, beats: int) -> list[Any]:
        own = [beats, *self._told, self._signs()]
        if self._store is not None:
            self._store.set(f"align/beat/{self._ranks.rank}", json.dumps(own))
        return own

    def _exchange(self, beats: int) -> dict[int, list[Any]]:
        """[beats, progress, where, sign] of every rank that has said something."""
        own = self._tell(beats)
        if self._store is None:
            return {self._ranks.rank: own}
        keys = {rank: f"align/beat/{rank}" for rank in range(self._ranks.world)}
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def _judge(self, said: dict[int, list[Any]]) -> str | None:
        now = time.monotonic()
        for rank, beat in said.items():
            before = self._seen.get(rank)
            if before is None or before[0][1::2] != beat[1::2]:
                self._moved = now
            if before is None or before[0] != beat:
                self._seen[rank] = (beat, now)
        silent = [rank for rank, (_, since) in self._seen.items() if now - since > self._silent]
        if silent:
            rank = silent[0]
            return (
                f"rank {rank} has not been heard of for {now - self._seen[rank][1]:.0f} s; it was at {self._seen[rank][0][2]}, "
                f"rank {self._ranks.rank} is at {self._told[1]}: the run ends; resume it with --resume"
            )
        if self._timeout is not None and now - self._moved > self._timeout:
            least = min(beat[1] for beat in said.values())
            behind = [f"rank {rank} at {beat[2]}" for rank, beat in sorted(said.items()) if beat[1] == least]
            return (
                f"no rank made progress for {now - self._moved:.0f} s (train.hang_timeout {self._timeout:g}); the others wait for "
                f"{', '.join(behind[:4])}{' …' if len(behind) > 4 else ''}: the run ends; resume it with --resume"
            )
        return None


def sign_of_life(run: Path) -> float:
    """When history.jsonl was last touched: what an evaluation does on its way (`RunDir.alive`)."""
    try:
        return (run / "history.jsonl").stat().st_mtime
    except OSError:
        return 0.0


def _end(message: str) -> None:
    """Says it, shows where every thread stands, and ends the process: its main thread may wait in a call that never returns."""
    print(f"watchdog: {message}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(EXIT_CODE)
