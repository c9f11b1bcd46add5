"""Exact evaluation at rational points, where every operation stays rational."""

from __future__ import annotations

from fractions import Fraction

from align.verify._budget import MAX_BITS, OverBudget, spend, spend_divisor, spend_product
from align.verify._tree import Node, bits, combined

TYPE_CHECKING = False  # typing is not imported: it is a tenth of the import
if TYPE_CHECKING:
    from align.verify._values import Read


def exact_value(node: Node, values: dict[Node, Read]) -> Read:
    """The rational value of a tree of rational operations, floors and remainders at a rational point, or None: none, or too long."""
    try:
        return _exact(node, values)
    except OverBudget:  # too long; when it was the verdict's last step, the next one says so
        return None


def _exact(node: Node, values: dict[Node, Read]) -> Read:
    spend(1)
    tag = node[0]
    if tag in "qd":
        return node[1]
    if tag == "s":
        return values.get(node)
    if tag not in ("+", "*", "^", "f"):
        return None
    if tag == "f" and node in values:
        return values[node]
    parts: list[Read] = []
    for part in node[2:] if tag == "f" else node[1:]:
        parts.append(_exact(part, values))
        if parts[-1] is None:
            return None
    if tag == "+" or tag == "*":
        result = parts[0]
        for value in parts[1:]:
            result = combined(result, value, tag == "*")
        return result
    if tag == "^":
        if parts[1].__class__ is not int or bits(parts[0]) * abs(parts[1]) > MAX_BITS or (parts[1] < 0 and not parts[0]):
            return None
        spend_product(bits(parts[0]) * abs(parts[1]), bits(parts[0]) * abs(parts[1]))
        return Fraction(parts[0]) ** parts[1]
    spend_divisor(2 * sum(map(bits, parts)))
    return _exact_function(node[1], parts)


def _exact_function(name: str, parts: list[Read]) -> Read:
    first = Fraction(parts[0])
    if name == "floor":
        return first.__floor__()
    if name == "ceil":
        return first.__ceil__()
    if name == "abs":
        return abs(first)
    if name in ("max", "min"):
        return (max if name == "max" else min)(parts)
    if name == "mod" and parts[1]:
        return first - parts[1] * (first / parts[1]).__floor__()
    return None
