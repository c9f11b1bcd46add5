"""The run directory of a reinforcement run: every line of its history is completed and looked at before it is written."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from align.rl._tripwire import CollapseTripwire
from align.tracking import RunDir


class WatchedRun(RunDir):
    """A RunDir whose history lines get the numbers of `complete()`, pass by the tripwire, and name its alarms.

    The Trainer writes a line after every step, before it saves: what the tripwire saw of a step is in that step's checkpoint. A wire that
    trips asks the Trainer to stop in the way that anyone does, by a signal; so there is a checkpoint.
    """

    tripwire: CollapseTripwire | None = None
    complete: Callable[[], dict[str, Any]] | None = None

    def log(self, step: int, **numbers: Any) -> None:
        line = {**numbers, **(self.complete() if self.complete else {})}
        if self.tripwire is not None:
            already = self.tripwire.fired
            for alarm in self.tripwire.observe(step, line):
                line["event"] = f"tripwire {alarm['rule']}: {alarm['text']}"
            if self.tripwire.fired and not already and self.tripwire.config.action == "stop":
                signal.raise_signal(signal.SIGTERM)
        super().log(step, **line)
