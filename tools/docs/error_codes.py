"""docs/errors.md from the code: every exit code, and every error class of a library or stage that a user may meet.

./bazelw run //tools/docs:error_codes             prints the page
./bazelw run //tools/docs:error_codes -- --write  writes docs/errors.md of the workspace
"""

import argparse
import ast
import os
import sys
from pathlib import Path
from typing import NamedTuple

CODES = {
    0: "done",
    2: "bad input or configuration: the message names the value, the place and the way out; nothing was lost",
    3: "refused by preflight: the message has the figures and the smallest change that would fit",
    4: "stopped by a tripwire: the run's report and `stage_result.json` say which, and at which step",
    5: "stopped by a signal or a time limit, with a checkpoint to resume (`--resume`)",
    130: "Ctrl-C while libraries were still imported; nothing was begun",
}
HEAD = """# Errors

What a stage or a tool ends with, and the error classes behind it. Generated from the code by
`./bazelw run //tools/docs:error_codes -- --write`; a test compares.

A user's mistake is one line on stderr, `<stage>: <message>`, and one of these exit codes. A traceback is a fault of align:
please report it.
"""


class ErrorClass(NamedTuple):
    """An exception class as it stands in the source."""

    name: str
    where: str  # libs/<lib> or stages
    bases: tuple[str, ...]
    code: int | None  # its own exit_code, if it has one
    doc: str


def classes(root: Path) -> list[ErrorClass]:
    found = []
    files = [*root.glob("libs/*/align/**/*.py"), *root.glob("stages/*.py")]
    for path in sorted(files, key=str):
        parts = path.relative_to(root).parts
        where = "/".join(parts[:2]) if parts[0] == "libs" else "stages"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases)
                codes = [value for statement in node.body if (value := _exit_code(statement)) is not None]
                doc = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
                found.append(ErrorClass(node.name, where, bases, codes[0] if codes else None, doc))
    return found


def _exit_code(statement: ast.stmt) -> int | None:
    if isinstance(statement, ast.Assign):
        target, value = statement.targets[0], statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        target, value = statement.target, statement.value
    else:
        return None
    named = isinstance(target, ast.Name) and target.id == "exit_code"
    return value.value if named and isinstance(value, ast.Constant) and isinstance(value.value, int) else None


def page(root: Path) -> str:
    """The page: exit codes, then a table of the classes that end a stage with one."""
    every = classes(root)
    by_name = {one.name: one for one in every}

    def code(one: ErrorClass, below: frozenset[str] = frozenset()) -> int | None:
        """Its own exit code, else that of the first base that has one."""
        if one.code is not None:
            return one.code
        below |= {one.name}
        inherited = (code(by_name[base], below) for base in one.bases if base in by_name and base not in below)
        return next((number for number in inherited if number is not None), None)

    rows = sorted({(code(one), one.where, one.name, ", ".join(one.bases), one.doc) for one in every if code(one) is not None}, key=str)
    lines = [HEAD, "| exit code | meaning |", "|---|---|", *(f"| {number} | {meaning} |" for number, meaning in CODES.items()), ""]
    lines += ["| error | exit code | of | is a | what it says |", "|---|---|---|---|---|"]
    lines += [f"| `{name}` | {number} | `{where}` | {bases} | {doc} |" for number, where, name, bases, doc in rows]
    lines += ["", "An OSError that names a file (absent, not readable, disk full) ends a stage with exit code 2 as well."]
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="error_codes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/errors.md")
    options = parser.parse_args(argv)
    root = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
    text = page(root)
    if options.write:
        (root / "docs/errors.md").write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
