"""Constants made of logarithms, or of arcs and π: proofs that they vanish, by way of algebraic numbers.

Σ nₖ ln aₖ with aₖ > 0 is zero just when Π aₖ^nₖ is 1. Σ nₖ arctan xₖ + n π lies in π ℤ just when Π (1 + i xₖ)^nₖ is real, and is zero when
it is less than π in modulus besides. Both products are algebraic, so that the separation bound of `_ball` decides.
"""

from __future__ import annotations

from math import lcm

from align.verify import _tree as tree
from align.verify._ball import Point, Straddles, Unknown
from align.verify._budget import OverBudget
from align.verify._normal import linear
from align.verify._tree import Node

TYPE_CHECKING = False  # typing is not imported: it is a tenth of the import
if TYPE_CHECKING:
    from align.verify._values import Read

_MAX_POWER = 48  # of all factors of a product together
_LAST = 6_000  # bits


def vanishes(difference: Node) -> bool:
    """Whether a constant in normal form is proved to be zero."""
    terms = _without_logarithms_below(linear(difference))
    if not terms or not all(monomial[0] == "f" or monomial == tree.PI for _, monomial in terms):
        return False
    scale = lcm(*(coefficient.denominator for coefficient, _ in terms))
    counts = [(int(coefficient * scale), monomial) for coefficient, monomial in terms]
    names = {monomial[1] for _, monomial in counts}
    algebraic = all(_algebraic(monomial[2]) for _, monomial in counts if monomial != tree.PI)
    if not algebraic or sum(abs(n) for n, monomial in counts if monomial != tree.PI) > _MAX_POWER:
        return False
    if names == {"ln"}:
        return all(_positive(monomial[2]) for _, monomial in counts) and _product_is_one(counts)
    return names <= {"atan", "pi"} and _product_is_real(counts) and _small(tree.mul(tree.rational(scale), difference))


def _without_logarithms_below(terms: list[tuple[Read, Node]]) -> list[tuple[Read, Node]]:
    """The terms times the sums of logarithms that stand in their denominators."""
    for _ in range(2):
        below = next((part for _, monomial in terms for part in _factors(monomial) if _is_inverse_logarithm(part)), None)
        if below is None:
            return terms
        cleared: list[tuple[Read, Node]] = []
        for coefficient, monomial in terms:
            parts = list(_factors(monomial))
            if below in parts:
                parts.remove(below)
                cleared.append((coefficient, tree.mul(*parts)))
            else:
                cleared += [(tree.combined(coefficient, c, True), m) for c, m in linear(tree.mul(*parts, below[1]))]
        terms = cleared
    return terms


def _factors(monomial: Node) -> Node:
    return monomial[1:] if monomial[0] == "*" else (monomial,)


def _is_inverse_logarithm(part: Node) -> bool:
    if part[0] != "^" or part[2] != tree.MINUS_ONE:
        return False
    summands = part[1][1:] if part[1][0] == "+" else (part[1],)
    return all(any(factor[:2] == ("f", "ln") for factor in _factors(summand)) for summand in summands)


def _algebraic(node: Node) -> bool:
    found = tree.nodes(node)
    return not any(item[0] in "sf" or item in (tree.PI, tree.E, tree.INF) or (item[0] == "^" and item[2][0] != "q") for item in found)


def _positive(node: Node) -> bool:
    try:
        low, _, imaginary = Point({}, 256).at(node)[:3]
    except (Straddles, Unknown, OverBudget):
        return False
    return imaginary is None and low > 0


def _small(node: Node) -> bool:
    """Whether a real constant is less than one in modulus."""
    try:
        low, high, imaginary = Point({}, 64).at(node)[:3]
    except (Straddles, Unknown, OverBudget):
        return False
    return imaginary is None and max(-low, high) < 1 << 64


def _product_is_one(counts: list[tuple[Read, Node]]) -> bool:
    above = tree.mul(*(tree.power(monomial[2], tree.rational(n)) for n, monomial in counts if n > 0))
    below = tree.mul(*(tree.power(monomial[2], tree.rational(-n)) for n, monomial in counts if n < 0))
    return _zero(tree.minus(above, below))


def _product_is_real(counts: list[tuple[Read, Node]]) -> bool:
    halves = []
    for sign in (1, -1):
        factors = []
        for n, monomial in counts:
            if monomial != tree.PI:
                turn = tree.mul(tree.rational(sign if n > 0 else -sign), tree.I)
                factors.append(tree.power(tree.add(tree.ONE, tree.mul(turn, monomial[2])), tree.rational(abs(n))))
        halves.append(tree.mul(*factors))
    return _zero(tree.minus(*halves))


def _zero(node: Node) -> bool:
    if tree.value_of(node) is not None:
        return node == tree.ZERO
    precision = 64
    while precision <= _LAST:
        try:
            found, needed = Point({}, precision).zero(node)
        except Straddles:
            found, needed = None, 0
        except (Unknown, OverBudget):
            return False
        if found is not None:
            return found
        if needed > _LAST:
            return False
        precision = max(2 * precision, int(needed) + 8)
    return False
