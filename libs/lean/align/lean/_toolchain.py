"""Finds the pinned Lean and checks that it is the pinned one. Lean is an external program: nothing here imports or builds it."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from align.lean._errors import LeanError, ToolchainNotFound

VARIABLE = "ALIGN_LEAN"
DEFAULT_PREFIX = Path("/usr/local/lib/align-lean")
SET_UP = "tools/lean_setup.sh PREFIX"
NAMES = ("PATH", "LEAN_PATH", "LD_LIBRARY_PATH", "LEAN_SYSROOT")  # a child's whole environment
_PINNED = Path(__file__).parent / "PINS.json"


def pinned() -> dict[str, Any]:
    """The pins this library was written for: PINS.json beside this file."""
    return dict(json.loads(_PINNED.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Toolchain:
    """How a REPL child is started. `command` is an absolute program with its arguments; it reads one JSON request ended by a blank line and
    writes one JSON reply ended by a blank line. `environment` is the child's whole environment, of the names in NAMES only."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    pins: Mapping[str, Any] = field(default_factory=dict)
    directory: str = "/"

    def __post_init__(self) -> None:
        others = sorted(set(self.environment) - set(NAMES))
        if others:
            raise LeanError(f"a Lean child's environment holds {', '.join(NAMES)} and nothing else, not {', '.join(others)}")
        if not self.command or not os.path.isabs(self.command[0]):
            raise LeanError(f"command {self.command!r} must begin with an absolute path")

    @property
    def label(self) -> str:
        """What verdicts are relative to, in one line."""
        lean = self.pins.get("lean", {}).get("version", "an unknown Lean")
        mathlib = self.pins.get("mathlib", {}).get("commit")
        return f"Lean {lean}" + (f", Mathlib {mathlib}" if mathlib else "")


def find_toolchain(prefix: str | os.PathLike[str] | None = None) -> Toolchain:
    """The toolchain at `prefix`, else at $ALIGN_LEAN, else at the default prefix; the first that is named must be whole.

    Raises ToolchainNotFound, naming where it looked and the command that installs one, also where the installation's PINS.json differs
    from the pins of this library or a recorded digest from the file on disk."""
    named = prefix or os.environ.get(VARIABLE)
    where = Path(named) if named else DEFAULT_PREFIX
    source = "the given path" if prefix else f"${VARIABLE}" if named else "the default prefix"
    record = where / "PINS.json"
    if not record.is_file():
        raise ToolchainNotFound(
            f"no Lean toolchain at {where} ({source}: no PINS.json in it); install one with {SET_UP}, then set {VARIABLE}=PREFIX"
        )
    try:
        pins = json.loads(record.read_text(encoding="utf-8"))
        _compare(pins, pinned())
        files = {name: (where / entry["path"], entry["sha256"]) for name, entry in pins["files"].items()}
        search = [str(where / path) for path in pins["lean_path"]]
        sysroot = where / pins["sysroot"]
        command = (str(files["repl"][0]),)
    except (KeyError, TypeError, AttributeError, ValueError) as trouble:
        raise ToolchainNotFound(f"{record}: {trouble!s} is missing or not as pinned; run {SET_UP} again") from None
    for name, (path, digest) in files.items():
        if not path.is_file() or not os.access(path, os.R_OK):
            raise ToolchainNotFound(f"{path} ({name} of {record}) cannot be read; run {SET_UP} again")
        if _sha256(path) != digest:
            raise ToolchainNotFound(f"{path}: its sha256 is not the one in {record}; run {SET_UP} again")
    environment = {
        "PATH": f"{sysroot}/bin",
        "LEAN_PATH": ":".join(search),
        "LD_LIBRARY_PATH": f"{sysroot}/lib/lean:{sysroot}/lib",
        "LEAN_SYSROOT": str(sysroot),
    }
    return Toolchain(command, environment, pins)


def _compare(found: Any, wanted: dict[str, Any]) -> None:
    for part, key in (("lean", "toolchain"), ("mathlib", "commit"), ("repl", "commit")):
        given = str(found[part][key])
        if not given.startswith(wanted[part][key]):
            raise ValueError(f"{part}.{key} {given!r} (pinned: {wanted[part][key]!r})")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
