"""The command line of a stage: --help, --config, --print-config, --dry-run, --resume, --allow-change and key=value."""

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from align.config._convert import closest, repr_text
from align.config._load import find_field, load_shown
from align.config._schema import TBD, UNSET, ConfigError, Field, fields, is_section, leaves, section, show
from align.config._toml import dumps, format_value

T = TypeVar("T")

_OPTIONS = (
    ("--config FILE", "read this TOML file first; relative to where you are"),
    ("key=value", "set one field, after the file: optimizer.lr=3e-4, levels=1,2,3, name= (empty), limit=none (no value)"),
    ("--dry-run", "print the plan and stop before anything is computed or written"),
    ("--print-config", "print the whole configuration as TOML and stop"),
    ("--resume", "go on from the newest whole checkpoint of run_dir"),
    ("--allow-change FIELD", "with --resume: let this field differ from the run's own configuration (may be repeated)"),
    ("--help", "print this and stop"),
)


@dataclass(frozen=True)
class Invocation(Generic[T]):
    """What a command line asked for."""

    config: T
    config_path: Path | None  # absolute
    dry_run: bool
    resume: bool
    allow_change: list[str]


def caller_path(path: str | Path) -> Path:
    """A path as the person meant it who typed it: relative to where `bazel run` was called, else to the current directory.

    Raises ConfigError when ~ names no home directory, or for a null byte, which TOML can write and no path can have.
    """
    if "\0" in str(path):
        raise ConfigError(f"{str(path)!r} has a null byte; no path has one")
    try:
        expanded = Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path}: there is no such home directory; write the whole path") from None
    return Path(os.environ.get("BUILD_WORKING_DIRECTORY") or Path.cwd()) / expanded


def workspace_root() -> Path:
    """The root of the workspace that `bazel run` was called in; without Bazel the current directory."""
    return Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY") or Path.cwd())


def parse_cli(cls: type[T], argv: Sequence[str], *, prog: str, description: str = "") -> Invocation[T]:
    """Reads a stage's arguments (without the program's name) into its configuration dataclass.

    --help and --print-config print and raise SystemExit(0). Raises ConfigError for a word that is neither an option nor
    key=value, and for whatever `load` refuses.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text(cls, prog, description), end="")
        raise SystemExit(0)
    words = list(argv)
    overrides: list[str] = []
    allow_change: list[str] = []
    flags = {"--dry-run": False, "--resume": False, "--print-config": False}
    given: str | None = None
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if word == "--":
            continue
        if option in ("--config", "--allow-change"):
            if not equals:
                if not words:
                    raise ConfigError(f"command line: {option} needs {'a file' if option == '--config' else 'a field'} after it")
                value = words.pop(0)
            if option == "--allow-change":
                allow_change.append(_known_field(cls, value))
            elif given is not None:
                raise ConfigError(f"command line: --config is given twice, {given} and {value}; give one")
            else:
                given = value
        elif word in flags:
            flags[word] = True
        elif word.startswith("-"):
            raise ConfigError(f"command line: unknown option {repr_text(word)}{_option_hint(cls, word)}")
        else:
            overrides.append(word)
    path = None if given is None else caller_path(given)
    config = load_shown(cls, path, overrides, given or "")
    if flags["--print-config"]:
        print(dumps(config), end="")
        raise SystemExit(0)
    return Invocation(config, path, flags["--dry-run"], flags["--resume"], allow_change)


def _known_field(cls: type, name: str) -> str:
    if not find_field(cls, name):
        near = closest(name, [leaf for leaf, _ in leaves(cls)])
        hint = f"; did you mean {near}?" if near else "; --help lists the fields"
        raise ConfigError(f"command line: --allow-change names no field: {repr_text(name)}{hint}")
    return name


def _option_hint(cls: type, word: str) -> str:
    option, equals, value = word.partition("=")
    name = option.lstrip("-")
    if find_field(cls, name):
        return f"; write {name}={value if equals else '<value>'} without the dashes"
    if equals and name in ("dry-run", "resume", "print-config", "help"):
        return f"; --{name} takes no value"
    near = closest(name, [option.split()[0].lstrip("-") for option, _ in _OPTIONS if option.startswith("-")])
    return f"; did you mean --{near}?" if near else "; --help lists the options"


def help_text(cls: type, prog: str, description: str = "", *, width: int = 120) -> str:
    """The --help text: usage, options, two examples, and every field of the dataclass by section with type, default and doc."""
    lines = [f"usage: {prog} [--config FILE] [key=value ...] [options]", ""]
    if description:
        lines += [*textwrap.wrap(description, width), ""]
    lines.append("options:")
    for option, text in _OPTIONS:
        lines += _entry(f"  {option}", text, 24, width)
    example = _example(cls)
    lines += ["", "examples:", f"  {prog} {example}".rstrip(), f"  {prog} --config my.toml --dry-run", "", "fields:"]
    lines += _section_help(cls, "", None, width)
    return "\n".join(lines) + "\n"


def _entry(head: str, text: str, column: int, width: int) -> list[str]:
    """A name and its text in two columns; the text moves to the next line when the name is too long."""
    body = textwrap.wrap(text, max(width - column, 20)) or [""]
    first = f"{head:<{column - 1}} {body[0]}".rstrip() if len(head) < column else head
    rest = body[1:] if len(head) < column else body
    return [first, *(" " * column + line for line in rest if line)]


def _section_help(cls: type, prefix: str, base: object, width: int) -> list[str]:
    lines, later = [], []
    for field in fields(cls):
        inner = section(field.type)
        if inner:
            default = field.value(base)
            later.append((field, inner, default if isinstance(default, inner) else None, default is None))
            continue
        text = f"{show(field.type)}, {_default(field, base)}" + (f". {field.doc}" if field.doc else "")
        lines += _entry(f"  {prefix}{field.name}", text, 36, width)
    for field, inner, default, absent in later:
        doc = field.doc or ("" if (inner.__doc__ or "").startswith(f"{inner.__name__}(") else (inner.__doc__ or "").split("\n")[0])
        note = " (none unless set)" if absent else ""
        lines += ["", *textwrap.wrap(f"[{prefix}{field.name}] {doc}".rstrip() + note, width)]
        lines += _section_help(inner, f"{prefix}{field.name}.", default, width)
    return lines


def _default(field: Field, base: object) -> str:
    value = field.value(base)
    if value is UNSET or value == TBD:
        return "required"
    if value is None:
        return "default none"
    shown = format_value(value) if not is_section(type(value)) else "..."
    return f"default {shown}"


def _example(cls: type) -> str:
    """One field set to its own default: a number where there is one."""
    for kinds in ((float,), (int,), (str, bool)):
        for name, field in leaves(cls):
            if type(field.default) in kinds:
                return f"{name}={format_value(field.default)}"
    return ""
