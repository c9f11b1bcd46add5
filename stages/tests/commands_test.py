"""The command line of every stage: help with examples, the configuration printed and read again, a plan that writes nothing."""

import dataclasses
import json
import re
import shutil
import tomllib
import typing
from pathlib import Path

import _common
import build_data
import chat
import download
import evaluate
import generate
import pretrain
import pytest
import serve
import sft
from _common import on_ranks, run_stage
from rl_stage_cases import STAGE

from align.config import load
from align.guard import Host

CHECKPOINT = Path(sft.__file__).parent / "assets/arithmetic_sft"
WORDS = {  # what a stage without defaults for everything is given
    "generate": ["input=prompts.jsonl"],
    "build_data": [
        'data.sources=["prompts.jsonl"]',
        "data.kind=answer",
        "tests.sets=[]",
        "tests.words=0",
        "shards.tokenizer=stages/models/arithmetic",
    ],
    "download": ["repo=org/name"],
}
ALL = {
    **STAGE,
    "sft": (sft.SftConfig, sft.sft),
    "pretrain": (pretrain.PretrainConfig, pretrain.pretrain),
    "evaluate": (evaluate.EvaluateConfig, evaluate.evaluate),
    "chat": (chat.ChatConfig, chat.chat),
    "serve": (serve.ServeConfig, serve.serve),
    "generate": (generate.GenerateConfig, generate.generate),
    "build_data": (build_data.BuildDataConfig, build_data.build_data),
    "download": (download.DownloadConfig, download.download),
}
TRAINING = ("sft", "pretrain", "dpo", "prm", "grpo", "ppo")
every = pytest.mark.parametrize("name", sorted(ALL))


@pytest.fixture(autouse=True)
def caller(tmp_path, monkeypatch):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1?", "answer": str(i + 1)}) + "\n" for i in range(40)))
    return tmp_path


def start(name, *words):
    config_class, stage = ALL[name]
    return run_stage(name, config_class, on_ranks("", stage) if name in TRAINING else stage, "What it does.", words)


def leaves(config_class, prefix=""):
    for name, kind in typing.get_type_hints(config_class).items():
        yield from leaves(kind, f"{prefix}{name}.") if dataclasses.is_dataclass(kind) else [prefix + name]


@every
def test_help_has_two_examples_as_typed_and_every_field(name, capsys):
    with pytest.raises(SystemExit) as end:
        start(name, "--help")
    told = capsys.readouterr().out
    assert end.value.code == 0 and "What it does." in told
    examples = told.partition("examples:\n")[2].partition("\n\n")[0].splitlines()
    assert len(examples) == 2 and all(line.startswith(f"  ./bazelw run //stages:{name} -- ") for line in examples)
    for field in leaves(ALL[name][0]):
        entry = re.search(rf"^  {re.escape(field)}((?: .*)?(?:\n {{30,}}.*)*)", told, re.MULTILINE)
        assert entry and re.search("default|required", entry[1]), field
    assert max(map(len, told.splitlines())) <= 140 and "\x1b" not in told


@every
def test_the_printed_configuration_is_read_back(name, caller, capsys):
    with pytest.raises(SystemExit) as end:
        start(name, *WORDS.get(name, []), "--print-config")
    text = capsys.readouterr().out
    assert end.value.code == 0 and tomllib.loads(text)
    (caller / "mine.toml").write_text(text)
    with pytest.raises(SystemExit):
        start(name, "--config", "mine.toml", "--print-config")
    assert capsys.readouterr().out == text
    assert load(ALL[name][0], caller / "mine.toml") == load(ALL[name][0], None, WORDS.get(name, []))


@pytest.mark.parametrize("name", sorted({*ALL} - {"download"}))  # it asks the hub for its list: download_test
def test_a_dry_run_says_so_and_writes_nothing(name, caller, capsys):
    before = sorted(caller.rglob("*"))
    assert start(name, *WORDS.get(name, []), "--dry-run") == 0, capsys.readouterr().err
    told = capsys.readouterr()
    assert "dry run: " in told.out and "nothing was " in told.out and "\x1b" not in told.out + told.err
    assert sorted(caller.rglob("*")) == before


@every
def test_a_misspelt_word_is_one_line_and_exit_code_2(name, capsys):
    assert start(name, *WORDS.get(name, []), "--dryrun") == 2
    told = capsys.readouterr().err
    assert told == f'{name}: command line: unknown option "--dryrun"; did you mean --dry-run?\n'


HUGE = 10**15
SIZES = {  # fields that memory, a loop or processes are made for at once; each was a MemoryError, or did not end
    **{(name, "threads"): [] for name in ("evaluate", "generate", "chat", "serve")},
    **{(name, "train.threads"): [] for name in (*TRAINING, "reference", "path_bias")},
    **{
        (name, field): []
        for name in TRAINING
        for field in ("train.global_batch", "train.micro_batch", "launch.nproc", "launch.nnodes", "lora.rank")
    },
    **{(name, "eval.samples"): ["eval.temperature=1"] for name in ("sft", "evaluate", "dpo", "grpo", "ppo")},
    **{(name, "eval.problems"): [] for name in ("sft", "evaluate", "dpo", "grpo", "ppo")},
    **{(name, "data.rows"): [] for name in ("sft", "dpo", "prm", "grpo", "ppo", "reference")},
    **{(name, "data.samples"): [] for name in ("dpo", "prm", "reference")},
    **{("prm", f"pairs.{field}"): ["kind=pairwise"] for field in ("rows", "samples")},
    **{(name, "data.max_length"): [] for name in ("sft", "pretrain", "dpo", "prm", "reference")},
    **{(name, "rollout.group"): [] for name in ("grpo", "ppo")},
    ("prm", "pairs.max_length"): ["kind=pairwise"],
    ("generate", "samples"): [],
    ("path_bias", "prompts"): [],
    ("ppo", "critic.rank"): [],
    ("build_data", "shards.processes"): [],
    ("serve", "port"): [],
}


@pytest.mark.parametrize(("name", "field"), SIZES)
def test_a_number_beyond_any_use_is_refused_by_its_field(name, field, caller, capsys):
    before = sorted(caller.rglob("*"))
    words = [*WORDS.get(name, []), *SIZES[name, field], f"{field}={HUGE}"]
    assert start(name, *words) == start(name, *words, "--dry-run") == 2
    told = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("prompts  ")]
    assert len(told) == 2 and told[0] == told[1], told
    assert re.match(rf"{name}: {re.escape(field)} is {HUGE}; it must be (at most (train.global_batch )?\d|from \d+ to \d)", told[0]), told
    assert sorted(caller.rglob("*")) == before


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_tripwire_that_cannot_be_is_refused_before_anything_is_trained(name, caller, capsys):
    assert start(name, f"tripwire.window={HUGE}", "--dry-run") == 2
    assert f"it must be at least twice tripwire.window, {HUGE}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "field", "words"),
    [
        ("evaluate", "eval.samples", ["eval.temperature=1", "eval.problems=30"]),
        ("generate", "samples", ["sampling.max_new_tokens=64", "batch=8000"]),
        ("sft", "eval.samples", ["eval.temperature=1", "eval.problems=30", "data.rows=60"]),
        ("reference", "data.samples", ["data.rows=30"]),
        ("prm", "data.samples", ["data.rows=30"]),
    ],
)
def test_answers_that_memory_does_not_hold_are_refused_with_how_many_it_does(name, field, words, monkeypatch, capsys):
    """30 problems × 200 answers × (64 tokens × 8 bytes + 1000) are 8.7 MiB."""
    words = [*WORDS.get(name, []), *words, f"{field}=200", *(["run_dir=run"] if name != "generate" else [])]
    monkeypatch.setattr(_common, "read_host", lambda folder: Host(40.0, 2**-9, 40.0, 0.0, 4, None))
    for module in ("sft", "prm"):
        monkeypatch.setattr(f"{module}.check_fit", lambda *_: [])
    assert start(name, *words) == 2
    told = re.search(
        rf"{name}: {field} is 200: so many answers of up to 64 tokens to \d+ prompts take .* take at most (\d+)", capsys.readouterr().err
    )
    assert told and 1 <= int(told[1]) < 200


FILES = {  # every field that names a file or a directory
    **{(name, "data.source"): "{}" for name in ("sft", "pretrain", "dpo", "prm", "grpo", "ppo", "reference")},
    **{(name, "model.path"): "{}" for name in sorted({*ALL} - {"build_data", "download"})},
    **{(name, "model.tokenizer"): "{}" for name in ("sft", "evaluate", "generate", "chat", "serve", "grpo")},
    **{(name, "eval.source"): "{}" for name in ("sft", "evaluate", "dpo", "grpo", "ppo")},
    ("pretrain", "data.held_out_source"): "{}",
    **{(name, "model.plan_config"): "{}" for name in ("sft", "dpo", "prm", "grpo", "ppo", "reference", "path_bias")},
    **{(name, "data.reward"): "{}:score" for name in ("dpo", "reference")},
    **{("prm", f"pairs.{field}"): form for field, form in (("source", "{}"), ("reward", "{}:score"))},
    ("generate", "input"): "{}",
    ("path_bias", "source"): "{}",
    ("build_data", "data.sources"): '["{}"]',
    ("build_data", "tests.sets"): '["{}"]',
    ("build_data", "shards.tokenizer"): "{}",
    ("dpo", "reference"): "{}",
    ("grpo", "reward"): "{}:score",
    ("ppo", "prm.path"): "{}",
    ("ppo", "path_bias"): "{}",
}
AWAY = ["model.path=away", "--dry-run"]
MORE = {
    **{key: AWAY for key in FILES if key[1] == "model.plan_config"},
    ("prm", "model.plan_config"): [*AWAY, "prm.label_token_ids=[70,71]"],
    ("ppo", "model.plan_config"): [*AWAY, "prm.label_token_ids=[70,71]", "prm.path=judge"],
    ("prm", "pairs.source"): ["kind=pairwise"],
    ("prm", "pairs.reward"): ["kind=pairwise", "pairs.rows=20"],
    ("prm", "model.path"): ["prm.label_token_ids=[70,71]"],
    ("ppo", "model.path"): ["prm.label_token_ids=[70,71]", "prm.path=judge"],
    ("ppo", "prm.path"): ["prm.label_token_ids=[70,71]"],
    ("build_data", "tests.sets"): ["tests.words=13"],
    **{(name, "eval.source"): ["data.rows=20", "train.global_batch=16", "train.micro_batch=16"] for name in ("grpo", "ppo")},
    ("sft", "eval.source"): ["data.rows=60"],
}
FORMS = {
    ("evaluate", "eval.source"): ["lean:{}"],
    ("prm", "data.source"): ["prm800k:{}"],
    ("grpo", "data.source"): ["lean:{}"],
    ("grpo", "reward"): ["{}.py:score"],
}


@pytest.mark.parametrize("trouble", ["absent", "folder", "bad.jsonl"])
@pytest.mark.parametrize(("name", "field"), FILES)
def test_a_file_that_cannot_be_used_is_told_with_its_field(name, field, trouble, caller, capsys):
    """Not there, a directory in place of a file, not what it should be."""
    (caller / "folder").mkdir()
    (caller / "bad.jsonl").write_text("{7: 8\n")
    before = sorted(caller.rglob("*"))
    run = [] if name in ("generate", "chat", "serve") else ["run_dir=run"]
    given = [word for word in WORDS.get(name, []) if not word.startswith(f"{field}=")]
    for form in (FILES[name, field], *FORMS.get((name, field), [])):
        words = [*given, *run, *MORE.get((name, field), []), f"{field}={form.format(trouble)}"]
        assert start(name, *words) == 2, words
        told = capsys.readouterr().err.splitlines()[-1]
        assert re.match(rf"{name}: {re.escape(field)}[ :]", told) and trouble in told and told.count(f"{field}:") <= 1, told
    made = {path for path in caller.rglob("*") if path.relative_to(caller).parts[0] != "run" or name != "build_data"}
    assert sorted(made) == before, "something was half-written"  # build_data keeps a folder that says what failed


@pytest.mark.parametrize(
    ("name", "field"),
    [*FILES, *((name, "run_dir") for name in sorted({*ALL} - {"generate", "chat", "serve", "download"})), ("generate", "output"),
     ("download", "to"), ("grpo", "vllm.weights")],
)  # fmt: skip
def test_a_home_directory_that_is_not_there_is_told_with_its_field(name, field, caller, capsys):
    more = ["rollout.sampler=vllm", 'vllm.command=["true"]'] if field == "vllm.weights" else MORE.get((name, field), [])
    given = [word for word in WORDS.get(name, []) if not word.startswith(f"{field}=")]
    assert start(name, *given, *more, f"{field}={FILES.get((name, field), '{}').format('~nobody-here/x.py')}") == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == f"{name}: {field}: ~nobody-here/x.py: there is no such home directory; write the whole path"


@pytest.mark.parametrize("name", ["sft", "dpo", "grpo", "ppo"])
def test_a_dry_run_reads_what_evaluations_ask(name, caller, capsys):
    assert start(name, "data.rows=60", "eval.source=absent.jsonl", "--dry-run") == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"{name}: eval.source") and not (caller / "runs").exists()


@pytest.mark.parametrize("name", ["sft", "pretrain", "evaluate", "grpo", "reference", "path_bias", "build_data"])
def test_a_run_directory_that_cannot_be_made_is_told_with_its_field(name, caller, capsys):
    (caller / "file").write_text("")
    short = {"sft": ["data.rows=60"], "pretrain": ["data.rows=20"], "reference": ["data.rows=20"], "evaluate": ["eval.problems=3"]}
    assert start(name, *WORDS.get(name, []), *short.get(name, []), "run_dir=file/run") == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"{name}: run_dir") and "file/run" in told and "ot a directory" in told


@pytest.mark.parametrize("name", ["evaluate", "generate", "chat", "serve", "sft", "dpo"])
def test_weights_that_are_cut_off_are_told_with_their_field(name, caller, capsys):
    shutil.copytree(CHECKPOINT, caller / "model")
    weights = caller / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    more = {"sft": ["model.from_scratch=false", "data.rows=60"], "generate": WORDS["generate"]}.get(name, [])
    assert start(name, *more, "model.path=model") == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"{name}: model.path: {weights} is truncated"), told
