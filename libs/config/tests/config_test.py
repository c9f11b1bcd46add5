"""align.config: every promise of the contract, by value; and round trips over generated configurations."""

import dataclasses
import math
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.config import ConfigError, Invocation, dumps, help_text, load, parse_cli


@dataclass(frozen=True)
class Optimizer:
    """How the weights are updated."""

    name: Annotated[Literal["adamw8bit", "adamw"], "Which optimizer"] = "adamw8bit"
    lr: Annotated[float, "Peak learning rate"] = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: Annotated[float | None, "Clip; none is off"] = 1.0

    def __post_init__(self):
        if self.lr < 0:
            raise ValueError(f"lr must not be negative, got {self.lr}")


@dataclass(frozen=True)
class Source:
    path: Path
    weight: float = 1.0
    kind: str | None = None


@dataclass(frozen=True)
class Stage:
    run_dir: Annotated[Path | None, "Where the run goes"] = None
    seed: int = 0
    packing: bool = False
    title: str = "run"
    note: Optional[str] = None  # noqa: UP045 (both spellings are read)
    label: str | None = "some"
    levels: list[int] = field(default_factory=lambda: [1, 2, 3])
    names: list[str] = field(default_factory=list)
    stops: tuple[str, ...] = ()
    size: int | Literal["auto"] = "auto"
    checkpointing: Literal["none", "full"] | None = None
    variables: dict[str, int | str] = field(default_factory=lambda: {"a": 1})
    sources: list[Source] = field(default_factory=list)
    optimizer: Annotated[Optimizer, "The optimizer"] = field(default_factory=lambda: Optimizer(lr=6e-3))
    extra: Optimizer | None = None


@dataclass(frozen=True)
class Model:
    path: Path
    layers: int
    dtype: str = "[TBD]"


@dataclass(frozen=True)
class Required:
    model: Model
    rows: Path
    seed: int = 0


def write(tmp_path, text, name="c.toml"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refused(cls, path=None, overrides=(), **cli):
    with pytest.raises(ConfigError) as caught:
        load(cls, path, overrides)
    message = str(caught.value)
    assert "\n" not in message and caught.value.exit_code == 2
    return message.replace(f"{path}", "FILE") if path else message


# --- values


def test_no_file_gives_the_defaults():
    assert load(Stage) == Stage()


def test_every_type_from_a_file(tmp_path):
    path = write(
        tmp_path,
        """
run_dir = "runs/x"   # a comment with = and [brackets]
seed = 7
packing = true
title = "a \\"b\\""
note = ""
levels = [
  1,
  2, # two
]
stops = ["]", "#"]
size = 3
checkpointing = "full"
variables = { x = 1, "y z" = "two" }
[[sources]]
path = "a.jsonl"
[[sources]]
path = "b.jsonl"
weight = 2
[optimizer]
name = "adamw"
lr = 1
betas = [0, 0.999]
""",
    )
    assert load(Stage, path) == Stage(
        run_dir=Path("runs/x"),
        seed=7,
        packing=True,
        title='a "b"',
        note="",
        levels=[1, 2],
        stops=("]", "#"),
        size=3,
        checkpointing="full",
        variables={"x": 1, "y z": "two"},
        sources=[Source(Path("a.jsonl")), Source(Path("b.jsonl"), 2.0)],
        optimizer=Optimizer("adamw", 1.0, (0.0, 0.999)),
    )
    lr = load(Stage, path).optimizer.lr
    assert type(lr) is float


def test_zero_empty_and_absent_are_three_things(tmp_path):
    assert load(Stage, write(tmp_path, 'note = ""')).note == ""
    assert load(Stage, write(tmp_path, "")).note is None
    zero = load(Stage, write(tmp_path, "[optimizer]\nmax_grad_norm = 0"))
    assert zero.optimizer.max_grad_norm == 0.0 and zero.optimizer.max_grad_norm is not None
    assert load(Stage).optimizer.max_grad_norm == 1.0
    assert load(Stage, overrides=["optimizer.max_grad_norm=none"]).optimizer.max_grad_norm is None
    assert load(Stage, overrides=["levels=[]"]).levels == []
    assert load(Stage, overrides=["note="]).note == ""


def test_a_section_given_in_part_keeps_the_rest_of_its_default(tmp_path):
    path = write(tmp_path, "[optimizer]\nname = 'adamw'")
    assert load(Stage, path).optimizer == Optimizer("adamw", lr=6e-3)
    assert load(Stage, overrides=["optimizer.name=adamw"]).optimizer == Optimizer("adamw", lr=6e-3)
    assert load(Stage, overrides=["extra.name=adamw"]).extra == Optimizer("adamw")


@pytest.mark.parametrize(
    "word, name, value",
    [
        ("seed=1_000", "seed", 1000),
        ("seed=0x10", "seed", 16),
        ("packing=true", "packing", True),
        ("title=", "title", ""),
        ("title=none", "title", "none"),
        ("title=true", "title", "true"),
        ("title=2026-11-30", "title", "2026-11-30"),
        ('title=" a=b "', "title", " a=b "),
        ("title=a b # c", "title", "a b # c"),
        ("note=none", "note", None),
        ('note="none"', "note", "none"),
        ("label=none", "label", None),
        ("levels=4,5", "levels", [4, 5]),
        ("levels=[4, 5]", "levels", [4, 5]),
        ("levels=4", "levels", [4]),
        ('stops=a,b,"c,d"', "stops", ("a", "b", "c,d")),
        ('stops=["a,b"]', "stops", ("a,b",)),
        ("names=12", "names", ["12"]),
        ("size=auto", "size", "auto"),
        ("size=12", "size", 12),
        ("checkpointing=none", "checkpointing", "none"),
        ("run_dir=/tmp/12", "run_dir", Path("/tmp/12")),
        ("run_dir=12", "run_dir", Path("12")),
        ("run_dir=none", "run_dir", None),
        ("variables.b=2", "variables", {"a": 1, "b": 2}),
        ('variables."x.y"=z', "variables", {"a": 1, "x.y": "z"}),
        ("variables={}", "variables", {}),
        ("extra={ lr = 1 }", "extra", Optimizer(lr=1.0)),
    ],
)
def test_overrides(word, name, value):
    got = getattr(load(Stage, overrides=[word]), name)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("word, lr", [("3e-4", 3e-4), ("1", 1.0), (".5", 0.5), ("2.", 2.0), ("inf", math.inf), ("0", 0.0)])
def test_a_float_may_be_written_as_python_writes_it(word, lr):
    got = load(Stage, overrides=[f"optimizer.lr={word}"]).optimizer.lr
    assert got == lr and type(got) is float


def test_the_last_override_wins_over_the_file(tmp_path):
    path = write(tmp_path, "seed = 1\n[optimizer]\nlr = 0.5\nbetas = [0, 0]")
    config = load(Stage, path, ["optimizer.lr=0.25", "seed=2", "seed=3"])
    assert config.seed == 3 and config.optimizer == Optimizer(lr=0.25, betas=(0.0, 0.0))
    assert load(Stage, path, ["extra.lr=1", "extra=none"]).extra is None
    assert load(Stage, path, ["extra=none", "extra.lr=1"]).extra == Optimizer(lr=1.0)


def test_a_byte_order_mark_and_windows_lines(tmp_path):
    path = write(tmp_path, b"\xef\xbb\xbfseed = 1\r\n[optimizer]\r\nlrr = 2\r\n")
    assert refused(Stage, path) == "FILE:3: unknown key optimizer.lrr; did you mean optimizer.lr?"


# --- refusals


@pytest.mark.parametrize(
    "text, message",
    [
        ("seeds = 1", "FILE:1: unknown key seeds; did you mean seed?"),
        (
            "\n[optimizer]\n\nlearning = 1\n",
            "FILE:4: unknown key optimizer.learning; known: optimizer.name, optimizer.lr, optimizer.betas, optimizer.max_grad_norm",
        ),
        ("lr = 1", "FILE:1: unknown key lr; did you mean optimizer.lr?"),
        ("[optimiser]\nlr = 1", "FILE:1: unknown key optimiser; did you mean optimizer?"),
        ('title = """\nseed = 1\n"""\noptimizer.lrr = 1', "FILE:4: unknown key optimizer.lrr; did you mean optimizer.lr?"),
        (
            "[[sources]]\npath='a'\n[[sources]]\npath='b'\nwieght=1",
            "FILE:5: unknown key sources[1].wieght; did you mean sources[1].weight?",
        ),
        ("seed = true", "FILE:1: seed must be int, got the boolean true"),
        ("seed = 60.0", "FILE:1: seed must be int, got the float 60.0; write 60"),
        ("seed = 9223372036854775808", "FILE:1: seed must be int, got the integer 9223372036854775808 of more than 64 bits"),
        ("levels = [-9223372036854775809]", "FILE:1: levels[0] must be int, got the integer -9223372036854775809 of more than 64 bits"),
        ('seed = "7"', 'FILE:1: seed must be int, got the string "7"; write 7 without quotes'),
        ("packing = 1", "FILE:1: packing must be bool, got the integer 1; write true or false"),
        ("title = 3", "FILE:1: title must be str, got the integer 3"),
        ("run_dir = ''", "FILE:1: run_dir must be path | none, got an empty string; write . for the current folder, or leave the key out"),
        ("levels = [1,\n 'x']", 'FILE:1: levels[1] must be int, got the string "x"'),
        ("levels = 1", "FILE:1: levels must be list[int], got the integer 1"),
        ("variables = { a = 1.5 }", "FILE:1: variables.a must be int | str, got the float 1.5"),
        ("optimizer = 3", "FILE:1: optimizer must be table, got the integer 3; it is a table: set optimizer.name and so on"),
        (
            "[optimizer]\nname = 'adam8bit'",
            'FILE:2: optimizer.name must be "adamw8bit" | "adamw", got the string "adam8bit"; did you mean "adamw8bit"?',
        ),
        ("[optimizer]\nbetas = [0.9]", "FILE:2: optimizer.betas must have 2 values (tuple[float, float]), got 1: the list [0.9]"),
        ("[optimizer]\nlr = true", "FILE:2: optimizer.lr must be float, got the boolean true"),
        ("[optimizer]\nlr = 2026-11-30", "FILE:2: optimizer.lr must be float, got the date 2026-11-30"),
        ("[optimizer]\n# two\nlr = -1", "FILE:1: optimizer: lr must not be negative, got -1.0"),
        ("seed = 1\nseed = 2", "FILE:2: not valid TOML at the end of the file: cannot overwrite a value"),
        ("seed = \n", "FILE:1: not valid TOML at column 8: invalid value"),
        ("a = 1 2\nb = 1\n", "FILE:1: not valid TOML at column 7: expected newline or end of document after a statement"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path, text, message):
    assert refused(Stage, write(tmp_path, text)) == message


@pytest.mark.parametrize(
    "word, message",
    [
        ("seeds=1", "command line: unknown key seeds; did you mean seed?"),
        ("optimizer.lrr=1", "command line: unknown key optimizer.lrr; did you mean optimizer.lr?"),
        ("learning_rate", 'command line: "learning_rate" is not key=value'),
        ("seed", 'command line: "seed" is not key=value; write seed=<value>'),
        ("optimizer", 'command line: "optimizer" is not key=value; write optimizer.<field>=<value>'),
        ("seed=", "command line: seed must be int, got an empty string"),
        ("seed=none", 'command line: seed must be int, got the string "none"'),
        ("seed=1e3", "command line: seed must be int, got the float 1000.0; write 1000"),
        ("packing=True", 'command line: packing must be bool, got the string "True"; write true or false'),
        ("levels=1,x", 'command line: levels[1] must be int, got the string "x"'),
        (
            "optimizer.max_grad_norm=",
            "command line: optimizer.max_grad_norm must be float | none, got an empty string; write none for no value",
        ),
        ("seed.x=1", 'command line: seed must be int, got the table { x = "1" }'),
        ("optimizer.lr=-1", "command line: optimizer: lr must not be negative, got -1.0"),
        ("title=\udcff", "command line: title got '\\udcff', which is not valid UTF-8"),
        ("run_dir=a\0b", 'command line: run_dir must be path | none, got the string "a\\x00b"'),
    ],
)
def test_a_bad_word_is_refused(word, message):
    assert refused(Stage, None, [word]) == message


def test_a_word_over_a_wrong_section_of_the_file_reports_the_file(tmp_path):
    assert refused(Stage, write(tmp_path, "\noptimizer = 3"), ["optimizer.lr=1"]).startswith("FILE:2: optimizer must be table")


def test_required_and_tbd_fields_are_listed_at_once(tmp_path):
    assert refused(Required) == (
        '4 fields need a value: model.path (path), model.layers (int), model.dtype ("[TBD]"), rows (path); '
        "set them in the file or as key=value"
    )
    path = write(tmp_path, 'rows = "r"\nseed = "[TBD]"\n[model]\nlayers = "[TBD]"\ndtype = "bf16"')
    assert refused(Required, path).replace(str(path), "FILE") == (
        'FILE: 3 fields need a value: model.path (path), model.layers ("[TBD]" at FILE:4), seed ("[TBD]" at FILE:2); '
        "set them in the file or as key=value"
    )
    assert refused(Required, path, ["model.path=m", "seed=1"]).startswith("FILE: a field needs a value: model.layers")
    assert load(Required, path, ["model.path=m", "model.layers=2", "seed=0"]) == Required(Model(Path("m"), 2, "bf16"), Path("r"))


def test_a_tbd_word_is_no_value():
    assert 'seed ("[TBD]" at command line)' in refused(Stage, None, ["seed=[TBD]"])
    assert "names[0]" in refused(Stage, None, ['names=["[TBD]"]'])


def test_files_that_cannot_be_read(tmp_path):
    write(tmp_path, "", "sft_smollm2.toml")
    assert refused(Stage, tmp_path / "sft_smolm2.toml") == f"FILE: no such file; did you mean {tmp_path}/sft_smollm2.toml?"
    assert refused(Stage, tmp_path / "no" / "x.toml") == f"FILE: no such file (nor the directory {tmp_path}/no)"
    assert refused(Stage, tmp_path) == "FILE: is a directory; name a .toml file in it: sft_smollm2.toml"
    assert refused(Stage, tmp_path / "sft_smollm2.toml" / "x") == "FILE: cannot be read: Not a directory"
    assert refused(Stage, write(tmp_path, b"a = 1\nb = '\xff'")) == "FILE:2: byte 0xff is not UTF-8; save the file as UTF-8"
    assert refused(Stage, write(tmp_path, "a = " + "[" * 5000)).startswith("FILE: nested too deeply")


def test_a_type_that_no_file_can_hold_is_the_programmers_error():
    for hint in (object, list, dict[int, int], list[int | None], str | Path, set[int]):
        cls = dataclasses.make_dataclass("Bad", [("x", hint, None)])
        with pytest.raises(TypeError, match=r"Bad\.x"):
            load(cls)


# --- writing


def test_dumps_by_value():
    assert dumps(Required(Model(Path("m"), 2, "bf16"), Path("r"))) == (
        'rows = "r"\nseed = 0\n\n[model]\npath = "m"\nlayers = 2\ndtype = "bf16"\n'
    )
    assert dumps(Optimizer(max_grad_norm=None)).splitlines()[-1] == 'max_grad_norm = "none"'


INTEGERS = st.integers(-(2**63), 2**63 - 1)  # TOML's
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda text: text.strip() != "[TBD]")
PIECES = ["seed", "optimizer", "lr", ".", " = ", "=", "1", "true", "\n", "[", "]", "[[", "{", "}", '"', '"""', "'", "#", ",", "x"]
FLOATS = st.floats(allow_nan=False)
PATHS = st.text("ab/. é\"'\\#=", min_size=1, max_size=8).map(Path)
OPTIMIZERS = st.builds(
    Optimizer,
    name=st.sampled_from(["adamw8bit", "adamw"]),
    lr=st.floats(0, 1e30),
    betas=st.tuples(FLOATS, FLOATS),
    max_grad_norm=st.none() | FLOATS,
)
STAGES = st.builds(
    Stage,
    run_dir=st.none() | PATHS,
    seed=INTEGERS,
    packing=st.booleans(),
    title=TEXT,
    note=st.none() | TEXT,
    label=st.none() | TEXT,
    levels=st.lists(INTEGERS, max_size=3),
    names=st.lists(TEXT, max_size=3),
    stops=st.lists(TEXT, max_size=3).map(tuple),
    size=INTEGERS | st.just("auto"),
    checkpointing=st.sampled_from([None, "none", "full"]),
    variables=st.dictionaries(TEXT, INTEGERS | TEXT, max_size=3),
    sources=st.lists(st.builds(Source, path=PATHS, weight=FLOATS, kind=st.none() | TEXT), max_size=2),
    optimizer=OPTIMIZERS,
    extra=st.none() | OPTIMIZERS,
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("config") / "c.toml"


@settings(max_examples=30)
@given(config=STAGES)
def test_dumps_loads_back_equal(scratch, config):
    scratch.write_text(dumps(config), encoding="utf-8")
    assert load(Stage, scratch) == config


@settings(max_examples=30)
@given(config=STAGES)
def test_a_line_as_a_word_means_the_same(scratch, config):
    """Each `key = value` line of a dump, as one word, sets the same value; a bare string is its own text."""
    section, words = "", []
    for line in dumps(config).split("\n"):
        if line.startswith("["):
            section = line[1:-1] + "."
            words.append(f"{line[1:-1]}={{}}")
        elif line:
            key, _, value = line.partition(" = ")
            absent = (key, value) in (("label", "[]"), ("max_grad_norm", '"none"'))
            words.append(f"{section}{key}={'none' if absent else value}")
    assert load(Stage, overrides=words) == config


@settings(max_examples=60)
@given(text=st.text(max_size=60) | st.lists(st.sampled_from(PIECES), max_size=25).map("".join))
def test_any_text_loads_or_is_a_config_error(scratch, text):
    scratch.write_bytes(text.encode("utf-8", "surrogatepass"))
    for path, words in ((scratch, ()), (None, [text]), (None, [f"seed={text}"]), (None, [f"optimizer.{text}"]), (None, [f"levels={text}"])):
        try:
            assert isinstance(load(Stage, path, words), Stage)
        except ConfigError as error:
            assert "\n" not in str(error)


@settings(max_examples=30)
@given(
    before=st.lists(
        st.sampled_from(["seed = 1", "# x = 1", "note = '''\nseed = 2\n'''", "levels = [\n1,\n2]", 'title = "a # \\" ["', ""]), unique=True
    )
)
def test_the_line_of_a_key_is_right_after_anything(scratch, before):
    text = "\n".join([*before, "[optimizer]", "lrr = 1"])
    scratch.write_text(text, encoding="utf-8")
    assert refused(Stage, scratch).startswith(f"FILE:{text.count(chr(10)) + 1}: ")


# --- the command line


def test_parse_cli(tmp_path, monkeypatch):
    write(tmp_path, "seed = 4", "a.toml")
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    words = ["--config", "a.toml", "title=x", "--dry-run", "--resume", "--allow-change", "seed", "--allow-change=optimizer.lr"]
    assert parse_cli(Stage, words, prog="sft") == Invocation(
        Stage(seed=4, title="x"), tmp_path / "a.toml", True, True, ["seed", "optimizer.lr"]
    )
    assert parse_cli(Stage, [], prog="sft") == Invocation(Stage(), None, False, False, [])
    assert parse_cli(Stage, ["--", "--config=a.toml", "seed=5"], prog="sft").config.seed == 5


@pytest.mark.parametrize(
    "words, message",
    [
        (["--config"], "command line: --config needs a file after it"),
        (["--config", "a", "--config", "b"], "command line: --config is given twice, a and b; give one"),
        (["--config", "gone.toml"], "gone.toml: no such file"),
        (["--dryrun"], 'command line: unknown option "--dryrun"; did you mean --dry-run?'),
        (["--seed=3"], 'command line: unknown option "--seed=3"; write seed=3 without the dashes'),
        (["--optimizer.lr", "3"], 'command line: unknown option "--optimizer.lr"; write optimizer.lr=<value> without the dashes'),
        (["--resume=x"], 'command line: unknown option "--resume=x"; --resume takes no value'),
        (["-x"], 'command line: unknown option "-x"; --help lists the options'),
        (["--allow-change", "optimizer.lrr"], 'command line: --allow-change names no field: "optimizer.lrr"; did you mean optimizer.lr?'),
        (["train"], 'command line: "train" is not key=value'),
    ],
)
def test_a_bad_command_line(words, message, tmp_path, monkeypatch):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        parse_cli(Stage, words, prog="sft")
    assert str(caught.value) == message


def test_print_config_prints_what_loads_back(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_cli(Stage, ["--print-config", "seed=9", "optimizer.max_grad_norm=none"], prog="sft")
    assert caught.value.code == 0
    config = load(Stage, write(tmp_path, capsys.readouterr().out))
    assert config == Stage(seed=9, optimizer=Optimizer(lr=6e-3, max_grad_norm=None))


def test_help_has_every_field_with_type_default_and_doc(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_cli(Stage, ["nonsense", "--help"], prog="bazel run //stages:sft --", description="Trains on rows.")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text == help_text(Stage, "bazel run //stages:sft --", "Trains on rows.")
    for line in (
        "usage: bazel run //stages:sft -- [--config FILE] [key=value ...] [options]",
        "  bazel run //stages:sft -- optimizer.lr=0.001",
        "  bazel run //stages:sft -- --config my.toml --dry-run",
        "[optimizer] The optimizer",
        "[extra] How the weights are updated. (none unless set)",
    ):
        assert line in text.splitlines(), line
    flat = " ".join(text.split())
    for entry in (
        "run_dir path | none, default none. Where the run goes",
        "optimizer.lr float, default 0.006. Peak learning rate",
        'optimizer.name "adamw8bit" | "adamw", default "adamw8bit". Which optimizer',
        "levels list[int], default [1, 2, 3]",
        'size int | "auto", default "auto"',
        "optimizer.betas tuple[float, float], default [0.9, 0.95]",
    ):
        assert entry in flat, entry
    required = help_text(Required, "x")
    assert "model.path" in required and required.count("required") == 4
    assert max(map(len, text.splitlines())) <= 120


def test_the_readmes_example_runs():
    """In an interpreter of its own: the example defines modules' worth of names, and exec is not for this tree."""
    code = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == 'seed = 0\n\n[optimizer]\nname = "adamw8bit"\nlr = 0.0003\nmax_grad_norm = "none"\n\n'
