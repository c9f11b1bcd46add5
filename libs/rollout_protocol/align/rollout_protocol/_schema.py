"""What the fields of messages may be. A kind takes a value and where it stands, and gives it back or raises MessageError with the place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from align.rollout_protocol._errors import MessageError

Kind = Callable[[Any, str], Any]
T = TypeVar("T")

_SHOWN = 40  # characters of a wrong value that an error repeats


def wrong(where: str, wanted: str, value: Any) -> MessageError:
    """The error for a value that is not what is wanted at this place."""
    shown = repr(value) if isinstance(value, (str, int, float, type(None))) else type(value).__name__
    return MessageError(f"{where} must be {wanted}, not {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '…'}", where)


def integer(low: int, high: int) -> Kind:
    def check(value: Any, where: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise wrong(where, f"an integer from {low} to {high}", value)
        return value

    return check


def number(low: float, high: float) -> Kind:
    """A finite number; an integer will do, and becomes a float."""

    def check(value: Any, where: str) -> float:
        if type(value) not in (int, float) or not low <= value <= high or not math.isfinite(value):
            raise wrong(where, f"a number from {low:g} to {high:g}", value)
        return float(value)

    return check


def text(most: int, least: int = 0) -> Kind:
    def check(value: Any, where: str) -> str:
        if type(value) is not str or not least <= len(value) <= most:
            raise wrong(where, f"a text of {least} to {most} characters", value)
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise wrong(where, "a text of whole characters", value)
        return value

    return check


def digest(value: Any, where: str) -> str:
    """A sha256 in lower-case hexadecimal."""
    if type(value) is not str or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise wrong(where, "64 hexadecimal digits", value)
    return value


def choice(*names: str) -> Kind:
    def check(value: Any, where: str) -> str:
        if type(value) is not str or value not in names:
            raise wrong(where, f"one of {', '.join(names)}", value)
        return value

    return check


def optional(kind: Kind) -> Kind:
    def check(value: Any, where: str) -> Any:
        return None if value is None else kind(value, where)

    return check


def listing(kind: Kind, *, least: int = 0, most: int) -> Kind:
    def check(value: Any, where: str) -> list[Any]:
        if type(value) is not list or not least <= len(value) <= most:
            raise wrong(where, f"a list of {least} to {most}", value if type(value) is not list else f"one of {len(value)}")
        return [kind(each, f"{where}[{index}]") for index, each in enumerate(value)]

    return check


def numbers(kind: Kind, number_type: type, low: float, high: float, *, least: int = 0, most: int) -> Kind:
    """A listing of numbers, told quickly where all are right: `kind` finds the wrong one otherwise."""
    slow = listing(kind, least=least, most=most)

    def check(value: Any, where: str) -> list[Any]:
        if (
            type(value) is list and max(least, 1) <= len(value) <= most and set(map(type, value)) == {number_type}
            and low <= min(value) and max(value) <= high and (number_type is int or all(map(math.isfinite, value)))
        ):  # fmt: skip
            return value
        found: list[Any] = slow(value, where)
        return found

    return check


def fields(value: Any, kinds: dict[str, Kind], where: str) -> dict[str, Any]:
    """Every field of `kinds`, checked; no other may be there and none may be missing."""
    if type(value) is not dict:
        raise wrong(where, "an object", value)
    for name in value:
        if name not in kinds:
            place = f"{where}.{name[:_SHOWN] if name.isidentifier() else ascii(name[:_SHOWN])}"
            raise MessageError(f"{place} is no field of the protocol; there are {', '.join(kinds)}", place)
    for name in kinds:
        if name not in value:
            raise MessageError(f"{where}.{name} is missing", f"{where}.{name}")
    return {name: kind(value[name], f"{where}.{name}") for name, kind in kinds.items()}
