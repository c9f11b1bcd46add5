"""A deterministic order over documents, and where a run stands in it."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ._errors import DataError


class Cursor:
    """Indices 0..size-1, each exactly once an epoch, epoch after epoch, in an order that is a function of (seed, epoch, digest) alone.

    Ranks hold equal cursors and take the same indices; which rank works on which is the loader's affair, so the order does not
    change with the number of ranks or workers. The permutation is made from our own hash and is the same under every numpy.
    """

    def __init__(self, size: int, *, seed: int, digest: str):
        if size < 1:
            raise DataError(f"size {size}: there is nothing to draw from; give at least one row")
        self.size, self.seed, self.digest = size, seed, digest
        self.epoch = self.position = 0  # position counts what was taken of this epoch
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def remaining(self) -> int:
        """Indices left in this epoch; after the last one, those of the next."""
        return self.size - self.position % self.size

    @property
    def progress(self) -> float:
        """Epochs done, with the part of the present one."""
        return self.epoch + self.position / self.size

    def take(self, k: int) -> list[int]:
        """The next k indices; goes on into the next epoch where this one ends."""
        if k < 0:
            raise DataError(f"cannot take {k} indices; k is at least 0")
        taken: list[int] = []
        while len(taken) < k:
            if self.position == self.size:
                self.epoch, self.position = self.epoch + 1, 0
            order = self._permutation()
            stop = min(self.position + k - len(taken), self.size)
            taken += order[self.position : stop].tolist()
            self.position = stop
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON."""
        return {"size": self.size, "seed": self.seed, "digest": self.digest, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to where `state` was made. Raises DataError when it is of other data, another seed or another size, by name."""
        for name, what in (("size", "rows"), ("digest", "data"), ("seed", "order")):
            if state.get(name) != getattr(self, name):
                raise DataError(
                    f"the saved cursor has {name} {state.get(name)!r}, this run {getattr(self, name)!r}: the {what} changed, so nothing "
                    f"can be resumed exactly; restore them, or start a new run"
                )
        epoch, position = state.get("epoch"), state.get("position")
        if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position <= self.size:
            raise DataError(
                f"the saved cursor's epoch {epoch!r} and position {position!r} fit no run over {self.size} rows; use another checkpoint"
            )
        self.epoch, self.position = epoch, position

    def _permutation(self) -> np.ndarray:
        if self._order is None or self._order[0] != self.epoch:
            self._order = self.epoch, permutation(self.size, f"{self.seed}:{self.epoch}:{self.digest}")
        return self._order[1]


def permutation(size: int, key: str) -> np.ndarray:
    """(size,) int64: 0..size-1 sorted by a 64-bit hash of (key, index); ties, one in 2^64 pairs, by index."""
    start = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    z = np.arange(1, size + 1, dtype=np.uint64)
    # SplitMix64 (Steele, Lea, Flood 2014): the index-th output of the generator that starts at `start`; uint64 wraps around.
    z = z * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(z ^ (z >> np.uint64(31)), kind="stable")
