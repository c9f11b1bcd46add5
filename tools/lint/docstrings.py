"""Public functions and classes have docstrings and annotations; what takes tensors tells shapes, what takes files tells what is raised.

Public is what a facade's literal `__all__` names. Read from the syntax tree, nothing is imported.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SHAPE = re.compile(r"\((?:[A-Z0-9]\w*|\.\.\.|…|\*|[a-z_]+,)[^()]*\)|0-d|[Ss]calar|\bshapes?\b|[Ee]lementwise|\bbatch\b|state_dict")
RAISES = re.compile(r"[Rr]aise|[Rr]efuse|[Ee]rror")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def check(root: Path, library: str) -> list[str]:
    """Returns complaints about the public names of libs/<library>."""
    package = root / "libs" / library / "align" / library
    facade = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    found = []
    for name, path, original in _public(facade, package):
        node = _definition(path, original)
        shown = path.relative_to(root)
        if isinstance(node, ast.ClassDef):
            found += [f"{shown}:{line}: {words}" for line, words in _of_class(node, name)]
        elif isinstance(node, Function):
            found += [f"{shown}:{line}: {words}" for line, words in _of_function(node, name, "")]
    return found


def _public(facade: ast.Module, package: Path) -> Iterator[tuple[str, Path, str]]:
    """(public name, file, name there) of all that `__all__` names."""
    listed = next(
        ast.literal_eval(node.value)
        for node in facade.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    )
    where = {name: (package / "__init__.py", name) for name in listed}
    for node in facade.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            module = node.module.rpartition(".")[2]
            for alias in node.names:
                where[alias.asname or alias.name] = (package / f"{module}.py", alias.name)
    for name in listed:
        path, original = where[name]
        if path.is_file():
            yield name, path, original


def _definition(path: Path, name: str) -> ast.stmt | None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return next((node for node in tree.body if isinstance(node, Function | ast.ClassDef) and node.name == name), None)


def _of_class(node: ast.ClassDef, name: str) -> Iterator[tuple[int, str]]:
    text = ast.get_docstring(node) or ""
    if not text:
        yield node.lineno, f"{name} has no docstring"
    for method in node.body:
        if isinstance(method, Function) and (not method.name.startswith("_") or method.name == "__init__"):
            yield from _of_function(method, f"{name}.{method.name}", text)


def _of_function(node: Function, name: str, above: str) -> Iterator[tuple[int, str]]:
    """`above` is the class's docstring: a method may leave the telling to it."""
    own = ast.get_docstring(node) or ""
    if not own and not above:
        yield node.lineno, f"{name} has no docstring"
        return
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    arguments = [each for each in arguments if each.arg not in ("self", "cls")]
    bare = [each.arg for each in arguments if each.annotation is None] + ([] if node.returns or node.name == "__init__" else ["return"])
    if bare:
        yield node.lineno, f"{name} has no annotation for {', '.join(bare)}"
    types = " ".join(ast.unparse(each.annotation) for each in arguments if each.annotation)
    text = own + above
    if re.search(r"\b(Tensor|ndarray)\b", types) and not SHAPE.search(text):
        yield node.lineno, f"{name} takes tensors, and its docstring tells no shape"
    if re.search(r"\b(Path|PathLike)\b", types) and not RAISES.search(text):
        yield node.lineno, f"{name} takes a file, and its docstring tells nothing that is raised"
