r"""What stands in brackets: tuples, intervals, sets, builders, matrices; and sums with bounds. `g` is the grammar that reads."""

from __future__ import annotations

from align.verify import _names as names
from align.verify import _operate as op
from align.verify import _tree as tree
from align.verify._budget import Unreadable
from align.verify._matrix import determinant, nodes_of
from align.verify._values import Value

TYPE_CHECKING = False  # typing is not imported: it is a tenth of the import
if TYPE_CHECKING:
    from align.verify._grammar import Grammar
    from align.verify._values import Read


def bracket(g: Grammar, value: str) -> Read:
    g.at += 1
    if value == "(":
        return sequence(g, "(", "op", ")", ")", "]")
    if value == "[":
        return sequence(g, "[", "op", "]", "]", ")")
    if value == "{":
        g.enter()
        inner = members(g, "op", "}", "op", "}")
        g.depth -= 1
        return inner[0][0] if len(inner[0]) == 1 else Value("list", items=tuple(map(op.as_value, inner[0])))
    if value == "|":
        g.enter()
        g.bars += 1
        inner = g.expression()
        g.bars -= 1
        if g.is_cmd("|"):
            g.at += 1
        else:
            g.expect("op", "|")
        g.depth -= 1
        return tree.call("abs", op.plain(inner))
    raise Unreadable(f"{value!r} where an operand should be")


def sequence(g: Grammar, opening: str, kind: str, close: str, closing: str, other: str = "") -> Read:
    """( … ) or [ … ]: one member is just bracketed, several are a tuple or an interval."""
    g.enter()
    saved_bars, g.bars = g.bars, 0
    items, ended = members(g, kind, close, "op", other or close)
    g.bars = saved_bars
    g.depth -= 1
    closing = ended if ended in ")]" else closing
    if len(items) == 1 and (opening, closing) in (("(", ")"), ("[", "]")):
        return items[0]
    if len(items) == 2 and (opening == "[" or closing == "]"):
        return Value("interval", items=tuple(map(op.as_value, items)), info=opening + closing)
    if not items or (opening, closing) not in (("(", ")"), ("[", "]")):
        raise Unreadable("brackets that do not match")
    return Value("tuple", items=tuple(map(op.as_value, items)), info=opening + closing)


def members(g: Grammar, kind: str, close: str, other_kind: str, other: str) -> tuple[list[Read], str]:
    """Comma-separated members up to the closing bracket, and which bracket that was."""
    items: list[Read] = []
    while True:
        token = g.peek()
        if (token.kind == kind and token.value == close) or (token.kind == other_kind and token.value == other):
            g.at += 1
            return items, token.value
        if items:
            if not (g.is_op(",", ";") or (token.kind in ("text", "word") and token.value in names.JOINERS) or g.is_cmd("and", "or")):
                raise Unreadable(f"{token.value!r} inside brackets")
            g.at += 1
            if g.peek().kind in ("text", "word") and g.peek().value in names.JOINERS:
                g.at += 1
            if g.is_op(close) or g.is_op(","):
                raise Unreadable("a member is missing")
        items.append(g.expression())


def braced_set(g: Grammar) -> Read:
    r"""\{ … \}: members, or a builder \{x \mid condition\}."""
    g.enter()
    saved, g.bars = g.bars, 1
    start = g.at
    if g.is_cmd("}"):
        g.at += 1
        g.depth -= 1
        g.bars = saved
        return Value("set", info="finite")
    first = g.expression()
    if g.is_op("|", ":") or g.is_cmd("in"):
        value = builder(g, first, start)
    else:
        rest: list[Read] = []
        if g.is_op(",", ";"):
            g.at += 1
            rest = members(g, "cmd", "}", "cmd", "}")[0]
        else:
            g.expect("cmd", "}")
        value = Value("set", items=tuple(op.as_value(item) for item in [first, *rest]), info="finite")
    g.depth -= 1
    g.bars = saved
    return value


def builder(g: Grammar, bound: Read, start: int) -> Read:
    """The condition of a set builder is an item of its own; the reader parses it from its tokens."""
    domain = None
    if g.is_cmd("in"):
        g.at += 1
        domain = op.as_value(g.expression())
    if not g.is_op("|", ":"):
        raise Unreadable("a set builder without a condition")
    g.at += 1
    begin, depth = g.at, 0
    while True:
        token = g.peek()
        if token.kind == "end":
            raise Unreadable("a set that is not closed")
        if token.kind == "cmd" and token.value in "{}":
            if token.value == "}" and not depth:
                break
            depth += 1 if token.value == "{" else -1
        g.at += 1
    condition = g.tokens[begin : g.at]
    g.at += 1
    return Value("set", op.node_or_none(bound), items=(domain,) if domain else (), info=("builder", condition))


def matrix(g: Grammar, name: str) -> Read:
    g.enter()
    rows: list[Read] = []
    row: list[Read] = []
    separators = 0
    while True:
        ends = g.is_cmd(f"end:{name}")
        if (g.is_op("&") or ((ends or g.is_cmd("\\")) and row)) and len(row) <= separators:
            raise Unreadable("an empty cell")
        if ends:
            g.at += 1
            break
        if g.is_cmd("\\"):
            g.at += 1
            rows.append(row)
            row, separators = [], 0
        elif g.is_op("&"):
            g.at += 1
            separators += 1
        elif g.is_cmd("hline"):
            g.at += 1
        else:
            row.append(op.as_value(g.expression()))
    if row:
        rows.append(row)
    g.depth -= 1
    rows = [r for r in rows if r]
    if not rows or len({len(r) for r in rows}) != 1:
        raise Unreadable("rows of different lengths")
    value = Value("matrix", items=tuple(tuple(r) for r in rows))
    return determinant(nodes_of(value)) if name == "vmatrix" else value


def series(g: Grammar, name: str) -> Read:
    """A sum or product with bounds; a short one over whole numbers is written out."""
    g.expect("op", "_")
    g.expect("op", "{")
    saved, g.index = g.index, g.peek().value
    index = op.plain(g.primary())
    g.expect("op", "=")
    low = op.plain(g.expression())
    g.expect("op", "}")
    g.expect("op", "^")
    high = op.plain(g.group())
    g.enter()
    body = op.plain(g.expression(10))
    g.index = saved
    g.depth -= 1
    if index[0] not in "sc":
        raise Unreadable("a sum without an index")
    a, b = tree.value_of(low), tree.value_of(high)
    if a.__class__ is int and b.__class__ is int and b - a < 300 and op.size(body) * max(1, b - a) < 6_000:
        terms = [op.substitute(body, index, ("q", k)) for k in range(a, b + 1)]
        return (tree.add if name == "sum" else tree.mul)(*terms) if terms else ("q", int(name == "prod"))
    return ("f", name, index, low, high, body)
