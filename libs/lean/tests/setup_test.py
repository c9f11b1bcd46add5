"""tools/lean_setup.sh with downloads and builds that are scripts: every step broken once, then mended; nothing outside the prefix."""

import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from align.lean import ToolchainNotFound, find_toolchain, pinned

ROOT = Path(__file__).absolute().parents[3]
SCRIPT = ROOT / "tools/lean_setup.sh"
STEPS = ["curl", "tar", "elan-init", "toolchain", "version", "clone mathlib", "checkout mathlib", "commit mathlib", "cache", "no cache"]
STEPS += ["clone repl", "checkout repl", "commit repl", "build", "no build", "proof", "wrong proof"]
HANGS = ["curl", "elan-init", "toolchain", "clone mathlib", "checkout mathlib", "cache", "clone repl", "build", "proof"]

# One program under many names: what each download or build would leave, unless FAKE_FAIL or FAKE_HANG names the step.
FAKE = """#!/bin/bash
echo "${0##*/} $*" >> "${FAKE_LOG:-/dev/null}"
step() { if [ "$FAKE_HANG" = "$1" ]; then sleep 100; fi; if [ "$FAKE_FAIL" = "$1" ]; then exit 9; fi; }
program() { mkdir -p "${1%/*}"; cp "$FAKE_SELF" "$1"; chmod +x "$1"; }
case ${0##*/} in
curl)
    step curl
    while [ "$1" != --output ]; do shift; done
    if [ "$FAKE_FAIL" = tar ]; then echo cut > "$2"; else cp "$FAKE_ARCHIVE" "$2"; fi ;;
elan-init) step elan-init; program "$ELAN_HOME/bin/elan" ;;
elan) step toolchain; for name in lean lake; do program "$ELAN_HOME/toolchains/leanprover--lean4---v4.9.0-rc1/bin/$name"; done ;;
lean) if [ "$FAKE_FAIL" = version ]; then echo 4.8.0; else echo "Lean (version 4.9.0-rc1, x86_64)"; fi ;;
git)
    if [ "$1" = -C ]; then name=$(basename "$2" .part); shift 2; else name=$(basename "$4" .part); fi
    case $1 in
    clone) step "clone $name"; mkdir -p "$4/.git" ;;
    -c) step "checkout $name" ;;
    rev-parse)
        if [ "$FAKE_FAIL" = "commit $name" ]; then echo 0000
        elif [ "$name" = mathlib ]; then echo d1d1e4b72c6e0123; else echo 7df77c0a1c910123; fi ;;
    esac ;;
lake)
    if [ "$1" = exe ]; then
        step cache
        for at in . .lake/packages/batteries; do mkdir -p $at/.lake/build/lib; done
        if [ "$FAKE_FAIL" != "no cache" ]; then echo olean > .lake/build/lib/Mathlib.olean; fi
    else
        step build
        if [ "$FAKE_FAIL" != "no build" ]; then program "$PWD/.lake/build/bin/repl"; fi
    fi ;;
repl)
    PATH=/usr/bin:/bin
    FAKE_FAIL=$(cat "${0%/*}/../../../../fake_fail" 2> /dev/null)
    if [ "$FAKE_FAIL" = "hang proof" ]; then sleep 100; fi
    if [ "$FAKE_FAIL" = proof ]; then exit 9; fi
    if [ "$FAKE_FAIL" = "wrong proof" ]; then echo '{"env": 0}'; exit; fi
    echo "{\\"data\\": \\"'align_first' depends on axioms: [propext]\\"}" ;;
esac
"""


@pytest.fixture
def fake(tmp_path: Path):
    """Returns run(prefix, fail=…, hang=…, …) -> CompletedProcess; the programs' calls are in tmp_path/log."""
    programs = tmp_path / "bin"
    programs.mkdir()
    script = tmp_path / "fake.sh"
    script.write_text(FAKE)
    script.chmod(0o755)
    for name in ("curl", "git"):
        shutil.copy(script, programs / name)
    roomy = programs / "df"  # whatever room this machine has
    roomy.write_text("#!/bin/sh\necho filesystem\necho disk 0 0 104857600 0% /\n")
    roomy.chmod(0o755)
    init = tmp_path / "elan-init"
    shutil.copy(script, init)
    with tarfile.open(tmp_path / "archive.tar.gz", "w:gz") as archive:
        archive.add(init, "elan-init")
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o555)

    def run(
        prefix: Path, *, fail: str = "", hang: str = "", options: tuple[str, ...] = (), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        prefix.parent.mkdir(exist_ok=True)
        if (prefix / "repl").is_dir() or fail in ("proof", "wrong proof") or hang == "proof":
            prefix.mkdir(exist_ok=True)
            (prefix / "fake_fail").write_text("hang proof" if hang == "proof" else fail)
        environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": str(home),
            "FAKE_LOG": str(tmp_path / "log"),
            "FAKE_SELF": str(script),
            "FAKE_ARCHIVE": str(tmp_path / "archive.tar.gz"),
            "FAKE_FAIL": fail,
            "FAKE_HANG": hang,
            "LEAN_SETUP_SECONDS": "0.5" if hang else "30",
        }
        done = subprocess.run(
            ["bash", str(SCRIPT), *options, str(prefix)],
            env=environment | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert list(home.iterdir()) == []
        return done

    yield run
    home.chmod(0o755)


def log(tmp_path: Path) -> list[str]:
    file = tmp_path / "log"
    return file.read_text().splitlines() if file.exists() else []


def test_an_installation_its_record_and_its_repetition(fake, tmp_path: Path):
    prefix = tmp_path / "there" / "lean"
    done = fake(prefix)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"lean_setup: done: ALIGN_LEAN={prefix}"
    record = json.loads((prefix / "PINS.json").read_text())
    assert record["mathlib"]["commit"] == "d1d1e4b72c6e0123"
    assert record["lean_path"] == ["mathlib/.lake/build/lib", "mathlib/.lake/packages/batteries/.lake/build/lib"]
    assert record["why"] == pinned()["why"]
    assert len(record["elan"]["sha256"]) == 64
    toolchain = find_toolchain(prefix)
    assert toolchain.command == (str(prefix / "repl/.lake/build/bin/repl"),)
    assert set(toolchain.environment) == {"PATH", "LEAN_PATH", "LD_LIBRARY_PATH", "LEAN_SYSROOT"}
    assert toolchain.label == "Lean 4.9.0-rc1, Mathlib d1d1e4b72c6e0123"
    assert not (prefix / "mathlib/.lake/build/lib/Mathlib.olean").stat().st_mode & 0o222
    before, written = len(log(tmp_path)), (prefix / "PINS.json").stat().st_mtime_ns
    assert fake(prefix).returncode == 0
    again = log(tmp_path)[before:]
    assert not [line for line in again if line.startswith(("curl", "elan", "lake")) or "clone" in line], again
    assert (prefix / "PINS.json").stat().st_mtime_ns == written


@pytest.mark.parametrize("step", [pytest.param(s, marks=[] if s == "cache" else pytest.mark.slow) for s in STEPS])
def test_every_step_can_fail_and_is_made_good_by_the_next_run(fake, tmp_path: Path, step: str):
    prefix = tmp_path / "lean"
    done = fake(prefix, fail=step)
    assert done.returncode not in (0, 124)
    assert "failed" in done.stderr and "run the same command again" in done.stderr
    assert not (prefix / "PINS.json").exists()
    with pytest.raises(ToolchainNotFound):
        find_toolchain(prefix)
    done = fake(prefix)
    assert done.returncode == 0, done.stderr
    find_toolchain(prefix)


@pytest.mark.parametrize("step", [pytest.param(s, marks=pytest.mark.slow) for s in HANGS])
def test_every_step_of_network_or_build_has_a_time_limit(fake, tmp_path: Path, step: str):
    done = fake(tmp_path / "lean", hang=step)
    assert done.returncode == 124
    assert "was stopped after" in done.stderr
    assert not (tmp_path / "lean/PINS.json").exists()


@pytest.mark.slow
def test_another_archive_than_before_is_refused(fake, tmp_path: Path):
    assert fake(tmp_path / "lean").returncode == 0
    shutil.rmtree(tmp_path / "lean/elan/bin")
    (tmp_path / "lean/downloads/elan.tar.gz.sha256").write_text("0" * 64)
    done = fake(tmp_path / "lean")
    assert done.returncode == 1
    assert "is not the file that it was" in done.stderr


def test_preflight(fake, tmp_path: Path):
    done = fake(tmp_path / "lean", options=("--dry-run",))
    assert done.returncode == 0
    assert "d1d1e4b72c6e" in done.stdout
    assert not (tmp_path / "lean").exists()
    assert log(tmp_path) == []
    (tmp_path / "bin/df").write_text("#!/bin/sh\necho head\necho fs 9 9 8388607 1 /\n")
    (tmp_path / "bin/df").chmod(0o755)
    done = fake(tmp_path / "lean")
    assert done.returncode == 3
    assert "8191 MiB free" in done.stderr and "needs 8 GiB" in done.stderr
    (tmp_path / "bin/df").unlink()
    only = tmp_path / "only"
    only.mkdir()
    for name in ("bash", "dirname", "python3", "git", "tar"):
        (only / name).symlink_to(shutil.which(name) or name)
    done = fake(tmp_path / "lean", PATH=str(only))
    assert done.returncode == 2
    assert "curl is not installed" in done.stderr
    for wrong in ((), ("a", "b"), ("--help",)):
        done = subprocess.run(["bash", str(SCRIPT), *wrong], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr[:6]) == (2, "usage:")


@pytest.mark.slow
def test_a_read_only_home_and_tmp_are_no_hindrance(fake, tmp_path: Path):
    """$HOME is read-only in every test here; with /tmp mounted read-only too where this machine lets a test mount."""
    where = Path(os.environ.get("TEST_TMPDIR", "/var/tmp")) / f"align-lean-setup-{os.getpid()}"  # Bazel's own: it lets a test write there
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o ro none /tmp && exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
        mount = []
    shutil.copytree(tmp_path, where / "t")
    for file in (SCRIPT, ROOT / "libs/lean/align/lean/PINS.json"):  # the repository itself may lie under /tmp
        copied = where / "t" / file.relative_to(ROOT)
        copied.parent.mkdir(parents=True)
        shutil.copy(file, copied)
    try:
        (where / "t/home").chmod(0o555)
        environment = {"PATH": f"{where}/t/bin:{os.environ['PATH']}", "HOME": str(where / "t/home"), "TMPDIR": "/tmp"}
        environment |= {"FAKE_SELF": str(where / "t/fake.sh"), "FAKE_ARCHIVE": str(where / "t/archive.tar.gz")}
        command = [*mount, "bash", str(where / "t" / SCRIPT.relative_to(ROOT)), str(where / "lean")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        assert list((where / "t/home").iterdir()) == []
    finally:
        subprocess.run(["chmod", "-R", "u+w", str(where)], check=False)
        shutil.rmtree(where)


def test_a_changed_record_or_file_is_no_toolchain(fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    prefix = tmp_path / "lean"
    assert fake(prefix).returncode == 0
    monkeypatch.setenv("ALIGN_LEAN", str(prefix))
    assert find_toolchain() == find_toolchain(prefix)
    repl = prefix / "repl/.lake/build/bin/repl"
    repl.chmod(0o755)
    repl.write_text("other")
    with pytest.raises(ToolchainNotFound, match="sha256"):
        find_toolchain()
    record = json.loads((prefix / "PINS.json").read_text())
    for change in ({"mathlib": {"commit": "2f65ba7f"}}, {"lean": {}}, {"files": 1}, {"lean_path": None}):
        (prefix / "PINS.json").write_text(json.dumps(record | change))
        with pytest.raises(ToolchainNotFound, match=r"lean_setup\.sh"):
            find_toolchain()
    (prefix / "PINS.json").write_text("{")
    with pytest.raises(ToolchainNotFound):
        find_toolchain()
    monkeypatch.setenv("ALIGN_LEAN", str(tmp_path / "nowhere"))
    with pytest.raises(ToolchainNotFound, match=r"\$ALIGN_LEAN.*lean_setup\.sh"):
        find_toolchain()
