"""Lint: python3 tools/lint/lint.py [--update] [check …], or ./bazelw test --config=lint //... with the pinned tools.

Checks: ruff, format, mypy, build, docstrings, figures, dead. Without Bazel ruff is the one on PATH, mypy this interpreter's. A
complaint that is known and waits stands in tools/lint/known.txt, one a line, without its line number; --update writes that file anew.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import build_format
import dead_code
import docstrings
import figures

BAZEL = "TEST_SRCDIR" in os.environ
ROOT = Path(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"]) if BAZEL else Path(__file__).resolve().parents[2]
SITES = ROOT.parent  # under Bazel: the other repositories
MYPY = ["mypy", "ast_serialize", "librt", "mypy_extensions", "pathspec", "typing_extensions"]
FOREIGN = ("third_party/oracle/", "third_party/poison/")  # another venv's programs; files that raise


def files(*endings: str) -> list[str]:
    """Paths of the tree, relative to the root: under Bazel what the test was given, else what git knows or does not ignore."""
    if BAZEL:
        every = [str((Path(folder) / name).relative_to(ROOT)) for folder, _, names in os.walk(ROOT) for name in names]
    else:
        command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        every = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted(path for path in every if path.endswith(endings) and (ROOT / path).is_file())


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def ran(command: list[str], environment: dict[str, str] | None = None) -> list[str]:
    """A tool's complaints, one a line; what it says besides where it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | (environment or {}))
    if not done.returncode:
        return []
    said = (done.stdout + done.stderr).splitlines()
    return [line for line in said if re.match(r"\S+:\d+:", line)] or said


def ruff(*words: str) -> list[str]:
    program = SITES / "align_lint_ruff/site/bin/ruff" if BAZEL else shutil.which("ruff")
    if not program:
        sys.exit("lint: no ruff on PATH; ./bazelw test --config=lint //... brings the pinned one")
    return ran([str(program), *words, "--output-format=concise", "--no-cache", "--config=pyproject.toml", *files(".py")])


def ruff_check() -> list[str]:
    return ruff("check")


def ruff_format() -> list[str]:
    return ruff("format", "--check")


def mypy() -> list[str]:
    """--strict (pyproject.toml) on the facades; what they import is followed silently, torch and numpy are Any."""
    facades = [path for path in files("__init__.py") if re.fullmatch(r"libs/\w+/align/\w+/__init__\.py", path)]
    paths = os.pathsep.join(str(SITES / f"align_lint_{name}/site") for name in MYPY)
    cache = os.environ.get("TEST_TMPDIR", os.devnull)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--follow-imports=silent",
        "--ignore-missing-imports",
        "--no-site-packages",
        f"--cache-dir={cache}",
    ]
    return ran([*command, "--no-error-summary", *facades], {"PYTHONPATH": paths} if BAZEL else {})


def build() -> list[str]:
    return [line for path in files("BUILD") for line in build_format.check(path, read(path))]


def docstring() -> list[str]:
    libraries = [path.split("/")[1] for path in files("__init__.py") if re.fullmatch(r"libs/\w+/align/\w+/__init__\.py", path)]
    return [line for library in libraries for line in docstrings.check(ROOT, library)]


def figure() -> list[str]:
    wanted = [path for path in files(".md") if re.fullmatch(r"README\.md|libs/\w+/README\.md|benchmarks/.*\.md", path)]
    return [line for path in wanted for line in figures.check(path, read(path))]


def dead() -> list[str]:
    return dead_code.check({path: read(path) for path in files(".py") if not path.startswith(FOREIGN)})


CHECKS: dict[str, Callable[[], list[str]]] = {
    "ruff": ruff_check,
    "format": ruff_format,
    "mypy": mypy,
    "build": build,
    "docstrings": docstring,
    "figures": figure,
    "dead": dead,
}


def bare(name: str, complaint: str) -> str:
    """As known.txt has it."""
    return f"{name}: {re.sub(r':[0-9]+(:[0-9]+)?:', ':', complaint, count=1)}"


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="lint.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", metavar="check", nargs="*", help=f"which checks run: {', '.join(CHECKS)} (default: all)")
    parser.add_argument("--update", action="store_true", help="write known.txt anew with the complaints that there are")
    options = parser.parse_args(words)
    if unknown := [name for name in options.checks if name not in CHECKS]:
        parser.error(f"there is no check {unknown[0]!r}; the checks are {', '.join(CHECKS)}")
    names = options.checks or list(CHECKS)
    known = [line for line in read("tools/lint/known.txt").splitlines() if line]
    failed, kept = 0, [line for line in known if line.partition(":")[0] not in names]
    for name in names:
        complaints = CHECKS[name]()
        found = {bare(name, line) for line in complaints}
        left = [line for line in complaints if bare(name, line) not in known]
        gone = [line for line in known if line.startswith(f"{name}: ") and line not in found]
        print(*left, *(f"known.txt: holds no longer, remove: {line}" for line in gone), sep="\n")
        print(f"lint {name}: {len(left)} complaints, {len(found) - len({bare(name, line) for line in left})} known ones", flush=True)
        failed, kept = failed + len(left), kept + sorted(found)
    if options.update:
        (ROOT / "tools/lint/known.txt").write_text("\n".join([*kept, ""]), encoding="utf-8")
        return 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
