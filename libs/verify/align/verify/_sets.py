"""Sets of real numbers as sorted disjoint pieces, for intervals, inequalities, builders and what is made of them."""

from align.verify import _tree as tree
from align.verify._budget import OverBudget, Unreadable, spend
from align.verify._decide import sign
from align.verify._read import condition
from align.verify._relations import links
from align.verify._solve import roots
from align.verify._tree import Node
from align.verify._values import Value

Piece = tuple[Node, bool, Node, bool]  # low, closed, high, closed

_LINE: Piece = (tree.NEG_INF, False, tree.INF, False)
_MAX_PIECES = 200


class Undecided(Exception):
    """Two bounds could not be put in order."""


def real_set(value: Value) -> list[Piece] | None:
    """The pieces of a set of real numbers; None when the value describes no such set. Raises: Undecided."""
    kind, info = value.kind, value.info
    if kind == "tuple":  # (0, 0) is a point, no empty interval
        if info != "()" or len(value.items) != 2:
            return None
        return _interval(value.items[0].node, False, value.items[1].node, False) or None
    if kind == "interval":
        return _interval(value.items[0].node, info[0] == "[", value.items[1].node, info[1] == "]")
    if kind == "inequality":
        return _inequality(value, None)
    if kind == "list":
        return _joined(value, None)
    if kind != "set":
        return None
    if info == "finite":
        return _points(value.items)
    if info == "all":
        return [_LINE] if value.sides == ("R",) else None
    if isinstance(info, tuple):
        return _builder(value)
    left, right = (real_set(item) for item in value.items)
    if left is None or right is None:
        return None
    if info == "union":
        return _merged(left + right)
    return _cut(left, right) if info == "cap" else _cut(left, _complement(right))


def same_sets(a: list[Piece], b: list[Piece]) -> bool | None:
    """Equality of two sets in normal form."""
    if len(a) != len(b):
        return False
    try:
        for (low, closed, high, shut), (low2, closed2, high2, shut2) in zip(a, b, strict=True):
            if closed != closed2 or shut != shut2 or _order(low, low2) or _order(high, high2):
                return False
    except Undecided:
        return None
    return True


def _order(a: Node, b: Node) -> int:
    spend(4)
    if a == b:
        return 0
    for node, result in ((tree.NEG_INF, -1), (tree.INF, 1)):
        if a == node:
            return result
        if b == node:
            return -result
    found = sign(tree.minus(a, b))
    if found is None:
        raise Undecided
    return found


def _interval(low: Node | None, closed: bool, high: Node | None, shut: bool) -> list[Piece] | None:
    if low is None or high is None or tree.symbols(low) or tree.symbols(high):
        return None
    try:
        order = _order(low, high)
    except Undecided:
        return None
    if order < 0:
        return [(low, closed, high, shut)]
    return [(low, True, low, True)] if not order and closed and shut else [] if not order else None


def _points(items: tuple[Value, ...]) -> list[Piece] | None:
    if any(item.kind != "number" or item.node in (tree.INF, tree.NEG_INF) or item.unit for item in items):
        return None
    return _merged([(item.node, True, item.node, True) for item in items])


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Sorted, with pieces that touch or overlap made one."""
    if len(pieces) > _MAX_PIECES:
        raise OverBudget
    ordered: list[Piece] = []
    for piece in pieces:
        at = len(ordered)
        while at and _before(piece, ordered[at - 1]):
            at -= 1
        ordered.insert(at, piece)
    result: list[Piece] = []
    for low, closed, high, shut in ordered:
        if result:
            before = result[-1]
            gap = _order(before[2], low)
            if gap > 0 or (gap == 0 and (before[3] or closed)):
                order = _order(before[2], high)
                end = before[2:] if order > 0 else (high, shut) if order < 0 else (high, shut or before[3])
                result[-1] = (before[0], before[1] or (closed and _order(before[0], low) == 0), *end)
                continue
        result.append((low, closed, high, shut))
    return result


def _before(a: Piece, b: Piece) -> bool:
    order = _order(a[0], b[0])
    return order < 0 or (order == 0 and a[1] and not b[1])


def _complement(pieces: list[Piece]) -> list[Piece]:
    result: list[Piece] = []
    low, closed = tree.NEG_INF, False
    for piece in pieces:
        result.extend(_interval(low, closed, piece[0], not piece[1] and piece[0] != tree.NEG_INF) or [])
        low, closed = piece[2], not piece[3]
    if low != tree.INF:
        result.append((low, closed and low != tree.NEG_INF, tree.INF, False))
    return result


def _cut(a: list[Piece], b: list[Piece]) -> list[Piece]:
    """The intersection."""
    result: list[Piece] = []
    for low, closed, high, shut in a:
        for low2, closed2, high2, shut2 in b:
            order = _order(low, low2)
            start = (low, closed) if order > 0 else (low2, closed2) if order < 0 else (low, closed and closed2)
            order = _order(high, high2)
            end = (high, shut) if order < 0 else (high2, shut2) if order > 0 else (high, shut and shut2)
            result.extend(_interval(*start, *end) or [])
    return _merged(result)


def _variable(value: Value, name: str | None) -> str | None:
    names = set().union(*(tree.symbols(item) for item in value.items))
    if name is not None:
        return name if names == {name} else None
    return names.pop() if len(names) == 1 else None


def _inequality(value: Value, name: str | None) -> list[Piece] | None:
    """The solutions of a chain of inequalities in one symbol, each of which `roots` can solve."""
    name = _variable(value, name)
    if name is None:
        return None
    result = [_LINE]
    for difference, relation in links(value):
        found = roots(difference, name)
        if found is None:
            return None
        result = _cut(result, _where(relation, *found))
    return result


def _where(relation: str, direction: int, ends: list[Node]) -> list[Piece]:
    """The points at which a function with these roots is > 0, >= 0, = 0 or != 0."""
    if relation == "=":
        return _merged([(end, True, end, True) for end in ends])
    if relation == "!=":
        return _complement(_where("=", direction, ends))
    closed = relation == ">="
    first, last = ends[0], ends[-1]
    if len(ends) == 1:
        return [(first, closed, tree.INF, False)] if direction > 0 else [(tree.NEG_INF, False, first, closed)]
    if direction > 0:
        return _merged([(tree.NEG_INF, False, first, closed), (last, closed, tree.INF, False)])
    return _interval(first, closed, last, closed) or []


def _joined(value: Value, name: str | None) -> list[Piece] | None:
    """Inequalities or intervals joined by "or", "and" or commas (commas: "and" unless nothing would be left)."""
    if value.info == "pm" or any(item.kind not in ("inequality", "interval", "tuple") for item in value.items):
        return None
    if value.info == "," and all(item.kind == "tuple" for item in value.items):
        return None
    parts: list[list[Piece]] = []
    for item in value.items:
        part = _inequality(item, name) if item.kind == "inequality" else real_set(item)
        if part is None:
            return None
        parts.append(part)
    if len({_variable(item, name) for item in value.items if item.kind == "inequality"}) > 1:
        return None
    together = parts[0]
    for part in parts[1:]:
        together = _cut(together, part)
    holes = all(item.kind == "inequality" and set(item.info) == {"!="} for item in value.items)
    if value.info == "and" or (together and value.info == ",") or holes:
        return together
    return _merged([piece for part in parts for piece in part])


def _builder(value: Value) -> list[Piece] | None:
    """{x in a domain | condition}, where the condition bounds x; of whole numbers only when there are few."""
    pieces = _conditions(value)
    if pieces is None or not value.items:
        return pieces
    domain = value.items[0]
    if domain.kind != "set" or domain.info != "all":
        limits = real_set(domain)
        return None if limits is None else _cut(pieces, limits)
    if domain.sides == ("R",):
        return pieces
    return _whole(pieces, domain.sides == ("N",)) if domain.sides in (("Z",), ("N",)) else None


def _whole(pieces: list[Piece], natural: bool) -> list[Piece] | None:
    """The whole numbers in bounded pieces; None when there are many, or when it depends on whether zero is a natural number."""
    members: list[int] = []
    for low, closed, high, shut in pieces:
        a, b = tree.value_of(low), tree.value_of(high)
        if a is None or b is None or b - a > _MAX_PIECES:
            return None
        first = a.__ceil__() + (a.__ceil__() == a and not closed)
        last = b.__floor__() - (b.__floor__() == b and not shut)
        members.extend(range(first, last + 1))
    if natural and (0 in members or any(member < 0 for member in members)):
        return None
    return _merged([(("q", member), True, ("q", member), True) for member in members])


def same_builders(a: Value, b: Value) -> bool | None:
    """Whether two builders have one domain and the same condition."""
    if not (a.items and b.items) or a.items[0].sides != b.items[0].sides or a.items[0].info != "all":
        return False
    left, right = _conditions(a), _conditions(b)
    return False if left is None or right is None else same_sets(left, right)


def _conditions(value: Value) -> list[Piece] | None:
    if value.node is None or value.node[0] != "s":
        return None
    try:
        given = condition(value.info[1])
    except Unreadable:
        return None
    name = value.node[1]
    if given.kind == "inequality":
        return _inequality(given, name)
    if given.kind == "list":
        return _joined(given, name)
    if given.name == name and given.kind == "number":
        return _points((given,))
    return real_set(given) if given.name == name else None
