"""From what TOML or a command-line word gave to what a field's type wants; the first misfit is an error with its place."""

import contextlib
import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args, get_origin

from align.config._schema import (
    TBD,
    UNSET,
    ConfigError,
    fields,
    is_literal,
    is_section,
    leaves,
    members,
    none_is_text,
    optional,
    section,
    show,
)
from align.config._toml import Beyond, KeyPath, format_value, parse_value, read_float

# The parts of a,"b,c",d: a comma inside quotes separates nothing.
_LISTED = re.compile(r"""\s*("(?:[^"\\]|\\.)*"(?=\s*(?:,|\Z))|'[^']*'(?=\s*(?:,|\Z))|[^,]+)\s*(?:,|\Z)""")


class Word(str):
    """The right-hand side of `key=value` on a command line: its field's type says how to read it."""


class Patch(dict[str, Any]):
    """A table that command-line words made: it changes the default of a dict field where a table in a file replaces it."""


class Places:
    """Where each key was set, for messages: `sft.toml:12` or `command line`."""

    def __init__(self, origin: str):
        self.origin = origin
        self.known: dict[KeyPath, str] = {}

    def of(self, path: KeyPath) -> str:
        """The place of the key, else of the nearest table around it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.known:
                return self.known[path[:end]]
        return self.origin

    def error(self, path: KeyPath, message: str) -> ConfigError:
        """A ConfigError whose message begins with the place and the dotted key."""
        return ConfigError(": ".join(part for part in (self.of(path), f"{dotted(path)} {message}") if part))


def dotted(path: KeyPath) -> str:
    """`optimizer.lr`, `sources[0].path`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def build(cls: type, table: dict[str, Any], base: object, path: KeyPath, places: Places, missing: list[str]) -> Any:
    """The dataclass from a table; UNSET when a field below it is still to be given, its name then being in `missing`."""
    known = fields(cls)
    for key in table:
        if key not in {field.name for field in known}:
            place = places.of((*path, key))
            raise ConfigError(f"{place}: unknown key {dotted((*path, key))}{nearest(cls, key, path)}")
    values: dict[str, Any] = {}
    for field in known:
        here, default = (*path, field.name), field.value(base)
        inner = section(field.type)
        if field.name in table:
            values[field.name] = convert(table[field.name], field.type, default, here, places, missing)
        elif default is UNSET and inner and not optional(field.type):
            values[field.name] = build(inner, {}, None, here, places, missing)
        else:
            values[field.name] = default
            if default is UNSET:
                missing.append(f"{dotted(here)} ({show(field.type)})")
            elif holds_tbd(default):
                missing.append(f'{dotted(here)} ("{TBD}")')
                values[field.name] = UNSET
    if any(value is UNSET for value in values.values()):
        return UNSET
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{places.of(path)}: {error}" if places.of(path) else str(error)) from error
    except ValueError as error:  # a check in __post_init__
        raise ConfigError(": ".join(part for part in (places.of(path), dotted(path), str(error)) if part)) from error


def convert(value: Any, hint: Any, default: Any, path: KeyPath, places: Places, missing: list[str]) -> Any:
    """`value` as the type wants it. Raises ConfigError; a "[TBD]" gives UNSET and a line in `missing`."""
    if isinstance(value, str) and value.strip() == TBD:
        missing.append(f'{dotted(path)} ("{TBD}" at {places.of(path)})')
        return UNSET
    if optional(hint) and _means_none(value, hint):
        return None
    alternatives = members(hint)
    if isinstance(value, Word):
        return _read_word(value, hint, default, path, places, missing)
    # A literal before the text around it, an int before the float that would take it too.
    for member in sorted(alternatives, key=lambda member: not is_literal(member) and member is not type(value)):
        if is_section(member) and isinstance(value, dict):
            return build(member, value, default if isinstance(default, member) else None, path, places, missing)
        origin, args = get_origin(member), get_args(member)
        if origin is dict and isinstance(value, dict):
            given = {key: convert(item, args[1], UNSET, (*path, key), places, missing) for key, item in value.items()}
            merged = {**default, **given} if isinstance(value, Patch) and isinstance(default, dict) else given
            return UNSET if any(item is UNSET for item in merged.values()) else merged
        if origin in (list, tuple) and isinstance(value, list):
            return _convert_list(value, member, path, places, missing)
        if (result := _scalar(value, member)) is not UNSET:
            return result
    raise places.error(path, f"must be {show(hint)}, got {describe(value)}{_way_out(value, hint, path)}")


def _means_none(value: Any, hint: Any) -> bool:
    if isinstance(value, Word):
        return value == "none" and not any(is_literal(m) and "none" in get_args(m) for m in members(hint))
    return bool(value == [] if none_is_text(hint) else value == "none")


def _scalar(value: Any, member: Any) -> Any:
    """The value when it is one of a scalar type, else UNSET. An int is a float's value; a bool is not an int's."""
    if is_literal(member):
        return next((arg for arg in get_args(member) if type(arg) is type(value) and arg == value), UNSET)
    if member is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return UNSET
    if member is int and type(value) is int:
        return value if -(2**63) <= value < 2**63 else UNSET  # TOML's; what counts or indexes takes no more
    if member is Path and isinstance(value, str):
        return Path(value) if value and "\0" not in value else UNSET
    return value if type(value) is member else UNSET


def _convert_list(value: list[Any], member: Any, path: KeyPath, places: Places, missing: list[str]) -> Any:
    origin, args = get_origin(member), get_args(member)
    kinds = list(args) if origin is tuple and args[-1] is not Ellipsis else [args[0]] * len(value)
    if len(kinds) != len(value):
        raise places.error(path, f"must have {len(args)} values ({show(member)}), got {len(value)}: {describe(value)}")
    items = [convert(item, kind, UNSET, (*path, i), places, missing) for i, (item, kind) in enumerate(zip(value, kinds, strict=True))]
    return UNSET if any(item is UNSET for item in items) else origin(items)


def _read_word(word: Word, hint: Any, default: Any, path: KeyPath, places: Places, missing: list[str]) -> Any:
    """A command-line word as each alternative would read it, text last: `10` is the int of `int | str`."""
    text = str(word)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise places.error(path, f"got {text!r}, which is not valid UTF-8") from None
    if any(is_literal(member) and text in get_args(member) for member in members(hint)):
        return text
    try:
        value = parse_value(text)
    except ValueError:
        value = text  # not TOML: a bare word
    readings = [value]
    for member in members(hint):
        if get_origin(member) in (list, tuple) and value == text and text.startswith("["):
            # A shell takes the quotes of ["a"]; whether [a] is a list of a or the text [a] cannot be told.
            raise places.error(
                path, f"""got {repr_text(text)}, no list in TOML; write a,b without brackets, or '["a", "b"]' in a shell's quotes"""
            )
        if get_origin(member) in (list, tuple) and not isinstance(value, list) and text:
            readings.append([Word(part.strip()) for part in _LISTED.findall(text) if part.strip()])
        elif member is float and not isinstance(value, (bool, int, float)) and text[:1] not in "\"'":
            with contextlib.suppress(ValueError):
                readings.append(read_float(text))  # .5 and 1. are not TOML
        elif member in (str, Path) and not isinstance(value, str) and not (isinstance(value, Beyond) and float in members(hint)):
            readings.append(text)
    for reading in readings[:-1]:
        found: list[str] = []
        try:
            result = convert(reading, hint, default, path, places, found)
        except ConfigError:
            continue
        missing += found
        return result
    return convert(readings[-1], hint, default, path, places, missing)


def holds_tbd(value: Any) -> bool:
    """Whether "[TBD]" stands in a default, at any depth of its lists and tables."""
    if isinstance(value, str):
        return value.strip() == TBD
    if isinstance(value, dict):
        return any(map(holds_tbd, value.values()))
    if is_section(type(value)):
        return any(holds_tbd(getattr(value, field.name)) for field in fields(type(value)))
    return isinstance(value, (list, tuple)) and any(map(holds_tbd, value))


def describe(value: Any) -> str:
    """The value with its TOML type, cut to a length that fits a line."""
    if isinstance(value, Beyond):
        return f"the number {_short(value.text)}"
    names = {bool: "the boolean", int: "the integer", float: "the float", list: "the list", dict: "the table"}
    if isinstance(value, str):
        return "an empty string" if not value else f"the string {_short(repr_text(value))}"
    if type(value) in names or isinstance(value, dict):
        try:
            return f"{names.get(type(value), 'the table')} {_short(format_value(value))}"
        except (TypeError, ConfigError):
            return names.get(type(value), "the table")
    return f"the {type(value).__name__} {value}"


def repr_text(text: str) -> str:
    """A string in double quotes, whatever is in it, on one line."""
    return f'"{ascii(text)[1:-1]}"' if not text.isprintable() else f'"{text}"'


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _way_out(value: Any, hint: Any, path: KeyPath) -> str:
    """What to write in its place, where that can be said."""
    kinds = members(hint)
    choices = [arg for member in kinds if is_literal(member) for arg in get_args(member)]
    if isinstance(value, str) and choices:
        near = closest(value, [str(choice) for choice in choices])
        return f'; did you mean "{near}"?' if near else ""
    if isinstance(value, str) and bool in kinds and value.lower() in ("true", "false", "yes", "no", "on", "off", "0", "1"):
        return "; write true or false"
    if isinstance(value, str) and not value:
        if Path in kinds:
            return "; write . for the current folder, or leave the key out"
        return "; write none for no value" if optional(hint) else ""
    if isinstance(value, str) and (int in kinds or float in kinds):
        try:
            return f"; write {value.strip()} without quotes" if isinstance(parse_value(value), (int, float)) else ""
        except ValueError:
            return ""
    if float in kinds and (isinstance(value, Beyond) or type(value) is int):
        return ", which no float holds: they reach from 5e-324 to 1.8e308"
    if type(value) is int and bool in kinds:
        return "; write true or false"
    if type(value) is int and int in kinds:
        return " of more than 64 bits"
    if type(value) is float and int in kinds and value.is_integer() and abs(value) < 1e18:
        return f"; write {int(value)}"
    if section(hint) and not isinstance(value, dict):
        return f"; it is a table: set {dotted(path)}.{fields(section(hint))[0].name} and so on"
    return ""


def closest(name: str, known: Iterable[str]) -> str | None:
    """The nearest of the known names, or None when nothing is near."""
    names = {candidate.lower().replace("-", "_"): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower().replace("-", "_"), list(names), 1, 0.6)
    return names[near[0]] if near else None


def nearest(cls: type, key: str, path: KeyPath) -> str:
    """The end of an unknown key's message: the nearest field of this table, else one of that name elsewhere, else all."""
    names = [field.name for field in fields(cls)]
    below = {name: dotted((*path, name)) for name, _ in leaves(cls)}
    same = [full for name, full in below.items() if name.rpartition(".")[2] == key.rpartition(".")[2]]
    near = closest(key, names)
    found = dotted((*path, near)) if near else same[0] if same else below.get(closest(key, below) or "")
    if found:
        return f"; did you mean {found}?"
    shown = [dotted((*path, name)) for name in names]
    return f"; known: {', '.join(shown[:12])}{', …' if len(shown) > 12 else ''}" if shown else ""
