"""Scalars on their way from the device to the host, without holding the device up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Numbers:
    """Some 0-d tensors and plain numbers, to be read as floats later.

    The copy of what is on a GPU begins at once; what is launched after it runs while the host reads.
    """

    def __init__(self, values: Sequence[Tensor | float]) -> None:
        self._values = list(values)
        on_device = [value.detach().double() for value in self._values if isinstance(value, Tensor) and value.is_cuda]
        self._event: torch.cuda.Event | None = None
        if on_device:
            self._host = torch.empty(len(on_device), dtype=torch.float64, pin_memory=True)
            self._host.copy_(torch.stack(on_device), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[float]:
        """In the order given; waits for the copy, not for what came after it."""
        copied = iter(())
        if self._event is not None:
            self._event.synchronize()
            copied = iter(self._host.tolist())
        return [next(copied) if isinstance(value, Tensor) and value.is_cuda else float(value) for value in self._values]
