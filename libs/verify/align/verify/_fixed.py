"""Elementary functions on intervals of fixed-point numbers: integers that stand for n / 2^P.

Every function returns (low, high) that enclose the true value for all arguments of the given interval. Rounding inside is covered by
guard bits: each takes fewer than 2^16 rounded operations on numbers with 24 guard bits, so the last place outside is off by less than
one, and the result is widened by two. Every function charges for its own precision, a table look-up as much as what it spares, so that
the steps of a verdict do not depend on the verdicts before it.
"""

from math import isqrt

from align.verify._budget import OverBudget, spend
from align.verify._tree import integer_root, spend_root

_GUARD = 24
_MAX_EXPONENT = 4_000  # e^4000 has 5,771 bits
_pi: dict[int, int] = {}
_ln2: dict[int, int] = {}


def _spend_series(w: int) -> None:
    """Charges for a series of terms of w bits."""
    square = w * w >> 13
    spend(8 + square + square * (w >> 13))


def pi(p: int) -> int:
    """⌊π · 2^p⌋, give or take one (Machin)."""
    _spend_series(p)
    value = _pi.get(p)  # one look-up: another thread may empty the table
    if value is None:
        w = p + _GUARD
        value = 4 * (4 * _atan_inverse(5, w) - _atan_inverse(239, w)) >> _GUARD
        _keep(_pi, p, value)
    return value


def _keep(table: dict[int, int], p: int, value: int) -> None:
    if len(table) >= 64:
        table.clear()
    table[p] = value


def _atan_inverse(n: int, w: int) -> int:
    total = term = (1 << w) // n
    square, k, sign = n * n, 1, -1
    while term:
        term //= square
        k += 2
        total += sign * (term // k)
        sign = -sign
    return total


def ln2(p: int) -> int:
    """⌊ln 2 · 2^p⌋, give or take one: 18 atanh(1/26) - 2 atanh(1/4801) + 8 atanh(1/8749)."""
    _spend_series(p)
    value = _ln2.get(p)
    if value is None:
        w = p + _GUARD
        value = (18 * _atanh_inverse(26, w) - 2 * _atanh_inverse(4801, w) + 8 * _atanh_inverse(8749, w)) >> _GUARD
        _keep(_ln2, p, value)
    return value


def _atanh_inverse(n: int, w: int) -> int:
    total = term = (1 << w) // n
    square, k = n * n, 1
    while term:
        term //= square
        k += 2
        total += term // k
    return total


def root(low: int, high: int, k: int, p: int) -> tuple[int, int]:
    """k-th root of a non-negative interval."""
    shift = p * (k - 1)
    spend_root(shift + high.bit_length(), k)
    spend_root(shift + max(low, 0).bit_length(), k)
    if k == 2:
        return isqrt(max(low, 0) << shift), isqrt(high << shift) + 1
    return integer_root(max(low, 0) << shift, k), integer_root(high << shift, k) + 1


def exp(low: int, high: int, p: int) -> tuple[int, int]:
    """e^x. Raises: OverBudget when the result would be too large."""
    if high >> p > _MAX_EXPONENT:
        raise OverBudget
    if high >> p < -2 * p:
        return 0, 2
    return max(_exp(low, p) - 2, 0), _exp(high, p) + 2


def _exp(x: int, p: int) -> int:
    magnitude = max(0, (x >> p) * 3 // 2)
    halvings = max(4, isqrt(p) // 2)
    w = p + magnitude + _GUARD + 2 * halvings
    _spend_series(max(w, x.bit_length()))
    x <<= w - p
    two = ln2(w)
    k = x // two
    r = (x - k * two) >> halvings
    total = term = 1 << w
    n = 1
    while term:
        term = (term * r >> w) // n
        total += term
        n += 1
    for _ in range(halvings):
        total = total * total >> w
    shift = w - p - k
    return total >> shift if shift >= 0 else total << -shift


def ln(low: int, high: int, p: int) -> tuple[int, int]:
    """ln x of a positive interval."""
    return _ln(low, p) - 2, _ln(high, p) + 2


def _ln(x: int, p: int) -> int:
    k = x.bit_length() - p
    roots = max(4, isqrt(p) // 3)
    w = p + _GUARD + roots + max(k, 0).bit_length() + max(0, -k)
    _spend_series(w)
    y = x << (w - p - k) if w - p - k >= 0 else x >> (k + p - w)
    for _ in range(roots):
        y = isqrt(y << w)
    one = 1 << w
    t = ((y - one) << w) // (y + one)
    square = t * t >> w
    total = term = t
    n = 1
    while term not in (0, -1):
        term = term * square >> w
        n += 2
        total += term // n
    return ((total << (roots + 1)) + k * ln2(w)) >> (w - p)


def cos_sin(x: int, p: int) -> tuple[int, int]:
    """cos and sin of one number, each within two units of the last place."""
    halvings = max(4, isqrt(p) // 2)
    w = p + _GUARD + 2 * halvings + max(0, x.bit_length() - p)
    _spend_series(w)
    two_pi = 2 * pi(w)
    r = ((x << (w - p)) % two_pi) >> halvings
    square = r * r >> w
    c = term = 1 << w
    n = 0
    while term:
        n += 2
        term = -(term * square >> w) // (n * (n - 1))
        c += term
        if term == -1:
            break
    s = term = r
    n = 1
    while term:
        n += 2
        term = -(term * square >> w) // (n * (n - 1))
        s += term
        if term == -1:
            break
    for _ in range(halvings):
        c, s = (c * c - s * s) >> w, (2 * c * s) >> w
    return c >> (w - p), s >> (w - p)


def atan(low: int, high: int, p: int) -> tuple[int, int]:
    """arctan."""
    return _atan(low, p) - 2, _atan(high, p) + 2


def _atan(x: int, p: int) -> int:
    halvings = max(3, isqrt(p) // 4)
    w = p + _GUARD + halvings + 2
    _spend_series(max(w, x.bit_length()))
    x <<= w - p
    one = 1 << w
    for _ in range(halvings):
        x = (x << w) // (one + isqrt((one << w) + x * x))
    square = x * x >> w
    total = term = x
    n, sign = 1, -1
    while term not in (0, -1):
        term = term * square >> w
        n += 2
        total += sign * (term // n)
        sign = -sign
    return total << halvings >> (w - p)
