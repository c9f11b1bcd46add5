r"""Numbers as they are written: mixed, repeating, in another base. `g` is the grammar that reads."""

from __future__ import annotations

from fractions import Fraction

from align.verify import _operate as op
from align.verify import _tree as tree
from align.verify._budget import Unreadable

TYPE_CHECKING = False  # typing is not imported: it is a tenth of the import
if TYPE_CHECKING:
    from align.verify._grammar import Grammar
    from align.verify._values import Read


def number(g: Grammar) -> Read:
    text = g.peek().value
    g.at += 1
    after = g.peek()
    if after.kind == "cmd":
        if after.value in ("overline", "dot") and "." in text:
            return repeating(g, text)
        if after.value == "ldots" and "." in text:
            tail = text.partition(".")[2]
            if len(tail) >= 3 and len(set(tail[-3:])) == 1:
                g.at += 1
                return op.repeating(text[:-1], tail[-1])
            raise Unreadable("an ellipsis")
        if after.value == "frac" and "." not in text and "e" not in text:
            return mixed(g, text)
    elif after.kind == "num" and after.spaced and g.peek(1).value == "/" and g.peek(2).kind == "num":
        whole, top, bottom = text, after.value, g.peek(2).value
        if whole.isdigit() and top.isdigit() and bottom.isdigit() and int(bottom[:9]):
            g.at += 3
            return tree.add(tree.literal(whole), tree.div(tree.literal(top), tree.literal(bottom)))
    elif after.kind == "num":
        raise Unreadable("two numbers side by side")
    elif after.kind == "sym" and g.peek(1).value == "_" and g.peek(1).kind == "op" and after.value.isupper():
        return hexadecimal(g, text)
    return tree.literal(text)


def hexadecimal(g: Grammar, text: str) -> Read:
    letter, saved = g.peek().value, g.at
    g.at += 2
    base = g.subscript_text()
    if base.isdigit() and int(base[:4]) > 10:
        return op.in_base(text + letter, base)
    g.at = saved
    return tree.literal(text)


def mixed(g: Grammar, text: str) -> Read:
    """1\\frac{4}{5}; a fraction that is not a proper one of two whole numbers is a factor instead."""
    whole, saved = tree.literal(text), g.at
    g.at += 1
    a = whole_group(g)
    b = whole_group(g) if a else 0
    if 0 < a < b:
        return tree.add(whole, ("q", Fraction(a, b)))
    g.at = saved
    return whole


def whole_group(g: Grammar) -> int:
    """A braced whole number, or one digit of it; 0 when something else stands there, which is read only once, as a factor."""
    if g.is_op("{"):
        token = g.peek(1)
        if token.kind != "num" or not token.value.isdigit() or g.peek(2).value != "}":
            return 0
        g.at += 3
        return tree.integer(token.value)
    token = g.peek()
    return tree.value_of(g.single()) if token.kind == "num" and token.value.isdigit() else 0


def repeating(g: Grammar, text: str) -> Read:
    r"""0.1\overline{6}."""
    g.at += 1
    if g.is_op("{"):
        g.at += 1
        block = g.peek().value
        g.at += 1
        g.expect("op", "}")
    else:
        block = g.peek().value
        g.at += 1
    if not block.isdigit() or len(block) > 200:
        raise Unreadable("a repeating decimal without digits")
    return op.repeating(text, block)
