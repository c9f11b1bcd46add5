"""chat and generate as a person uses them, on the checked-in checkpoint."""

import errno
import fcntl
import io
import json
import os
from pathlib import Path

import _common
import _entry
import chat as chat_stage
import generate as generate_stage
import pytest
from _common import Sampling, run_stage

from align.data import arithmetic_rows
from align.model import load
from align.rollout import NativeSampler
from align.tokenizer import ChatError, Tokenizer

STAGES = Path(chat_stage.__file__).parent
CHECKPOINT = STAGES / "assets/arithmetic_sft"


@pytest.fixture(scope="module")
def parts():
    tokenizer = Tokenizer.load(CHECKPOINT)
    return NativeSampler(load(CHECKPOINT), eos_ids=[tokenizer.eos_id], max_batch=8), tokenizer


def talk(parts, lines, *, templated=False, **sampling):
    config = chat_stage.ChatConfig(sampling=Sampling(temperature=0, max_new_tokens=40, **sampling))
    conversation = chat_stage.Conversation(*parts, config, templated=templated)
    out = io.StringIO()
    chat_stage.converse(conversation, io.StringIO(lines), out)
    return out.getvalue(), conversation


def greedy(parts, prompt):
    sampler, tokenizer = parts
    ids = tokenizer.encode(prompt, add_special_tokens=True)
    ids = ids[:-1] if ids[-1] == tokenizer.eos_id else ids
    (sample,) = sampler.generate([ids], max_new_tokens=40, temperature=0)
    return tokenizer.decode(sample.ids, skip_special=True)


def test_an_answer_is_the_samplers_and_commands_are_obeyed(parts):
    prompt = arithmetic_rows(1, seed=1, held_out=True)[0]["prompt"]
    said, _ = talk(parts, f"{prompt}\n/retry\n/nonsense\n/system be kind\n/quit\n{prompt}\n")
    lines = said.splitlines()
    assert lines[0] == lines[1] == greedy(parts, prompt)
    assert lines[2].startswith("/nonsense is no command") and "no chat template" in lines[3] and len(lines) == 4


def test_a_line_goes_on_after_a_backslash(parts):
    said, conversation = talk(parts, "Leo has 19 coins.\\\n Leo gets 4 more. How many coins now?\n")
    assert conversation.asked == "Leo has 19 coins.\n Leo gets 4 more. How many coins now?" and said.strip()


def test_a_line_that_would_go_on_is_asked_where_the_input_ends(parts):
    said, conversation = talk(parts, "Leo has 19 coins.\\")
    assert conversation.asked == "Leo has 19 coins." and said.strip()
    said, conversation = talk(parts, "Leo has\\\n19 coins.\\\n")
    assert conversation.asked == "Leo has\n19 coins." and said.strip()


def test_a_command_may_end_in_a_tab(parts):
    assert "no place for a system message" in talk(parts, "/system\tbe kind\n")[0]


def test_a_conversation_that_nobody_reads_ends_in_one_line(parts):
    class Gone(io.StringIO):
        def flush(self):
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    talked = chat_stage.Conversation(*parts, chat_stage.ChatConfig(), templated=False)
    with pytest.raises(_entry.OutputLost, match=r"standard output cannot be written \(Broken pipe\)") as caught:
        chat_stage.converse(talked, io.StringIO("Leo\n"), Gone())
    assert caught.value.exit_code == 2


def test_pieces_are_shown_as_they_come_and_an_interrupt_keeps_them(parts):
    sampler, tokenizer = parts
    conversation = chat_stage.Conversation(sampler, tokenizer, chat_stage.ChatConfig(sampling=Sampling(temperature=0)), templated=False)
    shown = []

    def show(piece):
        shown.append(piece)
        if len(shown) == 3:
            raise KeyboardInterrupt

    answer = conversation.ask("Leo has 19 coins. Leo gets 4 more. How many coins now?", show)
    assert " [stopped]" in shown and answer == "".join(piece for piece in shown if piece != " [stopped]")
    assert greedy(parts, "Leo has 19 coins. Leo gets 4 more. How many coins now?").startswith(answer) and answer


def test_a_stop_text_ends_the_answer(parts):
    said, _ = talk(parts, "Leo has 19 coins. Leo gets 4 more. How many coins now?\n", stop=["="])
    assert said.strip().endswith("=") and said.count("=") == 1


def test_the_conversation_is_what_the_template_gets(parts, monkeypatch):
    asked = []
    monkeypatch.setattr(
        chat_stage, "encode_prompt", lambda tokenizer, row: asked.append(row["messages"]) or tokenizer.encode("Leo has 19 coins.")
    )
    _, conversation = talk(parts, "one\ntwo\n/retry\n/system be brief\nthree\n/reset\nfour\n", templated=True)
    users = [[m["content"] for m in messages if m["role"] == "user"] for messages in asked]
    assert users == [["one"], ["one", "two"], ["one", "two"], ["three"], ["four"]]
    assert [messages[0]["role"] for messages in asked] == ["user", "user", "user", "system", "system"]
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"]


def test_a_message_that_cannot_be_answered_ends_nothing_and_is_what_retry_asks(parts, monkeypatch):
    said, conversation = talk(parts, "\udcff\n/retry\nLeo has 19 coins.\n")
    assert said.count("chat: character 0 is the lone surrogate") == 2 and conversation.asked == "Leo has 19 coins."
    asked = []

    def ask(tokenizer, row):
        asked.append([message["content"] for message in row["messages"] if message["role"] == "user"])
        if asked[-1][-1] == "no":
            raise ChatError("no place for it")
        return tokenizer.encode("Leo has 19 coins.")

    monkeypatch.setattr(chat_stage, "encode_prompt", ask)
    talk(parts, "one\nno\n/retry\ntwo\n/retry\n", templated=True)
    assert asked == [["one"], ["one", "no"], ["one", "no"], ["one", "two"], ["one", "two"]]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["sampling.temperature=nan"], "sampling.temperature is nan"),
        (["sampling.temperature=-1"], "sampling.temperature is -1.0"),
        (["sampling.max_new_tokens=0"], "sampling.max_new_tokens is 0"),
        (["sampling.top_p=0"], "sampling.top_p is 0.0"),
        (["sampling.top_k=-1"], "sampling.top_k is -1"),
        (["sampling.min_p=nan"], "sampling.min_p is nan"),
        (['sampling.stop=[""]'], "sampling.stop holds an empty text"),
        (["threads=-1"], "threads is -1"),
    ],
)
def test_what_no_answer_can_be_made_with_is_refused_at_the_start(prompts, capsys, words, told):
    assert run_stage("chat", chat_stage.ChatConfig, chat_stage.chat, "", words) == 2
    assert capsys.readouterr().err.startswith(f"chat: {told}")
    assert generate(f"input={prompts[0]}", *words) == 2 and capsys.readouterr().err.startswith(f"generate: {told}")
    assert [path.name for path in prompts[0].parent.iterdir()] == ["prompts.jsonl"]


def test_what_chat_refuses(capsys):
    assert run_stage("chat", chat_stage.ChatConfig, chat_stage.chat, "", ["template=true"]) == 2
    assert "has no chat template" in capsys.readouterr().err
    assert run_stage("chat", chat_stage.ChatConfig, chat_stage.chat, "", ["system=x"]) == 2
    assert run_stage("chat", chat_stage.ChatConfig, chat_stage.chat, "", ["--resume"]) == 2


def generate(*arguments):
    return run_stage("generate", generate_stage.GenerateConfig, generate_stage.generate, "", list(map(str, arguments)))


@pytest.fixture()
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = arithmetic_rows(7, seed=3, held_out=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, rows


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_generate_keeps_the_rows_and_a_batch_changes_nothing(prompts, tmp_path):
    path, rows = prompts
    options = [f"input={path}", "samples=2", "sampling.temperature=1", "logprobs=true", "seed=5"]
    assert generate(*options) == 0 and generate(*options, "batch=3", f"output={tmp_path / 'other.jsonl'}") == 0
    made = read(tmp_path / "prompts.samples.jsonl")
    for one, other in zip(made, read(tmp_path / "other.jsonl"), strict=True):
        assert [s["ids"] for s in one["samples"]] == [s["ids"] for s in other["samples"]]
    assert [{k: v for k, v in row.items() if k != "samples"} for row in made] == rows
    assert all(len(s["ids"]) == s["tokens"] == len(s["logprobs"]) == len(s["raw_logprobs"]) for row in made for s in row["samples"])


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_resume_after_a_torn_write_ends_in_the_same_file(prompts, tmp_path, share):
    path, _ = prompts
    target = tmp_path / "prompts.samples.jsonl"
    options = [f"input={path}", "sampling.temperature=1", "batch=2"]
    assert generate(*options) == 0
    whole = target.read_bytes()
    target.write_bytes(whole[: int(len(whole) * share)])
    assert generate(*options, "--resume") == 0 and target.read_bytes() == whole


def test_what_generate_refuses(prompts, tmp_path, capsys):
    path, _ = prompts
    target = tmp_path / "prompts.samples.jsonl"
    assert generate(f"input={path}", "--dry-run") == 0 and not target.exists()
    target.write_text('{"prompt": "another", "samples": []}\n')
    assert generate(f"input={path}") == 2 and "exists; name another output=" in capsys.readouterr().err
    assert generate(f"input={path}", "--resume") == 2 and "samples.jsonl:1 is not about row 1" in capsys.readouterr().err
    for text, wanted in (('{"prompt": 3}', 'object with "prompt"'), ("{", "not JSON"), ("[]", 'object with "prompt"')):
        (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n' + text + "\n")
        assert generate(f"input={tmp_path / 'bad.jsonl'}") == 2
        message = capsys.readouterr().err
        assert "bad.jsonl:2: " in message and wanted in message
    assert generate(f"input={path}", "system=x") == 2 and "without chat=true" in capsys.readouterr().err
    for words, wanted in (
        (["samples=0"], "samples is 0"),
        (["batch=0"], "batch is 0"),
        (["samples=2", "sampling.temperature=0"], "would all be alike"),
        (["chat=true"], "has no chat template; ask with bare prompts"),
        (["output=nowhere/x.jsonl"], "nowhere/x.jsonl: cannot be written (No such file or directory)"),
        (["input=nowhere.jsonl"], "nowhere.jsonl: cannot be read (No such file or directory)"),
    ):
        assert generate(f"input={path}", f"output={tmp_path / 'new.jsonl'}", *words) == 2 and wanted in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bad.jsonl", "prompts.jsonl", "prompts.samples.jsonl"]


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("p.jsonl", b'{"prompt": "x"}\n\xff\n', "p.jsonl:2: byte 0xff is not UTF-8"),
        ("p.txt", b"Leo has 3.\n\xff\n", "p.txt:2: byte 0xff is not UTF-8"),
        ("p.jsonl", b'\n{"prompt": "\\ud800"}\n', "p.jsonl:2: character 0 is the lone surrogate"),
        (
            "p.jsonl",
            b'{"prompt": "x"}\n{"prompt": "' + b"7 " * 300 + b'"}\n',
            "p.jsonl:2: the prompt has 601 tokens, and the",
        ),
        ("p.jsonl", b'{"messages": [{"role": "user", "content": "x"}]}\n', "p.jsonl has rows of messages, but"),
        ("p.jsonl", b'{"prompt": "x"}\n{"messages": []}\n', "p.jsonl:2: \"messages\" is '[]'; expected is a list of at least one"),
        ("p.jsonl", b'{"prompt": "x", "messages": "y"}\n', "p.jsonl:1: \"messages\" is 'y'; expected is a list of at least one"),
        ("p.jsonl", b"\n", "p.jsonl has no prompts"),
        ("p.jsonl", b'{"prompt": "x", "id": "\\ud800"}\n', "p.jsonl:1: holds a lone surrogate"),
        ("p.jsonl", b'{"prompt": "x", "id": NaN}\n', "p.jsonl:1: not JSON (Out of range float"),
        ("p.jsonl", b'{"prompt": "x", "id": 1e999}\n', "p.jsonl:1: not JSON (Out of range float"),
        ("p.jsonl", b'{"prompt": "x", "id": ' + b"[" * 3000 + b"]" * 3000 + b"}\n", "p.jsonl:1: not JSON (maximum recursion depth"),
    ],
)
def test_a_prompt_that_cannot_be_asked_is_named_with_file_and_line(tmp_path, capsys, name, data, told):
    (tmp_path / name).write_bytes(data)
    assert generate(f"input={tmp_path / name}", "batch=1") == 2
    assert told in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == [name]


def test_an_input_that_is_no_file_is_told(capsys):
    assert generate("input=/") == 2 and "input /: cannot be read (Is a directory)" in capsys.readouterr().err


def test_a_file_of_windows_is_read(tmp_path):
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfLeo has 19 coins.\r\nAna has 7.\r\n")
    assert generate(f"input={tmp_path / 'p.txt'}", "sampling.max_new_tokens=4") == 0
    assert [row["prompt"] for row in read(tmp_path / "p.samples.jsonl")] == ["Leo has 19 coins.", "Ana has 7."]


def test_a_resume_with_other_settings_or_of_another_file_changes_nothing(prompts, tmp_path, capsys):
    path, rows = prompts
    target, settings = tmp_path / "prompts.samples.jsonl", tmp_path / "prompts.samples.jsonl.settings.json"
    assert generate(f"input={path}", "sampling.temperature=1") == 0
    whole = target.read_bytes()
    half = whole[: len(whole) // 2]
    target.write_bytes(half)
    for words, told in (
        (["sampling.temperature=0.5"], "sampling.temperature was 1.0, is 0.5"),
        (["sampling.temperature=1", "seed=3"], "seed was 0, is 3"),
        (["sampling.temperature=1", "samples=2"], "is not about row 1 of the input with 2 samples"),
    ):
        assert generate(f"input={path}", "--resume", *words) == 2 and told in capsys.readouterr().err
    kept = settings.read_bytes()
    settings.unlink()
    assert generate(f"input={path}", "--resume", "sampling.temperature=1") == 2 and "nothing says what" in capsys.readouterr().err
    settings.write_bytes(kept.replace(b'"weights": "', b'"weights": "0'))
    assert generate(f"input={path}", "--resume", "sampling.temperature=1") == 2 and "weights was " in capsys.readouterr().err
    settings.write_bytes(kept)
    assert generate(f"input={path}", "--resume", "sampling.temperature=1", "batch=3") == 0 and target.read_bytes() == whole
    # The input for the output by mistake: with --resume its last line, which has no end, would have been cut away.
    path.write_text("\n".join(map(json.dumps, rows)))
    before = path.read_bytes()
    assert generate(f"input={path}", f"output={path}", "--resume") == 2 and "is not about row 1" in capsys.readouterr().err
    target.write_bytes(b"{\n")
    assert generate(f"input={path}", "--resume") == 2 and "samples.jsonl:1 is not about row 1" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_an_output_has_one_writer_and_a_dry_run_cuts_nothing(prompts, tmp_path, capsys):
    path, _ = prompts
    target = tmp_path / "prompts.samples.jsonl"
    assert generate(f"input={path}") == 0
    whole = target.read_bytes()
    torn = whole[: int(len(whole) * 0.9)]
    target.write_bytes(torn)
    with target.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert generate(f"input={path}", "--resume") == 2 and "another process writes it" in capsys.readouterr().err
    assert generate(f"input={path}", "--resume", "--dry-run") == 0 and target.read_bytes() == torn
    assert generate(f"input={path}", "--resume") == 0 and target.read_bytes() == whole


def test_a_full_disk_is_one_line_and_a_resume_goes_on(prompts, tmp_path, monkeypatch, capsys):
    path, _ = prompts
    target = tmp_path / "prompts.samples.jsonl"
    options = [f"input={path}", "sampling.temperature=1", "batch=2"]
    assert generate(*options) == 0
    whole = target.read_bytes()
    target.unlink()
    writes = []

    def full(descriptor):
        writes.append(descriptor)
        if len(writes) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(_common.os, "fsync", full)
        capsys.readouterr()
        assert generate(*options) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == f"generate: {target}: cannot be written (No space left on device); free space there, and go on with --resume"
    assert generate(*options, "--resume") == 0 and target.read_bytes() == whole
