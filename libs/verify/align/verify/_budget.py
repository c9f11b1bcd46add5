"""Limits that hold on every machine alike: counted steps and counted bits, in place of clocks and signals."""

STEPS = 40_000  # of one verdict; a step is about a microsecond of Python
MAX_BITS = 32_768  # of one evaluated integer, numerator or denominator
MAX_TOKENS = 4_000  # of one answer
MAX_DEPTH = 70  # of nested brackets in one answer


class OverBudget(Exception):
    """A limit would be passed; the verdict is "undecided"."""


class Unreadable(ValueError):
    """The answer is no mathematics that the grammar knows."""


class Budget:
    """Counts the steps of one verdict."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int = STEPS):
        self.used = 0
        self.limit = limit

    def spend(self, steps: int) -> None:
        """Raises: OverBudget when the verdict has cost more than its limit."""
        self.used += steps
        if self.used > self.limit:
            raise OverBudget
