"""Names that are defined and never used: functions, classes, methods and constants whose name stands nowhere else in the tree.

A name in a string counts as used (getattr, __all__, sources run elsewhere), a name after a prefix in one too (f"visit_{kind}"), and so
does one in a test: this finds the forgotten, not the untested. What is decorated is left alone, except by the decorators below: pytest,
torch and functools call such functions by other ways.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping

PLAIN_DECORATORS = {"classmethod", "dataclass", "property", "staticmethod", "contextmanager", "cache", "inference_mode", "no_grad"}
# Called by name from outside: dunders, pytest, http.server, ast.NodeVisitor, torch's classes, io, html.parser.
CALLED = re.compile(
    r"__\w+__|test_\w+|pytest_\w+|do_[A-Z]+|log_message|visit_\w+|forward|backward|setup_context|add_param_group|reset_parameters|seekable|handle_\w+"
    r"|exit_code|main"
)


def check(sources: Mapping[str, str]) -> list[str]:
    """Returns complaints; `sources` are the Python files of the whole tree, by path."""
    words: Counter[str] = Counter()
    prefixes: set[str] = set()
    defined: list[tuple[str, int, str]] = []
    for path, text in sources.items():
        words.update(re.findall(r"[^\W\d]\w*", text))
        prefixes.update(re.findall(r"[\"']([a-zA-Z_]+_)[{\"']", text))
        defined += [(path, line, name) for line, name in _defined(ast.parse(text))]
    definitions = Counter(name for _, _, name in defined)
    return [
        f"{path}:{line}: {name} is never used; remove it"
        for path, line, name in defined
        if words[name] == definitions[name] and not CALLED.fullmatch(name) and not name.startswith(tuple(prefixes))
    ]


def _defined(tree: ast.Module | ast.ClassDef) -> Iterator[tuple[int, str]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if {_name(decorator) for decorator in node.decorator_list} <= PLAIN_DECORATORS:
                yield node.lineno, node.name
            if isinstance(node, ast.ClassDef):
                yield from _defined(node)
        elif isinstance(node, ast.Assign) and isinstance(tree, ast.Module):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield node.lineno, target.id


def _name(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
