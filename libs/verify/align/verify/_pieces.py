"""Where a function that is put together from pieces may change its form: |u|, max, min and even roots do at the zeros of something inside.

Random points say nothing about a piece that they miss. So an identity between such functions is tested on every piece of two lines through
the space of the symbols: between the zeros of what is linear or quadratic along the line, and at magnitudes up to the largest constant.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise
from math import isqrt

from align.verify import _tree as tree
from align.verify._budget import OverBudget, spend
from align.verify._exact import exact_value
from align.verify._modular import Noise
from align.verify._tree import Node

TYPE_CHECKING = False  # typing is not imported: it is a tenth of the import
if TYPE_CHECKING:
    from collections.abc import Iterator

    Line = dict[Node, tuple[Fraction, Fraction]]  # start and slope of each variable

_MAX_INNER = 16
_MAX_BITS = 400


def points(difference: Node, variables: list[Node], given: dict[Node, Fraction], noise: Noise) -> Iterator[dict[Node, Fraction]]:
    """Values of the variables on every piece, where the atoms have the values `given`; none when there are no pieces.

    Raises: OverBudget for too many pieces.
    """
    inner = [node for node in _inner(difference) if node not in variables]  # a variable has had both signs
    if not inner:
        return
    inner += [node for node in variables if node[0] == "f"]  # e^x ends at zero
    if len(inner) > _MAX_INNER:
        raise OverBudget
    reach = min(_MAX_BITS, 4 + sum(tree.bits(item[1]) for item in tree.nodes(difference) if item[0] in "qd"))
    for _ in range(1 if len(variables) == 1 else 2):
        line = {node: (Fraction(noise.next() % 89, 11), Fraction(noise.next() % 61 + 7, 13)) for node in variables}
        if len(variables) == 1:
            line = {variables[0]: (Fraction(0), Fraction(1))}
        elif noise.next() & 1:
            line[variables[0]] = (line[variables[0]][0], -line[variables[0]][1])
        for t in _stops(inner, line, given, reach, noise):
            yield _at(line, t)


def _inner(difference: Node) -> list[Node]:
    found: set[Node] = set()
    for item in tree.nodes(difference):
        if item[0] == "f" and item[1] == "abs":
            found.add(item[2])
        elif item[0] == "f" and item[1] in ("max", "min"):
            found.update(tree.minus(x, y) for x, y in combinations(item[2:], 2))
        elif item[0] == "^" and item[2][0] == "q" and item[2][1].__class__ is not int and item[2][1].denominator % 2 == 0:
            found.add(item[1])
            if item[1][0] == "^":
                found.add(item[1][1])
    return sorted((node for node in found if tree.symbols(node)), key=tree.text)


def _at(line: Line, t: Fraction) -> dict[Node, Fraction]:
    return {node: start + slope * t for node, (start, slope) in line.items()}


def _stops(inner: list[Node], line: Line, given: dict[Node, Fraction], reach: int, noise: Noise) -> list[Fraction]:
    """Parameters on both sides of every zero that is found, and on a grid of magnitudes."""
    zeros: set[Fraction] = set()
    for node in inner:
        zeros.update(_zeros([exact_value(node, {**given, **_at(line, Fraction(t))}) for t in range(5)]))
    ordered = sorted(zeros)
    spend(20 * len(ordered))
    stops = [sign * Fraction(2) ** (reach * k // 6) * (1 + Fraction(noise.next() % 97, 301)) for k in (-1, 0, 2, 4, 6) for sign in (1, -1)]
    if ordered:
        stops += [ordered[0] - 1 - abs(ordered[0]) / 3, ordered[-1] + 1 + abs(ordered[-1]) / 3]
    for low, high in pairwise(ordered):
        stops += [low + (high - low) * Fraction(noise.next() % 89 + 5, 100), (low + high) / 2]
    return stops


def _zeros(values: list[Fraction | int | None]) -> list[Fraction]:
    """The zeros of the linear or quadratic function with these values at 0, 1, 2, 3, 4; of another none."""
    if None in values:
        return []
    g = [Fraction(value) for value in values if value is not None]
    a, b = (g[2] - 2 * g[1] + g[0]) / 2, g[1] - g[0]
    b -= a
    if any(a * t * t + b * t + g[0] != g[t] for t in (3, 4)):
        return []
    if not a:
        return [-g[0] / b] if b else []
    square = b * b - 4 * a * g[0]
    if square < 0:
        return []
    wide = 1 << 64
    root = Fraction(isqrt(square.numerator * square.denominator * wide * wide), square.denominator * wide)
    return [(-b - root) / (2 * a), (-b + root) / (2 * a)]
