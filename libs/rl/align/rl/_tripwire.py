"""Watches the numbers of a reinforcement run for collapse, and remembers what it saw across a resume."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from align.rl._errors import RlError


@dataclass(frozen=True, kw_only=True)
class TripwireConfig:
    """When a run is taken to have collapsed. Every rule raises an alarm; all but `flat` also trip the wire, which stays tripped."""

    action: Annotated[Literal["stop", "warn"], "stop: end the run with a checkpoint and exit code 4; warn: only record"] = "stop"
    window: Annotated[int, "steps over which numbers are averaged"] = 5
    drop: Annotated[float | None, "trip when reward, or the verifier's accuracy, falls below (1 - drop) of the best so far"] = 0.4
    floor: Annotated[float, "a best value below this is no height to fall from"] = 0.1
    dead: Annotated[float | None, "trip when so large a share of groups is dead at a low reward, over the window"] = 0.95
    grad_norm: Annotated[float | None, "trip when the norm before clipping is so many times its median, for `patience` steps"] = 10.0
    patience: Annotated[int, "steps in a row"] = 3
    kl: Annotated[float | None, "trip when the KL from the reference, averaged over the window, is above this; none: off"] = None
    flat: Annotated[int | None, "alarm when after so many steps reward (or accuracy) is no higher than at the start; none: off"] = 100
    flat_margin: Annotated[float, "how much higher it must be"] = 0.02


class CollapseTripwire:
    """`observe` takes the numbers of a step: reward, accuracy, dead_low, grad_norm (before clipping), kl, whichever there are.

    fired, at_step, reason: the latch, set by the first rule that trips. alarms: all that was noticed, in order, each with step, rule, value
    and limit; a rule that goes on being broken is one alarm until it was whole again. State is plain JSON; a restored wire is as it was.
    """

    def __init__(self, config: TripwireConfig) -> None:
        """Raises RlError: a value that no rule can have."""
        for name, value, fits in (
            ("window", config.window, config.window >= 1),
            ("patience", config.patience, config.patience >= 1),
            ("drop", config.drop, config.drop is None or 0 < config.drop < 1),
            ("dead", config.dead, config.dead is None or 0 < config.dead <= 1),
            ("grad_norm", config.grad_norm, config.grad_norm is None or config.grad_norm > 1),
            ("kl", config.kl, config.kl is None or config.kl > 0),
        ):
            if not fits:
                raise RlError(f"tripwire.{name} is {value}; see --help for its range")
        if config.flat is not None and config.flat < 2 * config.window:
            raise RlError(f"tripwire.flat is {config.flat}; it must be at least twice tripwire.window, {config.window}, or none")
        self.config = config
        self.fired = False
        self.at_step: int | None = None
        self.reason: str | None = None
        self.alarms: list[dict[str, Any]] = []
        self._recent: dict[str, list[float]] = {}
        self._best: dict[str, float] = {}
        self._first: list[float] = []
        self._norms: list[float] = []
        self._over = 0
        self._ringing: list[str] = []

    def observe(self, step: int, numbers: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the alarms that are new."""
        config, known = self.config, len(self.alarms)
        for name in ("reward", "accuracy", "dead_low", "kl"):
            value = numbers.get(name)
            if isinstance(value, int | float):
                self._recent.setdefault(name, []).append(float(value))
                del self._recent[name][: -config.window]
        means = {name: statistics.fmean(values) for name, values in self._recent.items() if len(values) == config.window}
        for name in ("reward", "accuracy"):
            self._dropped(step, name, means)
        self._rule(step, "dead", means.get("dead_low"), config.dead, lambda value, limit: value >= limit,
                   "of the groups are dead at a low reward")  # fmt: skip
        self._rule(step, "kl", means.get("kl"), config.kl, lambda value, limit: value > limit, "KL from the reference")
        self._norm(step, numbers.get("grad_norm"))
        name = "reward" if "reward" in numbers else "accuracy"
        self._flat(step, name, numbers.get(name), means.get(name))
        return self.alarms[known:]

    def state_dict(self) -> dict[str, Any]:
        return {
            "fired": self.fired, "at_step": self.at_step, "reason": self.reason, "alarms": self.alarms, "recent": self._recent,
            "best": self._best, "first": self._first, "norms": self._norms, "over": self._over, "ringing": self._ringing,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave, latch and alarms included. Raises RlError: something else."""
        try:
            self.fired, self.at_step, self.reason = state["fired"], state["at_step"], state["reason"]
            self.alarms, self._recent, self._best = list(state["alarms"]), dict(state["recent"]), dict(state["best"])
            self._first, self._norms = list(state["first"]), list(state["norms"])
            self._over, self._ringing = state["over"], list(state["ringing"])
        except (KeyError, TypeError) as error:
            raise RlError(f"the saved state is no tripwire's ({error!r}); resume a checkpoint of the same stage") from None

    def summary(self) -> dict[str, Any]:
        """For stage_result.json."""
        return {"fired": self.fired, "at_step": self.at_step, "reason": self.reason, "alarms": self.alarms}

    def _dropped(self, step: int, name: str, means: Mapping[str, float]) -> None:
        now, drop = means.get(name), self.config.drop
        if now is None or drop is None:
            return
        best = self._best[name] = max(now, self._best.get(name, now))
        broken = best >= self.config.floor and now < (1 - drop) * best
        self._ring(step, f"{name}_drop", broken, now, (1 - drop) * best, f"{name} fell from {best:.3f} to {now:.3f}")

    def _norm(self, step: int, norm: Any) -> None:
        factor = self.config.grad_norm
        if factor is None or not isinstance(norm, int | float):
            return
        usual = statistics.median(self._norms) if len(self._norms) >= self.config.window else None
        high = not math.isfinite(norm) or (usual is not None and norm > factor * usual)
        self._over = self._over + 1 if high else 0
        if not high:
            self._norms.append(float(norm))
            del self._norms[:-100]
        limit = factor * usual if usual is not None else math.inf
        self._ring(step, "grad_norm", self._over >= self.config.patience, float(norm), limit,
                   f"gradient norm {norm:.3g} before clipping, usually {usual if usual is None else round(usual, 3)}")  # fmt: skip

    def _flat(self, step: int, name: str, reward: Any, mean: float | None) -> None:
        flat, window = self.config.flat, self.config.window
        if flat is None or not isinstance(reward, int | float):
            return
        if len(self._first) < window:
            self._first.append(float(reward))
        if step >= flat and mean is not None and len(self._first) == window:
            start = statistics.fmean(self._first)
            limit = start + self.config.flat_margin
            self._ring(
                step, "flat", mean < limit, mean, limit, f"{name} {mean:.3f} after {step} steps, {start:.3f} at the start", trips=False
            )

    def _rule(self, step: int, name: str, value: float | None, limit: float | None, broken: Any, what: str) -> None:
        if value is not None and limit is not None:
            self._ring(step, name, broken(value, limit), value, limit, f"{value:.3f} {what}, limit {limit:g}")

    def _ring(self, step: int, rule: str, broken: bool, value: float, limit: float, text: str, *, trips: bool = True) -> None:
        if not broken:
            self._ringing = [name for name in self._ringing if name != rule]
            return
        if rule not in self._ringing:
            self._ringing.append(rule)
            finite = {name: number if math.isfinite(number) else str(number) for name, number in (("value", value), ("limit", limit))}
            self.alarms.append({"step": step, "rule": rule, **finite, "text": text})
        if trips and not self.fired:
            self.fired, self.at_step, self.reason = True, step, f"{rule}: {text}"
