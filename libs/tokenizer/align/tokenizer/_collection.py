"""Holding the garbage collector back while much is made that it has no use for."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Without the collector, which would go through hundreds of thousands of new lists, tuples and strings again and again. Threads that
    do so at once leave it as it was: only who found it running starts it again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
