"""Progress: one live line on a terminal, plain lines in a log."""

import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

_LIVE_EVERY_S = 0.1
_WINDOW = 32  # updates that the rate is taken over


class Progress:
    """Tells how far a run is: `step 400/2600  loss 0.203  67.2k tok/s  21.4 steps/s  eta 1:43`.

    On a terminal one line is redrawn, at most ten times a second; elsewhere the first, every `every`-th and the last step make a
    line. A stream of None (ranks other than 0) prints nothing, and a stream that breaks is left alone: the run goes on.
    """

    def __init__(self, total_steps: int, *, every: int, stream: TextIO | None, clock: Callable[[], float] = time.monotonic):
        self.total_steps = total_steps
        self.every = max(every, 1)
        self._stream = stream
        self._clock = clock
        self._live = stream is not None and _is_terminal(stream)
        self._marks: deque[tuple[float, int]] = deque([(clock(), -1)], maxlen=_WINDOW)
        self._shown: str | None = None  # the live line that stands on the terminal
        self._drawn_at = -1e9
        self._first = True

    def update(self, step: int, **numbers: float) -> None:
        """After optimizer step `step` (1-based). Shows the numbers that are given, in their order; tokens_per_s and *_gb with units."""
        now = self._clock()
        if self._marks[0][1] < 0:
            self._marks[0] = (self._marks[0][0], step - 1)
        self._marks.append((now, step))
        last = step >= self.total_steps
        if self._live:
            if last or self._first or now - self._drawn_at >= _LIVE_EVERY_S:
                self._drawn_at = now
                self._draw(self._text(step, numbers))
            if last:
                self.close()
        elif last or self._first or step % self.every == 0:
            self._write(self._text(step, numbers) + "\n")
        self._first = False

    def line(self, text: str) -> None:
        """Prints a line of its own, above the live one."""
        if self._live and self._shown is not None:
            shown = self._shown
            self._write(f"\r\x1b[K{text}\n")
            self._draw(shown)
        else:
            self._write(text + "\n")

    def close(self) -> None:
        """Leaves the live line standing and moves below it."""
        if self._shown is not None:
            self._write("\n")
            self._shown = None

    def _text(self, step: int, numbers: dict[str, float]) -> str:
        parts = [f"step {step}/{self.total_steps}", *(show_number(name, value) for name, value in numbers.items())]
        (then, before), (now, _) = self._marks[0], self._marks[-1]
        if now > then and step > before:
            rate = (step - before) / (now - then)
            parts.append(f"{rate:.1f} steps/s" if rate >= 1 else f"{1 / rate:.1f} s/step")
            if step < self.total_steps:
                parts.append(f"eta {show_duration((self.total_steps - step) / rate)}")
        return "  ".join(parts)

    def _draw(self, text: str) -> None:
        columns = shutil.get_terminal_size().columns
        self._shown = text
        self._write(f"\r{text[: max(columns - 1, 1)]}\x1b[K")

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(text.encode("ascii", "backslashreplace").decode())
            self._stream.flush()
        except (OSError, ValueError):  # a closed pipe or file
            self._stream = None


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:
        return False


def show_number(name: str, value: float) -> str:
    """`loss 0.203`, `67.2k tok/s`, `3.1 GiB`."""
    if value is None or isinstance(value, str):
        return f"{name} {value}"
    value = float(value)
    if name == "tokens_per_s":
        return f"{value / 1000:.1f}k tok/s" if value >= 1000 else f"{value:.0f} tok/s"
    if name.endswith("_gb"):
        return f"{name[:-3]} {value:.1f} GiB"
    return f"{name} {value:.3e}" if value and not 1e-3 <= abs(value) < 1e5 else f"{name} {value:.4g}"


def show_duration(seconds: float) -> str:
    """`0:09`, `1:43`, `2:05:09`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
