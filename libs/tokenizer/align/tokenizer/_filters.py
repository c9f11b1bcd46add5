"""Filters, tests and functions that chat templates may use, with Jinja's and Hugging Face's meanings."""

import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

from align.tokenizer import _values as V


class Raised(Exception):
    """raise_exception("…") in a template."""


class Loop:
    """The `loop` variable."""

    def __init__(self, items: list[Any], index: int) -> None:
        self.items, self.index = items, index

    def attribute(self, name: str, undefined: Any) -> Any:
        size, i = len(self.items), self.index
        values = {
            "index": i + 1,
            "index0": i,
            "revindex": size - i,
            "revindex0": size - i - 1,
            "first": i == 0,
            "last": i == size - 1,
            "length": size,
            "depth": 1,  # of recursive loops, which there are none of
            "depth0": 0,
        }
        if name == "previtem":
            return self.items[i - 1] if i else undefined(name)
        if name == "nextitem":
            return self.items[i + 1] if i + 1 < size else undefined(name)
        return values[name] if name in values else undefined(name)


def listed(value: Any) -> list[Any]:
    """What a loop runs over."""
    if isinstance(value, str):
        return [V.part(value, i, i + 1) for i in range(len(value))]
    if isinstance(value, Loop) or callable(value):
        raise TypeError(f"{type(value).__name__!r} object is not iterable")
    return list(value)


def as_text(value: Any) -> str:
    """str(value), with origins."""
    return value if isinstance(value, str) else V.tagged(shown(value), V.origin_of(value))


def shown(value: Any) -> str:
    """A value as Jinja prints it; strings inside lists and dicts print like plain ones."""
    return str(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, V.Text) else value


def tojson(value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False) -> str:
    """Hugging Face's tojson: json.dumps without HTML escapes. Raises TypeError on what is no JSON."""
    separators = tuple(separators) if separators else None
    return V.tagged(
        json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys), V.origin_of(value)
    )


def trim(value: Any, chars: Any = None) -> str:
    return V.stripped(as_text(value), "both", chars)


def join(value: Any, separator: str = "", attribute: Any = None) -> str:
    items = listed(value)
    if attribute is not None:
        items = [_attribute(item, attribute) for item in items]
    pieces = [x for item in items for x in (as_text(separator), as_text(item))]
    return V.concat(pieces[1:])


def _attribute(item: Any, path: Any, default: Any = None) -> Any:
    for name in str(path).split(".") if isinstance(path, str) else [path]:
        _defined(item)
        if isinstance(name, str) and name.isdigit():
            name = int(name)
        try:
            item = item[name]
        except (KeyError, IndexError, TypeError):
            item = V.Undefined(str(name)) if default is None else default
    return item


def _select(keep: bool, by_attribute: bool) -> Any:
    def select(value: Any, *args: Any) -> Any:
        rest = list(args)
        attribute = rest.pop(0) if by_attribute else None
        name = rest.pop(0) if rest else None
        if name is not None and name not in TESTS:
            raise ValueError(f"the test {name!r} is not supported")
        test: Callable[..., Any] = TESTS[name] if name is not None else bool
        return [i for i in listed(value) if bool(test(_attribute(i, attribute) if by_attribute else i, *rest)) == keep]

    return select


def map_(value: Any, name: str | None = None, *args: Any, attribute: Any = None, default: Any = None) -> Any:
    if attribute is not None:
        return [_attribute(item, attribute, default) for item in listed(value)]
    if name is None or name not in FILTERS:
        raise ValueError(f"the filter {name!r} is not supported")
    return [FILTERS[name](item, *args) for item in listed(value)]


def dictsort(value: Any, case_sensitive: Any = False, by: Any = "key", reverse: Any = False) -> Any:
    def key(pair: Any) -> Any:
        return _folded(pair[0 if by == "key" else 1], case_sensitive)

    return sorted(value.items(), key=key, reverse=reverse)


def sort(value: Any, reverse: Any = False, case_sensitive: Any = False, attribute: Any = None) -> Any:
    def key(item: Any) -> Any:
        names = [None] if attribute is None else str(attribute).split(",")
        return [_folded(item if name is None else _attribute(item, name), case_sensitive) for name in names]

    return sorted(listed(value), key=key, reverse=reverse)


def default(value: Any, other: Any = "", boolean: Any = False) -> Any:
    return other if isinstance(value, V.Undefined) or (boolean and not value) else value


def items(value: Any) -> Any:
    if isinstance(value, V.Undefined):
        return []
    if not isinstance(value, dict):
        raise TypeError("items: can only get item pairs from a mapping")
    return list(value.items())


def indent(value: Any, width: Any = 4, first: Any = False, blank: Any = False) -> str:
    prefix = width if isinstance(width, str) else " " * min(width, 1000)
    text = V.concat([as_text(value), "\n"])  # as Jinja does, whose lines end at every kind of line break
    out, at = [], 0
    for i, found in enumerate(_LINE_BREAK.finditer(str(text))):
        line = V.part(text, at, found.start())
        out += ["\n"] if i else []
        out += [prefix, line] if (i and (line or blank)) or (not i and first) else [line]
        at = found.end()
    return V.concat(out)


_LINE_BREAK = re.compile("\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


def _method(name: str) -> Any:
    return lambda value, *args: V.call_method(as_text(value), name, list(args), {})


def integer(value: Any, default: Any = 0, base: Any = 10) -> Any:
    """As in Jinja, "3.7" is 3."""
    _defined(value)
    try:
        return int(str(value), base) if isinstance(value, str) else int(value)
    except (TypeError, ValueError, OverflowError):
        try:
            return int(float(value))
        except (TypeError, ValueError, OverflowError):
            return default


def real(value: Any, default: Any = 0.0) -> Any:
    _defined(value)
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return default


def _defined(value: Any) -> None:
    if isinstance(value, V.Undefined):
        raise TypeError(f"{value.name!r} is undefined")


def _folded(value: Any, case_sensitive: Any) -> Any:
    return value.lower() if isinstance(value, str) and not case_sensitive else value


def _extreme(choose: Any) -> Any:
    """min and max, which like sort and unique take no notice of case."""

    def extreme(value: Any, case_sensitive: Any = False, attribute: Any = None) -> Any:
        found = listed(value)
        if not found:
            return V.Undefined("of nothing")
        return choose(found, key=lambda item: _folded(item if attribute is None else _attribute(item, attribute), case_sensitive))

    return extreme


def total(value: Any, attribute: Any = None, start: Any = 0) -> Any:
    return sum((item if attribute is None else _attribute(item, attribute) for item in listed(value)), start)


def title(value: Any) -> str:
    """Jinja's: the first letter of each word, where an apostrophe begins none."""
    words = re.split(r"([-\s({\[<]+)", as_text(value))
    return V.tagged("".join(word[0].upper() + word[1:].lower() for word in words if word), V.origin_of(value))


def _first(value: Any) -> Any:
    found = listed(value)
    return found[0] if found else V.Undefined("first of nothing")


def _last(value: Any) -> Any:
    found = listed(value)
    return found[-1] if found else V.Undefined("last of nothing")


def unique(value: Any, case_sensitive: Any = False, attribute: Any = None) -> Any:
    out: list[Any] = []
    seen: list[Any] = []
    for item in listed(value):
        key = _folded(item if attribute is None else _attribute(item, attribute), case_sensitive)
        if key not in seen:
            seen.append(key)
            out.append(item)
    return out


FILTERS: dict[str, Callable[..., Any]] = {
    "trim": trim, "tojson": tojson, "length": len, "count": len, "list": listed, "items": items, "join": join, "string": as_text,
    "selectattr": _select(True, True), "rejectattr": _select(False, True), "select": _select(True, False), "reject": _select(False, False),
    "map": map_, "dictsort": dictsort, "sort": sort, "default": default, "d": default, "safe": as_text, "unique": unique, "indent": indent,
    "lower": _method("lower"), "upper": _method("upper"), "capitalize": _method("capitalize"), "title": title,
    "replace": _method("replace"),
    "first": _first, "last": _last, "reverse": lambda v: V.sliced(v, slice(None, None, -1)) if isinstance(v, str) else listed(v)[::-1],
    "int": integer, "float": real, "abs": abs, "min": _extreme(min), "max": _extreme(max), "sum": total,
}  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _iterable(value: Any) -> bool:
    return isinstance(value, (str, list, tuple, dict, V.Undefined))


TESTS: dict[str, Callable[..., Any]] = {
    "defined": lambda v: not isinstance(v, V.Undefined), "undefined": lambda v: isinstance(v, V.Undefined), "none": lambda v: v is None,
    "string": lambda v: isinstance(v, str), "mapping": lambda v: isinstance(v, dict), "iterable": _iterable, "number": _is_number,
    "sequence": lambda v: isinstance(v, (str, list, tuple, dict, V.Undefined)), "boolean": lambda v: v is True or v is False,
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool), "float": lambda v: isinstance(v, float),
    "true": lambda v: v is True, "false": lambda v: v is False, "callable": lambda v: callable(v) or hasattr(v, "call"),
    "odd": lambda v: v % 2 == 1, "even": lambda v: v % 2 == 0, "divisibleby": lambda v, n: v % n == 0, "in": lambda v, s: v in s,
    "equalto": lambda a, b: a == b, "eq": lambda a, b: a == b, "==": lambda a, b: a == b, "ne": lambda a, b: a != b,
    "!=": lambda a, b: a != b,
    "lt": lambda a, b: a < b, "lessthan": lambda a, b: a < b, "gt": lambda a, b: a > b, "greaterthan": lambda a, b: a > b,
    "le": lambda a, b: a <= b, "ge": lambda a, b: a >= b, "sameas": lambda a, b: a is b, "lower": lambda v: str(v).islower(),
    "upper": lambda v: str(v).isupper(),
}  # fmt: skip


def raise_exception(message: Any = "") -> None:
    raise Raised(shown(message))


def namespace(*args: Any, **named: Any) -> Any:
    space = V.Namespace()
    for arg in args:
        space.update(arg)
    space.update(named)
    return space


def strftime_now(pattern: Any) -> Any:
    """The time of the call; a run that must repeat passes its own `strftime_now` or date in `variables`."""
    return datetime.now().strftime(str(pattern))


def range_(*args: Any) -> Any:
    numbers = range(*args)
    if len(numbers) > 100_000:
        raise ValueError("a range of more than 100000 numbers")
    return list(numbers)


FUNCTIONS = (raise_exception, namespace, strftime_now, range_, dict)


def globals_() -> dict[str, Any]:
    return {"raise_exception": raise_exception, "namespace": namespace, "strftime_now": strftime_now, "range": range_, "dict": dict}
