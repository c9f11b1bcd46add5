"""train.profile: a few steps under torch's profiler."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from align.train._errors import TrainError


def parse_range(text: str) -> tuple[int, int]:
    """ "10:13" is steps 10 to 13, "10" is one step.

    Raises:
        TrainError: anything else.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise TrainError(f"train.profile is {text!r}; it is a range of steps such as 10:13, the first at least 1")
    return first, last


class Profile:
    """Records the chosen steps, and writes a trace that chrome://tracing and perfetto read."""

    def __init__(self, steps: str | None, folder: Path) -> None:
        self._first, self._last = parse_range(steps) if steps is not None else (0, 0)
        self._folder = folder
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """Step `step` (1-based) begins."""
        if step == self._first:
            from torch.profiler import profile

            self._profiler = profile()
            self._profiler.start()

    def after(self, step: int) -> Path | None:
        """Step `step` is done. Returns the trace when it was the last of the range."""
        if self._profiler is None or step < self._last:
            return None
        return self.close()

    def close(self) -> Path | None:
        """Writes what was recorded, if anything was."""
        if self._profiler is None:
            return None
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        path = self._folder / f"profile-{self._first:06d}.json"
        profiler.export_chrome_trace(str(path))
        return path
