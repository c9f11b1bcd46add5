"""Limits that hold on every machine alike: counted steps and counted bits, in place of clocks and signals."""

STEPS = 16_000  # of one verdict; a step is one to three microseconds of Python
MAX_BITS = 32_768  # of one evaluated integer
MAX_FRACTION_BITS = 8_192  # of numerator and denominator together (their common divisor has to be found)
MAX_TERMS = 300  # of one sum or product
MAX_TOKENS = 1_500  # of one answer
MAX_DEPTH = 70  # of nested brackets in one answer


class OverBudget(Exception):
    """A limit would be passed; the verdict is "undecided"."""


class Unreadable(ValueError):
    """The answer is no mathematics that the grammar knows."""


class VerifyError(ValueError):
    """A caller's mistake: a mode that does not exist, something that is no text, a file that cannot be read."""

    exit_code = 2


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
