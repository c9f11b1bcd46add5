"""Numbers beyond a float, in a file and on a command line; words that a shell changed, that name nothing, that add to one before."""

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from align.config import ConfigError, load, parse_cli

NO_FLOAT = ", which no float holds: they reach from 5e-324 to 1.8e308"
NO_LIST = """, no list in TOML; write a,b without brackets, or '["a", "b"]' in a shell's quotes"""


@dataclass(frozen=True)
class Part:
    name: str = "a"
    lr: float = 1e-3
    pair: tuple[float, float] = (0.9, 0.95)


@dataclass(frozen=True)
class Stage:
    title: str = "run"
    size: int | Literal["auto"] = "auto"
    either: float | str = 1.0
    path: Path | None = None
    levels: list[int] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    variables: dict[str, int | str] = field(default_factory=lambda: {"a": 1})
    shares: dict[str, float] = field(default_factory=dict)
    part: Part = field(default_factory=Part)
    parts: list[Part] = field(default_factory=list)
    extra: Part | None = None


def refused(path, *words):
    with pytest.raises(ConfigError) as caught:
        load(Stage, path, words)
    return str(caught.value).replace(str(path), "FILE")


@pytest.mark.parametrize(
    "text, told",
    [
        ("[part]\n\nlr = 1e400", f"FILE:3: part.lr must be float, got the number 1e400{NO_FLOAT}"),
        ("part.pair = [0.9, -2e308]", f"FILE:1: part.pair[1] must be float, got the number -2e308{NO_FLOAT}"),
        ("[[parts]]\nname = 'b'\nlr = 1e-324", f"FILE:3: parts[0].lr must be float, got the number 1e-324{NO_FLOAT}"),
        ("shares = { x = 1e999 }", f"FILE:1: shares.x must be float, got the number 1e999{NO_FLOAT}"),
        ("part.lr = 1" + "0" * 400, f"FILE:1: part.lr must be float, got the integer 1{'0' * 58}…{NO_FLOAT}"),
        ("size = 1e400", 'FILE:1: size must be int | "auto", got the number 1e400'),
        ("title = 1e400", "FILE:1: title must be str, got the number 1e400"),
    ],
)
def test_a_number_of_a_file_that_no_float_holds_is_refused(tmp_path, text, told):
    (tmp_path / "c.toml").write_text(text)
    assert refused(tmp_path / "c.toml") == told


@pytest.mark.parametrize(
    "word, told",
    [
        ("part.lr=1e400", f"part.lr must be float, got the number 1e400{NO_FLOAT}"),
        ("part.lr=1.0000000001e-400", f"part.lr must be float, got the number 1.0000000001e-400{NO_FLOAT}"),
        ("part.lr=.1e-400", f"part.lr must be float, got the number .1e-400{NO_FLOAT}"),
        ("part.lr=1" + "0" * 5000, f"part.lr must be float, got the number 1{'0' * 58}…{NO_FLOAT}"),
        ("part.pair=.9,9e999", f"part.pair[1] must be float, got the number 9e999{NO_FLOAT}"),
        ("extra={lr=1e400}", f"extra.lr must be float, got the number 1e400{NO_FLOAT}"),
        ("either=1e400", f"either must be float | str, got the number 1e400{NO_FLOAT}"),
        ("stops=[END]", f'stops got "[END]"{NO_LIST}'),
        ("levels=[1,2", f'levels got "[1,2"{NO_LIST}'),
        ("part.=1", '"part.=1" is not key=value'),
    ],
)
def test_a_word_that_cannot_be_meant_is_refused(word, told):
    assert refused(None, word) == f"command line: {told}"


@pytest.mark.parametrize(
    "text, lr", [("5e-324", 5e-324), ("1.7976931348623157e308", sys.float_info.max), ("0e-999", 0.0), ("inf", math.inf)]
)
def test_the_ends_of_floats_are_floats(tmp_path, text, lr):
    (tmp_path / "c.toml").write_text(f"part.lr = {text}")
    assert load(Stage, overrides=[f"part.lr={text}"]).part.lr == load(Stage, tmp_path / "c.toml").part.lr == lr


def test_a_text_may_look_like_a_number_that_is_none():
    got = load(Stage, overrides=["title=1e400", "path=1e-400", "stops=1e400,x", "variables.x=1e400"])
    assert (got.title, got.path, got.stops, got.variables["x"]) == ("1e400", Path("1e-400"), ["1e400", "x"], "1e400")


def test_a_word_adds_to_the_table_of_a_word_before():
    got = load(Stage, overrides=['extra={name="b", lr=2}', "extra.lr=1", "variables={b=2}", "variables.c=3"])
    assert got.extra == Part(name="b", lr=1.0) and got.variables == {"b": 2, "c": 3}


def test_allow_change_names_a_field():
    with pytest.raises(ConfigError, match=r'--allow-change names no field: "part[.]"; did you mean part[.]'):
        parse_cli(Stage, ["--allow-change", "part."], prog="sft")
