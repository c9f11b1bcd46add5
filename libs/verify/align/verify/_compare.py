"""Equality of two parsed answers. Every function here is symmetric in its two arguments."""

from __future__ import annotations

import re
from fractions import Fraction

from align.verify import _tree as tree
from align.verify import _units as units
from align.verify._budget import OverBudget, spend
from align.verify._decide import same, within
from align.verify._relations import same_equation, same_inequality, sides
from align.verify._sets import Undecided, real_set, same_builders, same_sets
from align.verify._tree import Node
from align.verify._values import Value

TYPE_CHECKING = False  # typing is not imported: it is a tenth of the import
if TYPE_CHECKING:
    from align.verify._values import Read

_SCALAR = ("number", "expression", "choice")
_MAX_PAIRS = 3_000


def equal(a: Value, b: Value) -> bool | None:
    """Whether two answers are the same; None: undecided. Raises: OverBudget."""
    spend(2)
    if a.kind == "raw" or b.kind == "raw":
        return False
    if a.kind == "text" or b.kind == "text":
        return _text(a) == _text(b)
    if a.name and b.name and not _same_name(a.name, b.name):
        return _as_equations(a, b) if sides(a) and sides(b) else False
    if not (_consistent(a) and _consistent(b)):
        return False
    if a.kind in _SCALAR and b.kind in _SCALAR:
        return _scalar(a, b)
    if a.kind == "equation" or b.kind == "equation":
        return _as_equations(a, b)
    if a.kind == b.kind and a.kind in _BY_KIND:
        return _BY_KIND[a.kind](a, b)
    return _mixed(a, b)


_MEANT = re.compile(r"[^\W_]|(?<=[0-9])[.:,'](?=[0-9])|(?<![^\W_])[.-](?=[0-9])|(?<=[0-9])[ -]+(?=[0-9])|[<>=+*/^_%\\|!?]")


def _text(value: Value) -> str:
    """Words as they are compared: without blanks and marks, except for those that belong to a number or a formula."""
    words = value.info if value.kind == "text" else value.source
    return "".join(_MEANT.findall(words.lower()))


def _same_name(a: str, b: str) -> bool:
    """Names agree when they are one, when only one of them has an index or arguments, or when one is a word for the other's letter."""
    if a == b or (a[0] == "\\") != (b[0] == "\\"):
        return True
    return any((mark in a) != (mark in b) and a.partition(mark)[0] == b.partition(mark)[0] for mark in "_(")


def _consistent(value: Value) -> bool:
    """Whether no two constant sides of x = … = … are proved to differ."""
    constants = [side for side in value.sides[1:] if side.__class__ is tuple and not tree.symbols(side)]
    return all(same_number(side, constants[-1]) is not False for side in constants[:-1])


def _scalar(a: Value, b: Value) -> bool | None:
    if a.unit and not b.unit:
        b = _measured(b, a.unit)
    elif b.unit and not a.unit:
        a = _measured(a, b.unit)
    x, y = a.node, b.node
    if a.unit and b.unit:
        if a.unit.dimensions != b.unit.dimensions and {a.unit.dimensions, b.unit.dimensions} == units.ANGLES:
            turn = tree.mul(tree.PI, tree.rational(Fraction(1, 180)))
            return same(tree.mul(x, turn) if _is(a, units.DEGREE) else x, tree.mul(y, turn) if _is(b, units.DEGREE) else y)
        if units.conflict(a.unit, b.unit):
            return False
        if a.unit.dimensions == b.unit.dimensions and a.unit.scale != b.unit.scale:
            return same(tree.mul(x, tree.rational(a.unit.scale)), tree.mul(y, tree.rational(b.unit.scale)))
    found = same_number(x, y)
    if found is not True:
        for unit, factor in (
            (units.PERCENT, tree.rational(Fraction(1, 100))),
            (units.DEGREE, tree.mul(tree.PI, tree.rational(Fraction(1, 180)))),
        ):
            if _is(a, unit) != _is(b, unit):
                scaled = (tree.mul(x, factor), y) if _is(a, unit) else (x, tree.mul(y, factor))
                if same(*scaled):
                    return True
    return found


def _measured(value: Value, wanted: units.Unit) -> Value:
    """5m or 10 m/s, read as letters, as a number with a unit where the other side has a unit of the same kind; else unchanged."""
    if value.kind != "expression" or not wanted.known:
        return value
    letters, rest = [], []
    for part in value.node[1:] if value.node[0] == "*" else (value.node,):
        base, power = (part[1], part[2]) if part[0] == "^" else (part, tree.ONE)
        if base[0] == "s" and power[1].__class__ is int and abs(power[1]) < 10:
            letters.append((base[1], power[1]))
        else:
            rest.append(part)
    number = tree.mul(*rest)
    found = units.of_letters(letters)
    if found is None or found.dimensions != wanted.dimensions or tree.symbols(number):
        return value
    return Value("number", number, unit=found)


def _is(value: Value, unit: units.Unit | None) -> bool:
    return value.unit is not None and unit is not None and value.unit.dimensions == unit.dimensions


def same_number(x: Node, y: Node) -> bool | None:
    """Equality of two expressions, where a decimal also stands for what rounds to it at six significant digits or more.

    From fifteen digits on an error below one unit of the last place passes, which is what the printed form of a double has.
    """
    if (x[0] == "d") != (y[0] == "d"):
        decimal, other = (x, y) if x[0] == "d" else (y, x)
        if decimal[2] >= 6 and not tree.symbols(other):
            room = decimal[3] / 2 if decimal[2] < 15 else decimal[3] * Fraction(999, 1000)
            value = tree.value_of(other)
            if value is not None:
                return bool(abs(value - decimal[1]) <= room)
            if within(tree.add(other, ("q", -decimal[1])), room):
                return True
    return same(x, y)


def _as_equations(a: Value, b: Value) -> bool | None:
    x, y = sides(a), sides(b)
    if x and y:
        return same_equation(x, y)
    if a.kind == b.kind == "equation" and len(a.items) == len(b.items):
        return _all(_sides_equal(p, q) for p, q in zip(a.items, b.items, strict=True))
    return False


def _sides_equal(a: Read, b: Read) -> bool | None:
    if a.__class__ is tuple and b.__class__ is tuple:
        return same(a, b)
    return equal(a, b) if isinstance(a, Value) and isinstance(b, Value) else False


def _all(results: Read) -> bool | None:
    undecided = False
    for result in results:
        if result is False:
            return False
        undecided |= result is None
    return None if undecided else True


def _in_order(a: tuple[Value, ...], b: tuple[Value, ...]) -> bool | None:
    return _all(_as_member(x, y) for x, y in zip(a, b, strict=True)) if len(a) == len(b) else False


def _same_members(a: tuple[Value, ...], b: tuple[Value, ...]) -> bool | None:
    """Whether two lists hold the same values in any order, however often."""
    if len(a) * len(b) > _MAX_PAIRS:
        raise OverBudget
    return _all([_cover(a, b), _cover(b, a)])


def _cover(a: tuple[Value, ...], b: tuple[Value, ...]) -> bool | None:
    """Whether each value of `a` occurs in `b`."""
    undecided = False
    for item in a:
        spend(1 + len(b) // 4)
        alike = sorted(b, key=lambda other: not _looks_alike(item, other))
        for other in alike:
            found = _as_member(item, other)
            if found:
                break
            undecided |= found is None
        else:
            return None if undecided else False
    return True


def _as_member(a: Value, b: Value) -> bool | None:
    """Equality inside of a list, set or tuple, where {1} is not 1."""
    return equal(a, b) if (a.kind == "set" and a.info == "finite") == (b.kind == "set" and b.info == "finite") else False


def _looks_alike(a: Value, b: Value) -> bool:
    """A first guess at which members belong together: the same tree."""
    return a.node is not None and b.node is not None and a.node[:2] == b.node[:2] and (a.node == b.node or a.node[0] in "qd")


def _list(a: Value, b: Value) -> bool | None:
    if (a.info == "or") != (b.info == "or") and all(len({item.name for item in value.items} - {None}) > 1 for value in (a, b)):
        return False  # x = 1 or y = 2
    labels = [[item.unit.words for item in value.items if item.unit] for value in (a, b)]
    if sorted(labels[0]) == sorted(labels[1]) and len(set(labels[0])) == len(labels[0]) == len(a.items) == len(b.items):
        return _in_order(a.items, tuple(b.items[labels[1].index(label)] for label in labels[0]))  # 5 boys, 3 girls
    found = _same_members(a.items, b.items)
    return _mixed(a, b) if found is False and any(item.kind == "inequality" for item in a.items) else found


def _set(a: Value, b: Value) -> bool | None:
    if a.info == b.info == "finite":
        return _same_members(a.items, b.items)
    return _mixed(a, b)


def _tuple(a: Value, b: Value) -> bool | None:
    return _in_order(a.items, b.items)


def _interval(a: Value, b: Value) -> bool | None:
    return _in_order(a.items, b.items) if a.info == b.info else False


def _matrix(a: Value, b: Value) -> bool | None:
    if len(a.items) != len(b.items):
        return False
    return _all(_in_order(x, y) for x, y in zip(a.items, b.items, strict=True))


def _inequality(a: Value, b: Value) -> bool | None:
    found = same_inequality(a, b)
    if found or set(tree.symbols(("+", *a.items))) != set(tree.symbols(("+", *b.items))):
        return found
    return _mixed(a, b) if _mixed(a, b) is not None else found


def _ratio(a: Value, b: Value) -> bool | None:
    """a : b : c, up to a factor."""
    x, y = [[item.node for item in value.items] for value in (a, b)]
    if len(x) != len(y) or None in x or None in y:
        return False
    products = [same(tree.mul(p, y[0]), tree.mul(x[0], q)) for p, q in zip(x[1:], y[1:], strict=True)]
    zeros = [same(p, tree.ZERO) == same(q, tree.ZERO) for p, q in zip(x, y, strict=True)]
    return _all([*products, *zeros])


def _time(a: Value, b: Value) -> bool:
    spend(1)
    return a.info[:2] == b.info[:2] and (a.info[2] == b.info[2] or not (a.info[2] and b.info[2]))


_BY_KIND = {
    "list": _list, "set": _set, "tuple": _tuple, "interval": _interval, "matrix": _matrix, "inequality": _inequality, "ratio": _ratio,
    "time": _time,
}  # fmt: skip


def _mixed(a: Value, b: Value) -> bool | None:
    """Values of different kinds, and sets that are not just listed."""
    kinds = {a.kind, b.kind}
    if kinds == {"matrix", "tuple"}:
        matrix, other = (a, b) if a.kind == "matrix" else (b, a)
        cells = [cell for row in matrix.items for cell in row]
        line = len(matrix.items) == 1 or len(matrix.items[0]) == 1
        return _in_order(tuple(cells), other.items) if line and other.info == "()" else False
    if kinds == {"list", "tuple"} and not any(item.kind == "inequality" for item in (*a.items, *b.items)):
        other = a if a.kind == "tuple" else b
        listed = b if a.kind == "tuple" else a
        members = _as_point(listed, other.name) if other.info == "()" else None
        return _in_order(members, other.items) if members else False
    if kinds == {"list", "set"}:
        other = a if a.kind == "set" else b
        if other.info == "finite":
            return _same_members(a.items, b.items)
    if "set" in kinds and len(kinds) == 2:
        single, one = (a, b) if a.kind == "set" else (b, a)
        if single.info == "finite" and len(single.items) == 1 and one.kind in ("tuple", "matrix", "ratio", "time", "choice"):
            return equal(single.items[0], one)
    if kinds == {"ratio", "time"}:
        time, other = (a, b) if a.kind == "time" else (b, a)
        parts = tuple(Value("number", ("q", part)) for part in time.info[:2])
        return not time.info[2] and time.info[1] >= 10 and _ratio(Value("ratio", items=parts), other)
    if kinds & {"number", "expression"} and kinds & {"set", "list"}:
        many, one = (a, b) if a.kind in ("set", "list") else (b, a)
        alone = len(many.items) == 1 and many.info == "finite"
        repeated = many.kind == "list" and 1 < len(many.items) < 5 and len({item.name for item in many.items}) == 1
        return _all(equal(item, one) for item in many.items) if alone or repeated else False  # one value, in several forms
    return _as_real_sets(a, b)


def _as_point(listed: Value, order: str | None) -> tuple[Value, ...] | None:
    """The members of a list as the coordinates of a point: y = 5, x = 3 is (3, 5), in the order of the letters or of `order`, (y, x)."""
    given = [item.name for item in listed.items]
    if not any(given) or all(name and name[0] == "(" for name in given):
        return listed.items if listed.info == "," else None
    if listed.info not in (",", "and") or None in given or len(set(given)) < len(given):
        return None  # x = 3, x = 5 is no point
    wanted = order.strip("()").split(",") if order else sorted(given, key=lambda name: (name.partition("_")[0], len(name), name))
    if set(wanted) != set(given) or not all(len(name.partition("_")[0]) == 1 for name in given):
        return listed.items if wanted == given or not order else None
    return tuple(listed.items[given.index(name)] for name in wanted)


def _as_real_sets(a: Value, b: Value) -> bool | None:
    if a.kind == b.kind == "set" and a.info == b.info == "all":
        return a.sides == b.sides
    try:
        left, right = real_set(a), real_set(b)
    except Undecided:
        return None
    if left is None or right is None:
        if a.kind != "set" or b.kind != "set":
            return False
        if isinstance(a.info, tuple) and isinstance(b.info, tuple) and left is right is None and same_builders(a, b):
            return True
        return bool(a.source) and a.source == b.source
    return same_sets(left, right)
