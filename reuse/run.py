"""Uses align as strangers would, from other workspaces: python3 reuse/run.py. Bazel inside Bazel, so no test of //...; .ci/run calls it.

1. reuse/bazel by local_repository: a library that needs nothing installs no package; then one test a library, each on
   @align_ml//:<library> alone.
2. The same tests from a `git archive` by http_archive, with the stranger's own torch, numpy, … in place of the pinned ones.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "align-reuse")  # kept: the next run installs nothing
QUIET = ["--noshow_progress", "--curses=no"]
FLAGS = [*QUIET, "--symlink_prefix=/", "--nosandbox_debug", "--test_output=errors", "--test_timeout=900"]  # the machine may be busy
STANDARD_LIBRARY = ["config", "evals", "guard", "lean", "tokenizer", "tracking", "verify"]
PACKAGES = ["numpy", "pyarrow", "safetensors", "torch", "triton"]


def bazel(workspace: Path, base: str, *words: str) -> str:
    """Runs Bazel there with an output base of its own; its words. Prints them and exits where it fails."""
    done = _run(workspace, base, *words)
    if done.returncode:
        print(done.stdout)
        sys.exit(f"reuse: bazel {' '.join(words)} in {workspace} failed")
    return done.stdout


def _run(workspace: Path, base: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "bazelw", f"--output_base={CACHE / base}", *words]
    return subprocess.run(command, cwd=workspace, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def installed(base: str) -> list[str]:
    return sorted(path.parent.name for path in (CACHE / base / "external").glob("align_pip_*/site"))


def told(name: str, output: str, started: float) -> None:
    passed = len(re.findall(r"^//\S+ .*PASSED", output, re.MULTILINE))
    print(f"reuse: {name}: {passed} tests pass, {time.monotonic() - started:.0f} s", flush=True)


def local() -> None:
    workspace, started = ROOT / "reuse/bazel", time.monotonic()
    targets = [f"//:{name}_test" for name in STANDARD_LIBRARY]
    output = bazel(workspace, "plain", "test", *FLAGS, *targets, "//:libs_test")
    flag = bazel(workspace, "plain", "test", *FLAGS, "--incompatible_default_to_explicit_init_py", "//:flag_test")
    if found := installed("plain"):
        sys.exit(f"reuse: libraries that need nothing installed {', '.join(found)}")
    told("local_repository, libraries that need nothing: no package installed", output + flag, started)
    started = time.monotonic()
    told("local_repository, all libraries", bazel(workspace, "local", "test", *FLAGS, "//..."), started)


def archive() -> None:
    started, base = time.monotonic(), CACHE / "archive.tar.gz"
    with base.open("wb") as file:
        subprocess.run(["git", "-C", ROOT, "archive", "--format=tar.gz", "--prefix=align/", "HEAD"], stdout=file, check=True)
    workspace = CACHE / "archive"
    shutil.rmtree(workspace, ignore_errors=True)
    shutil.copytree(ROOT / "reuse/bazel", workspace, ignore=shutil.ignore_patterns("bazel-*"))
    needs = (ROOT / "third_party/python/needs.bzl").read_text(encoding="utf-8")
    torch = re.findall(r'"(\w+)"', re.search(r'"torch": \[(.*)\]', needs)[1])  # type: ignore[index]
    values = {
        "{sha256}": hashlib.sha256(base.read_bytes()).hexdigest(),
        "{archive}": str(base),
        "{packages}": str(CACHE / "local/external"),
        "{everything}": str([*PACKAGES, *torch]),
        "{own}": str(PACKAGES),
        "{needs}": str({name: torch if name == "torch" else [] for name in PACKAGES}),
    }
    for name in ("WORKSPACE", "own/BUILD"):
        text = (workspace / f"{name}.archive").read_text(encoding="utf-8")
        for key, value in values.items():
            text = text.replace(key, value)
        (workspace / name).write_text(text, encoding="utf-8")
    for name in PACKAGES:
        (workspace / f"own/own_{name}.py").write_text("")
    output = bazel(workspace, "archive-base", "test", *FLAGS, "//...")
    if found := installed("archive-base"):
        sys.exit(f"reuse: the stranger has packages of their own, and align installed {', '.join(found)}")
    refused = _run(workspace, "archive-base", "build", *FLAGS, "//own:past_the_door")
    if not refused.returncode or "libs/verify:verify' is not visible" not in refused.stdout:
        sys.exit(f"reuse: a stranger reached past the aliases\n{refused.stdout}")
    told("http_archive of a git archive, the stranger's own packages, one that reaches past the aliases refused", output, started)


def main() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    try:
        local()
        archive()
    finally:
        for workspace, base in ((ROOT / "reuse/bazel", "plain"), (ROOT / "reuse/bazel", "local"), (CACHE / "archive", "archive-base")):
            if workspace.exists():
                _run(workspace, base, "shutdown")


if __name__ == "__main__":
    main()
