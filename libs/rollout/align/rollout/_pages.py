"""The pages of the key-value cache: who holds which, counted on the host."""

from __future__ import annotations

from collections.abc import Sequence

PAGE = 128
"""Positions of a page: a whole tile of the attention kernels, or two, so that a tile never lies in two pages."""
SCRATCH = 0
"""A page that belongs to nobody: idle rows write to it."""


class Pages:
    """Pages 1 .. count - 1, each free or held by one or more: the full pages of a prompt by all its samples."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.clear()

    def clear(self) -> None:
        """All are free, whoever held them."""
        self._free = list(range(self._count - 1, SCRATCH, -1))
        self._holders = [0] * self._count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many free pages, held once. There must be as many."""
        if count > len(self._free):
            raise ValueError(f"{count} pages of {len(self._free)} free ones")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """One more holder of each."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less of each; a page without any is free."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)


def pages_for(positions: int) -> int:
    return -(-positions // PAGE)
