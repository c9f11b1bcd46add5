"""Equality and order of expressions: proved, refuted, or undecided within the budget; never by rounding."""

from __future__ import annotations

from fractions import Fraction
from math import lcm

from align.verify import _modular as modular
from align.verify import _tree as tree
from align.verify._ball import Point, Straddles, Unknown
from align.verify._budget import OverBudget, spend, spend_divisor
from align.verify._closed import vanishes
from align.verify._exact import exact_value
from align.verify._normal import normal, sign_of
from align.verify._pieces import points
from align.verify._tree import Node

TYPE_CHECKING = False  # typing is not imported: it is a tenth of the import
if TYPE_CHECKING:
    from align.verify._values import Read

_FIRST = 64  # bits
_LAST = 6_000  # bits of the algebraic proofs
_LAST_TRUE = 1_024  # bits, for transcendental constants
_TRIALS = 4


def same(a: Node, b: Node) -> bool | None:
    """True with a proof, False with a refutation, None when neither was found. Raises: OverBudget."""
    spend(1)
    x, y = tree.value_of(a), tree.value_of(b)
    if x is not None and y is not None:
        return bool(x == y)
    constants = tree.constants(tree.weigh(a)) | tree.constants(tree.weigh(b))
    if "undef" in constants:
        return False
    if a == b:
        return True
    if "inf" in constants:
        return False
    first, second = tree.text(a), tree.text(b)
    if first > second:  # the same work, and so the same verdict, in either order
        a, b, first, second = b, a, second, first
    noise = modular.Noise(first + second)
    found = modular.same(a, b, noise)
    if found:
        return not (_undefined(a) or _undefined(b))
    if found is False:
        return False
    names = tree.symbols(a) | tree.symbols(b)
    try:
        if not names:
            found = _zero_constant(_cancelled(tree.minus(a, b)))
            if found is not None:
                return found
        left, right = normal(a), normal(b)
    except RecursionError:
        raise OverBudget from None
    if "undef" in tree.constants(left) | tree.constants(right):
        return None
    if left == right:
        return True
    difference = _cancelled(tree.minus(left, right))
    if tree.value_of(difference) is not None:
        return difference == tree.ZERO
    atoms = _atoms(difference)
    signed = {atom for atom in atoms if atom[0] == "f" and atom[1] not in _ONE_SIGN and tree.symbols(atom)}
    variables = sorted([("s", name) for name in names] + list(signed), key=tree.text)
    found = _formal(difference, (left, right), variables, atoms - signed, noise)
    if found and names:
        found = _on_pieces(difference, (left, right), variables, atoms - signed, noise)
    if found is True or (found is False and not atoms):
        return found
    if names:
        return False if _refute_function(a, b, names, noise) else None
    return False if _zero_constant(difference) is False else True if vanishes(difference) else None


def _undefined(node: Node) -> bool:
    """Whether a function in a tree is undefined where it stands (ln 0, tan 90°), so that the tree equals nothing."""
    if not any(item[0] == "f" for item in tree.nodes(node)):
        return False
    try:
        return "undef" in tree.constants(normal(node))
    except (OverBudget, RecursionError):
        return False


def _cancelled(node: Node) -> Node:
    """A sum with equal terms taken together."""
    if node[0] != "+":
        return node
    total: dict[Node, Read] = {}
    for term in node[1:]:
        coefficient, rest = tree.split(term)
        total[rest] = tree.add(total.get(rest, tree.ZERO), tree.rational(coefficient))
    return tree.add(*(tree.mul(c, rest) for rest, c in total.items() if c != tree.ZERO))


def sign(node: Node) -> int | None:
    """-1, 0 or 1 of a real constant; None when it cannot be settled or is no real constant."""
    value = tree.value_of(node)
    if value is not None:
        return int(value > 0) - int(value < 0)
    if node == tree.INF:
        return 1
    if node == tree.NEG_INF:
        return -1
    if tree.symbols(node) or not tree.constants(node).isdisjoint(("undef", "inf")):
        return None
    precision = _FIRST
    while precision <= _LAST_TRUE:
        try:
            low, high, imaginary = Point({}, precision).at(node)[:3]
        except Straddles:
            precision *= 2
            continue
        except Unknown:
            return None
        if imaginary is None and low > 0:
            return 1
        if imaginary is None and high < 0:
            return -1
        precision *= 2
    return 0 if same(node, tree.ZERO) else None


def within(node: Node, bound: Read) -> bool:
    """Whether |node| ≤ bound is proved, for a real constant and a rational bound."""
    precision = _FIRST
    while precision <= _LAST_TRUE:
        try:
            low, high, imaginary = Point({}, precision).at(node)[:3]
        except Straddles:
            precision *= 2
            continue
        except (Unknown, OverBudget):
            return False
        if imaginary is not None:
            return False
        limit = (Fraction(bound) * (1 << precision)).__floor__()
        if max(-low, high) <= limit:
            return True
        if low > limit or high < -limit:
            return False
        precision *= 2
    return False


def _zero_constant(difference: Node) -> bool | None:
    """Whether a constant is zero, by its interval and its separation bound alone; None: not settled."""
    if tree.value_of(difference) is not None:
        return bool(difference[1] == 0)
    precision = _FIRST
    while precision <= _LAST_TRUE:
        try:
            found, _ = Point({}, precision).zero(difference)
        except Straddles:
            found = None
        except (Unknown, OverBudget):
            return None
        if found is not None:
            return found
        precision *= 4
    return None


def _atoms(node: Node) -> set[Node]:
    """Subtrees that a formal evaluation takes for variables."""
    return {item for item in tree.nodes(node, lambda item: not _is_atom(item)) if _is_atom(item)}


_ONE_SIGN = ("E", "EI", "P", "fact")  # atoms whose values have a sign that is known, or none


def _is_atom(node: Node) -> bool:
    tag = node[0]
    if tag == "f":
        return node[1] not in ("abs", "max", "min", "cosr", "sinr") or (node[1] in ("abs", "max", "min") and _complex(node))
    if tag == "^":
        return node[2][0] != "q" or (node[2][1].__class__ is not int and node[2][1].denominator % 2 == 0 and _complex(node[1]))
    return node in (tree.PI, tree.E)


def _complex(node: Node) -> bool:
    """Whether a function has e^(ix) in it, which is taken for a variable: nothing can be said about its modulus, order or root then."""
    return any(item == tree.I or item[:2] == ("f", "EI") for item in tree.nodes(node)) and bool(tree.symbols(node))


def _formal(difference: Node, sides: tuple[Node, Node], variables: list[Node], atoms: set[Node], noise: modular.Noise) -> bool | None:
    """Whether a difference is zero for all values of its variables (of both signs) and atoms (of one): exact zeros at random points.

    Signs for which neither side is defined (roots of negative numbers) are left out; if only one side is, nothing is claimed.
    """
    zeros = 0
    powers = _fractional_powers(difference, atoms)
    patterns = _signs(len(variables), noise)
    trials = len(patterns) if variables or atoms else 1
    for trial in range(3 * trials):
        values: dict[Node, Read] = {}
        pattern = patterns[trial % len(patterns)]
        for variable, negative in zip(variables, pattern, strict=True):
            size = noise.next() % 997 + 2
            value = Fraction(size, noise.next() % 31 + 1) if trial % 2 else Fraction(size)
            values[variable] = -value if negative else value
        _give_all(values, atoms, powers, noise)
        found = _zero_at(difference, values)
        if found is False:
            return False
        zeros += found is True
        if zeros == trials:
            return True
        if found is None:
            defined = [_defined(side, values) for side in sides]
            if defined[0] != defined[1] or not (defined[0] or len(patterns) > 1):
                return None
            if not defined[0]:
                patterns.remove(pattern)
    return None


def _defined(node: Node, values: dict[Node, Read]) -> bool:
    try:
        Point(values, _FIRST, formal=True).at(node)
    except Unknown:
        return False
    except Straddles:
        pass
    return True


def _on_pieces(difference: Node, sides: tuple[Node, Node], variables: list[Node], atoms: set[Node], noise: modular.Noise) -> bool | None:
    """Whether an identity that holds at random points holds on every piece of functions such as |u|, as far as `points` finds them."""
    positive = {atom for atom in atoms if atom[0] == "f" and atom[1] in ("E", "P") and tree.symbols(atom)}
    given: dict[Node, Read] = {}
    _give_all(given, atoms - positive, _fractional_powers(difference, atoms - positive), noise)
    zeros, tried = 0, 0
    for point in points(difference, [*variables, *sorted(positive, key=tree.text)], given, noise):
        if any(point[atom] <= 0 for atom in positive):
            continue
        values = {**given, **point}
        found = _zero_at(difference, values)
        if found is False:
            return False
        if found is None and _defined(sides[0], values) != _defined(sides[1], values):
            return None
        zeros += found is True
        tried += 1
    return True if not tried or zeros >= 4 else None


def _fractional_powers(node: Node, atoms: set[Node]) -> dict[Node, Read]:
    """The exponents that are no whole numbers, of each atom."""
    found: dict[Node, Read] = {}
    for item in tree.nodes(node, lambda item: not _is_atom(item)):
        if item[0] == "^" and item[2][0] == "q" and item[2][1].__class__ is not int and item[1] in atoms:
            found.setdefault(item[1], set()).add(item[2][1])
    return found


def _give_all(values: dict[Node, Read], atoms: set[Node], powers: dict[Node, Read], noise: modular.Noise) -> None:
    for atom in sorted(atoms, key=tree.text):
        value = Fraction(noise.next() % 9973 + 2, noise.next() % 7 + 1)
        if atom[0] == "f" and atom[1] not in _ONE_SIGN and sign_of(atom) < 0:  # the logarithm of a half
            values[atom] = -value
        else:
            _give(values, atom, powers.get(atom, ()), value)


def _give(values: dict[Node, Read], atom: Node, exponents: Read, root: Fraction) -> None:
    """A value for an atom: a power whose roots, where the tree takes roots of the atom, are rational too."""
    common = lcm(*(exponent.denominator for exponent in exponents))
    largest = max((abs(exponent.numerator) for exponent in exponents), default=0) * common
    if common > 24 or largest > 1_000:  # such powers stay what they are: atoms without a value, which is undecided
        common, exponents, largest = 1, (), 0
    spend_divisor(20 * largest)
    values[atom] = root**common
    for exponent in exponents:
        values[("^", atom, ("q", exponent))] = root ** int(exponent * common)


def _signs(count: int, noise: modular.Noise) -> list[list[bool]]:
    """Which symbols are negative in each trial: all choices for up to three, else none, all, each alone, and at random."""
    if count <= 3:
        patterns = [[bool(mask >> k & 1) for k in range(count)] for mask in range(1 << count)]
    else:
        patterns = [[False] * count, [True] * count, *([k == j for k in range(count)] for j in range(count if count <= 4 else 0))]
    while len(patterns) < _TRIALS:
        patterns.append([bool(noise.next() & 1) for _ in range(count)])
    return patterns


def _zero_at(difference: Node, values: dict[Node, Read]) -> bool | None:
    exact = exact_value(difference, values)
    if exact is not None:
        return bool(exact == 0)
    precision = _FIRST
    while precision <= _LAST:
        point = Point(values, precision, formal=True)
        try:
            found, needed = point.zero(difference)
        except Straddles:
            found, needed = None, 2 * precision
        except Unknown:
            return None
        if found is not None:
            return found
        if needed > _LAST:
            return None
        precision = max(2 * precision, int(needed) + 8)
    return None


def _refute_function(a: Node, b: Node, names: set[str], noise: modular.Noise) -> bool:
    """Whether two functions differ at some real point."""
    difference = tree.minus(normal(a), normal(b))
    for trial in range(6):
        values = {}
        for name in sorted(names):
            value = Fraction(noise.next() % 400 + 40, 100)
            values[("s", name)] = -value if trial >= 3 and noise.next() & 1 else value
        for precision in (_FIRST, 256):
            try:
                found, _ = Point(values, precision).zero(difference)
            except (Straddles, Unknown):
                continue
            if found is False:
                return True
    return False
