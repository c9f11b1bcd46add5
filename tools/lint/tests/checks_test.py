"""Each check on a planted mistake of each kind, and on the same thing put right."""

from pathlib import Path

import build_format
import dead_code
import docstrings
import figures
import pytest

GOOD = """load("@align_py//:defs.bzl", "py_library", "py_test")

package(default_visibility = ["//visibility:private"])

py_library(
    name = "own",
    testonly = True,
    srcs = glob(["align/**/*.py"]),
    visibility = [
        ":__pkg__",
        "//firewall:__pkg__",
    ],
    deps = [
        ":other",
        "//libs/data",
        "//libs/data:cases",
        "@other//:pkg",
    ],
)
"""


TESTONLY, SRCS = "    testonly = True,\n", '    srcs = glob(["align/**/*.py"]),\n'
VISIBLE = '[\n        ":__pkg__",\n        "//firewall:__pkg__",\n    ]'
MISTAKES = {
    "'own' has single quotes": (6, '"own"', "'own'"),
    "a tab": (7, "    testonly", "\ttestonly"),
    "two blank lines": (3, "package(", "\npackage("),
    "white space at the end": (7, "True,", "True, "),
    "loaded names are not sorted": (1, '"py_library", "py_test"', '"py_test", "py_library"'),
    "load after another": (5, "package(", 'x = 1\n\nload(":y.bzl", "y")\n\npackage('),
    "attribute testonly is out of order": (5, TESTONLY + SRCS, SRCS + TESTONLY),
    "not in buildifier's order": (13, '        ":other",\n        "//libs/data",\n', '        "//libs/data",\n        ":other",\n'),
    "a list of several": (9, VISIBLE, '[":__pkg__", "//firewall:__pkg__"]'),
    "a call over several lines": (5, TESTONLY, TESTONLY.rstrip("\n")),
    "ends with one newline": (19, "    ],\n)\n", "    ],\n)"),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_build_files(words: str):
    line, right, wrong = MISTAKES[words]
    assert right in GOOD
    assert any(found.startswith(f"BUILD:{line}: {words}") for found in build_format.check("BUILD", GOOD.replace(right, wrong)))


def test_a_build_file_in_form_passes():
    assert build_format.check("BUILD", GOOD) == []


def library(tmp_path: Path, source: str) -> Path:
    package = tmp_path / "libs/own/align/own"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('from align.own._x import f\n\n__all__ = ["f"]\n')
    (package / "_x.py").write_text(source)
    return tmp_path


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f() -> None:\n    pass\n", "_x.py:1: f has no docstring"),
        ('def f(x) -> None:\n    """Does."""\n', "_x.py:1: f has no annotation for x"),
        ('def f(x: int):\n    """Does."""\n', "_x.py:1: f has no annotation for return"),
        ('def f(x: Tensor) -> None:\n    """Does."""\n', "f takes tensors, and its docstring tells no shape"),
        ('def f(x: Path) -> None:\n    """Does."""\n', "f takes a file, and its docstring tells nothing that is raised"),
        ('class f:\n    """Is."""\n\n    def g(self, x: np.ndarray) -> None:\n        pass\n', "_x.py:4: f.g takes tensors"),
    ],
)
def test_docstrings(tmp_path: Path, source: str, words: str):
    found = docstrings.check(library(tmp_path, source), "own")
    assert len(found) == 1
    assert words in found[0]


def test_docstrings_that_tell(tmp_path: Path):
    source = 'def f(x: Tensor, path: Path) -> None:\n    """Writes x, (B, T), float32. Raises OSError: no room."""\n'
    assert docstrings.check(library(tmp_path, source), "own") == []


FIGURE = "# A\n\n## Speed\nIt runs at 12.5 MB/s.\n"


def test_a_figure_without_its_command_is_found():
    assert [line.partition(": ")[0] for line in figures.check("README.md", FIGURE)] == ["README.md:4"]


@pytest.mark.parametrize(
    "told",
    [
        FIGURE + "(`python3 libs/a/benchmarks/speed.py`)\n",
        FIGURE + "```\nOMP_NUM_THREADS=1 ./bazelw run //libs/a:speed\n```\n",
        FIGURE.replace("# A\n", "# A\nAll by `./bazelw run //libs/a:speed`.\n"),
        FIGURE.replace("12.5 MB/s", "home"),
    ],
)
def test_a_figure_with_its_command_passes(told: str):
    assert figures.check("README.md", told) == []


def test_a_command_of_another_section_is_none():
    assert figures.check("README.md", "# A\n## B\n`python3 x.py`\n" + FIGURE) != []


def test_dead_code():
    sources = {
        "a.py": "LIMIT = 1\nused = 2\n\n\ndef left():\n    pass\n\n\nclass Kept:\n    def lost(self):\n        pass\n\n"
        "    def visit_Name(self):\n        pass\n",
        "b.py": 'from a import Kept, used\n\n\ndef on_click():\n    pass\n\n\nprint(getattr(Kept, f"on_{used}"))\n',
    }
    assert [line.partition(" is")[0] for line in dead_code.check(sources)] == ["a.py:1: LIMIT", "a.py:5: left", "a.py:10: lost"]
    recursive = {"a.py": "def loop():\n    return loop()\n"}
    assert dead_code.check(recursive) == []  # by name only: a limit of this check, not a promise
