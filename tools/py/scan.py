"""Wall 3: scans every file that git knows or does not ignore, with or without Bazel. Run: python3 tools/py/scan.py [root]"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from check_imports import imported

# Banned by name, with the reason that a reader is told.
BANNED = {
    "transformers": "align.model, align.tokenizer",
    "omegaconf": "align.config",
    "datasets": "align.data",
    "math_verify": "align.verify",
    "sympy": "align.verify",
    "wandb": "align.tracking",
    "bitsandbytes": "align.optim8bit",
    "peft": "align.train",
    "deepspeed": "align.train",
    "trl": "align.rl",
    "vllm": "align.rollout_protocol",
    "ray": "torch's own launcher",
    "matplotlib": "align.tracking",
    "pyarrow": "align.ingest",
}
ALLOWED = {"pyarrow": ("libs/ingest/", "reuse/bazel/ingest_test.py"), "vllm": ("stages/extras/vllm_rollout/vllm_serve.py",)}
NO_TARGET = (
    "conftest.py",
    "reuse/",
    "third_party/poison/",
    "third_party/oracle/",
    "stages/extras/vllm_rollout/vllm_serve.py",
)  # plain pytest's; a workspace of its own; data; another venv's
OTHER_VENV = "third_party/oracle/"  # run by the oracles' interpreter, never imported here


def scan(root: Path) -> list[str]:
    """Returns complaints, each with file and line."""
    files = _files(root)
    found = [complaint for path in files for complaint in _file(root, path)]
    shadows = [path for path in files if re.fullmatch(r"libs/[^/]+/align/__init__\.py", path)]
    found += [f"{path}:1: the namespace `align` must not have a package file; remove it" for path in shadows]
    found += [
        f"{path}:501: over 500 lines; the house keeps rooms small" for path in files if path.endswith(".py") and _lines(root / path) > 500
    ]
    return sorted(found + list(_lists(root)) + [complaint for path in files for complaint in _tags(root, path)])


def _files(root: Path) -> list[str]:
    listed = subprocess.run(
        ["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [path for path in listed.split("\0") if path and (root / path).is_file()]


def _file(root: Path, path: str) -> Iterator[str]:
    if path.endswith(".py"):
        module = path.removesuffix(".py").partition("/align/")[2].replace("/", ".")
        module = "align." + module.removesuffix(".__init__") if module else path.removesuffix(".py").replace("/", ".")
        for line, names, trouble in imported((root / path).read_text(encoding="utf-8"), module, path.endswith("/__init__.py")):
            top = names[0].partition(".")[0] if names else ""
            if top in BANNED and not path.startswith((*ALLOWED.get(top, ()), OTHER_VENV)):
                yield f"{path}:{line}: {top} is banned; use {BANNED[top]}"
            if trouble:
                yield f"{path}:{line}: {trouble}"
    elif path.endswith("/BUILD") and path.startswith(("libs/", "stages/", "firewall/", "tools/")):
        for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg in ("deps", "actual"):
                for label in ast.walk(node.value):
                    if isinstance(label, ast.Constant) and str(label.value).startswith(("//:", "@align_ml//:")):
                        library = label.value.partition(":")[2]
                        yield f"{path}:{label.lineno}: {label.value} is for other repositories; depend on //libs/{library}"


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def _targets(build: str) -> list[set[str]]:
    """The strings of each call, and of each tuple that a comprehension makes targets of, in a BUILD file."""
    nodes = [node for node in ast.walk(ast.parse(build)) if isinstance(node, ast.Call | ast.Tuple)]
    return [{leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)} for node in nodes]


def _tags(root: Path, path: str) -> Iterator[str]:
    """A marked test is in a target with that tag: its file's own for a module-level mark, <name>_slow_test for a mark on single tests."""
    if not re.fullmatch(r"(libs/\w+|stages)/tests/\w+_test\.py", path):
        return
    package, name = path.split("/tests/")[0], path.rpartition("/")[2].removesuffix(".py")
    build, text = (root / package / "BUILD").read_text(encoding="utf-8"), (root / path).read_text(encoding="utf-8")
    whole = "\npytestmark = " in text
    for line, found in enumerate(text.splitlines(), 1):
        if whole and not found.startswith("pytestmark"):
            continue
        for mark in re.findall(r"pytest\.mark\.(slow|gpu|oracle|weights)\b", found):
            target = name if found.startswith("pytestmark") else name.removesuffix("_test") + f"_{mark}_test"
            if not any(target in strings and mark in strings for strings in _targets(build)):
                yield f"{path}:{line}: marked {mark}, but {package}/BUILD has no target {target} tagged {mark}; add it, or it never runs"


def _lists(root: Path) -> Iterator[str]:
    """pyproject.toml and libraries.bzl name exactly the libraries on disk."""
    libraries = sorted(path.parent.name for path in root.glob("libs/*/BUILD"))
    paths = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]["pythonpath"]
    if sorted(p.removeprefix("libs/") for p in paths if re.fullmatch(r"libs/\w+", p)) != libraries:
        yield f"pyproject.toml:1: pythonpath is not libs/* = {libraries}"
    listed = re.findall(r'^    "(\w+)",$', (root / "libraries.bzl").read_text(encoding="utf-8"), re.MULTILINE)
    if listed != libraries:
        yield f"libraries.bzl:1: the list is not libs/*, sorted = {libraries}"


def orphans(root: Path, labels: list[str]) -> list[str]:
    """Python files that are in no target; `labels` come from bazel query 'labels(srcs, kind(py_, //...))'."""
    known = {label.removeprefix("//").replace(":", "/").lstrip("/") for label in labels if label.startswith("//")}
    python = [p for p in _files(root) if p.endswith(".py") and not p.startswith(NO_TARGET)]
    return [f"{p}:1: is in no target; add it to srcs, or remove it" for p in python if p not in known]


if __name__ == "__main__":
    tree = Path(__file__).resolve().parents[2]
    complaints = orphans(tree, sys.stdin.read().split()) if sys.argv[1:] == ["--orphans"] else scan(tree)
    print(*complaints, f"scan: {len(complaints)} complaints", sep="\n")
    sys.exit(bool(complaints))
