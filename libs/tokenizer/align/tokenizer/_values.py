"""Values inside a chat template: strings that know where they come from, and what is undefined.

`Text` is a str with runs (length, origin). Origin None is the template (and the caller's variables); (3, "content") is that field of
messages[3]; ("tools", None) the tool descriptions. A derived string keeps the origins of its characters; where an operation
cannot say which is which, all of the result counts as data, so that nothing a user wrote passes for template text.
"""

import re
from collections.abc import Iterator
from typing import Any

Origin = tuple[Any, ...] | None


class Text(str):
    """A string with runs; an empty one keeps a run of length 0, so that an empty field still has its place."""

    __slots__ = ("runs",)
    runs: list[tuple[int, Origin]]

    def __new__(cls, value: str, runs: list[tuple[int, Origin]]) -> "Text":
        self = super().__new__(cls, value)
        self.runs = runs
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Text, (str(self), self.runs)


class Undefined:
    """What a missing name or field gives: empty where printed or looped over, an error where used."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Undefined)

    def __hash__(self) -> int:
        return 0

    def __str__(self) -> str:
        return ""

    def __repr__(self) -> str:
        return "Undefined"  # in a printed list

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0


class Namespace(dict[str, Any]):
    """namespace(): the one value whose attributes a template can set."""


def wrap(value: Any, origin: Origin) -> Any:
    """A deep copy of JSON-like data in which every string is a Text of this origin."""
    if isinstance(value, str):
        return Text(value, [(len(value), origin)])
    if isinstance(value, dict):
        return {wrap(k, origin): wrap(v, origin) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [wrap(v, origin) for v in value]
    return value


def runs_of(value: str) -> list[tuple[int, Origin]]:
    return value.runs if isinstance(value, Text) else [(len(value), None)]


def origin_of(value: Any) -> Origin:
    """An origin found in a value, looking into lists and dicts; None where all is the template's."""
    if isinstance(value, Text):
        return next((origin for _, origin in value.runs if origin is not None), None)
    if isinstance(value, dict):
        return next((o for pair in value.items() for o in map(origin_of, pair) if o is not None), None)
    if isinstance(value, (list, tuple)):
        return next((o for o in map(origin_of, value) if o is not None), None)
    return None


def tagged(value: str, origin: Origin) -> str:
    """The string, all of it of one origin."""
    return Text(value, [(len(value), origin)]) if origin is not None else str(value)


def concat(parts: list[str]) -> str:
    if not any(isinstance(part, Text) for part in parts):
        return "".join(parts)
    return Text("".join(parts), [run for part in parts for run in runs_of(part)])


def part(value: str, start: int, end: int) -> str:
    """value[start:end] with its origins, 0 <= start <= end <= len."""
    if not isinstance(value, Text):
        return value[start:end]
    out, at = [], 0
    for length, origin in value.runs:
        low, high = max(start, at), min(end, at + length)
        if high > low or (length == 0 and start <= at <= end):
            out.append((max(high - low, 0), origin))
        at += length
    return Text(str.__getitem__(value, slice(start, end)), out or [(0, origin_of(value))])


def sliced(value: str, index: slice) -> str:
    start, stop, step = index.indices(len(value))
    if step == 1:
        return part(value, start, max(start, stop))
    return concat([part(value, i, i + 1) for i in range(start, stop, step)] or [part(value, 0, 0)])


def stripped(value: str, side: str, chars: Any = None) -> str:
    plain = str(value)
    start = len(plain) - len(plain.lstrip(chars)) if side != "right" else 0
    end = len(plain.rstrip(chars)) if side != "left" else len(plain)
    return part(value, start, max(start, end))


def split(value: str, separator: str | None = None, limit: int = -1) -> list[str]:
    plain = str(value)
    if separator is None:
        found = list(re.finditer(r"\S+", plain))
        if limit >= 0 and len(found) > limit:
            rest = found[limit].start()
            return [part(value, m.start(), m.end()) for m in found[:limit]] + [part(value, rest, len(plain.rstrip()))]
        return [part(value, m.start(), m.end()) for m in found]
    out, at = [], 0
    for piece in plain.split(separator, limit):
        out.append(part(value, at, at + len(piece)))
        at += len(piece) + len(separator)
    return out


def replaced(value: str, old: str, new: str, count: int = -1) -> str:
    if not old:
        return tagged(str(value).replace(old, new, count), origin_of([value, new]))
    pieces = split(value, old, count)
    out: list[str] = []
    for piece in pieces:
        out += [new, piece]
    return concat(out[1:])


def call_method(value: str, name: str, args: list[Any], named: dict[str, Any]) -> Any:
    """A str method on a string, with origins. None where the method is not one that templates may call."""
    if name in ("strip", "lstrip", "rstrip"):
        return stripped(value, {"strip": "both", "lstrip": "left", "rstrip": "right"}[name], *args)
    if name == "split":
        return split(value, *args, **{"limit" if k == "maxsplit" else "separator": v for k, v in named.items()})
    if name == "replace":
        return replaced(value, *args)
    if name == "removeprefix":
        return part(value, len(args[0]) if str(value).startswith(args[0]) else 0, len(value))
    if name == "removesuffix":
        return part(value, 0, len(value) - (len(args[0]) if args[0] and str(value).endswith(args[0]) else 0))
    if name == "join":
        items: list[Any] = list(*args)
        return concat([x for item in items for x in (value, item)][1:])
    result = getattr(str(value), name)(*args, **named)
    origin = origin_of([value, *args, *named.values()])
    if isinstance(result, str):
        return tagged(result, origin)
    if isinstance(result, (list, tuple)):
        return type(result)(tagged(item, origin) for item in result)
    return result


STRING_METHODS = frozenset(
    [
        "strip",
        "lstrip",
        "rstrip",
        "split",
        "replace",
        "removeprefix",
        "removesuffix",
        "join",
        "lower",
        "upper",
        "title",
        "capitalize",
        "startswith",
        "endswith",
        "find",
        "rfind",
        "index",
        "count",
        "isdigit",
        "isalpha",
        "isalnum",
        "isspace",
        "isupper",
        "islower",
        "splitlines",
        "rsplit",
        "partition",
        "rpartition",
    ]
)
