"""Plants violations in a small copy of the workspace and shows that each is refused, with file, line and what to do.

Bazel inside Bazel, so no test of //...: .ci/run calls it. By hand: python3 firewall/planted.py [bazel options]
One build with --keep_going meets all of what the build refuses; the tree scan and the orphan check meet the rest.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ["WORKSPACE", "deps.bzl", "libraries.bzl", ".bazelrc", ".bazelversion", "bazelw", "pyproject.toml", "third_party"]
COPIED += ["tools/bazel", "tools/py", "tools/lint/deps.bzl", "tools/lint/lock.bzl"]
PACKAGES = ["hypothesis", "numpy", "pyarrow", "pytest", "safetensors", "torch", "triton"]

LIBRARY = """load("@align_py//:defs.bzl", "py_library")

package(default_visibility = ["//visibility:private"])

py_library(
    name = "{name}",
    srcs = glob(["align/**/*.py"]),
    imports = ["."],
    visibility = {visibility},
    deps = {deps},
)
"""

# name of the library it is planted in: (source of align/<name>/_x.py, deps, words that must appear)
IN_SOURCE = {
    "lazy": ("def f():\n    import transformers\n", [], "_x.py:2: imports transformers"),
    "literal": ("import importlib\nimportlib.import_module('sympy.core')\n", [], "_x.py:2: imports sympy.core"),
    "variable": ("import importlib\ndef f(n):\n    return importlib.import_module(n)\n", [], "_x.py:3: import_module with a name"),
    "dunder": ("imp = __import__\nimp('sympy')\n", [], "_x.py:1: __import__ imports or runs unseen code"),
    "runs": ("import runpy\n", [], "_x.py:1: runpy runs unseen code"),
    "syspath": ("import sys\nsys.path.insert(0, 'd')\n", [], "_x.py:2: sys.path is the build's to set"),
    "resolve": ("import pkgutil\npkgutil.resolve_name('sympy:core')\n", [], "_x.py:2: imports sympy"),
    "executes": ("exec('import sympy')\n", [], "_x.py:1: exec imports or runs unseen code"),
    "transitive": ("import align.middle\nimport align.bottom\n", ["//libs/middle"], "_x.py:2: imports align.bottom"),
    "undeclared": ("from align.bottom import thing\n", [], "_x.py:1: imports align.bottom"),
    "idle": ("import math\n", ["//libs/bottom"], "dep //libs/bottom:bottom is never imported; remove it"),
    "escape": ("from ..bottom import thing\n", [], "_x.py:1: imports align.bottom"),
    "banned": ("import wandb\n", [], "_x.py:1: imports wandb"),
    "hidden": ("from importlib.util import spec_from_file_location\n", [], "_x.py:1: spec_from_file_location imports unseen code"),
}
# Who may not see what: refused at analysis, with the BUILD's file and line.
IN_VISIBILITY = {
    "data": (
        "import pyarrow\n",
        ["//third_party/python:pyarrow"],
        "//third_party/python:pyarrow' is not visible from target '//libs/data:data",
    ),
    "torchneeds": ("import sympy\n", ["//third_party/python:torch_sympy"], "'//third_party/python:torch_sympy' is not visible"),
    "pytests": ("import pytest\n", ["//third_party/python:pytest"], "//third_party/python:pytest' is not visible"),
    "verify": ("import align.upper\n", ["//libs/upper"], "'//libs/upper:upper' is not visible from target '//libs/verify:verify"),
    "tokenizer": (
        "import torch\n",
        ["//third_party/python:torch"],
        "//third_party/python:torch' is not visible from target '//libs/tokenizer:tokenizer",
    ),
}
# Found without Bazel, by tools/py/scan.py: path, text, words.
IN_TREE = [
    ("libs/bottom/tests/lazy_test.py", "def f():\n    import bitsandbytes\n", "libs/bottom/tests/lazy_test.py:2: bitsandbytes is banned"),
    ("libs/alias/BUILD", LIBRARY.format(name="alias", visibility="[]", deps='["//:bottom"]'), "//:bottom is for other repositories"),
    ("libs/bottom/align/__init__.py", "", "libs/bottom/align/__init__.py:1: the namespace `align` must not have a package file"),
    ("libs/bottom/align/bottom/_arrow.py", "import pyarrow\n", "libs/bottom/align/bottom/_arrow.py:1: pyarrow is banned"),
    ("stray.py", "import math\n", "stray.py:1: is in no target"),
]

# What would make a build depend on the machine or the hour. The tests pass only where they get what they must not.
TEST = """load("@align_py//:defs.bzl", "py_test")

py_test(
    name = "{name}",
    size = "small",
    srcs = ["{name}.py"],
)
"""
CLOCK = """genrule(
    name = "clock",
    outs = ["clock.txt"],
    cmd = "date +%s%N > $@",
)
"""
MARKER = ".align-planted"
REACHES = {
    "network": "import urllib.request\nurllib.request.urlopen({address!r}, timeout=5).read()\n",
    "home": f"from pathlib import Path\nPath.home().joinpath({MARKER!r}).read_text()\n",
}


def plant(tree: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, tree / name) if source.is_dir() else shutil.copy2(source, tree / name)
    # A stranger's packages, all of them nothing: what is refused is refused before anything would be installed.
    own = f"align_dependencies(packages = {{name: '//fake' for name in {PACKAGES}}})"
    (tree / "WORKSPACE").write_text((tree / "WORKSPACE").read_text().replace("align_dependencies()", own))
    (tree / "fake").mkdir()
    (tree / "fake/BUILD").write_text(LIBRARY.format(name="fake", visibility='["//visibility:public"]', deps="[]"))
    (tree / "BUILD").write_text('exports_files(["pyproject.toml", ".bazelrc"], visibility = ["//visibility:public"])\n')
    public = '["//visibility:public"]'
    cases = {"bottom": ("thing = 1\n", []), "middle": ("import align.bottom\n", ["//libs/bottom"]), "upper": ("x = 1\n", [])}
    cases |= {name: case[:2] for name, case in (IN_SOURCE | IN_VISIBILITY).items()}
    for name, (source, deps) in cases.items():
        package = tree / "libs" / name / "align" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("thing = 1\n" if name == "bottom" else "")
        (package / "_x.py").write_text(source)
        visible = '["//libs/middle:__pkg__"]' if name == "upper" else public
        (tree / "libs" / name / "BUILD").write_text(LIBRARY.format(name=name, visibility=visible, deps=str(deps).replace("'", '"')))
    (tree / "tools/lint/BUILD").write_text("")
    (tree / "libs/clock").mkdir()
    (tree / "libs/clock/BUILD").write_text(CLOCK)
    (tree / ".bazelignore").write_text("third_party/bazel\n")


class Answer(BaseHTTPRequestHandler):
    """What a test on the network would hear."""

    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def repeatability(tree: Path, bazel: list[str | Path], quiet: list[str]) -> int:
    """Plants a clock, tests that read the network and the home directory, a line that pins nothing. How many got through."""
    logs = [tree / "first.json", tree / "second.json"]
    for log in logs:
        run(tree, *bazel, "clean")
        run(tree, *bazel, "build", *quiet, f"--execution_log_json_file={log}", "//libs/clock")
    said = run(ROOT, sys.executable, "tools/ci/same_bytes.py", *logs)
    failed = report("a time stamp", "libs/clock/clock.txt differs between two builds", said.splitlines())

    own = "127.0.0.1"  # a machine without any other interface: the test below passes, and says so
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # TEST-NET-1, RFC 5737; no packet is sent, the kernel says which address would be ours
        own = probe.getsockname()[0]
    server = ThreadingHTTPServer((own, 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    marker = Path.home() / MARKER
    marker.write_text("")
    try:
        for name, source in REACHES.items():
            (tree / "libs" / name).mkdir()
            (tree / "libs" / name / f"{name}.py").write_text(source.format(address=f"http://{own}:{server.server_port}/"))
            (tree / "libs" / name / "BUILD").write_text(TEST.format(name=name))
            if outside := run(tree, sys.executable, tree / "libs" / name / f"{name}.py"):
                print(f"  the planted test does not even pass outside Bazel:\n{outside}")
        said = run(tree, *bazel, "test", "--keep_going", *quiet, *(f"//libs/{name}" for name in REACHES))
    finally:
        marker.unlink()
        server.shutdown()
    for name in REACHES:
        failed += report(
            f"a test that reads the {name}", "FAILED", [line for line in said.splitlines() if line.startswith(f"//libs/{name}:")]
        )

    lock = tree / "third_party/python/lock.bzl"
    lock.write_text(re.sub(r"(?m)^iniconfig==.*$", "iniconfig>=2", lock.read_text()))
    said = run(tree, *bazel, "query", *quiet[1:3], "//libs/bottom")
    return failed + report("an unpinned dependency", "iniconfig>=2 is not pinned", said.splitlines())


def run(tree: Path, *command: str | Path) -> str:
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def main(options: list[str]) -> int:
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "align-planted")  # kept: the next run extracts nothing
    with tempfile.TemporaryDirectory(prefix="align-planted-") as directory:
        tree = Path(directory)
        plant(tree)
        bazel = [tree / "bazelw", f"--output_base={base}"]
        quiet = ["--symlink_prefix=/", "--noshow_progress", "--curses=no", *options]
        said = run(tree, *bazel, "build", "--keep_going", *quiet, "//libs/...")
        sources = run(tree, *bazel, "query", *quiet[1:3], 'labels(srcs, kind("py_", //libs/...))')
        for path, text, _ in IN_TREE:
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text)
        run(tree, "git", "init", "-q", ".")
        seen = run(tree, sys.executable, "tools/py/scan.py")
        seen += subprocess.run(
            [sys.executable, "tools/py/scan.py", "--orphans"], cwd=tree, input=sources, capture_output=True, text=True, check=False
        ).stdout
        repeats = repeatability(tree, bazel, quiet)
        (version,) = (path.suffix.removeprefix(".") for path in tree.glob(".bazelrc.*"))  # tools/bazel has written it
        run(tree, *bazel, "shutdown")
    failed = repeats
    for name, (_, _, words) in (IN_SOURCE | IN_VISIBILITY).items():
        failed += report(name, words, [line for line in said.splitlines() if f"libs/{name}" in line])
    for path, _, words in IN_TREE:
        failed += report(path, words, seen.splitlines())
    total = len(IN_SOURCE) + len(IN_VISIBILITY) + len(IN_TREE) + len(REACHES) + 2
    if failed:
        print(said, seen, sep="\n")
    print(f"planted violations: {total - failed} of {total} refused (Bazel {version})")
    return 1 if failed else 0


def report(name: str, words: str, output: list[str]) -> int:
    line = next((line.strip() for line in output if words in line), "")
    print(f"  {'refused' if line else 'NOT REFUSED'}  {name}: {line or words}"[:220])
    return 0 if line else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
