"""Steps made ahead, in a thread of their own."""

import queue
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from ._errors import DataError
from ._loader import Loader, Step


class Prefetch:
    """A `Loader` whose next steps are made while the present one is worked on; at most `depth` wait.

    The steps and the states are the loader's own: `state_dict` tells what was delivered, not what was made ahead. The loader belongs to it
    from then on. What goes wrong in the thread is raised by the `next_step` that would have delivered it. Use it in a with
    statement, or call `close`.
    """

    def __init__(self, loader: Loader, *, depth: int = 2):
        if depth < 1:
            raise DataError(f"depth {depth} must be at least 1; use the loader itself to make nothing ahead")
        self._loader, self._depth = loader, depth
        self._state = loader.state_dict()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    @property
    def digest(self) -> str:
        return self._loader.digest

    def next_step(self) -> Step:
        if self._thread is None:
            self._stop = threading.Event()
            self._ready: queue.Queue[tuple[Step | Exception, dict[str, Any]]] = queue.Queue(self._depth)
            # A daemon: a run that ends by an exception must not wait for it.
            self._thread = threading.Thread(target=_make, args=(self._loader, self._ready, self._stop), name="data prefetch", daemon=True)
            self._thread.start()
        step, state = self._ready.get()
        if isinstance(step, Exception):
            self.close()
            raise step
        self._state = state
        return step

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[str, Any], *, allow_change: tuple[str, ...] = ()) -> None:
        self.close()
        self._loader.load_state_dict(state, allow_change=allow_change)
        self._state = self._loader.state_dict()

    def close(self) -> None:
        """Ends the thread and drops what was made ahead; the next `next_step` goes on where the last one was delivered."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            self._loader.load_state_dict(self._state)

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _make(loader: Loader, ready: "queue.Queue[tuple[Step | Exception, dict[str, Any]]]", stop: threading.Event) -> None:
    while not stop.is_set():
        item: tuple[Step | Exception, dict[str, Any]]
        try:
            item = loader.next_step(), loader.state_dict()
        except Exception as error:
            item = error, {}
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.05)
                break
            except queue.Full:
                continue
        if isinstance(item[0], Exception):
            return
