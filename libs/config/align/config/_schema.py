"""What a configuration dataclass says about itself: fields, types, docs, defaults."""

import dataclasses
import functools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

SCALARS = (bool, int, float, str, Path)
TBD = "[TBD]"  # a value that its author has still to decide; no run starts with one


class ConfigError(ValueError):
    """A configuration that cannot be used. The message is one line: the place, the value and the way out."""

    exit_code = 2


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"


UNSET = _Unset()  # no value and no default: neither 0, nor "", nor None


class Field(NamedTuple):
    """One settable field of a configuration dataclass; `type` has no Annotated left at its top."""

    name: str
    type: Any
    doc: str
    default: Any  # UNSET when there is none
    factory: Any  # None, or the callable that makes the default

    def value(self, base: object) -> Any:
        """What the field is when nobody sets it: its value in `base`, the section's own default instance, else the field's."""
        if base is not None:
            return getattr(base, self.name)
        return self.factory() if self.factory else self.default


def fields(cls: Any) -> tuple[Field, ...]:
    """The fields of a configuration dataclass. Raises TypeError for a type that a configuration cannot hold."""
    return _fields(cls)


@functools.cache
def _fields(cls: Any) -> tuple[Field, ...]:
    hints = get_type_hints(cls, include_extras=True)
    result = []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        hint, doc = hints[field.name], ""
        if get_origin(hint) is Annotated:
            hint, *notes = get_args(hint)
            doc = " ".join(note for note in notes if isinstance(note, str))
        hint = plain(hint)
        _check(hint, f"{cls.__name__}.{field.name}")
        default = UNSET if field.default is dataclasses.MISSING else field.default
        factory = None if field.default_factory is dataclasses.MISSING else field.default_factory
        result.append(Field(field.name, hint, doc, default, factory))
    return tuple(result)


def plain(hint: Any) -> Any:
    """The type below Annotated."""
    return plain(get_args(hint)[0]) if get_origin(hint) is Annotated else hint


def members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union without None; any other type alone."""
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(plain(arg) for arg in get_args(hint) if arg is not type(None))
    return (hint,)


def optional(hint: Any) -> bool:
    """Whether None is a value of the type."""
    return get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)


def is_section(hint: Any) -> bool:
    """Whether the type is a nested configuration dataclass."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def section(hint: Any) -> Any:
    """The nested dataclass in a type, or None when it holds none."""
    return next((member for member in members(hint) if is_section(member)), None)


def is_literal(member: Any) -> bool:
    """Whether the type is a Literal."""
    return get_origin(member) is Literal


def takes(hint: Any, *kinds: Any) -> bool:
    """Whether one alternative of the type is one of `kinds`: str, list, Literal, …"""
    return any(member in kinds or get_origin(member) in kinds for member in members(hint))


def none_is_text(hint: Any) -> bool:
    """Whether the word none is a value of the type, so that None needs another spelling in a file."""
    return takes(hint, str, Path) or any(is_literal(member) and "none" in get_args(member) for member in members(hint))


def _check(hint: Any, where: str, *, inside: bool = False) -> None:
    """Raises TypeError when a type is not one that a configuration can hold: the programmer's mistake, not the user's."""
    alternatives = members(plain(hint))
    fine = not (inside and optional(plain(hint)))  # TOML has no null to put in a list
    for kinds in ((str, Path), (list, tuple), (dict,)):  # two that TOML writes alike cannot be told apart when read
        alike = [m for m in alternatives if m in kinds or get_origin(m) in kinds or (dict in kinds and is_section(m))]
        fine = fine and len(alike) <= 1
    for member in alternatives:
        origin, args = get_origin(member), get_args(member)
        if is_section(member):
            fields(member)
        elif origin in (list, tuple) and args:
            for arg in args:
                if arg is not Ellipsis:
                    _check(arg, where, inside=True)
        elif origin is dict and args[0] is str and takes(args[1], *SCALARS, Literal):
            _check(args[1], where, inside=True)
        elif is_literal(member):
            fine = fine and all(isinstance(arg, (bool, int, str)) for arg in args)
        else:
            fine = fine and member in SCALARS
    if not fine:
        raise TypeError(
            f"{where}: a configuration cannot hold {hint!r}; use bool, int, float, str, Path, Literal, Optional, "
            "list[…], tuple[…], dict[str, scalar] or a dataclass"
        )


def show(hint: Any) -> str:
    """The type as --help writes it: `float | none`, `"a" | "b"`, `list[int]`, `path`."""
    hint = plain(hint)
    if optional(hint) or len(members(hint)) > 1:
        return " | ".join([show(member) for member in members(hint)] + ["none"] * optional(hint))
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join(f'"{arg}"' if isinstance(arg, str) else str(arg).lower() for arg in args)
    if origin in (list, tuple, dict):
        return f"{origin.__name__}[{', '.join('...' if arg is Ellipsis else show(arg) for arg in args)}]"
    return "path" if hint is Path else "table" if is_section(hint) else hint.__name__


def leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, Field]]:
    """Every field below a dataclass by dotted name, sections left out; a section inside a list is not walked into."""
    for field in fields(cls):
        inner = section(field.type)
        if inner is None:
            yield prefix + field.name, field
        else:
            yield from leaves(inner, f"{prefix}{field.name}.")
