"""Identity testing of rational functions: evaluation at a random point modulo a random prime (Schwartz 1980, Zippel 1979).

The prime and the point are derived from the two answers, so the verdict is the same everywhere and no answer can be made for a known prime.
A wrong "equal" needs a polynomial of degree d to vanish at a random point, with chance about d / 2^61 for each of two trials.
"""

from align.verify._budget import spend
from align.verify._tree import Node

_SMALL = 3 * 5 * 7 * 11 * 13 * 17 * 19 * 23 * 29 * 31 * 37 * 41 * 43 * 47 * 53
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)  # exact below 3.3e24 (Sorenson and Webster 2015)
_MASK = (1 << 64) - 1


class Noise:
    """A counter generator (splitmix64) over a seed made from text."""

    __slots__ = ("state",)

    def __init__(self, text: str):
        self.state = int.from_bytes(text.encode("utf-8", "replace"), "big") % ((1 << 127) - 1)

    def next(self) -> int:
        """64 bits."""
        self.state += 0x9E3779B97F4A7C15
        z = (self.state ^ (self.state >> 64)) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def prime(self) -> int:
        """A prime between 2^60 and 2^61."""
        while True:
            candidate = (self.next() >> 4) | (1 << 60) | 1
            if _coprime(candidate) and is_prime(candidate):
                return candidate


def _coprime(n: int) -> bool:
    a, b = _SMALL, n
    while b:
        a, b = b, a % b
    return a == 1


def is_prime(n: int) -> bool:
    """Miller and Rabin, exact for the sizes used here."""
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd //= 2
        twos += 1
    for witness in _WITNESSES:
        if witness >= n:
            continue
        x = pow(witness, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


class _Pole(Exception):
    """The point hits a pole."""


def same(a: Node, b: Node, noise: Noise) -> bool | None:
    """Whether two expressions are one rational function of their symbols, constants, roots and functions, each taken for a variable.

    None: they are not, and hold more than symbols, between which there may be relations.
    """
    agreed = 0
    for _ in range(6):
        prime = noise.prime()
        point: dict[Node, int] = {}
        spend(400)
        try:
            if evaluate(a, prime, point, noise) != evaluate(b, prime, point, noise):
                return False if all(atom[0] == "s" for atom in point) else None
        except _Pole:
            continue
        agreed += 1
        if agreed == 2:
            return True
    return None


def evaluate(node: Node, p: int, point: dict[Node, int], noise: Noise) -> int:
    """The value modulo p; `point` gives each symbol and atom its value and is filled as they appear."""
    tag = node[0]
    spend(1)
    if tag == "q" or tag == "d":
        value = node[1]
        if value.__class__ is int:
            spend(value.bit_length() >> 11)
            return int(value % p)
        spend(4)
        if value.denominator % p == 0:
            raise _Pole
        return int(value.numerator * pow(value.denominator, -1, p) % p)
    if tag == "+":
        total = 0
        for part in node[1:]:
            total += evaluate(part, p, point, noise)
        return total % p
    if tag == "*":
        product = 1
        for part in node[1:]:
            product = product * evaluate(part, p, point, noise) % p
        return product
    if tag == "^" and node[2][0] == "q" and node[2][1].__class__ is int:
        base = evaluate(node[1], p, point, noise)
        exponent = node[2][1]
        spend(abs(exponent).bit_length())
        if exponent < 0 and base == 0:
            raise _Pole
        return pow(base, exponent, p)
    if node not in point:
        point[node] = noise.next() % (p - 2) + 2
    return point[node]
