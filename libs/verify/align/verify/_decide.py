"""Equality of two expressions."""

from align.verify import _modular as modular
from align.verify import _tree as tree
from align.verify._budget import Budget
from align.verify._tree import Node


def same(a: Node, b: Node, budget: Budget) -> bool | None:
    """True with a proof, False with a refutation, None when neither was found within the budget."""
    budget.spend(1)
    if tree.contains(a, tree.UNDEF) or tree.contains(b, tree.UNDEF):
        return False
    x, y = tree.value_of(a), tree.value_of(b)
    if x is not None and y is not None:
        return x == y
    if a == b:
        return True
    if tree.INF in (a, b) or tree.NEG_INF in (a, b):
        return False
    noise = modular.Noise(repr(min(a, b, key=repr)) + repr(max(a, b, key=repr)))
    found = modular.same(a, b, noise, budget)
    if found is True:
        return True
    if found is False and not _constants(a) and not _constants(b):
        return False
    return None


def _constants(node: Node) -> bool:
    return any(tree.contains(node, constant) for constant in (tree.PI, tree.E, tree.I))
