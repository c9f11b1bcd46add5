"""The command line of every stage: help with examples, the configuration printed and read again, a plan that writes nothing."""

import dataclasses
import json
import re
import tomllib
import typing

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
    return run_stage(name, config_class, on_ranks("", stage) if name in ("sft", "pretrain") else stage, "What it does.", words)


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
