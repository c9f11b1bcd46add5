"""Creates a library in the house's form: python3 tools/new_lib.py NAME --layer N --about "One sentence."

Writes libs/NAME (facade with the library's error class, py.typed, README, pyproject.toml, BUILD, a test), a stranger's test in reuse/bazel,
and the name into libraries.bzl, pyproject.toml and the table of docs/architecture.md. What the new library uses comes with the code that
uses it: a dep in its BUILD, a dependency in its pyproject.toml, its name in the other's visibility. Then: firewall/update_goldens.sh.
"""

import argparse
import keyword
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

FACADE = '''"""{about}"""

from align.{name}._errors import {error}

__all__ = ["{error}"]
'''
ERRORS = '''class {error}(ValueError):
    """What a user asked for cannot be done; the message of one line names the value, the place and the way out."""

    exit_code = 2
'''
TEST = """from pathlib import Path

from align.{name} import {error}


def test_a_user_s_mistake_is_one_line_and_exit_code_2():
    error = {error}("rows is 0; give at least 1")
    assert isinstance(error, ValueError)
    assert (str(error), error.exit_code) == ("rows is 0; give at least 1", 2)


def test_the_readme_names_every_public_name():
    import align.{name} as library

    text = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    assert [name for name in library.__all__ if name not in text] == []
"""
README = """# align.{name}

{about}

```python
from align.{name} import {error}
```

A user's mistake raises `{error}` (a ValueError, exit code 2) with a message of one line.
"""
PROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "align-{name}"
version = "{version}"
description = "{summary}"
readme = "README.md"
license = "Apache-2.0"
requires-python = ">=3.11"
dependencies = []

[tool.setuptools.packages.find]
include = ["align.{name}"]
namespaces = true

[tool.setuptools.package-data]
"align.{name}" = ["py.typed"]
"""
BUILD = """load("@align_py//:defs.bzl", "py_library", "py_test")

package(default_visibility = ["//visibility:private"])

# All of this package, for the wheel and for lint.
filegroup(
    name = "sources",
    srcs = glob(
        ["**"],
        exclude = ["**/__pycache__/**"],
    ),
    visibility = ["//tools:__subpackages__"],
)

py_library(
    name = "{name}",
    srcs = glob(["align/**/*.py"]),
    data = ["align/{name}/py.typed"],
    imports = ["."],
    visibility = [
        "//:__pkg__",
        "//firewall:__pkg__",
    ],
)

py_test(
    name = "{name}_test",
    size = "small",
    srcs = [
        "tests/{name}_test.py",
        "//tools/py:pytest_main.py",
    ],
    data = ["README.md"],
    main = "//tools/py:pytest_main.py",
    deps = [
        ":{name}",
        "//tools/py:testing",
    ],
)
"""
STRANGER = '''"""{about}"""

from align.{name} import {error}

assert issubclass({error}, ValueError)
'''


def create(root: Path, name: str, layer: int, about: str) -> list[str]:
    """Writes and edits the files; returns their paths. Raises ValueError: a name that is taken or no module's, a layer that is none."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ValueError(f"{name!r} is no module's name; use lower-case letters, digits and _")
    libraries = (root / "libraries.bzl").read_text(encoding="utf-8")
    listed = re.findall(r'^    "(\w+)",$', libraries, re.MULTILINE)
    if name in listed or (root / "libs" / name).exists():
        raise ValueError(f"libs/{name} exists; edit it, or choose another name")
    document = (root / "docs/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| {layer} \| .*\n", document, re.MULTILINE)
    if not rows or "stages" in rows[-1]:
        raise ValueError(f"there is no layer {layer} for libraries; docs/architecture.md has the table")
    about = about.strip().rstrip(".") + "."
    version = re.search(r'VERSION = "(.*)"', libraries)[1]  # type: ignore[index]
    error = "".join(part.capitalize() for part in name.split("_")) + "Error"
    words = {"name": name, "about": about, "summary": about.rstrip("."), "version": version, "error": error}
    package = f"libs/{name}/align/{name}"
    files = {
        f"libs/{name}/BUILD": BUILD,
        f"libs/{name}/README.md": README,
        f"libs/{name}/pyproject.toml": PROJECT,
        f"{package}/__init__.py": FACADE,
        f"{package}/_errors.py": ERRORS,
        f"{package}/py.typed": "",
        f"libs/{name}/tests/{name}_test.py": TEST,
        f"reuse/bazel/{name}_test.py": STRANGER,
    }
    texts = {path: text.format(**words) for path, text in files.items()}
    block = "".join(f'    "{each}",\n' for each in sorted([*listed, name]))
    texts["libraries.bzl"] = re.sub(r'(LIBRARIES = \[\n)(    "\w+",\n)+', lambda found: found[1] + block, libraries)
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    # After the last library that comes before it, in each of the two lists.
    before = max((each for each in listed if each < name), default=listed[0])
    texts["pyproject.toml"] = project.replace(f'    "libs/{before}",\n', f'    "libs/{before}",\n    "libs/{name}",\n')
    uses = rows[-1].rstrip(" |\n").rpartition("| ")[2]
    texts["docs/architecture.md"] = document.replace(rows[-1], f"{rows[-1]}| {layer} | `{name}` | {uses} |\n", 1)
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return list(texts)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="new_lib", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--layer", type=int, required=True, help="of the table in docs/architecture.md")
    parser.add_argument("--about", required=True, help="one sentence: what the library is for")
    arguments = parser.parse_args(argv)
    try:
        written = create(ROOT, arguments.name, arguments.layer, arguments.about)
    except ValueError as error:
        print(f"new_lib: {error}", file=sys.stderr)
        return 2
    print(*written, "Next: the code; firewall/update_goldens.sh; a line in CHANGELOG.md.", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
