"""TOML 1.0 around tomllib: on which line a key stands, and writing a configuration back."""

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

from align.config._schema import ConfigError, fields, is_section, none_is_text, takes

_BARE = re.compile(r"[A-Za-z0-9_-]+\Z")
_PART = re.compile(r'\s*([A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\')\s*')
_HEADER = re.compile(r"[ \t]*(\[\[?)")
# Strings first, so that a bracket, a hash or a newline inside one does not count.
_TOKEN = re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*|[\[\]{}\n]', re.DOTALL)

KeyPath = tuple[str | int, ...]


class Beyond(float):
    """A written number that no float holds, `text`: 1e400 would be infinity, 1e-400 zero. It is no value of any field."""

    text: str


def read_float(text: str) -> float:
    """float(text), or `Beyond`; inf and nan are what they say. Raises ValueError when it is no number."""
    value = float(text)
    digits = text.lower().partition("e")[0]
    if (math.isinf(value) and any(map(str.isdigit, text))) or (value == 0 and any(digit.isdigit() and int(digit) for digit in digits)):
        value = Beyond(value)
        value.text = text.strip()
    return value


def parse_table(text: str) -> dict[str, Any]:
    """A TOML document. Raises ValueError, RecursionError."""
    return tomllib.loads(text, parse_float=read_float)


def parse_value(text: str) -> Any:
    """The value of a TOML right-hand side. Raises ValueError when it is none."""
    if "\n" in text:
        raise ValueError("a newline")
    try:
        table = parse_table(f"x = {text}")
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if len(table) != 1:
        raise ValueError("more than one value")
    return table["x"]


def split_key(text: str, start: int = 0) -> tuple[tuple[str, ...], int]:
    """A dotted key at `start` and where it ends; ((), start) when there is none."""
    parts: list[str] = []
    end = start
    while match := _PART.match(text, end):
        part = match[1]
        try:
            parts.append(part if _BARE.match(part) else parse_value(part))
        except ValueError:
            return (), start
        end = match.end()
        if text[end : end + 1] != ".":
            return tuple(parts), end
        end += 1
    return (), start


def locate(text: str) -> dict[KeyPath, int]:
    """Line of every table header and key of a TOML document that tomllib has accepted. Keys of inline tables are not in it."""
    lines: dict[KeyPath, int] = {}
    counts: dict[KeyPath, int] = {}
    table: KeyPath = ()
    position, line = 0, 1
    while position < len(text):
        key, end = split_key(text, position)
        if key:
            leading = len(text[position:end]) - len(text[position:end].lstrip())
            lines[table + key] = line + text.count("\n", position, position + leading)
        elif match := _HEADER.match(text, position):
            names, end = split_key(text, match.end())
            table = _table_path(names, counts)
            if len(match[1]) == 2:
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
            lines[table] = line
            end = (text + "\n").index("\n", end)
        stop = _end_of_value(text, max(end, position))
        line += text.count("\n", position, stop)
        position = stop
    return lines


def _table_path(names: tuple[str, ...], counts: dict[KeyPath, int]) -> KeyPath:
    """[a.b.c] below arrays of tables: each array on the way adds the index of its last element."""
    path: KeyPath = ()
    for i, name in enumerate(names):
        path = (*path, name)
        if i + 1 < len(names) and path in counts:
            path = (*path, counts[path])
    return path


def _end_of_value(text: str, position: int) -> int:
    """Just after the newline that ends the statement: brackets closed, strings skipped."""
    depth = 0
    for match in _TOKEN.finditer(text, position):
        if match[0] in "[{":
            depth += 1
        elif match[0] in "]}":
            depth -= 1
        elif match[0] == "\n" and depth <= 0:
            return match.end()
    return len(text)


def dumps(config: object) -> str:
    """Writes a configuration dataclass as TOML that `load` reads back equal.

    None is left out where leaving the key out means None; else it is written "none", and [] where a string could be
    meant. Raises ConfigError for a value that TOML cannot hold (text that is not Unicode), TypeError for a value that is not a
    configuration's.
    """
    lines: list[str] = []
    _dump(config, None, "", lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _dump(config: Any, base: object, prefix: str, lines: list[str]) -> None:
    later = []
    for field in fields(type(config)):
        value, absent = getattr(config, field.name), field.value(base)
        if is_section(type(value)):
            later.append((f"{prefix}{field.name}", value, absent if type(absent) is type(value) else None))
        elif value is not None:
            lines.append(f"{field.name} = {format_value(value)}")
        elif absent is not None:
            lines.append(f"{field.name} = {_none(field.type)}")
    for name, value, absent in later:
        lines += ["", f"[{name}]"]
        _dump(value, absent, f"{name}.", lines)


def _none(hint: Any) -> str:
    if not none_is_text(hint):
        return '"none"'
    if takes(hint, list, tuple):
        raise TypeError(f"TOML has no null, and {hint!r} leaves no other spelling for None; give the field the default None")
    return "[]"


def format_value(value: Any) -> str:
    """One value as TOML on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return "nan" if math.isnan(value) else repr(float(value))
    if isinstance(value, (str, Path)):
        return _format_text(str(value))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(format_value(item) for item in value)}]"
    if isinstance(value, dict):
        pairs = [f"{key if _BARE.match(key) else _format_text(key)} = {format_value(item)}" for key, item in value.items()]
        return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
    if is_section(type(value)):
        items = {field.name: (getattr(value, field.name), field) for field in fields(type(value))}
        for name, (item, field) in items.items():
            if item is None and field.value(None) is not None:
                raise TypeError(f"{type(value).__name__}.{name} is None inside a list; give the field the default None")
        return format_value({name: item for name, (item, _) in items.items() if item is not None})
    raise TypeError(f"a configuration cannot hold {value!r} of type {type(value).__name__}")


def _format_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{text!r} is not valid Unicode text; TOML cannot hold it, give it another name") from None
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
