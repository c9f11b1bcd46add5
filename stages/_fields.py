"""Fields of a configuration that name a file or a number of things: what is wrong with those is told with the field's name."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from align.config import ConfigError


class Most(NamedTuple):
    """The last number that is taken, and of what."""

    number: int
    of: str


# Memory, a loop or processes are made for these at once. The limits are beyond any use and far below what fits.
ANSWERS = Most(100_000, "answers to a prompt; pass@k is measured on fewer")
GENERATED = Most(1_000_000, "problems where they are made here; take rows of a file for more")
PROCESSES = Most(1024, "processes; more than there are cores make nothing faster")
THREADS = Most(1024, "threads; more than there are cores make nothing faster")
TOKENS = Most(2**24, "tokens; no model here has such a window")


def check_most(name: str, value: int, most: Most) -> None:
    """Raises ConfigError: the field `name` is above its limit."""
    if value > most.number:
        raise ConfigError(f"{name} is {value}; it must be at most {most.number} {most.of}")


@contextmanager
def of_field(name: str) -> Iterator[None]:
    """A user's mistake, or the disk's refusal, that is met while what the field names is used: raised again as ConfigError with the field's
    name in front, unless it has it already."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and getattr(error, "exit_code", None) != 2:
            raise
        told = str(error)
        if isinstance(error, OSError) and error.strerror:  # "[Errno 21] Is a directory: 'x'" in words
            told = f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
        if told.startswith((f"{name} ", f"{name}:")):
            raise
        raise ConfigError(f"{name}: {told}") from None
