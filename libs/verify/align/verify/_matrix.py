"""Sums and products of matrices of expressions."""

from __future__ import annotations

from align.verify import _tree as tree
from align.verify._budget import OverBudget, Unreadable
from align.verify._tree import Node
from align.verify._values import Value, of_node

TYPE_CHECKING = False  # typing is not imported: it is a tenth of the import
if TYPE_CHECKING:
    from collections.abc import Callable


def nodes_of(value: Value) -> list[list[Node]]:
    rows = []
    for row in value.items:
        rows.append([cell.node for cell in row])
        if None in rows[-1]:
            raise Unreadable("a matrix of things that are no numbers")
    return rows


def _matrix(rows: list[list[Node]]) -> Value:
    return Value("matrix", items=tuple(tuple(of_node(cell) for cell in row) for row in rows))


def determinant(rows: list[list[Node]]) -> Node:
    """By the first row. Raises: Unreadable when the rows are no square of at most five."""
    if any(len(row) != len(rows) for row in rows) or len(rows) > 5:
        raise Unreadable("a determinant that is no small square")
    if len(rows) == 1:
        return rows[0][0]
    minors = ([row[:k] + row[k + 1 :] for row in rows[1:]] for k in range(len(rows)))
    return tree.add(*(tree.mul(("q", (-1) ** k), rows[0][k], determinant(minor)) for k, minor in enumerate(minors)))


def matrix_sum(a: Value, b: Value) -> Value:
    """a + b. Raises: Unreadable when the shapes differ or these are no matrices."""
    if {a.kind, b.kind} == {"number", "set"}:
        return _each(tree.add, a, b)
    if a.kind != "matrix" or b.kind != "matrix":
        raise Unreadable(f"{a.kind} + {b.kind}")
    x, y = nodes_of(a), nodes_of(b)
    if len(x) != len(y) or len(x[0]) != len(y[0]):
        raise Unreadable("a sum of matrices of different shapes")
    return _matrix([[tree.add(p, q) for p, q in zip(r, s, strict=True)] for r, s in zip(x, y, strict=True)])


def _each(operation: Callable[[Node, Node], Node], a: Value, b: Value) -> Value:
    """A number with every member of a finite set."""
    scalar, other = (a, b) if a.kind == "number" else (b, a)
    if other.kind != "set" or other.info != "finite" or scalar.kind != "number" or any(item.node is None for item in other.items):
        raise Unreadable(f"{a.kind} with {b.kind}")
    return Value("set", items=tuple(of_node(operation(scalar.node, item.node)) for item in other.items), info="finite")


def matrix_times(a: Value, b: Value) -> Value:
    """The product of a number and a matrix (or a vector written as a tuple), or of two matrices. Raises: Unreadable."""
    for scalar, other in ((a, b), (b, a)):
        if scalar.kind in ("number", "expression"):
            if other.kind == "matrix":
                return _matrix([[tree.mul(scalar.node, cell) for cell in row] for row in nodes_of(other)])
            if other.kind == "tuple" and all(item.node is not None for item in other.items):
                return Value("tuple", items=tuple(of_node(tree.mul(scalar.node, item.node)) for item in other.items), info=other.info)
            return _each(tree.mul, a, b)
    if a.kind != "matrix" or b.kind != "matrix":
        raise Unreadable(f"{a.kind} × {b.kind}")
    x, y = nodes_of(a), nodes_of(b)
    if len(x[0]) != len(y):
        raise Unreadable("a product of matrices whose shapes do not fit")
    if len(x) * len(y) * len(y[0]) > 1_000:
        raise OverBudget
    columns = list(zip(*y, strict=True))
    return _matrix([[tree.add(*(tree.mul(p, q) for p, q in zip(row, column, strict=True))) for column in columns] for row in x])
