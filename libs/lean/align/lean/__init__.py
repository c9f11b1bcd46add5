"""Strict verdicts on Lean 4 proofs from a real kernel, in a pool of external processes that leaks nothing. Standard library only."""

import atexit
import os
import threading

from align.lean._check import Verdict, check_in
from align.lean._errors import HeaderError, LeanError, StatementError, ToolchainNotFound
from align.lean._policy import Policy, inspect
from align.lean._pool import LeanPool, Limits
from align.lean._reward import LeanReward, Problem
from align.lean._text import extract_code, split_imports, statement_of, without_header
from align.lean._toolchain import Toolchain, find_toolchain, pinned

__all__ = [
    "HeaderError",
    "LeanError",
    "LeanPool",
    "LeanReward",
    "Limits",
    "Policy",
    "Problem",
    "StatementError",
    "Toolchain",
    "ToolchainNotFound",
    "Verdict",
    "check",
    "extract_code",
    "find_toolchain",
    "inspect",
    "pinned",
    "split_imports",
    "statement_of",
    "without_header",
]

_shared: dict[int, LeanPool] = {}
_lock = threading.Lock()


def check(
    statement: str, submission: str, *, name: str, header: str = "", pool: LeanPool | None = None, policy: Policy | None = None
) -> Verdict:
    """Does `submission` prove, under `name`, exactly `statement`?

    `statement` is a proposition, elaborated before user code in the environment of `header` (imports and opens; the caller's, trusted).
    `submission` is Lean source without imports that declares `name`. Without a pool, one worker of `find_toolchain()` is started at the
    first call and kept. Raises LeanError for a name that is none, StatementError, HeaderError, ToolchainNotFound: mistakes of the caller,
    never of the submission."""
    return check_in(pool or _default(), statement, submission, name=name, header=header, policy=policy)


def _default() -> LeanPool:
    with _lock:
        pool = _shared.get(os.getpid())
        if pool is None:
            pool = _shared[os.getpid()] = LeanPool(find_toolchain(), workers=1)
            atexit.register(pool.close)
        return pool
