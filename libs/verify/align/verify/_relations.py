"""Equations and inequalities: as polynomials up to a factor, and as the real sets that they describe."""

from fractions import Fraction
from itertools import pairwise

from align.verify import _tree as tree
from align.verify._budget import spend
from align.verify._decide import same, sign
from align.verify._operate import substitute
from align.verify._tree import Node
from align.verify._values import Value

_FLIP = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "="}


def sides(value: Value) -> tuple[Node, ...] | None:
    """The sides of an equation or of an assignment, where all are expressions."""
    found = value.items if value.kind == "equation" else value.sides
    return found if found and all(side.__class__ is tuple for side in found) else None


def same_equation(a: tuple[Node, ...], b: tuple[Node, ...]) -> bool | None:
    """Whether two equations (or chains of them) are one up to non-zero factors and order; a tautology equals only its own sides."""
    if len(a) != len(b):
        return False
    a, b = sorted((a, b), key=_written)  # the same work, and so the same verdict, in either order
    if all(same(x, y) for x, y in zip(a, b, strict=True)):
        return True
    left = [_cleared(tree.minus(x, y)) for x, y in pairwise(a)]
    right = [_cleared(tree.minus(x, y)) for x, y in pairwise(b)]
    if _tautology(a) or _tautology(b) or not (_varies(left) and _varies(right)):
        pairs = [same(x, y) for x, y in zip(a, b, strict=True)]
        return None if None in pairs and False not in pairs else all(pairs)
    undecided = False
    for x in left:
        for k, y in enumerate(right):
            factor, found = proportion(x, y)
            apart = same(factor, tree.ZERO) if found else None
            if apart is False:
                del right[k]
                break
            undecided |= found is None or (bool(found) and apart is None)
        else:
            return None if undecided and not _vacuous(left + right) else False
    return True


def _cleared(difference: Node) -> Node:
    """Times the denominators of its terms, so that y = 1/x is the equation xy = 1."""
    highest: dict[Node, int] = {}
    for term in difference[1:] if difference[0] == "+" else (difference,):
        for part in term[1:] if term[0] == "*" else (term,):
            if part[0] == "^" and part[2][0] == "q" and part[2][1].__class__ is int and part[2][1] < 0 and tree.symbols(part):
                highest[part[1]] = max(highest.get(part[1], 0), -part[2][1])
    return tree.mul(difference, *(tree.power(base, ("q", n)) for base, n in highest.items()))


def _written(sides: tuple[Node, ...]) -> list[str]:
    return [tree.text(side) for side in sides]


def _tautology(sides: tuple[Node, ...]) -> bool:
    """Whether two sides that stand together are written alike: x = x."""
    return any(x == y for x, y in pairwise(sides))


def _varies(differences: list[Node]) -> bool:
    return all(tree.symbols(difference) for difference in differences)


def _vacuous(differences: list[Node]) -> bool:
    """Whether one of them is zero in another form, as in x = x."""
    return any(same(difference, tree.ZERO) for difference in differences)


def proportion(x: Node, y: Node) -> tuple[Node, bool | None]:
    """A constant c and whether x = c · y is proved."""
    names = sorted(tree.symbols(x) | tree.symbols(y))
    for k in range(3):
        top, bottom = x, y
        for j, name in enumerate(names):
            point = tree.rational(Fraction(7 + 5 * j + 3 * k, 3 + k))
            top, bottom = substitute(top, ("s", name), point), substitute(bottom, ("s", name), point)
            spend(20)
        if sign(bottom) in (0, None) and same(bottom, tree.ZERO) is not False:
            continue
        factor = tree.div(top, bottom)
        return factor, same(x, tree.mul(factor, y))
    return tree.ZERO, None


def links(value: Value) -> list[tuple[Node, str]]:
    """An inequality as (difference, sign) pairs with signs among >, >=, !=."""
    result = []
    for left, relation, right in zip(value.items, value.info, value.items[1:], strict=False):
        if relation in ("<", "<="):
            left, right, relation = right, left, _FLIP[relation]
        result.append((tree.minus(left, right), relation))
    return result


def same_inequality(a: Value, b: Value) -> bool | None:
    """Whether two inequalities (or chains) have the same links up to positive factors and order."""
    a, b = sorted((a, b), key=lambda value: _written(value.items))
    if a.info == b.info and len(a.items) == len(b.items) and all(same(x, y) for x, y in zip(a.items, b.items, strict=True)):
        return True
    left, right = links(a), links(b)
    if len(left) != len(right) or _tautology(a.items) != _tautology(b.items):
        return False
    undecided = False
    for difference, relation in left:
        for k, (other, other_relation) in enumerate(right):
            if relation != other_relation:
                continue
            factor, found = proportion(difference, other)
            direction = sign(factor) if found else None
            if found and (direction == 1 or (relation in ("!=", "=") and direction)):
                del right[k]
                break
            undecided |= found is None or (found and direction is None)
        else:
            return None if undecided and not _vacuous([zero for zero, _ in [*left, *links(b)]]) else False
    return True


def bound(difference: Node, name: str) -> tuple[Node, int] | None:
    """The root of a linear function of one symbol and the sign of its slope, or None."""
    symbol = ("s", name)
    if tree.symbols(difference) != {name}:
        return None
    direct = _direct(difference, symbol)
    if direct:
        return direct
    at_zero = substitute(difference, symbol, tree.ZERO)
    slope = tree.add(substitute(difference, symbol, tree.ONE), tree.neg(at_zero))
    direction = sign(slope)
    if not direction or not same(difference, tree.add(at_zero, tree.mul(slope, symbol))):
        return None
    return tree.div(tree.neg(at_zero), slope), direction


def _direct(difference: Node, symbol: Node) -> tuple[Node, int] | None:
    """`bound` of q·x + c, read off."""
    terms = difference[1:] if difference[0] == "+" else (difference,)
    varying = [term for term in terms if tree.symbols(term)]
    if len(varying) != 1:
        return None
    term = varying[0]
    slope = 1 if term == symbol else term[1][1] if term[0] == "*" and len(term) == 3 and term[1][0] == "q" and term[2] == symbol else None
    if slope is None:
        return None
    rest = tree.add(*(part for part in terms if part is not term))
    return tree.mul(rest, tree.rational(Fraction(-1) / slope)), 1 if slope > 0 else -1
