"""The value model: what an answer was read as."""

from __future__ import annotations

from align.verify._budget import OverBudget, restart
from align.verify._tree import Node, symbols, text

TYPE_CHECKING = False  # typing is not imported: it is a tenth of the import
if TYPE_CHECKING:
    from typing import Any

    from align.verify._units import Unit

    Read = Any  # what the grammar hands on: a tree (a tuple) or a Value


class Value:
    """A parsed answer.

    kind: number, expression, tuple, interval, list, set, matrix, equation, inequality, ratio, time, choice, text or raw (unreadable).
    node: the expression tree of a number or an expression; of an assignment (x = 5) the tree of its right side, where that is one.
    items: the members of a tuple, list or set; the rows of a matrix, each a tuple of values; the sides of an equation or inequality; the
        operands of a union, intersection or difference.
    info: brackets of a tuple or interval; relation signs; "finite", "union", "cap", "minus", "builder", "all" of a set; letter, words.
    name: what stands on the left of an assignment or of a membership sign; `sides` then holds all sides, left to right
        (of a number set, its letter).
    unit: a `Unit`, or None.
    source: the text that was read, without styling; two texts are compared by it.
    """

    __slots__ = ("info", "items", "kind", "name", "node", "sides", "source", "unit")

    def __init__(
        self,
        kind: str,
        node: Node | None = None,
        items: tuple[Read, ...] = (),
        info: Read = None,
        name: str | None = None,
        unit: Unit | None = None,
        source: str = "",
    ):
        self.kind = kind
        self.node: Read = node  # a tree, or None
        self.items = items
        self.info = info
        self.name = name
        self.unit = unit
        self.source = source
        self.sides: tuple[Read, ...] = ()

    def __repr__(self) -> str:
        name = f"{self.name} = " if self.name else ""
        unit = f" [{self.unit}]" if self.unit else ""
        source = self.source if len(self.source) <= 80 else self.source[:77] + "..."
        return f"<{self.kind} {name}{source or self._content()}{unit}>"

    def _content(self) -> str:
        if self.node is not None:
            before = restart()
            try:
                shown = text(self.node)
            except OverBudget:
                shown = "…"
            finally:
                restart(before)
            return shown if len(shown) <= 80 else shown[:77] + "..."
        return repr(list(self.items)) if self.items else str(self.info)


def of_node(node: Node, **fields: Read) -> Value:
    """A number, or an expression when it holds symbols."""
    return Value("expression" if symbols(node) else "number", node, **fields)


def number_set(letter: str) -> Value:
    """ℝ, ℤ, ℕ, ℚ or ℂ."""
    value = Value("set", info="all")
    value.sides = (letter,)
    return value
