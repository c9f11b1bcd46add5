r"""Numbers as they are written: mixed, repeating, in another base; double factorials; derivatives. `g` is the grammar that reads."""

from __future__ import annotations

import re
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
    elif after.value == "(" and after.kind == "op" and "." in text and not after.spaced:
        return repeating_in_brackets(g, text)
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
    block = block_under_mark(g)
    if g.peek(-1 - (g.peek(-1).value == "}")).kind == "num":
        between = g.peek().value if g.peek().kind == "num" else ""
        if (
            g.peek(1 if between else 0).value == "dot" and g.peek(1 if between else 0).kind == "cmd"
        ):  # dots on the first digit and on the last
            g.at += 1 if between else 0
            block += between + block_under_mark(g)
    if not block.isdigit() or len(block) > 200:
        raise Unreadable("a repeating decimal without digits")
    return op.repeating(text, block)


def block_under_mark(g: Grammar) -> str:
    """The digits under a bar or a dot, whose command is the next token."""
    g.at += 1
    braced = g.is_op("{")
    g.at += braced
    block = g.peek().value
    g.at += 1
    if braced:
        g.expect("op", "}")
    return block


def repeating_in_brackets(g: Grammar, text: str) -> Read:
    """3.(3) and 0.8(3) as answers; elsewhere 0.8(3) is a product."""
    block, close, after = g.peek(1), g.peek(2), g.peek(3)
    digits = block.kind == "num" and block.value.isdigit() and not block.spaced and close.value == ")"
    if digits and (text[-1] == "." or after.kind == "end" or after.value in (",", "%", "$")) and len(block.value) <= 200:
        g.at += 3
        return op.repeating(text, block.value)
    return tree.literal(text)


def factorial(g: Grammar, left: Read) -> Read:
    """n!, after its sign; n!! is the product of every second whole number up to n, and not (n!)!."""
    if not g.is_op("!") or g.peek().spaced:
        return tree.fact(op.plain(left))
    g.at += 1
    n = tree.value_of(op.plain(left))
    if n.__class__ is not int or not 0 <= n < 2_000 or g.is_op("!"):
        raise Unreadable("a double factorial of something else than a whole number")
    half = ("q", (n + 1) // 2)
    pairs = tree.mul(tree.power(("q", 2), half), tree.fact(half))
    return pairs if n % 2 == 0 else tree.div(tree.fact(("q", n + 1)), pairs)


_MAX_DERIVATIVE = 16  # tokens of its numerator, and of its denominator
_ABOVE = re.compile(r"(d|partial|Delta|delta)(?:\^[0-9])?(.*)")
_BELOW = re.compile(r"(?:(d|partial|Delta|delta)[A-Za-z]+(?:_[0-9A-Za-z])?(?:\^[0-9])?)+")


def derivative(g: Grammar) -> Read:
    r"""\frac{dy}{dx} as a name: its d cancels nothing. None when the next two groups are no such quotient.

    Raises: Unreadable for an operator, as in \frac{d}{dx} x^2.
    """
    top, at = _flat(g, 0)
    bottom, end = _flat(g, at)
    above, below = _ABOVE.fullmatch(top), _BELOW.fullmatch(bottom)
    if not above or not below or above.group(1) != below.group(1):
        return None
    if not re.fullmatch(r"[A-Za-z]+(?:_[0-9A-Za-z])?", above.group(2)):
        raise Unreadable("a derivative that is not worked out")
    g.at += end
    return ("s", f"{top}/{bottom}")


def _flat(g: Grammar, ahead: int) -> tuple[str, int]:
    """A short braced group as text without its braces, and where what follows it stands; "" for another."""
    depth, parts = 0, []
    for at in range(ahead, ahead + _MAX_DERIVATIVE):
        token = g.peek(at)
        depth += (token.value == "{") - (token.value == "}")
        if not depth:
            return "".join(parts), at + 1
        if token.value not in "{}":
            parts.append(token.value)
    return "", ahead
