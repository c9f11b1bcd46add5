r"""Rewriting with identities, until what is transcendental stands in atoms that can be taken for independent variables.

Powers with symbolic exponents become products of atoms over monomials m: ("f", "E", m) = e^m, ("f", "EI", m) = e^(im) and
("f", "P", b, m) = b^m; circular functions become exponentials, logarithms of products become sums over primes and
symbols, factorials (n + c)! become n! times factors. Two expressions whose
normal forms agree for all values of the atoms are equal; the converse does not hold and is not used.
"""

from __future__ import annotations

from fractions import Fraction
from math import isqrt

from align.verify import _tree as tree
from align.verify._ball import Point, Straddles, Unknown
from align.verify._budget import OverBudget, spend, spend_divisor
from align.verify._tree import Node, add, mul, power, value_of

TYPE_CHECKING = False  # typing is not imported: it is a tenth of the import
if TYPE_CHECKING:
    from align.verify._values import Read

_HALF: Node = ("q", Fraction(1, 2))
_TWO: Node = ("q", 2)


def normal(node: Node) -> Node:
    """The rewritten tree. Raises: OverBudget when it grows beyond MAX_NODES."""
    return tree.weigh(_normal(node))


def _normal(node: Node) -> Node:
    spend(3)
    tag = node[0]
    if tag == "d":
        return tree.rational(node[1])
    if tag == "+":
        return _sorted(add(*(normal(part) for part in node[1:])))
    if tag == "*":
        return _sorted(mul(*(normal(part) for part in node[1:])))
    if tag == "^":
        return _power(normal(node[1]), normal(node[2]))
    if tag == "f":
        if node[1] in ("sum", "prod"):
            return node
        known = sign_of(node[2]) if node[1] == "abs" else 0
        if known:
            inside = normal(node[2])
            return inside if known > 0 else tree.neg(inside)
        return _function(node[1], [normal(part) for part in node[2:]])
    return node


def _sorted(node: Node) -> Node:
    if node[0] in "+*":
        return (node[0], *sorted(node[1:], key=tree.text))
    return node


def linear(node: Node) -> list[tuple[Fraction | int, Node]]:
    """A sum as (rational coefficient, monomial) pairs; products are multiplied out where that is small."""
    terms = [(1, tree.ONE)]
    if node[0] == "+":
        result: list[Read] = []
        for part in node[1:]:
            result.extend(linear(part))
        return result
    if node[0] == "*":
        for part in node[1:]:
            inner = linear(part) if part[0] == "+" else [(value_of(part), tree.ONE)] if value_of(part) is not None else [(1, part)]
            spend(len(inner) * len(terms))
            if len(inner) * len(terms) > 60:
                raise OverBudget
            terms = [(tree.combined(c, d, True), _sorted(mul(m, n))) for c, m in terms for d, n in inner]
        return [pair for c, m in terms for pair in _without_constant(c, m)]
    constant = value_of(node)
    return [(constant, tree.ONE)] if constant is not None else [(1, node)]


def collected(node: Node) -> Node:
    """A sum with equal monomials taken together."""
    if node[0] != "+":
        return node
    total: dict[Read, Read] = {}
    for coefficient, monomial in linear(node):
        total[monomial] = tree.combined(total.get(monomial, 0), coefficient, False)
    return _sorted(add(*(mul(tree.rational(c), m) for m, c in total.items() if c)))


def _without_constant(coefficient: Read, monomial: Node) -> list[Read]:
    if value_of(monomial) is not None:
        return [(tree.combined(coefficient, value_of(monomial), True), tree.ONE)]
    if monomial[0] == "*" and value_of(monomial[1]) is not None:
        return [(tree.combined(coefficient, monomial[1][1], True), mul(*monomial[2:]))]
    return [(coefficient, monomial)]


def _power(base: Node, exponent: Node) -> Node:
    n = value_of(exponent)
    if n is not None:
        return _constant_power(base, n, exponent)
    result = tree.ONE
    for coefficient, monomial in linear(exponent):
        result = mul(result, _one_power(base, coefficient, monomial))
    return result


def _constant_power(base: Node, n: Read, exponent: Node) -> Node:
    if base[0] == "*" and n.__class__ is int:
        return mul(*(power(part, exponent) for part in base[1:]))
    if n.__class__ is not int and base[0] == "q" and base[1] > 0:
        return mul(*(power(("q", prime), tree.rational(a * n)) for prime, a in factors(base[1])))
    return power(base, exponent)


def _one_power(base: Node, coefficient: Read, monomial: Node) -> Node:
    """base^(coefficient · monomial)."""
    c = tree.rational(coefficient)
    if monomial == tree.ONE:
        return _constant_power(base, c[1], c)
    if base == tree.E:
        return _exponential(coefficient, monomial)
    if base[0] == "*":  # (2ex)^y = 2^y e^y x^y: positive factors may stand apart
        apart = [part for part in base[1:] if part in (tree.E, tree.PI) or (value_of(part) or 0) > 0]
        rest = mul(*(part for part in base[1:] if part not in apart))
        if apart:
            return mul(*(_one_power(part, coefficient, monomial) for part in (*apart, rest) if part != tree.ONE))
    constant = value_of(base)
    if constant is not None and constant > 0:
        result = tree.ONE
        for prime, a in factors(constant):
            undone = _over_logarithm(monomial, prime)
            if undone is not None:
                result = mul(result, power(undone, tree.rational(coefficient * a)))
            else:
                result = mul(result, power(("f", "P", ("q", prime), monomial), tree.rational(coefficient * a)))
        return result
    return power(("f", "P", base, monomial), c)


def _over_logarithm(monomial: Node, prime: int) -> Node | None:
    """v when the monomial is ln v / ln prime."""
    parts = list(monomial[1:]) if monomial[0] == "*" else [monomial]
    below = ("^", ("f", "ln", ("q", prime)), tree.MINUS_ONE)
    if len(parts) == 2 and below in parts:
        parts.remove(below)
        if parts[0][0] == "f" and parts[0][1] == "ln":
            argument: Node = parts[0][2]
            return argument
    return None


def _exponential(coefficient: Read, monomial: Node) -> Node:
    """e^(coefficient · monomial)."""
    c = tree.rational(coefficient)
    parts = list(monomial[1:]) if monomial[0] == "*" else [monomial]
    if len(parts) == 1 and parts[0][0] == "f" and parts[0][1] == "ln":
        return power(parts[0][2], c)
    logarithms = [part for part in parts if part[0] == "f" and part[1] == "ln"]
    if len(logarithms) == 1 and tree.I not in parts:  # e^(x ln 2) = 2^x
        parts.remove(logarithms[0])
        return _one_power(logarithms[0][2], coefficient, mul(*parts))
    if tree.I in parts:
        parts.remove(tree.I)
        if parts == [tree.PI]:
            return _turn(coefficient)
        rest = mul(*parts)
        return power(("f", "EI", rest), c) if rest != tree.ONE else power(("f", "EI", tree.ONE), c)
    return power(("f", "E", monomial), c)


def _turn(r: Read) -> Node:
    """e^(i π r) as cosine and sine."""
    return add(_cos_pi(r), mul(tree.I, _cos_pi(Fraction(1, 2) - r)))


_EXACT = {
    Fraction(0): tree.ONE,
    Fraction(1, 6): mul(_HALF, tree.root(("q", 3), 2)),
    Fraction(1, 5): mul(("q", Fraction(1, 4)), add(tree.ONE, tree.root(("q", 5), 2))),
    Fraction(1, 4): mul(_HALF, tree.root(_TWO, 2)),
    Fraction(1, 3): _HALF,
    Fraction(2, 5): mul(("q", Fraction(1, 4)), add(tree.MINUS_ONE, tree.root(("q", 5), 2))),
    Fraction(1, 2): tree.ZERO,
}


def _cos_pi(r: Read) -> Node:
    """cos(π r): folded to the first quadrant, exact where it is a simple surd, else a root-of-unity atom."""
    spend_divisor(2 * tree.bits(r))
    r = abs(Fraction(r)) % 2
    r = 2 - r if r > 1 else r
    if r > Fraction(1, 2):
        return tree.neg(_cos_pi(1 - r))
    return _EXACT.get(r) or ("f", "cosr", tree.rational(r))


def _function(name: str, arguments: list[Node]) -> Node:
    first = arguments[0]
    if name == "ln":
        return _ln(first)
    if name == "tan" and first[0] == "f" and first[1] == "atan":
        return mul(first[2])
    if name in ("cos", "sin", "tan", "cot", "sec", "csc"):
        return _circular(name, first)
    if name in ("sinh", "cosh", "tanh", "coth", "sech", "csch"):
        return _hyperbolic(name, first)
    if name in ("asin", "acos", "atan", "acot", "asec", "acsc"):
        return _inverse(name, first)
    if name in ("asinh", "acosh", "atanh"):
        return _area(name, first)
    if name == "fact":
        return _factorial(first)
    if name == "floor":
        return _floor(first)
    if name == "ceil":
        return tree.neg(_floor(tree.neg(first)))
    if name == "mod" and len(arguments) == 2:
        whole = _floor(normal(tree.div(first, arguments[1])))
        return add(first, tree.neg(mul(arguments[1], whole)))
    if name == "abs":
        constant, rest = _positive_part(first)
        return mul(constant, tree.call("abs", rest)) if rest != tree.ONE else constant
    return tree.call(name, *arguments)


def _floor(u: Node) -> Node:
    """⌊v + n⌋ = ⌊v⌋ + n; the floor of a constant is a number where an interval settles it; else an atom."""
    if u[0] == "*":
        u = add(*(mul(tree.rational(c), m) for c, m in linear(u)))
    u = collected(u)
    if value_of(u) is not None:
        return tree.call("floor", u)
    if u[:2] == ("f", "floor"):
        return u
    if not tree.symbols(u) and not tree.contains(u, tree.INF):
        for precision in (64, 256):
            try:
                low, high, imaginary = Point({}, precision).at(u)[:3]
            except (Straddles, Unknown):
                continue
            if imaginary is None and low >> precision == high >> precision:
                return ("q", low >> precision)
    constant = next((part[1] for part in u[1:] if part[0] == "q"), 0) if u[0] == "+" else 0
    whole = constant.__floor__()
    return add(("f", "floor", _sorted(add(u, ("q", -whole)))), ("q", whole)) if whole else ("f", "floor", u)


def sign_of(node: Node) -> int:
    """The sign of a real constant, as far as a first interval shows it; 0: not shown."""
    if tree.symbols(node) or tree.contains(node, tree.INF):
        return 0
    try:
        low, high, imaginary = Point({}, 64).at(node)[:3]
    except (Straddles, Unknown):
        return 0
    return 0 if imaginary is not None else 1 if low > 0 else -1 if high < 0 else 0


def _positive_part(node: Node) -> tuple[Node, Node]:
    if node[0] == "*":
        known = [part for part in node[1:] if value_of(part) is not None]
        rest = [part for part in node[1:] if value_of(part) is None]
        return tree.rational(abs(value_of(mul(*known)))) if known else tree.ONE, mul(*rest)
    return tree.ONE, node


def _ln(node: Node) -> Node:
    if node == tree.E:
        return tree.ONE
    constant = value_of(node)
    if constant is not None:
        if constant == 0:
            return tree.UNDEF
        if constant < 0:
            return add(_ln(tree.rational(-constant)), mul(tree.I, tree.PI))
        return add(*(mul(("q", a), ("f", "ln", ("q", prime))) for prime, a in factors(constant)))
    if node[0] == "*":
        return add(*(_ln(part) for part in node[1:]))
    if node[0] == "^" and value_of(node[2]) is not None and (value_of(node[1]) or 1) > 0:
        n = value_of(node[2])
        if node[1] in (tree.E, tree.PI):
            return mul(node[2], _ln(node[1]))
        if n.__class__ is int and n % 2 == 0 and node[1][0] != "f" and value_of(node[1]) is None:
            return mul(node[2], _ln(tree.call("abs", node[1])))
        return mul(node[2], _ln(node[1]))
    if node[0] == "f" and node[1] == "E":
        return mul(node[2])
    if node[0] == "f" and node[1] == "P":
        return mul(node[3], _ln(node[2]))
    return ("f", "ln", node)


def _circular(name: str, angle: Node) -> Node:
    c, s = _cos_sin(angle)
    if name == "cos":
        return c
    if name == "sin":
        return s
    top, bottom = {"tan": (s, c), "cot": (c, s), "sec": (tree.ONE, c), "csc": (tree.ONE, s)}[name]
    return tree.div(top, bottom)


def _cos_sin(angle: Node) -> tuple[Node, Node]:
    terms = linear(angle)
    if all(monomial == tree.PI for _, monomial in terms) or angle == tree.ZERO:
        r: Read = 0
        for coefficient, _ in terms:
            r = tree.combined(r, coefficient, False)
        return _cos_pi(r), _cos_pi(Fraction(1, 2) - r)
    turned = tree.ONE
    for coefficient, monomial in terms:
        turned = mul(turned, _exponential(coefficient, _sorted(mul(monomial, tree.I))))
    back = power(turned, tree.MINUS_ONE)
    half_i = mul(tree.rational(Fraction(-1, 2)), tree.I)
    return mul(_HALF, add(turned, back)), mul(half_i, add(turned, tree.neg(back)))


def _hyperbolic(name: str, x: Node) -> Node:
    up = _power(tree.E, x)
    down = power(up, tree.MINUS_ONE)
    c, s = mul(_HALF, add(up, down)), mul(_HALF, add(up, tree.neg(down)))
    if name == "cosh":
        return c
    if name == "sinh":
        return s
    top, bottom = {"tanh": (s, c), "coth": (c, s), "sech": (tree.ONE, c), "csch": (tree.ONE, s)}[name]
    return tree.div(top, bottom)


def _area(name: str, x: Node) -> Node:
    if name == "atanh":
        return mul(_HALF, _ln(tree.div(add(tree.ONE, x), add(tree.ONE, tree.neg(x)))))
    sign = tree.ONE if name == "asinh" else tree.MINUS_ONE
    return _ln(add(x, tree.root(add(mul(x, x), sign), 2)))


def _inverse(name: str, x: Node) -> Node:
    """arcsin and the others through arctan; arctan of ±1, ±√3 and ±1/√3 is exact."""
    if name in ("asec", "acsc", "acot"):
        return _inverse({"asec": "acos", "acsc": "asin", "acot": "atan"}[name], tree.div(tree.ONE, x))
    if name == "acos":
        return add(mul(_HALF, tree.PI), tree.neg(_inverse("asin", x)))
    if name == "asin":
        if value_of(x) in (1, -1):
            return mul(x, _HALF, tree.PI)
        x = tree.div(x, tree.root(add(tree.ONE, tree.neg(mul(x, x))), 2))
        x = normal(x)
    if value_of(x) == 0:
        return tree.ZERO
    square = normal(power(x, _TWO)) if not tree.symbols(x) else None
    if square is not None and value_of(square) in _SQUARES:
        sign = tree.MINUS_ONE if _looks_negative(x) else tree.ONE
        return mul(sign, tree.PI, tree.rational(_SQUARES[value_of(square)]))
    return ("f", "atan", x)


_SQUARES = {1: Fraction(1, 4), 3: Fraction(1, 3), Fraction(1, 3): Fraction(1, 6)}


def _looks_negative(x: Node) -> bool:
    """The sign of ±1, ±√3, ±1/√3: a product of roots of positive numbers has that of its rational factors."""
    sign = 1
    for part in x[1:] if x[0] == "*" else (x,):
        if value_of(part) is not None and value_of(part) < 0:
            sign = -sign
    return sign < 0


def _factorial(n: Node) -> Node:
    """(m + c)! = m! (m + 1) … (m + c)."""
    shift = 0
    n = collected(n)
    if n[0] == "+":
        constant = next((part[1] for part in n[1:] if part[0] == "q"), 0)
        if constant.__class__ is int and abs(constant) <= 40:
            shift = constant
    if not shift:
        return tree.fact(_sorted(n))
    base = _sorted(add(n, ("q", -shift)))
    result: Node = ("f", "fact", base)
    for k in range(1, shift + 1):
        result = mul(result, add(base, ("q", k)))
    for k in range(0, shift, -1):
        result = tree.div(result, add(base, ("q", k)))
    return result


def factors(value: Read) -> list[tuple[int, int]]:
    """Prime factors of a positive rational with their exponents; what trial division to 2,000 leaves is one factor, or its root."""
    result: dict[int, int] = {}
    spend(1 if tree.bits(value) < 12 else 60 + tree.bits(value) // 8)
    for number, sign in ((value, 1),) if value.__class__ is int else ((value.numerator, 1), (value.denominator, -1)):
        if number.bit_length() > 2_000:
            result[number] = result.get(number, 0) + sign
            continue
        k = 2
        while k * k <= number and k < 2_000:
            while number % k == 0:
                number //= k
                result[k] = result.get(k, 0) + sign
            k += 1 + (k > 2)
        if number > 1:
            half = isqrt(number)
            if half * half == number:
                result[half] = result.get(half, 0) + 2 * sign
            else:
                result[number] = result.get(number, 0) + sign
    return [(prime, exponent) for prime, exponent in sorted(result.items()) if exponent]
