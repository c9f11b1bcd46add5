"""Toolchains for tests: the scripted REPL, and the real kernel with its prelude; and what is left of them in /proc."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import requires

import align.lean
from align.lean import Toolchain

HERE = Path(__file__).absolute().parent
ENVIRONMENT = {"PATH": os.defpath, "LEAN_PATH": "", "LD_LIBRARY_PATH": "", "LEAN_SYSROOT": "/"}
PRELUDE = "prelude\nimport AlignSyntax\n"
PINS = {"lean": {"version": "4.35.0"}}


def fake_toolchain() -> Toolchain:
    """The scripted REPL of fake_repl.py."""
    return Toolchain((sys.executable, "-I", "-S", str(HERE / "fake_repl.py")), ENVIRONMENT, {"lean": {"version": "fake"}})


def real_toolchain() -> Toolchain:
    """Lean 4.35 with the prelude compiled into a scratch folder; use with the header PRELUDE."""
    library = requires.lean_library()
    scratch = tempfile.mkdtemp(prefix="align-lean-", dir=os.environ.get("TEST_TMPDIR"))
    command = (sys.executable, "-I", "-S", str(HERE / "real_repl.py"), str(library), scratch)
    sources = [str(HERE / "prelude" / name) for name in ("AlignInit.lean", "AlignSyntax.lean")]
    subprocess.run([*command, "--build", *sources], check=True, env=ENVIRONMENT)
    return Toolchain(command, ENVIRONMENT, PINS)


def python_path() -> str:
    """PYTHONPATH for a python that a test starts: what this one imports the library, the harness and its needs from."""
    own = [Path(align.lean.__file__).parents[2], HERE, Path(requires.__file__).parent]
    return os.pathsep.join([*map(str, own), *filter(None, [os.environ.get("PYTHONPATH")])])


def descendants(pid: int) -> list[int]:
    """All processes below a process, from one walk over /proc."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path("/proc", name, "stat").read_bytes()
        except OSError:
            continue
        parents[int(name)] = int(stat.rpartition(b")")[2].split()[1])
    found, todo = [], [pid]
    while todo:
        below = [child for child, parent in parents.items() if parent in todo]
        found += below
        todo = below
    return found


def command_line(pid: int) -> bytes:
    """The arguments of a process, each ended by a zero byte; empty for one that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False
