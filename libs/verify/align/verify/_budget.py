"""Limits that hold on every machine alike: counted steps and counted bits, in place of clocks and signals.

A step is about a microsecond of one core. Whatever can be made expensive by an answer charges for its work before it is done: each token
that is read, each node of a tree that is visited or built, each operation on long integers by the length of its operands, each elementary
function by its precision. The counter belongs to the thread, so that no function can forget to hand it on.
"""

from _thread import _local  # what threading.local is; importing threading costs a millisecond

STEPS = 12_000  # of one verdict
MAX_BITS = 32_768  # of one evaluated integer
MAX_FRACTION_BITS = 8_192  # of numerator and denominator together (their common divisor has to be found)
MAX_TERMS = 300  # of one sum or product
MAX_NODES = 3_000  # of one tree, subtrees that occur twice counted twice
MAX_TOKENS = 1_500  # of one answer
MAX_DEPTH = 70  # of nested brackets in one answer


class OverBudget(Exception):
    """A limit would be passed; the verdict is "undecided"."""


class Unreadable(ValueError):
    """The answer is no mathematics that the grammar knows."""


class VerifyError(ValueError):
    """A caller's mistake: a mode that does not exist, something that is no text, a file that cannot be read."""

    exit_code = 2


class _Meter(_local):
    used = 0


_meter = _Meter()


def spend(steps: int) -> None:
    """Charges steps to the verdict that this thread works on. Raises: OverBudget when it has cost more than STEPS."""
    used = _meter.used + steps
    _meter.used = used
    if used > STEPS:
        raise OverBudget


def spend_product(a_bits: int, b_bits: int) -> None:
    """Charges for a product of two integers, or a quotient."""
    if a_bits * b_bits >= 1 << 20:
        spend(a_bits * b_bits >> 20)


def spend_divisor(bits: int) -> None:
    """Charges for a common divisor: every operation on fractions, whose numerators and denominators have so many bits together."""
    if bits >= 2048:
        spend(bits * bits >> 22)


def used() -> int:
    """The steps charged since `restart`."""
    return _meter.used


def restart(steps: int = 0) -> int:
    """Begins a new count; returns the old one, so that a verdict inside a verdict (a signal handler's) can put it back."""
    before = _meter.used
    _meter.used = steps
    return before
