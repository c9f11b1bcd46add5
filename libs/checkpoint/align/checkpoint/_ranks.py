"""Several processes that save one checkpoint: who they are, and how an error of one becomes an error of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from torch import Tensor

T = TypeVar("T")


class Ranks(Protocol):
    """The processes of a run. `gather` gives every rank's value to every rank, in their order."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    def gather(self, value: Any) -> list[Any]: ...


class Alone:
    """A run of one process."""

    rank, world = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]


def together(ranks: Ranks, action: Callable[[], T]) -> T:
    """Runs `action` on every rank and returns its result here; when it raises on one, all raise that error."""
    result: T | None = None
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    others = [other for other in ranks.gather(error) if other is not None]
    if error is not None or others:
        raise error if error is not None else others[0]
    return cast(T, result)


def sharded(tensor: Any) -> bool:
    """Whether the tensor is a DTensor, of which this rank holds some rows."""
    return hasattr(tensor, "full_tensor")


def local(tensor: Any) -> Tensor:
    """This rank's rows, sharing memory."""
    rows: Tensor = tensor.detach().to_local() if sharded(tensor) else tensor.detach()
    return rows


def whole(tensor: Any) -> Tensor:
    """The full tensor; of a sharded one all ranks must ask together."""
    full: Tensor = tensor.detach().full_tensor() if sharded(tensor) else tensor.detach()
    return full


def rows_of(tensor: Any) -> tuple[int, int]:
    """First and end row of dimension 0 that this rank holds, as torch's chunk cuts; a 0-d tensor counts as one row."""
    start, stop = 0, tensor.shape[0] if tensor.ndim else 1
    if sharded(tensor):
        for dim, placement in enumerate(tensor.placements):
            if placement.is_shard(0):
                parts, part = tensor.device_mesh.size(dim), tensor.device_mesh.get_local_rank(dim)
                chunk = -(-(stop - start) // parts)
                start, stop = min(stop, start + part * chunk), min(stop, start + (part + 1) * chunk)
    return start, stop
