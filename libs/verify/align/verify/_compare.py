"""Equality of two parsed answers. Every function here is symmetric in its two arguments."""

from fractions import Fraction

from align.verify import _tree as tree
from align.verify import _units as units
from align.verify._budget import Budget, OverBudget
from align.verify._decide import same
from align.verify._values import Value

_SCALAR = ("number", "expression", "choice")


def equal(a: Value, b: Value, budget: Budget) -> bool | None:
    """Whether two answers are the same; None: undecided. Raises: OverBudget."""
    budget.spend(2)
    if a.kind == "raw" or b.kind == "raw":
        return False
    if a.kind == "text" or b.kind == "text":
        return _text(a) == _text(b)
    if a.kind == "choice" and b.kind == "choice":
        return a.info == b.info
    if a.kind in _SCALAR and b.kind in _SCALAR:
        return _scalar(a, b, budget)
    if a.kind == b.kind == "list":
        return _members(a.items, b.items, budget)
    return None


def _text(value: Value) -> str:
    words = value.info if value.kind == "text" else value.source.lower()
    return "".join(words.split()) if isinstance(words, str) else ""


def _scalar(a: Value, b: Value, budget: Budget) -> bool | None:
    x, y = a.node, b.node
    if a.unit and b.unit:
        if units.conflict(a.unit, b.unit):
            return False
        if a.unit.dimensions == b.unit.dimensions and a.unit.scale != b.unit.scale:
            return same(tree.mul(x, tree.rational(a.unit.scale)), tree.mul(y, tree.rational(b.unit.scale)), budget)
    found = same_number(x, y, budget)
    if found is not True:
        for unit, factor in ((units.PERCENT, tree.rational(Fraction(1, 100))), (units.DEGREE, tree.mul(tree.PI, tree.rational(Fraction(1, 180))))):
            if (a.unit == unit) != (b.unit == unit):
                scaled = (tree.mul(x, factor), y) if a.unit == unit else (x, tree.mul(y, factor))
                if same(*scaled, budget):
                    return True
    return found


def same_number(x: tree.Node, y: tree.Node, budget: Budget) -> bool | None:
    """Equality of two expressions, where a decimal also stands for what rounds to it at six significant digits or more."""
    if (x[0] == "d") != (y[0] == "d"):
        decimal, other = (x, y) if x[0] == "d" else (y, x)
        if decimal[2] >= 6:
            value = tree.value_of(other)
            if value is not None:
                gap = abs(value - decimal[1])
                if gap * 2 <= decimal[3] or (decimal[2] >= 15 and gap < decimal[3]):
                    return True
    return same(x, y, budget)


def _members(a: tuple, b: tuple, budget: Budget) -> bool | None:
    """Whether two lists hold the same values in any order."""
    if len(a) != len(b):
        return False
    rest = list(b)
    undecided = False
    for item in a:
        for k, other in enumerate(rest):
            found = equal(item, other, budget)
            if found:
                del rest[k]
                break
            undecided |= found is None
        else:
            return None if undecided else False
    return True


__all__ = ["OverBudget", "equal", "same_number"]
