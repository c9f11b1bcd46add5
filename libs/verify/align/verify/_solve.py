"""Where a function of one symbol changes its sign: linear, quadratic, and with one modulus of a linear function."""

from __future__ import annotations

from fractions import Fraction

from align.verify import _tree as tree
from align.verify._decide import same, sign
from align.verify._operate import substitute
from align.verify._relations import bound
from align.verify._tree import Node


def roots(difference: Node, name: str) -> tuple[int, list[Node]] | None:
    """The sign of the function towards +∞ and its real roots in order, each as often as it counts; None: not found.

    A function without a root is left alone: two conditions that nothing fulfils are not the same answer.
    """
    found = bound(difference, name)
    if found is not None:
        return found[1], [found[0]]
    if tree.symbols(difference) != {name}:
        return None
    solved = _modulus(difference, name) or _quadratic(difference, name)
    return solved if solved and solved[1] else None


def _quadratic(difference: Node, name: str) -> tuple[int, list[Node]] | None:
    x = ("s", name)
    below, middle, above = (substitute(difference, x, ("q", k)) for k in (-1, 0, 1))
    half: Node = ("q", Fraction(1, 2))
    a = tree.add(tree.mul(half, tree.add(above, below)), tree.neg(middle))
    b = tree.mul(half, tree.add(above, tree.neg(below)))
    direction = sign(a)
    if not direction or not same(difference, tree.add(tree.mul(a, x, x), tree.mul(b, x), middle)):
        return None
    discriminant = tree.add(tree.mul(b, b), tree.mul(("q", -4), a, middle))
    known = sign(discriminant)
    if known is None:
        return None
    if known < 0:
        return direction, []
    minus_b, doubled = tree.neg(b), tree.mul(("q", 2), a)
    if not known:
        root = tree.div(minus_b, doubled)
        return direction, [root, root]
    step = tree.root(discriminant, 2)
    ends = [tree.div(tree.add(minus_b, tree.neg(step)), doubled), tree.div(tree.add(minus_b, step), doubled)]
    return direction, ends if direction > 0 else ends[::-1]


def _modulus(difference: Node, name: str) -> tuple[int, list[Node]] | None:
    """Of s |L| + c."""
    terms = difference[1:] if difference[0] == "+" else (difference,)
    varying = [term for term in terms if tree.symbols(term)]
    if len(varying) != 1:
        return None
    scale, inner = tree.split(varying[0])
    if inner[:2] != ("f", "abs"):
        return None
    limit = tree.mul(tree.add(*(term for term in terms if term is not varying[0])), tree.rational(Fraction(-1) / scale))
    reach = sign(limit)
    if reach is None or reach < 0:
        return None
    low, high = (bound(tree.add(inner[2], tree.mul(("q", k), limit)), name) for k in (1, -1))
    if low is None or high is None:
        return None
    ends = [low[0], high[0]] if low[1] > 0 else [high[0], low[0]]
    return 1 if scale > 0 else -1, ends
