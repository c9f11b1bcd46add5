"""The command line, the toolchain it finds, and the README's example: with an installation whose repl is the scripted one."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lean_harness import ENVIRONMENT, HERE, python_path

from align.lean import LeanError, Toolchain, ToolchainNotFound, check, find_toolchain, pinned

README = HERE.parent / "README.md"
GOOD = "theorem t : 1 = 1 := rfl"


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An installation as tools/lean_setup.sh records it; its repl starts the scripted one."""
    where = tmp_path / "lean"
    where.mkdir()
    repl = where / "repl"
    repl.write_text(f"#!/bin/sh\nexec '{sys.executable}' -I -S '{HERE / 'fake_repl.py'}'\n")
    repl.chmod(0o755)
    files = {"repl": {"path": "repl", "sha256": hashlib.sha256(repl.read_bytes()).hexdigest()}}
    record = pinned() | {"files": files, "lean_path": ["mathlib", "batteries"], "sysroot": "toolchain"}
    (where / "PINS.json").write_text(json.dumps(record))
    return where


def run(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ALIGN_", "BUILD_"))}
    environment |= {"PYTHONPATH": python_path()} | variables
    command = [sys.executable, "-m", "align.lean", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment)


def test_the_command_line(prefix: Path, tmp_path: Path):
    (tmp_path / "good.lean").write_text(f"import Mathlib\n\n{GOOD}\n")
    done = run("good.lean", "--statement", "1 = 1", "--prefix", str(prefix), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:3] == ["ACCEPT: accepted", "  accepted under Lean 4.9.0-rc1, Mathlib d1d1e4b72c6e", "  axioms: none"]
    assert re.fullmatch(r"  \d+\.\d\d s, \d+ MiB, asked Lean 1 time\(s\)", lines[3])
    done = run("good.lean", "--statement", "theorem t : 1 = 2 := by sorry", cwd=tmp_path, ALIGN_LEAN=str(prefix))
    assert done.returncode == 1
    assert done.stdout.startswith("REJECT: statement_mismatch\n  type mismatch\n")
    (tmp_path / "bad.lean").write_text("instance : X := y\n" + GOOD)
    done = run("bad.lean", "--statement", "1 = 1", cwd=Path("/"), ALIGN_LEAN=str(prefix), BUILD_WORKING_DIRECTORY=str(tmp_path))
    assert done.returncode == 1
    assert done.stdout.startswith("REJECT: forbidden\n  line 1: instance can change")
    done = run("bad.lean", "--statement", "1 = 1", "--allow", "instance", cwd=tmp_path, ALIGN_LEAN=str(prefix))
    assert done.returncode == 0


def test_mistakes_on_the_command_line_are_one_line(prefix: Path, tmp_path: Path):
    (tmp_path / "good.lean").write_text(GOOD)
    for arguments, words in (
        (["absent.lean", "--statement", "1 = 1"], "absent.lean"),
        (["good.lean", "--statement", "1 = 1) ("], "closes a bracket"),
        (["good.lean", "--statement", "1 = 1", "--name", "a b"], "identifier"),
        (["good.lean", "--statement", "1 = 1", "--seconds", "0"], "limits.seconds"),
        (["good.lean", "--statement", "1 = 1", "--prefix", "/nowhere"], "lean_setup.sh"),
    ):
        done = run(*arguments, cwd=tmp_path, ALIGN_LEAN=str(prefix))
        assert done.returncode == 2
        assert done.stderr.startswith("check: ") and words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_the_default_pool(prefix: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ALIGN_LEAN", str(prefix))
    assert check("1 = 1", GOOD, name="t").accepted
    assert not check("1 = 2", GOOD, name="t").accepted


def test_find_toolchain(prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ALIGN_LEAN", raising=False)
    with pytest.raises(ToolchainNotFound, match=r"default prefix.*lean_setup\.sh"):
        find_toolchain()
    monkeypatch.setenv("ALIGN_LEAN", str(tmp_path))
    with pytest.raises(ToolchainNotFound, match=r"\$ALIGN_LEAN.*lean_setup\.sh"):
        find_toolchain()
    toolchain = find_toolchain(prefix)
    assert toolchain.environment == {
        "PATH": f"{prefix}/toolchain/bin",
        "LEAN_PATH": f"{prefix}/mathlib:{prefix}/batteries",
        "LD_LIBRARY_PATH": f"{prefix}/toolchain/lib/lean:{prefix}/toolchain/lib",
        "LEAN_SYSROOT": f"{prefix}/toolchain",
    }
    with pytest.raises(LeanError, match="absolute"):
        Toolchain(("lean",), ENVIRONMENT)


def test_the_pins_say_what_and_why():
    pins = pinned()
    assert pins["lean"]["toolchain"] == "leanprover/lean4:v4.9.0-rc1"
    assert (pins["elan"]["version"], pins["mathlib"]["commit"], pins["repl"]["commit"]) == ("4.2.4", "d1d1e4b72c6e", "7df77c0a1c91")
    assert "lakefile.lean" in pins["why"]["upstream parent"]


def test_the_readmes_example(prefix: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ALIGN_LEAN", str(prefix))
    example = README.read_text(encoding="utf-8").partition("```python\n")[2].partition("\n```\n")[0]
    file = prefix / "example.py"
    file.write_text(example)
    done = subprocess.run(
        [sys.executable, str(file)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": python_path()},
    )
    assert done.returncode == 0, done.stderr
    expected = [line.partition("# ")[2] for line in example.splitlines() if "print(" in line]
    assert done.stdout.splitlines() == expected
