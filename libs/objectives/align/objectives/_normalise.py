"""The one place where a summed loss becomes a mean."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

Summed = TypeVar("Summed", float, Tensor)


def normalise(summed: Summed, units: float) -> Summed:
    """Divides a sum over some trained units (tokens, pairs, samples) by all of them.

    Every stage uses this, and nothing else divides a loss. `units` counts the *whole* optimizer step: all micro-batches of all ranks,
    counted before the first forward. Then the gradients of the parts add up to the gradient of the whole, however the step was cut, and
    nobody may average over micro-batches or ranks afterwards (FSDP's divide factor is 1).

    Args:
        summed: a loss or a metric, summed over this rank's or this micro-batch's part of the units. 0-d tensor or number.
        units: the number of units in the whole step, > 0.

    Raises:
        ValueError: `units` is not positive. A step that trains nothing has no loss: skip it, optimizer, schedule and decay alike.
    """
    if not units > 0:
        raise ValueError(f"the step has {units} trained units; a step without any has no loss and must be skipped, not divided")
    return summed / units
