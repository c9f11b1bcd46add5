"""Operations of the grammar on what it has read: trees, and values such as tuples, sets and matrices."""

from __future__ import annotations

from fractions import Fraction

from align.verify import _tree as tree
from align.verify._budget import Unreadable, spend, spend_divisor, spend_product
from align.verify._matrix import matrix_sum, matrix_times
from align.verify._tree import Node
from align.verify._values import Value, of_node

TYPE_CHECKING = False  # typing is not imported: it is a tenth of the import
if TYPE_CHECKING:
    from align.verify._values import Read


def size(node: Read) -> int:
    """The number of nodes. Raises: OverBudget when it is very large."""
    return len(tree.nodes(node))


def substitute(node: Node, old: Node, new: Node) -> Node:
    """The tree with one subtree replaced, folded again."""
    spend(1)
    if node == old:
        return new
    tag = node[0]
    if tag == "+":
        return tree.add(*(substitute(part, old, new) for part in node[1:]))
    if tag == "*":
        return tree.mul(*(substitute(part, old, new) for part in node[1:]))
    if tag == "^":
        return tree.power(substitute(node[1], old, new), substitute(node[2], old, new))
    if tag == "f":
        arguments = [substitute(part, old, new) for part in node[2:]]
        if node[1] == "fact":
            return tree.fact(arguments[0])
        if node[1] == "binom":
            return tree.binomial(*arguments)
        return tree.call(node[1], *arguments)
    return node


def repeating(text: str, block: str) -> Read:
    whole = tree.literal(text if text[-1] != "." else text + "0")
    places = len(text.partition(".")[2])
    spend_divisor(8 * (places + len(block)))
    tail = Fraction(int(block), (10 ** len(block) - 1) * 10**places)
    return tree.rational(Fraction(tree.value_of(whole)) + tail)


def in_base(digits: str, base_text: str) -> Read:
    words = {
        "two": 2,
        "three": 3,
        "four": 4,
        "five": 5,
        "six": 6,
        "seven": 7,
        "eight": 8,
        "nine": 9,
        "ten": 10,
        "twelve": 12,
        "sixteen": 16,
    }
    base = words.get(base_text.lower()) or (int(base_text) if base_text.isdigit() and len(base_text) < 3 else 0)
    if not 2 <= base <= 36 or "." in digits or len(digits) > 400:
        raise Unreadable(f"base {base_text}")
    try:
        return ("q", int(digits, base))
    except ValueError:
        raise Unreadable(f"{digits} has no meaning in base {base}") from None


def node_or_none(item: Read) -> Read:
    """The tree of a value that has one."""
    if item.__class__ is tuple:
        return item
    return item.node if item.kind in ("number", "expression") else None


def node_of(item: Read) -> Node:
    node = node_or_none(item)
    if node is None:
        raise Unreadable(f"a {item.kind} where a number should be")
    return plain(node) if node[0] == "f" else node


def plain(item: Read) -> Node:
    """The tree with its own percent or degree sign worked in. Raises: Unreadable for anything but a number or expression."""
    node = item if item.__class__ is tuple else node_of(item)
    if node[0] == "f":
        if node[1] == "pct":
            return tree.mul(node[2], ("q", Fraction(1, 100)))
        if node[1] == "deg":
            return tree.call("deg", node[2])
    return node


def as_value(item: Read) -> Value:
    return item if isinstance(item, Value) else of_node(item)


def renamed(item: Read, suffix: str) -> Read:
    node = node_of(item)
    if node[0] == "s":
        return ("s", node[1] + suffix)
    if node[0] == "c" and node[1] in ("e", "i"):
        return ("s", node[1] + suffix)
    if node[0] == "^" and node[1][0] == "s":
        return ("^", ("s", node[1][1] + suffix), node[2])
    if node[0] == "f" and node[1].startswith("@"):
        return ("f", node[1] + suffix, *node[2:])
    raise Unreadable("a mark on something without a name")


def plus(a: Read, b: Read) -> Read:
    if a.__class__ is tuple and b.__class__ is tuple:
        return tree.add(plain(a), plain(b))
    return matrix_sum(as_value(a), as_value(b))


def negative(a: Read) -> Read:
    if a.__class__ is tuple:
        if a[0] == "f" and a[1] in ("pct", "deg"):
            return ("f", a[1], tree.neg(a[2]))
        return tree.neg(a)
    return matrix_times(of_node(tree.MINUS_ONE), a)


def times(a: Read, b: Read) -> Read:
    if a.__class__ is tuple and b.__class__ is tuple:
        if b[0] == "f" and b[1] in ("pct", "deg") and a[0] != "f":
            return ("f", b[1], tree.mul(a, b[2]))
        return _times_ten(plain(a), plain(b))
    return matrix_times(as_value(a), as_value(b))


def _times_ten(a: Node, b: Node) -> Node:
    """a × b; a decimal times a power of ten stays a decimal literal."""
    if a[0] == "d" and b[0] == "q":
        power = _ten_power(b[1])
        if power is not None:
            return tree.scaled(a, power)
    return tree.mul(a, b)


def _ten_power(value: Read) -> int | None:
    number = value if value.__class__ is int else value.denominator if value.numerator == 1 else 0
    if number < 1:
        return None
    power = number.bit_length() * 30103 // 100000
    spend_product(number.bit_length(), number.bit_length())
    for guess in (power - 1, power, power + 1):
        if guess >= 0 and 10**guess == number:
            return guess if value.__class__ is int else -guess
    return None


def combine(operator: str, a: Read, b: Read) -> Read:
    if operator == "*":
        return times(a, b)
    if a.__class__ is tuple and b.__class__ is tuple:
        a, b = plain(a), plain(b)
        return tree.div(a, b) if operator == "/" else tree.call("mod", a, b)
    if operator == "/" and b.__class__ is tuple:
        return matrix_times(as_value(tree.power(plain(b), tree.MINUS_ONE)), as_value(a))
    raise Unreadable("an operation between values that have none")


def raised(base: Read, exponent: Read) -> Read:
    if base.__class__ is tuple:
        return tree.power(plain(base), exponent)
    count = tree.value_of(exponent)
    if base.kind == "matrix" and count.__class__ is int and 1 <= count <= 16:
        result = base
        for _ in range(count - 1):
            result = matrix_times(result, base)
        return result
    raise Unreadable("a power of something that is no number")


def applied(name: str, arguments: list[Read], base: Read) -> Read:
    if not arguments:
        raise Unreadable(f"{name} of nothing")
    if name in ("lg", "log") or (name == "ln" and base is not None):
        base = base if base is not None else ("q", 10)
        if base == tree.E:
            return tree.call("ln", arguments[0])
        return tree.div(tree.call("ln", arguments[0]), tree.call("ln", base))
    if base is not None and name not in ("max", "min"):
        raise Unreadable(f"a subscript on {name}")
    if name in ("arsinh", "arcosh", "artanh"):
        name = "a" + name[2:]
    if name in ("Re", "Im", "arg", "det", "sgn", "sign"):
        raise Unreadable(f"the function {name}")
    return tree.call(name, *arguments)
