"""Evaluation of an expression at a point, as an interval around its value, with a separation bound for what is algebraic.

Intervals have 2^-P as their unit. Beside the interval every algebraic value carries log2 of two bounds: it is a quotient of algebraic
integers whose conjugates are at most 2^U and 2^L in modulus. With D the product of the degrees of the radicals in it, a value that is not
zero is at least 2^-((D-1)U + L) in modulus (Burnikel, Funke, Mehlhorn, Schirra, Schmitt 2001), so that an interval around zero that is
smaller proves zero. Transcendental functions have no such bound; `transcendental` says that one was met.
"""

from __future__ import annotations

from fractions import Fraction
from math import gcd, isqrt, log2

from align.verify import _fixed as fixed
from align.verify._budget import MAX_BITS, OverBudget, spend, spend_divisor, spend_product
from align.verify._exact import exact_value
from align.verify._tree import Node, symbols

TYPE_CHECKING = False  # typing is not imported: it is a tenth of the import
if TYPE_CHECKING:
    from collections.abc import Callable

    from align.verify._values import Read

    Ball = tuple[Read, ...]  # low, high, low, high, U, L (see `Point.at`)

_SLACK = 1e-6  # the logarithms are floats


class Straddles(Exception):
    """A sign, a floor or a division cannot be settled at this precision."""


class Unknown(Exception):
    """A function or a branch that this evaluation has no rule for."""


class Point:
    """Values for symbols and, in a formal evaluation, for transcendental atoms; evaluates trees at one precision."""

    def __init__(self, values: dict[Node, Read], precision: int, formal: bool = False):
        self.values = values
        self.p = precision
        self.formal = formal
        self.transcendental = False
        self.radicals: set[tuple[Node, int]] = set()
        self.order = 1
        self.moduli = 0
        self.cost = 1 + precision // 256 + (precision // 1024) ** 2 // 2

    def separation(self, upper: float, lower: float) -> float:
        """s such that a value with these bounds that is not zero is at least 2^-s."""
        degree = _degree(self.order)
        if degree > 1 << 20:
            return float("inf")
        for _, k in self.radicals:
            degree *= k
            if degree > 1 << 20:
                return float("inf")
        if self.moduli:
            degree = 2**self.moduli * degree * degree
        return (degree - 1) * max(upper, 0.0) + max(lower, 0.0) + 2

    def zero(self, node: Node) -> tuple[bool | None, float]:
        """(False, _) when the value is not zero, (True, _) when it is proved zero, else (None, the precision that would settle it)."""
        a, b, c, d, upper, lower = self.at(node)
        if a > 0 or b < 0 or (c is not None and (c > 0 or d < 0)):
            return False, 0
        if self.transcendental:
            return None, float("inf")
        needed = self.separation(upper, lower)
        size = max(-a, b, 0 if c is None else max(-c, d)).bit_length() + 1
        if size - self.p < -needed:
            return True, 0
        return None, needed + size + 8

    def at(self, node: Node) -> Ball:
        """(low, high, low, high, U, L): the real part, the imaginary part (None, None when it is exactly zero), and the bounds."""
        spend(self.cost)
        tag = node[0]
        if tag == "q" or tag == "d":
            return self.rational(node[1])
        if tag == "s":
            return self.rational(self.values[node])
        if tag == "+":
            return self.sum([self.at(part) for part in node[1:]])
        if tag == "*":
            result = self.at(node[1])
            for part in node[2:]:
                result = self.times(result, self.at(part))
            return result
        if tag == "c":
            return self.constant(node)
        if tag == "^":
            return self.power(node)
        if self.formal and node in self.values:
            return self.rational(self.values[node])
        return self.function(node)

    def rational(self, value: Read) -> Ball:
        p = self.p
        if value.__class__ is int:
            scaled = value << p
            return scaled, scaled, None, None, _log(value), 0.0
        spend_product(p + value.numerator.bit_length(), value.denominator.bit_length())
        scaled, rest = divmod(value.numerator << p, value.denominator)
        return scaled, scaled + (rest > 0), None, None, _log(value.numerator), _log(value.denominator)

    def constant(self, node: Node) -> Ball:
        name = node[1]
        if name == "i":
            self.order = _lcm(self.order, 4)
            return 0, 0, 1 << self.p, 1 << self.p, 0.0, 0.0
        if self.formal and node in self.values:
            return self.rational(self.values[node])
        if name == "pi":
            self.transcendental = True
            value = fixed.pi(self.p)
            return value - 1, value + 1, None, None, 2.0, 0.0
        if name == "e":
            self.transcendental = True
            low, high = fixed.exp(1 << self.p, 1 << self.p, self.p)
            return low, high, None, None, 2.0, 0.0
        raise Unknown(name)

    def sum(self, parts: list[Ball]) -> Ball:
        a = b = 0
        c = d = None
        lower = 0.0
        for part in parts:
            a += part[0]
            b += part[1]
            if part[2] is not None:
                c, d = (part[2], part[3]) if c is None else (c + part[2], d + part[3])
            lower += part[5]
        upper = max(part[4] - part[5] for part in parts) + lower + log2(len(parts)) + _SLACK
        return a, b, c, d, upper, lower

    def times(self, x: Ball, y: Ball) -> Ball:
        p = self.p
        upper, lower = x[4] + y[4], x[5] + y[5]
        size, other = _size(x), _size(y)
        if size + other > MAX_BITS + 4 * p:
            raise OverBudget
        spend_product(2 * size, 2 * other)
        a, b = _product(x[0], x[1], y[0], y[1], p)
        if x[2] is None and y[2] is None:
            return a, b, None, None, upper, lower
        if x[2] is None or y[2] is None:
            real, complex_ = (x, y) if x[2] is None else (y, x)
            c, d = _product(real[0], real[1], complex_[2], complex_[3], p)
            return a, b, c, d, upper, lower
        e, f = _product(x[2], x[3], y[2], y[3], p)
        c, d = _product(x[0], x[1], y[2], y[3], p)
        g, h = _product(x[2], x[3], y[0], y[1], p)
        return a - f, b - e, c + g, d + h, upper, lower

    def inverse(self, x: Ball) -> Ball:
        p = self.p
        a, b, c, d, upper, lower = x
        if c is None:
            if a <= 0 <= b:
                raise Straddles
            spend_product(2 * p, 2 * p)
            one = 1 << (2 * p)
            return one // b, -(-one // a), None, None, lower, upper
        norm_low, norm_high = _square(a, b, p)
        low, high = _square(c, d, p)
        norm = self.inverse((norm_low + low, norm_high + high, None, None, 0.0, 0.0))
        conjugate = (a, b, -d, -c, 0.0, 0.0)
        return (*self.times(conjugate, norm)[:4], lower, upper)

    def power(self, node: Node) -> Ball:
        exponent = node[2]
        if self.formal and node in self.values:
            return self.rational(self.values[node])
        if exponent[0] != "q":
            if self.formal:
                raise Unknown("a power")
            return self.general_power(self.at(node[1]), self.at(exponent))
        n = exponent[1]
        base = self.at(node[1])
        if n.__class__ is int:
            return self.integer_power(base, n)
        return self.root_power(node[1], base, n.numerator, n.denominator)

    def integer_power(self, base: Ball, n: int) -> Ball:
        if n == 0:
            return self.rational(1)
        if n < 0:
            return self.inverse(self.integer_power(base, -n))
        size = _size(base) - self.p
        if n > 1 << 24 or (max(size, 1) * n > MAX_BITS and size > 0) or -size * n > 16 * MAX_BITS:
            raise OverBudget
        if base[2] is None and n % 2 == 0:
            base = (*_absolute(base[0], base[1]), None, None, base[4], base[5])
        result: Ball | None = None
        while n > 1:
            spend(self.cost)
            if n & 1:
                result = base if result is None else self.times(result, base)
            n >>= 1
            base = self.times(base, base)
        return base if result is None else self.times(result, base)

    def root_power(self, radicand: Node, base: Ball, n: int, k: int) -> Ball:
        a, b, c, _, upper, lower = base
        upper, lower = _root_bounds(upper, lower, k)
        self.radicals.add((radicand, k))
        if k > 256:
            raise OverBudget
        if c is not None:
            x, y = self.exp(*self.scale(self.log(base), Fraction(1, k)))
            result = (*x, *y, upper, lower)
        elif a >= 0 or (a > -(1 << 12) and b >= 0 and self.zero_proved(base)):
            result = (*fixed.root(a, b, k, self.p), None, None, upper, lower)
        elif b >= 0:
            raise Straddles
        else:
            if self.formal and k % 2 == 0 and symbols(radicand):
                raise Unknown("a point outside of the domain")
            low, high = fixed.root(-b, -a, k, self.p)
            if k % 2:
                result = (-high, -low, None, None, upper, lower)
            else:
                self.order = _lcm(self.order, 2 * k)
                turn = self.turn(Fraction(1, k))
                result = (*self.times((low, high, None, None, 0.0, 0.0), turn)[:4], upper, lower)
        return self.integer_power(result, n)

    def zero_proved(self, base: Ball) -> bool:
        """Whether an interval around zero is zero."""
        if base[0] == base[1] == 0:
            return True
        if self.transcendental:
            raise Straddles
        if max(-base[0], base[1]).bit_length() + 1 - self.p < -self.separation(base[4], base[5]):
            return True
        raise Straddles

    def turn(self, part: Fraction) -> Ball:
        """e^(i π part)."""
        if part.denominator == 2:
            return 0, 0, (1, -1)[part.numerator % 4 // 2] << self.p, (1, -1)[part.numerator % 4 // 2] << self.p, 0.0, 0.0
        wide = self.p + 8
        c, s = fixed.cos_sin(fixed.pi(wide) * part.numerator // part.denominator, wide)
        return (c >> 8) - 2, (c >> 8) + 2, (s >> 8) - 2, (s >> 8) + 2, 0.0, 0.0

    def scale(self, z: Ball, factor: Fraction) -> Ball:
        """A pair of real intervals times a positive rational."""
        n, m = factor.numerator, factor.denominator
        return tuple((low * n // m, -(-high * n // m)) for low, high in z)

    def log(self, z: Ball) -> Ball:
        """The principal logarithm: (real interval, imaginary interval)."""
        a, b, c, d = z[:4]
        if c is None:
            raise Straddles
        low, high = _square(a, b, self.p), _square(c, d, self.p)
        square = (low[0] + high[0], low[1] + high[1])
        if square[0] <= 0:
            raise Straddles
        modulus = (fixed.ln(square[0], square[0], self.p)[0] // 2, -(-fixed.ln(square[1], square[1], self.p)[1] // 2))
        return modulus, self.argument(a, b, c, d)

    def argument(self, a: int, b: int, c: int, d: int) -> tuple[int, int]:
        p, pi = self.p, fixed.pi(self.p)
        spend_product(4 * p, 2 * p)
        if a > 0:
            quotients = [y * (1 << p) // x for x in (a, b) for y in (c, d)]
            return fixed.atan(min(quotients), max(quotients) + 1, p)
        if c > 0 or d < 0:
            quotients = [x * (1 << p) // y for x in (a, b) for y in (c, d)]
            low, high = fixed.atan(min(quotients), max(quotients) + 1, p)
            half = pi // 2 if c > 0 else -(pi // 2)
            return half - high - 2, half - low + 2
        raise Straddles

    def exp(self, x: Ball, y: Ball) -> Ball:
        """e^(x + iy) as a pair of real intervals."""
        low, high = fixed.exp(x[0], x[1], self.p)
        middle, radius = (y[0] + y[1]) // 2, (y[1] - y[0]) // 2 + 4
        c, s = fixed.cos_sin(middle, self.p)
        return (
            _product(low, high, c - radius, c + radius, self.p),
            _product(low, high, s - radius, s + radius, self.p),
        )

    def general_power(self, base: Ball, exponent: Ball) -> Ball:
        self.transcendental = True
        if base[2] is not None:
            raise Unknown("a complex base")
        if base[0] <= 0:
            raise Unknown("a base that is not positive")
        x = self.times((*fixed.ln(base[0], base[1], self.p), None, None, 0.0, 0.0), exponent)
        return self.exponential(x)

    def exponential(self, x: Ball) -> Ball:
        self.transcendental = True
        if x[2] is None:
            return *fixed.exp(x[0], x[1], self.p), None, None, 0.0, 0.0
        real, imaginary = self.exp(x[:2], x[2:4])
        return *real, *imaginary, 0.0, 0.0

    def function(self, node: Node) -> Ball:
        name = node[1]
        rule = _RULES.get(name)
        if rule is None:
            raise Unknown(name)
        if name in ("floor", "ceil", "mod"):
            exact = exact_value(node, self.values)
            if exact is not None:
                return self.rational(exact)
        if name in ("floor", "ceil"):  # once it is settled it is a whole number, whatever it was made of
            saved = self.transcendental, set(self.radicals), self.order, self.moduli
            result: Ball = rule(self, self.at(node[2]))
            self.transcendental, self.radicals, self.order, self.moduli = saved
            return result
        value: Ball = rule(self, *[self.at(part) if name not in ("cosr", "sinr") else part for part in node[2:]])
        return value


def _log(value: int) -> float:
    return log2(abs(value)) + _SLACK if value else 0.0


def _product(a: int, b: int, c: int, d: int, p: int) -> tuple[int, int]:
    if a >= 0 and c >= 0:
        return a * c >> p, -(-(b * d) >> p)
    corners = (a * c, a * d, b * c, b * d)
    return min(corners) >> p, -(-max(corners) >> p)


def _absolute(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a >= 0 else (-b, -a) if b <= 0 else (0, max(-a, b))


def _square(a: int, b: int, p: int) -> tuple[int, int]:
    low, high = _absolute(a, b)
    return low * low >> p, -(-(high * high) >> p)


def _root_bounds(upper: float, lower: float, k: int) -> tuple[float, float]:
    first = ((upper + (k - 1) * lower) / k + _SLACK, lower)
    second = (upper, ((k - 1) * upper + lower) / k + _SLACK)
    return min(first, second, key=sum)


def _size(x: Ball) -> int:
    """Bits of the longest bound."""
    size: int = max(x[0].bit_length(), x[1].bit_length())
    return size if x[2] is None else max(size, x[2].bit_length(), x[3].bit_length())


def _lcm(a: int, b: int) -> int:
    spend_divisor(a.bit_length() + b.bit_length())
    return a * b // gcd(a, b)


def _degree(n: int) -> int:
    """φ(n), the degree of the n-th roots of unity; for a large n, n, which is no less."""
    if n > 1 << 20:
        return n
    spend(isqrt(n) >> 3)
    result, k = n, 2
    while k * k <= n:
        if n % k == 0:
            while n % k == 0:
                n //= k
            result -= result // k
        k += 1
    return result - result // n if n > 1 else result


def _rule_abs(point: Point, x: Ball) -> Ball:
    a, b, c, d, upper, lower = x
    if c is None:
        if a < 0 < b:
            a, b = 0, max(-a, b)
            return a, b, None, None, upper, lower
        return *_absolute(a, b), None, None, upper, lower
    point.moduli += 1
    low, high = _square(a, b, point.p), _square(c, d, point.p)
    return *fixed.root(low[0] + high[0], low[1] + high[1], 2, point.p), None, None, upper + lower, 2 * lower


def _rule_floor(point: Point, x: Ball, up: bool = False) -> Ball:
    if x[2] is not None:
        raise Unknown("the floor of a complex number")
    low, high = (-(-x[0] >> point.p), -(-x[1] >> point.p)) if up else (x[0] >> point.p, x[1] >> point.p)
    if low != high:
        raise Straddles
    return point.rational(low)


def _rule_pick(point: Point, parts: Ball, sign: int) -> Ball:
    best: Ball = parts[0]
    for part in parts[1:]:
        if part[2] is not None or best[2] is not None:
            raise Unknown("the order of complex numbers")
        if part[0] * sign >= best[1] * sign and part[1] * sign >= best[1] * sign and part[0] * sign >= best[0] * sign:
            best = part
        elif not (part[1] <= best[0] if sign > 0 else part[0] >= best[1]):
            raise Straddles
    return best


def _rule_ln(point: Point, x: Ball) -> Ball:
    point.transcendental = True
    if x[2] is None and x[1] < 0:
        low, high = fixed.ln(-x[1], -x[0], point.p)
        pi = fixed.pi(point.p)
        return low, high, pi - 1, pi + 1, 0.0, 0.0
    if x[2] is None:
        if x[0] <= 0:
            raise Straddles
        return *fixed.ln(x[0], x[1], point.p), None, None, 0.0, 0.0
    real, imaginary = point.log(x)
    return *real, *imaginary, 0.0, 0.0


def _rule_circular(point: Point, x: Ball, which: int) -> Ball:
    point.transcendental = True
    if x[2] is not None:
        raise Unknown("a circular function of a complex number")
    middle, radius = (x[0] + x[1]) // 2, (x[1] - x[0]) // 2 + 4
    value = fixed.cos_sin(middle, point.p)[which]
    return value - radius, value + radius, None, None, 0.0, 0.0


def _rule_turn(point: Point, part: Ball, which: int) -> Ball:
    r = Fraction(part[1])
    point.order = _lcm(point.order, 2 * r.denominator)
    value = point.turn(r)
    return value[2 * which], value[2 * which + 1], None, None, 1.0, 1.0


def _rule_atan(point: Point, x: Ball) -> Ball:
    point.transcendental = True
    if x[2] is not None:
        raise Unknown("arctan of a complex number")
    return *fixed.atan(x[0], x[1], point.p), None, None, 0.0, 0.0


_RULES: dict[str, Callable[..., Ball]] = {
    "abs": _rule_abs,
    "floor": _rule_floor,
    "ceil": lambda point, x: _rule_floor(point, x, True),
    "max": lambda point, *parts: _rule_pick(point, parts, 1),
    "min": lambda point, *parts: _rule_pick(point, parts, -1),
    "ln": _rule_ln,
    "cos": lambda point, x: _rule_circular(point, x, 0),
    "sin": lambda point, x: _rule_circular(point, x, 1),
    "cosr": lambda point, r: _rule_turn(point, r, 0),
    "sinr": lambda point, r: _rule_turn(point, r, 1),
    "atan": _rule_atan,
    "E": Point.exponential,
    "EI": lambda point, x: point.exponential(point.times(x, (0, 0, 1 << point.p, 1 << point.p, 0.0, 0.0))),
    "P": Point.general_power,
}
