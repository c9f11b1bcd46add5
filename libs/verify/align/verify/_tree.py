"""Expression trees: tuples whose first item is a tag, with exact constants folded while they are built.

    ("q", n)                an int or a Fraction
    ("d", n, digits, ulp)   a decimal literal: its exact value, its significant digits, the unit of its last place
    ("s", name)             a symbol
    ("c", name)             pi, e, i, inf, undef
    ("+", terms…)  ("*", factors…)  ("^", base, exponent)
    ("f", name, arguments…) a function

Nothing is folded before its size has been bounded and its work has been charged, so no power, factorial or product can grow out of hand.
Trees share subtrees; `weigh` bounds what they would be written out, wherever a rewriting uses a part more than once.
"""

from __future__ import annotations

from fractions import Fraction
from math import comb, factorial, gcd, isqrt

from align.verify._budget import MAX_BITS, MAX_FRACTION_BITS, MAX_NODES, MAX_TERMS, OverBudget, spend, spend_divisor, spend_product

TYPE_CHECKING = False  # typing is not imported: it is a tenth of the import
if TYPE_CHECKING:
    from typing import Any

    from align.verify._values import Read

    Node = tuple[Any, ...]
else:
    Node = tuple

ZERO: Node = ("q", 0)
ONE: Node = ("q", 1)
MINUS_ONE: Node = ("q", -1)
UNDEF: Node = ("c", "undef")
INF: Node = ("c", "inf")
PI: Node = ("c", "pi")
E: Node = ("c", "e")
I: Node = ("c", "i")
NEG_INF: Node = ("*", MINUS_ONE, INF)
_MERSENNE = (1 << 127) - 1


def rational(value: Read) -> Node:
    """A constant, an int wherever it is one."""
    if value.__class__ is not int and value.denominator == 1:
        value = value.numerator
    return ("q", value)


def integer(digits: str) -> int:
    """int() of a digit string of any length, in pieces, because int() itself has a process-wide limit."""
    if len(digits) <= 600:
        return int(digits)
    half = len(digits) // 2
    spend_product(10 * half, 10 * half)
    shift: int = 10**half
    return integer(digits[:-half]) * shift + integer(digits[-half:])


def literal(text: str) -> Node:
    """A number as it is written. Raises: OverBudget for an exponent that is too large."""
    mantissa, _, exponent = text.replace("E", "e").partition("e")
    whole, point, fraction = mantissa.partition(".")
    power = int(exponent or "0")
    if abs(power) > 9_000:
        raise OverBudget
    if not point and not exponent:
        return ("q", integer(whole))
    digits = (whole + fraction).lstrip("0")
    spend_divisor(4 * (len(digits) + abs(power) + len(fraction)))
    value: Read = Fraction(integer(whole + fraction or "0")) * Fraction(10) ** (power - len(fraction))
    if value.denominator == 1:
        value = value.numerator
    return ("d", value, len(digits), Fraction(10) ** (power - len(fraction))) if point or exponent else ("q", value)


def text(node: Node) -> str:
    """The tree as text, for order and for seeds. Hexadecimal: str() of a long integer is limited, and slow."""
    spend(2)
    tag = node[0]
    if tag in "qd":
        value = node[1]
        if bits(value) > 512:  # its remainder is as good for both purposes
            spend(bits(value) >> 11)
            return f"{value.numerator % _MERSENNE:x}/{value.denominator % _MERSENNE:x}"
        return f"{value:x}" if value.__class__ is int else f"{value.numerator:x}/{value.denominator:x}"
    if tag == "s" or tag == "c":
        return f"{node[1]}"
    if tag == "f":
        return f"{node[1]}({','.join(map(text, node[2:]))})"
    return f"({tag.join(map(text, node[1:]))})"


def value_of(node: Node) -> Read:
    """The exact rational value of a constant, or None."""
    return node[1] if node[0] in "qd" else None


def split(term: Node) -> tuple[Read, ...]:
    """A term as its rational coefficient and the rest."""
    if term[0] in "qd":
        return term[1], ONE
    if term[0] == "*" and term[1][0] == "q":
        return term[1][1], term[2] if len(term) == 3 else ("*", *term[2:])
    return 1, term


def bits(value: Read) -> int:
    """Size of a rational: the bits of its numerator and denominator."""
    return value.bit_length() if value.__class__ is int else value.numerator.bit_length() + value.denominator.bit_length()


def combined(a: Read, b: Read, product: bool) -> Read:
    """a · b or a + b of two constants, charged for and bounded."""
    if a.__class__ is int and b.__class__ is int:
        if product:
            spend_product(a.bit_length(), b.bit_length())
        value = a * b if product else a + b
        if value.bit_length() > 2 * MAX_BITS:
            raise OverBudget
        return value
    size = bits(a) + bits(b)
    if size > 4 * MAX_FRACTION_BITS:
        raise OverBudget
    spend_divisor(size)
    value = a * b if product else a + b
    if bits(value) > (MAX_FRACTION_BITS if value.denominator != 1 else 2 * MAX_BITS):
        raise OverBudget
    return value


def add(*terms: Node) -> Node:
    """A sum."""
    spend(2)
    constant, rest = 0, []
    infinite = 0
    for term in terms:
        parts = term[1:] if term[0] == "+" else (term,)
        for part in parts:
            tag = part[0]
            if tag == "q" or tag == "d":
                constant = combined(constant, part[1], False) if constant else part[1]
            elif tag != "c" and tag != "*":
                rest.append(part)
            elif part == UNDEF:
                return UNDEF
            elif part in (INF, NEG_INF):
                sign = 1 if part == INF else -1
                if infinite == -sign:
                    return UNDEF
                infinite = sign
            else:
                rest.append(part)
    spend(len(rest) >> 2)
    if infinite:
        return INF if infinite > 0 else NEG_INF
    if len(rest) > MAX_TERMS:
        raise OverBudget
    if not rest:
        return rational(constant)
    if constant:
        rest.append(rational(constant))
    return rest[0] if len(rest) == 1 else ("+", *rest)


def mul(*factors: Node) -> Node:
    """A product."""
    spend(2)
    constant, rest = 1, []
    for factor in factors:
        parts = factor[1:] if factor[0] == "*" else (factor,)
        for part in parts:
            tag = part[0]
            if tag == "q" or tag == "d":
                constant = combined(constant, part[1], True) if constant != 1 else part[1]
            elif part == UNDEF:
                return UNDEF
            else:
                rest.append(part)
    spend(len(rest) >> 2)
    if len(rest) > MAX_TERMS:
        raise OverBudget
    if INF in rest:
        if constant == 0 or (len(rest) > 1 and any(part != INF for part in rest)):
            return UNDEF
        return INF if constant > 0 else NEG_INF
    if not rest or constant == 0:
        return rational(constant)
    if constant != 1:
        rest.insert(0, rational(constant))
    return rest[0] if len(rest) == 1 else ("*", *rest)


def neg(node: Node) -> Node:
    """The negative; a decimal literal stays one."""
    if node[0] == "d":
        return ("d", -node[1], node[2], node[3])
    return mul(MINUS_ONE, node)


def minus(a: Node, b: Node) -> Node:
    """a - b, term by term."""
    return add(a, *(neg(term) for term in (b[1:] if b[0] == "+" else (b,))))


def scaled(node: Node, power: int) -> Node:
    """node × 10^power; a decimal literal stays one."""
    if abs(power) > 9_000:
        raise OverBudget
    factor = Fraction(10) ** power
    if node[0] == "d":
        spend_divisor(bits(node[1]) + 4 * abs(power))
        return ("d", rational(node[1] * factor)[1], node[2], node[3] * factor)
    return mul(node, rational(factor))


def div(top: Node, bottom: Node) -> Node:
    """A quotient; division by zero is undefined."""
    return mul(top, power(bottom, MINUS_ONE))


def power(base: Node, exponent: Node) -> Node:
    """A power, evaluated where base and exponent are rational and the result is small enough; else left as it stands."""
    if base == UNDEF or exponent == UNDEF:
        return UNDEF
    b, n = value_of(base), value_of(exponent)
    if n is not None:
        n = rational(n)[1]
        if n == 1:
            return ("q", b) if b is not None else base
        if n == 0:
            return UNDEF if b == 0 or base in (INF, NEG_INF) else ONE
        if b is not None:
            return _rational_power(b, n, base, exponent)
        if base == INF:
            return INF if n > 0 else ZERO
        if base == I and n.__class__ is int:
            return (ONE, I, MINUS_ONE, ("*", MINUS_ONE, I))[n % 4]
        if base[0] == "^" and value_of(base[2]) is not None and (n.__class__ is int or (value_of(base[1]) or 0) > 0):
            return power(base[1], rational(value_of(base[2]) * n))
    if INF in (base, exponent) or NEG_INF in (base, exponent):
        return UNDEF
    return ("^", base, rational(exponent[1]) if exponent[0] == "d" else exponent)


def _rational_power(b: Read, n: Read, base: Node, exponent: Node) -> Node:
    if b == 0:
        return ZERO if n > 0 else UNDEF
    if b == 1:
        return ONE
    if n.__class__ is int:
        if b == -1:
            return ONE if n % 2 == 0 else MINUS_ONE
        if bits(b) * abs(n) > (MAX_BITS if b.__class__ is int else MAX_FRACTION_BITS):
            return ("^", rational(b), rational(n))
        spend_product(bits(b) * abs(n), bits(b) * abs(n))
        return rational(Fraction(b) ** n)
    root = n.denominator
    if root <= 64 and bits(b) * abs(n.numerator) <= MAX_FRACTION_BITS:
        sign = -1 if b < 0 else 1
        if sign > 0 or root % 2:
            spend_root(bits(b), root)
            top, bottom = exact_root(abs(b.numerator), root), exact_root(b.denominator, root)
            if top is not None and bottom is not None:
                return rational(Fraction(sign * top, bottom) ** n.numerator)
    return ("^", rational(b), ("q", n))


def spend_root(size: int, k: int) -> None:
    """Charges for a k-th root of an integer of `size` bits."""
    spend(size * size >> (20 if k == 2 else 18))


def exact_root(value: int, k: int) -> int | None:
    """The k-th root of a non-negative integer when it is an integer."""
    root = integer_root(value, k)
    return root if root**k == value else None


def integer_root(value: int, k: int) -> int:
    """The floor of the k-th root of a non-negative integer: Newton from above, from the root of the leading half of the digits."""
    if value < 2 or k == 1:
        return value
    if k == 2:
        return isqrt(value)
    size = value.bit_length()
    half = size // (2 * k)
    if size < 1_000:
        guess = int(value ** (1.0 / k) * (1 + 1e-12)) + 2
    elif half:
        guess = (integer_root(value >> (k * half), k) + 1) << half
    else:
        guess = 1 << -(-size // k)
    while True:
        better = ((k - 1) * guess + value // guess ** (k - 1)) // k
        if better >= guess:
            return guess
        guess = better


def root(node: Node, k: int) -> Node:
    """The k-th root."""
    return power(node, ("q", Fraction(1, k)))


def fact(node: Node) -> Node:
    """A factorial; a large or symbolic one stays as it is. Of a negative integer it is undefined."""
    n = value_of(node)
    if n.__class__ is int:
        if n < 0:
            return UNDEF
        if n <= 1_000:
            spend(n >> 4)
            return ("q", factorial(n))
    return ("f", "fact", node)


def binomial(n: Node, k: Node) -> Node:
    """n choose k."""
    a, b = value_of(n), value_of(k)
    if a.__class__ is int and b.__class__ is int and 0 <= b <= a:
        b = min(b, a - b)
        if b * a.bit_length() <= MAX_BITS:
            spend(b * a.bit_length() >> 5)
            return ("q", comb(a, b))
        return ("f", "binom", n, ("q", b))
    if a.__class__ is int and b.__class__ is int and a >= 0:
        return ZERO
    return div(fact(n), mul(fact(k), fact(add(n, neg(k)))))


def call(name: str, *arguments: Node) -> Node:
    """A function of evaluated arguments; the exact ones of rationals are folded."""
    spend(2)
    if UNDEF in arguments:
        return UNDEF
    values = [value_of(a) for a in arguments]
    if None not in values:
        spend_divisor(sum(map(bits, values)))
        first = values[0]
        if name == "abs":
            return rational(abs(first))
        if name == "floor":
            return ("q", first.numerator // first.denominator)
        if name == "ceil":
            return ("q", -(-first.numerator // first.denominator))
        if name == "max":
            return rational(max(values))
        if name == "min":
            return rational(min(values))
        if name in ("gcd", "lcm") and all(v.__class__ is int for v in values):
            return _gcd_lcm(name, values)
        if name == "mod" and values[1]:
            spend_divisor(2 * bits(first) + 2 * bits(values[1]))
            return rational(first - values[1] * (Fraction(first) / values[1]).__floor__())
        if name == "deg":
            return mul(arguments[0], PI, ("q", Fraction(1, 180)))
    if name == "exp":
        return power(E, arguments[0])
    if name == "deg":
        return mul(arguments[0], PI, ("q", Fraction(1, 180)))
    if name in ("mod", "gcd") and len(arguments) == 2:
        return _modulo_power(name, *arguments)
    return ("f", name, *arguments)


def _modulo_power(name: str, a: Node, b: Node) -> Node:
    """Remainders and common divisors with a power that is too large to be written out."""
    if name == "gcd" and a[0] != "^":
        a, b = b, a
    m = value_of(b)
    if _whole_power(a) and m.__class__ is int and m > 0:
        spend_product(m.bit_length(), 4 * m.bit_length() * a[2][1].bit_length())
        rest = pow(a[1][1], a[2][1], m)
        return ("q", rest if name == "mod" else gcd(rest, m))
    n = value_of(a)
    if name == "mod" and _whole_power(b) and n.__class__ is int and n >= 0 and n.bit_length() < b[2][1] * (b[1][1].bit_length() - 1):
        return a
    return ("f", name, a, b)


def _whole_power(node: Node) -> bool:
    return node[0] == "^" and all(part[0] == "q" and part[1].__class__ is int and part[1] > 1 for part in node[1:])


def _gcd_lcm(name: str, values: list[int]) -> Node:
    result = 0 if name == "gcd" else 1
    for value in values:
        spend_divisor(bits(result) + bits(value))
        if name == "gcd":
            result = gcd(result, value)
        else:
            result = result * value // gcd(result, value) if result and value else 0
            if bits(result) > MAX_BITS:
                raise OverBudget
    return ("q", abs(result))


def symbols(node: Node) -> set[str]:
    """Names of the symbols of a tree."""
    tag = node[0]
    return {item[1] for item in nodes(node) if item[0] == "s"} if tag in _BRANCHES else {node[1]} if tag == "s" else set()


def constants(node: Node) -> set[str]:
    """Names of the constants of a tree: pi, e, i, inf, undef."""
    tag = node[0]
    return {item[1] for item in nodes(node) if item[0] == "c"} if tag in _BRANCHES else {node[1]} if tag == "c" else set()


def contains(node: Node, wanted: Node) -> bool:
    """Whether a subtree occurs."""
    return node == wanted or (node[0] in _BRANCHES and wanted in nodes(node))


def nodes(node: Node, inside: Read = None) -> list[Node]:
    """All subtrees, those that occur twice twice; of a subtree for which `inside` is false only itself. Raises: OverBudget."""
    found = [node]
    at = 0
    while at < len(found):
        item = found[at]
        at += 1
        if item[0] in _BRANCHES and (inside is None or inside(item)):
            found.extend([part for part in item[1:] if part.__class__ is tuple])
            if len(found) > 2 * MAX_NODES:
                raise OverBudget
    spend(2 + (at >> 1))
    return found


_BRANCHES = frozenset("+*^f")


def weigh(node: Node) -> Node:
    """The tree itself. Raises: OverBudget when it has more than MAX_NODES nodes."""
    if node[0] in _BRANCHES and len(nodes(node)) > MAX_NODES:
        raise OverBudget
    return node
