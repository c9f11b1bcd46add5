"""load: a file and command-line words into one checked dataclass."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from align.config._convert import Patch, Places, Word, build, closest, dotted, nearest, repr_text
from align.config._schema import ConfigError, fields, section
from align.config._toml import KeyPath, locate, parse_table, parse_value, split_key

T = TypeVar("T")


def load(cls: type[T], path: str | Path | None = None, overrides: Iterable[str] = ()) -> T:
    """Reads the dataclass `cls` from a TOML file and words like `optimizer.lr=3e-4`, which win over the file.

    A section that is given in part keeps the rest of its default. Raises ConfigError, a message of one line with the place
    (`sft.toml:12` or `command line`), for a file that cannot be read, an unknown key (with the nearest known one), a value of
    another type (an int is a float's value, a bool is not an int's), a failed check of a `__post_init__`, and, all at once,
    for fields that have no value or "[TBD]".
    """
    return load_shown(cls, path, overrides, str(path))


def load_shown(cls: type[T], path: str | Path | None, overrides: Iterable[str], shown: str) -> T:
    """`load` with the file's name as messages are to show it."""
    places = Places(shown if path is not None else "")
    table: dict[str, Any] = {}
    if path is not None:
        text = _read(Path(path), shown)
        table = _parse(text, shown)
        places.known = {key: f"{shown}:{line}" for key, line in locate(text).items()}
    for word in overrides:
        _override(cls, table, word, places)
    missing: list[str] = []
    config: T = build(cls, table, None, (), places, missing)
    if missing:
        head = f"{shown}: " if path is not None else ""
        count, them = ("a field needs a value", "it") if len(missing) == 1 else (f"{len(missing)} fields need a value", "them")
        raise ConfigError(f"{head}{count}: {', '.join(missing)}; set {them} in the file or as key=value")
    return config


def _read(path: Path, shown: str) -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{shown}: no such file{_similar(path)}") from None
    except IsADirectoryError:
        inside = sorted(entry.name for entry in path.glob("*.toml"))[:6]
        raise ConfigError(f"{shown}: is a directory; name a .toml file" + (f" in it: {', '.join(inside)}" if inside else "")) from None
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{shown!r}: not a file name") from None
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{shown}:{line}: byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8") from None


def _similar(path: Path) -> str:
    try:
        near = closest(path.name, [entry.name for entry in path.parent.glob("*.toml")])
    except OSError:
        near = None
    if near:
        return f"; did you mean {path.parent / near}?"
    return "" if path.parent.is_dir() else f" (nor the directory {path.parent})"


def _parse(text: str, shown: str) -> dict[str, Any]:
    try:
        return parse_table(text)
    except RecursionError:
        raise ConfigError(f"{shown}: nested too deeply to be a configuration") from None
    except ValueError as error:
        match = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", str(error), re.DOTALL)
        if match is None:
            raise ConfigError(f"{shown}: not valid TOML: {error}") from None
        reason, line, column = match.groups()
        where = f"at column {column}" if line else "at the end of the file"
        line = line or text.count("\n") + 1
        raise ConfigError(f"{shown}:{line}: not valid TOML {where}: {reason[:1].lower()}{reason[1:]}") from None


def _override(cls: type, table: dict[str, Any], word: str, places: Places) -> None:
    """Puts one `key=value` into the table."""
    key, end = split_key(word)
    if not key or word[end : end + 1] != "=":
        raise ConfigError(f"command line: {repr_text(word)} is not key=value{_word_hint(cls, word)}")
    kind: Any = cls
    for depth, name in enumerate(key):
        inner = kind and next((field for field in fields(kind) if field.name == name), None)
        if kind and inner is None:
            raise ConfigError(f"command line: unknown key {dotted(key)}{nearest(kind, name, key[:depth])}")
        kind = section(inner.type) if inner else None
    path: KeyPath = ()
    for name in key[:-1]:
        path = (*path, name)
        below = table.get(name)
        if not isinstance(below, dict):
            # A value that is no table is the file's mistake and is reported as such, unless it says none.
            if below is not None and not isinstance(below, Word) and below != "none":
                return
            table[name] = below = _written_table(below) or Patch()  # optimizer={name="adamw"} optimizer.lr=1e-4 are both meant
            places.known[path] = "command line"
        table = below
    places.known = {known: place for known, place in places.known.items() if known[: len(key)] != key}
    places.known[key] = "command line"
    table[key[-1]] = Word(word[end + 1 :])


def _written_table(word: Any) -> dict[str, Any] | None:
    """The inline table of an earlier word, if it is one."""
    try:
        value = parse_value(word)
    except (ValueError, TypeError):
        return None
    return value if isinstance(value, dict) else None


def _word_hint(cls: type, word: str) -> str:
    bare = word.lstrip("-")
    name = re.split(r"[=\s:]", bare, maxsplit=1)[0]
    if section_of(cls, name):
        return f"; write {name}.<field>=<value>"
    return f"; write {bare if '=' in bare else f'{name}=<value>'}" if find_field(cls, name) else ""


def find_field(cls: type, name: str) -> bool:
    """Whether a dotted name is a field, or a section, of the dataclass."""
    first, dot, rest = name.partition(".")
    field = next((field for field in fields(cls) if field.name == first), None)
    if field is None or not dot:
        return field is not None
    return section(field.type) is not None and find_field(section(field.type), rest)


def section_of(cls: type, name: str) -> type | None:
    """The section class at a dotted name, or None."""
    for part in name.split("."):
        field = next((field for field in fields(cls) if field.name == part), None) if cls else None
        cls = section(field.type) if field else None  # type: ignore[assignment]
    return cls
