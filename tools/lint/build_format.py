"""BUILD files in buildifier's form, as far as this repository uses it; complaints with file and line, no rewriting.

What buildifier would change: quotes, tabs, blank lines, loads not at the top, the order of attributes (name first, deps last, its table),
lists of two or more strings not one a line, sorted lists out of order, calls over several lines without a line for each argument.
"""

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterator

# buildtools/tables: what has no number is 0, and equals stand in alphabetical order.
PRIORITY = {"name": -99, "size": -95, "timeout": -94, "testonly": -93, "src": -92, "srcs": -90, "out": -89, "outs": -88}
PRIORITY |= {"exports": 2, "runtime_deps": 3, "deps": 4, "implementation": 5, "alwayslink": 7}
SORTED = {"data", "deps", "srcs", "tags", "visibility"}


def check(path: str, text: str) -> list[str]:
    """Returns the complaints about one BUILD file."""
    return [f"{path}:{line}: {words}" for line, words in sorted({*_lines(text), *_quotes(text), *_tree(text)})]


def _lines(text: str) -> Iterator[tuple[int, str]]:
    lines = text.split("\n")
    if lines[-1] or (len(lines) > 1 and not lines[-2]):
        yield len(lines), "ends with one newline"
    for number, line in enumerate(lines, 1):
        if "\t" in line:
            yield number, "a tab; indent by four spaces"
        if line != line.rstrip():
            yield number, "white space at the end of the line"
        if number > 2 and not line and not lines[number - 2]:
            yield number, "two blank lines; one is enough"


def _quotes(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING and token.string.startswith("'") and '"' not in token.string:
            yield token.start[0], f"{token.string} has single quotes; use double ones"


def _tree(text: str) -> Iterator[tuple[int, str]]:
    tree, lines, others = ast.parse(text), text.split("\n"), False
    for statement in tree.body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        is_load = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "load"
        if is_load and others:
            yield statement.lineno, "load after another statement; loads stand first"
        if is_load and isinstance(call, ast.Call):
            names = [arg.value for arg in call.args[1:] if isinstance(arg, ast.Constant)]
            if names != sorted(names):
                yield statement.lineno, f"loaded names are not sorted: {', '.join(sorted(names))}"
        others = others or not (is_load or isinstance(call, ast.Constant))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.lineno != node.end_lineno:
            yield from _call(node)
        if isinstance(node, ast.keyword) and node.arg in SORTED:
            for part in _lists(node.value):
                yield from _sorted(part, lines)
        if isinstance(node, ast.List) and len(node.elts) > 1 and node.lineno == node.end_lineno:
            yield node.lineno, "a list of several on one line; one a line"


def _lists(value: ast.expr) -> Iterator[ast.List]:
    """The lists that make up an attribute; not the patterns of a glob, whose order is its author's."""
    if isinstance(value, ast.BinOp):
        yield from _lists(value.left)
        yield from _lists(value.right)
    elif isinstance(value, ast.List):
        yield value


def _call(call: ast.Call) -> Iterator[tuple[int, str]]:
    parts: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    starts = [part.lineno for part in parts]
    if len(parts) > 1 and (len(set(starts)) != len(starts) or call.lineno in starts[1:]):
        yield call.lineno, "a call over several lines; one argument a line"
    order = [(PRIORITY.get(key.arg or "", 0), key.arg or "") for key in call.keywords]
    wrong = next((pair[1][1] for pair in itertools.pairwise(order) if pair[1] < pair[0]), None)
    if wrong and order[0][1] == "name":  # a rule; functions keep the order of their author
        yield call.lineno, f"attribute {wrong} is out of order: {', '.join(name for _, name in sorted(order))}"


def _sorted(part: ast.List, lines: list[str]) -> Iterator[tuple[int, str]]:
    values = [element.value for element in part.elts if isinstance(element, ast.Constant) and isinstance(element.value, str)]
    if len(values) != len(part.elts) or any("#" in lines[n - 1] for n in range(part.lineno, part.end_lineno or 0)):
        return  # not all strings; or a comment that may be about the order
    if values != sorted(values, key=_key):
        yield part.lineno, f"not in buildifier's order: {', '.join(sorted(values, key=_key))}"


def _key(value: str) -> tuple[int, list[str]]:
    phase = 1 if value.startswith(":") else 2 if value.startswith("//") else 3 if value.startswith("@") else 0
    return phase, re.split(r"[:.]", value)
