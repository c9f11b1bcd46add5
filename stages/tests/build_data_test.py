"""build_data as a user starts it: what it writes, from every kind of source, what it refuses, and what a kill leaves."""

import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _entry import run_stage
from build_data import BuildDataConfig, build_data
from hub_server import COMMIT, REPO, TOKEN, Server

from align.config import load as load_configuration
from align.data import arithmetic_demonstrations, bundled, bundled_rows, encode_rows, open_shards, read_rows, solution_pairs
from align.ingest import to_jsonl
from align.tokenizer import Tokenizer
from align.tracking import read_history

STAGES = Path(__file__).absolute().parents[1]
PARQUET = STAGES.parent / "libs/ingest/tests/data"
TOKENIZER = STAGES / "models/arithmetic"
ROWS = arithmetic_demonstrations(60, seed=0)
TINY = [f"shards.tokenizer={TOKENIZER}", "tests.sets=asked.jsonl", "shards.rows_per_shard=10"]


@pytest.fixture(autouse=True)
def caller(tmp_path, monkeypatch):
    """The person stands in a folder with a file of rows and one of questions; the second row holds the second question."""
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(tmp_path))
    write(tmp_path / "rows.jsonl", [*ROWS, ROWS[0], {**ROWS[3], "prompt": ROWS[3]["prompt"].upper()}])
    write(tmp_path / "asked.jsonl", [{"prompt": "What is this about, then?", "answer": "1"}, {"prompt": ROWS[1]["prompt"], "answer": "2"}])
    return tmp_path


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def start(*words, tiny=True):
    return run_stage("build_data", BuildDataConfig, build_data, "", [*(TINY if tiny else []), *words])


def result_of(run):
    return json.loads((run / "stage_result.json").read_text())


def built(run):
    """All that must not depend on how often a build was killed: rows, tests, shards, and what they are of."""
    files = [path for path in run.rglob("*") if path.is_file() and path.relative_to(run).parts[0] in ("rows", "tests", "shards")]
    return {str(path.relative_to(run)): path.read_bytes() for path in [*files, run / "rows.json", run / "sources.json"]}


def test_a_build_leaves_everything(caller, capsys):
    assert start("run_dir=run", "data.sources=rows.jsonl") == 0
    run, printed = caller / "run", capsys.readouterr()
    assert {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and path.suffix not in (".bin", ".json")} == {
        ".lock", "config.toml", "eval.jsonl", "history.jsonl", "samples.jsonl", "report.html", "rows/train.jsonl", "rows/removed.jsonl",
        "tests/asked.jsonl", "tests/PROVENANCE.md",
    }  # fmt: skip
    result = result_of(run)
    assert (result["stage"], result["status"], result["steps"]) == ("build_data", "done", 6)
    numbers = result["metrics"]["after"]
    assert (numbers["rows_read"], numbers["rows_kept"]) == (62, 59)
    assert (numbers["rows_removed_copy"], numbers["rows_removed_contaminated"]) == (2, 1)
    assert (numbers["asked_rows_removed"], numbers["asked_questions_found"], numbers["asked_questions_too_short"]) == (1, 1, 0)
    assert read_rows(run / "rows/train.jsonl").rows == [ROWS[0], *ROWS[2:]]
    removed = [json.loads(line) for line in (run / "rows/removed.jsonl").read_text().splitlines()]
    assert [(line["why"], line["row"].rpartition("/")[2]) for line in removed] == [
        ("contaminated", "rows.jsonl:2"), ("copy", "rows.jsonl:61"), ("copy", "rows.jsonl:62"),
    ]  # fmt: skip
    assert removed[0]["item"] == 1 and [line.get("of_row_read") for line in removed] == [None, 0, 3]

    # The shards are those rows, encoded as a stage encodes them.
    tokenizer = Tokenizer.load(TOKENIZER)
    encoded = encode_rows([ROWS[0], *ROWS[2:]], tokenizer, kind="completion", max_length=2048)
    shards = open_shards(run / "shards/train", fingerprint=tokenizer.fingerprint)
    shards.verify()
    assert [(a.ids.tolist(), a.mask.tolist()) for a in shards.examples] == [(a.ids.tolist(), a.mask.tolist()) for a in encoded.examples]
    assert (numbers["train_tokens"], numbers["train_trained_tokens"]) == (encoded.tokens, encoded.trained_tokens)

    # What a person sees: counts on the screen, the summary page with figures and documents.
    assert "62 read, 59 kept (59 train; kind completion), removed 1 contaminated, 2 copy" in printed.out
    assert f"next     ./bazelw run //stages:sft -- data.source={run / 'rows/train.jsonl'} model.path=<checkpoint>" in printed.out
    assert "step 6/6" in printed.err and "asked" in printed.out and "1 rows removed" in printed.out
    page = (run / "report.html").read_text()
    assert "rows removed contaminated" in page and ROWS[0]["completion"] in page
    assert [line["train_rows"] for line in read_history(run / "history.jsonl")] == [10, 20, 30, 40, 50, 59]
    assert load_configuration(BuildDataConfig, run / "config.toml").shards.rows_per_shard == 10
    content = (run / "tests/asked.jsonl").read_bytes()
    assert hashlib.sha256(content).hexdigest() in (run / "tests/PROVENANCE.md").read_text()


def test_the_default_s_tests_come_with_their_provenance(caller):
    assert start("run_dir=run", "data.rows=40", f"shards.tokenizer={TOKENIZER}", tiny=False) == 0
    run = caller / "run"
    numbers = result_of(run)["metrics"]["after"]
    assert (numbers["rows_read"], numbers["rows_removed_contaminated"]) == (40, 1)  # line 21: libs/data/tests/overlap_test.py
    for name in ("gsm8k_test", "math500"):
        rows = read_rows(run / f"tests/{name}.jsonl")
        wanted = bundled_rows(name)
        assert rows.kind == "answer" and [(row["prompt"], row["answer"]) for row in rows.rows] == [
            (row["prompt"], row["answer"]) for row in wanted.rows
        ]
        assert wanted.digest in (run / "tests/PROVENANCE.md").read_text()
    text = (run / "tests/PROVENANCE.md").read_text()
    assert text.count("MIT License") == 2 and "openai/grade-school-math" in text and "hendrycks/math" in text


def sources_of(caller, server):
    """The same rows in every form and place."""
    write(caller / "clean.jsonl", ROWS[2:40])
    content = (caller / "clean.jsonl").read_bytes()
    (caller / "packed.jsonl.gz").write_bytes(gzip.compress(content))
    (caller / "parts").mkdir()
    write(caller / "parts/a.jsonl", ROWS[2:20])
    write(caller / "parts/b.jsonl", ROWS[20:40])
    write(caller / "theirs.jsonl", [{"question": row["prompt"], "reply": row["completion"]} for row in ROWS[2:40]])
    server.files |= {"data/x.jsonl": content, "data/y.jsonl.gz": gzip.compress(content)}
    return {
        "plain": ["data.sources=clean.jsonl"],
        "gzip": ["data.sources=packed.jsonl.gz"],
        "wildcards": ["data.sources=parts/*.jsonl"],
        "two files": ["data.sources=parts/a.jsonl,parts/b.jsonl"],
        "renamed": ["data.sources=theirs.jsonl", "data.rename=question=prompt,reply=completion"],
        "hub": [f"data.sources=hub:{REPO}/data/x.jsonl"],
        "hub, streamed": [f"data.sources=hub:{REPO}@main/data/x.jsonl", "data.stream=true"],
        "hub, gzip, by wildcard": [f"data.sources=hub:{REPO}/data/y*.gz"],
        "hub, gzip, streamed": [f"data.sources=hub:{REPO}/data/y.jsonl.gz", "data.stream=true"],
        "two processes": ["data.sources=clean.jsonl", "shards.processes=2"],
    }


@pytest.fixture
def server(caller, monkeypatch):
    made = Server()
    monkeypatch.setenv("HF_ENDPOINT", made.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("ALIGN_CACHE", str(caller / "cache"))
    yield made
    made.close()


def test_the_same_rows_from_every_source_are_the_same_shards(caller, server):
    digests = {}
    for name, words in sources_of(caller, server).items():
        run = f"run {len(digests)}"
        assert start(f"run_dir={run}", *words) == 0, name
        digests[name] = (result_of(caller / run)["shards"]["train"]["digest"], (caller / run / "rows/train.jsonl").read_bytes())
    assert len(set(digests.values())) == 1, {name: digest for name, (digest, _) in digests.items()}
    assert not server.leaks() and any(entry["token"] for entry in server.log)
    kept = json.loads((caller / "run 5/sources.json").read_text())["files"][0]["name"]
    assert kept == f"hub:{REPO}@{COMMIT}/data/x.jsonl"  # the branch may move, the build stays


def test_parquet_gives_the_rows_of_the_json_lines(caller):
    """Through the ingest tool, a process of its own."""
    published = gzip.decompress(bundled("gsm8k_test").read_bytes()).splitlines()[:60]
    write(caller / "first.jsonl", [json.loads(line) for line in published])
    assert start("run_dir=json", "data.sources=first.jsonl", "data.format=gsm8k") == 0
    expected = (caller / "json/rows/train.jsonl").read_bytes()
    flat = PARQUET / "gsm8k_test_flat_zstd.parquet"
    assert start("run_dir=flat", f"data.sources={flat}", "data.format=gsm8k") == 0
    assert (caller / "flat/rows/train.jsonl").read_bytes() == expected
    (caller / "chat.toml").write_text(f"[data]\ntemplate = {json.dumps(CHAT)}\n")
    chats = PARQUET / "gsm8k_test_snappy_rg20.parquet"
    assert start("--config", "chat.toml", "run_dir=chats", f"data.sources={chats}", "data.columns=messages") == 0
    to_jsonl(chats, caller / "chats.jsonl", columns=["messages"])
    assert (caller / "chats/rows/train.jsonl").read_bytes() == (caller / "chats.jsonl").read_bytes()


def test_without_the_ingest_library_its_tool_is_called_or_named(caller, capsys, monkeypatch):
    monkeypatch.setattr("_sources.importlib.util.find_spec", lambda name: None)
    words = [f"data.sources={PARQUET / 'gsm8k_test_flat_zstd.parquet'}", "data.format=gsm8k"]
    assert start("run_dir=run", *words) == 2
    assert "align.ingest, which is not here: pip install 'align-ingest[parquet]'" in capsys.readouterr().err
    wrapper = caller / "bazelw"
    tool = f"PYTHONPATH={os.environ['PYTHONPATH']} exec {sys.executable} -m align.ingest"
    wrapper.write_text(f'#!/bin/sh\necho "$@" > words\nshift 4\n{tool} "$@"\n')
    wrapper.chmod(0o755)
    assert start("run_dir=run", *words) == 0
    assert (caller / "words").read_text().startswith("run --noshow_progress //libs/ingest:to_jsonl -- /")
    (caller / "bad.parquet").write_bytes(b"PAR1" + b"\0" * 100)
    assert start("run_dir=other", "data.sources=bad.parquet") == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"build_data: data.sources: {caller / 'bad.parquet'}: is no whole parquet file")


def test_text_files(caller, capsys):
    texts = [row["prompt"] for row in ROWS[2:12]]
    (caller / "a.txt").write_text("\n".join(texts[:5]) + "\n\n" + "\n".join(texts[5:]) + "\n")
    (caller / "b.md.gz").write_bytes(gzip.compress(texts[0].encode()))
    documents = {}
    for by in ("file", "line", "paragraph"):
        assert start(f"run_dir={by}", "data.sources=a.txt,b.md.gz", f"data.text={by}", "data.dedupe=none") == 0
        documents[by] = [row["text"] for row in read_rows(caller / by / "rows/train.jsonl").rows]
    first, second = "\n".join(texts[:5]), "\n".join(texts[5:])
    assert documents == {
        "file": [f"{first}\n\n{second}", texts[0]], "line": [*texts, texts[0]], "paragraph": [first, second, texts[0]],
    }  # fmt: skip
    capsys.readouterr()
    assert start("run_dir=split", "data.sources=a.txt", "shards.max_length=20", "shards.overlong=split") == 0
    assert f"next     ./bazelw run //stages:pretrain -- data.source={caller / 'split/shards/train'}" in capsys.readouterr().out
    shards = open_shards(caller / "split/shards/train")
    assert max(shards.lengths) == 20 and shards.tokens == open_shards(caller / "file/shards/train").lengths[0]


def test_published_forms_and_kinds_without_tokens(caller):
    """Preference, answer and steps rows are kept as rows: the stages that use them encode them."""
    (caller / "raw.jsonl").write_bytes(gzip.decompress(bundled("gsm8k_solutions").read_bytes())[:40000].rpartition(b"\n")[0])
    assert start("run_dir=pairs", "data.sources=raw.jsonl", "data.format=solutions") == 0
    pairs, dropped = solution_pairs(caller / "raw.jsonl")
    numbers = result_of(caller / "pairs")["metrics"]["after"]
    assert read_rows(caller / "pairs/rows/train.jsonl").kind == "preference" and not (caller / "pairs/shards").exists()
    assert numbers["rows_kept"] == len(pairs) and numbers["rows_removed_all_wrong"] == dropped["all_wrong"] > 0
    assert start("run_dir=removed", "data.sources=gsm8k_solutions", "tests.sets=gsm8k_test") == 2  # answers to the test's own questions
    assert start("run_dir=answers", "data.sources=math500") == 0
    assert read_rows(caller / "answers/rows/train.jsonl").kind == "answer"


def test_every_field_changes_something(caller):
    prompt, completion = ROWS[2]["prompt"], ROWS[2]["completion"]
    changed = {"a": [{"prompt": prompt, "completion": completion}, {"prompt": prompt.upper(), "completion": completion}]}
    write(caller / "copies.jsonl", changed["a"])
    (caller / "chat.toml").write_text(f"[data]\nchat = true\ntemplate = {json.dumps(CHAT)}\n")
    (caller / "other.toml").write_text(f"[data]\nchat = true\ntemplate = {json.dumps('B' + CHAT)}\n")

    def digest(*words, source="rows.jsonl"):
        run = f"run{len(list(caller.glob('run*')))}"
        assert start(f"run_dir={run}", f"data.sources={source}", *words) == 0, words
        return result_of(caller / run)["shards"].get("train", {}).get("digest"), (caller / run / "rows/train.jsonl").read_bytes()

    plain = digest()
    chat = digest("--config", "chat.toml")
    for words in (["data.rows=20"], ["data.held_out=0.3"], ["tests.words=0"], ["data.dedupe=none"], ["shards.max_length=40"],
                  ["shards.max_length=40", "shards.overlong=drop"], ["--config", "chat.toml"]):  # fmt: skip
        assert digest(*words) != plain, words
    assert digest("--config", "other.toml")[0] != chat[0] and digest("--config", "chat.toml", "data.system=1")[0] != chat[0]
    assert len(digest("data.dedupe=exact", source="copies.jsonl")[1].splitlines()) == 2
    assert len(digest(source="copies.jsonl")[1].splitlines()) == 1
    assert start("run_dir=x", "data.sources=rows.jsonl", "data.kind=text") == 2


def test_held_out_questions_are_in_shards_of_their_own(caller):
    assert start("run_dir=run", "data.sources=rows.jsonl", "data.held_out=0.3") == 0
    train, held = (read_rows(caller / f"run/rows/{side}.jsonl").rows for side in ("train", "held_out"))
    assert len(train) + len(held) == 59 and 5 < len(held) < 30
    assert {row["prompt"] for row in train}.isdisjoint(row["prompt"] for row in held)
    assert open_shards(caller / "run/shards/held_out").documents == len(held)


def test_a_dry_run_says_what_would_be_and_writes_nothing(caller, server, capsys):
    server.files["x.jsonl"] = (caller / "rows.jsonl").read_bytes()
    server.files["y.parquet"] = (PARQUET / "gsm8k_test_flat_zstd.parquet").read_bytes()
    before = sorted(caller.iterdir())
    assert start("run_dir=run", f"data.sources=rows.jsonl,hub:{REPO}/x.jsonl", "data.stream=true", "--dry-run") == 0
    told = capsys.readouterr().out
    assert f"hub:{REPO}@{COMMIT}/x.jsonl" in told and "jsonl, " in told and "asked (2 questions)" in told
    assert "of all rows: 59 train, 0 held out, removed {'contaminated': 1, 'copy': 64}" in told and "59 rows kept" in told
    assert "dry run: nothing was written" in told
    words = ["run_dir=run", f"data.sources=hub:{REPO}/y.parquet", "data.rename=question=prompt,answer=completion"]
    assert start(*words, "--dry-run") == 0
    assert "of all rows: 60 train" in capsys.readouterr().out and not server.leaks()
    assert [path for path in caller.iterdir() if path.name != "cache"] == before and not list((caller / "cache").rglob("*.parquet"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["data.sources=absent.jsonl"], "absent.jsonl is not a file that is there (the bundled sets are gsm8k_train"),
        (["data.sources=."], "is a directory; name its files"),
        (["data.sources=*.none"], "no file matches"),
        (["data.sources=[]"], "data.sources is empty"),
        (["data.sources=rows.jsonl,./rows.jsonl,rows.jsonl"], "rows.jsonl 3 times"),
        (["data.sources=bad.jsonl"], "bad.jsonl:2: not JSON"),
        (["data.sources=table.csv"], "table.csv: is not read"),
        (["data.sources=hub:nowhere"], "names no file of a hub"),
        (["data.sources=rows.jsonl,chat.jsonl"], "chat.jsonl:1: is of kind messages, the rows before it of kind completion"),
        (["data.rename=a"], "data.rename 'a' is not of the form theirs=ours"),
        (["data.rename=a=b"], "rows.jsonl:1: has no field 'a' (data.rename); it has 'prompt', 'completion'"),
        (["data.rename=completion=prompt"], "rows.jsonl:1: has a field 'prompt' already"),
        (["data.sources=chat.jsonl", "data.chat=true"], "data.chat is for rows of prompt and completion"),
        (["data.rows=0"], "data.rows is 0"),
        (["data.held_out=1"], "held_out 1.0 must be at least 0 and less than 1"),
        (["tests.words=3"], "n 3 must be at least 5"),
        (["tests.sets=[]"], "tests.sets is empty"),
        (["tests.sets=asked.jsonl,./asked.jsonl"], "names a set twice"),
        (["tests.sets=rows.jsonl"], "field 'answer' is missing"),
        (["shards.tokenizer=nowhere"], "nowhere"),
        (["shards.max_length=1"], "max_length 1 leaves no target"),
        (["shards.overlong=split"], "overlong 'split' would train the tail"),
        (["shards.processes=0"], "processes 0 must be at least 1"),
        (["shards.rows_per_shard=0"], "rows_per_shard 0 and"),
        (["data.system=hello"], "template and system are for rows of kind messages"),
        (["run_dir=rows.jsonl/x"], "rows.jsonl/x: cannot be made"),
        (["run_dir=."], "holds other things already"),
        (["--allow-change", "run_dir"], "build_data changes nothing that is there"),
        (["data.sources=same.jsonl"], "no rows are left of 1 (contaminated 1); rows that hold the questions of tests.sets are removed"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(caller, capsys, words, told):
    (caller / "bad.jsonl").write_text('{"text": "a"}\n{"text": a}\n')
    (caller / "table.csv").write_text("a,b\n")
    write(caller / "chat.jsonl", [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}])
    write(caller / "same.jsonl", [{"prompt": ROWS[1]["prompt"], "completion": "1"}])
    assert start("run_dir=run", "data.sources=rows.jsonl", *words) == 2
    printed = capsys.readouterr()
    assert told in printed.err and printed.err.count("\n") == 1 and printed.err.startswith("build_data: ")


def test_what_is_built_is_not_built_over(caller, capsys):
    words = ["run_dir=run", "data.sources=rows.jsonl"]
    assert start(*words) == 0
    first = built(caller / "run")
    assert start(*words, "--resume") == 0 and built(caller / "run") == first
    capsys.readouterr()
    for more, told in (
        (["shards.max_length=99"], "was built with other settings (shards.max_length was 2048 and is 99); name a new directory"),
        (["data.sources=rows.jsonl,asked.jsonl"], "data.sources was"),
    ):
        assert start(*words, *more) == 2 and told in capsys.readouterr().err
    os.utime(caller / "rows.jsonl")  # only touched
    assert start(*words) == 0
    write(caller / "rows.jsonl", ROWS[:30])
    assert start(*words) == 2
    assert "rows.jsonl: was changed since" in capsys.readouterr().err and built(caller / "run") == first
    (caller / "rows.jsonl").unlink()
    assert start(*words) == 2


def test_other_files_than_before_are_refused_and_settings_may_change_while_nothing_is_whole(caller, capsys):
    (caller / "parts").mkdir()
    write(caller / "parts/a.jsonl", ROWS[2:30])
    assert start("run_dir=run", "data.sources=parts/*") == 0
    write(caller / "parts/b.jsonl", ROWS[30:])
    assert start("run_dir=run", "data.sources=parts/*") == 2
    assert f"was built of other files than data.sources names now ({caller / 'parts/b.jsonl'})" in capsys.readouterr().err
    (caller / "chat.toml").write_text(f"[data]\ntemplate = {json.dumps(CHAT)}\n")
    chat = ["run_dir=chat", "data.sources=rows.jsonl", "data.chat=true"]
    assert start(*chat) == 2
    assert "has no chat template, and conversations need one" in capsys.readouterr().err
    assert start("--config", "chat.toml", *chat) == 0


def test_a_full_disk_is_one_line(caller):
    code = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\nfrom build_data import *"
    process = begin(caller, "run", code=code)
    told = process.communicate()[1].splitlines()[-1]
    assert process.returncode == 2 and "rows/train.jsonl: cannot be written (File too large); free space, or name another run_dir" in told
    assert not list(caller.rglob("*.partial"))
    assert start("run_dir=run", "data.sources=rows.jsonl") == 0


def test_damage_in_the_folder_is_named(caller, capsys):
    words = ["run_dir=run", "data.sources=rows.jsonl"]
    assert start(*words) == 0
    damage = {"rows/train.jsonl": "train.jsonl: is missing or was changed", "shards/train/shard-00001.bin": "shard-00001.bin: is damaged"}
    for name, told in damage.items():
        path = caller / "run" / name
        content = path.read_bytes()
        path.write_bytes(bytes([content[100] ^ 1 if i == 100 else byte for i, byte in enumerate(content)]))
        capsys.readouterr()
        assert start(*words) == 2 and told in capsys.readouterr().err
        path.write_bytes(content)
    for name in ("rows.json", "sources.json"):
        content = (caller / "run" / name).read_bytes()
        for damaged in (content[:-20], b'{"files": 1}'):
            (caller / "run" / name).write_bytes(damaged)
            assert start(*words) == 2 and f"{name}: is damaged; remove" in capsys.readouterr().err
        (caller / "run" / name).write_bytes(content)
    assert start(*words) == 0


def begin(caller, run, *more, code="from build_data import *"):
    program = f"{code}\nsys.exit(run_stage('build_data', BuildDataConfig, build_data, '', sys.argv[1:]))"
    words = [*TINY, f"run_dir={run}", "data.sources=rows.jsonl", *more]
    return subprocess.Popen([sys.executable, "-c", program, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_second_build_in_the_same_folder_is_refused(caller, capsys):
    code = "from build_data import *\nimport build_data as b\nb.write_tests = lambda *a: print('here', flush=True) or time.sleep(99)"
    process = begin(caller, "run", code=code)
    while process.stdout.readline() != "here\n":
        assert process.poll() is None
    assert start("run_dir=run", "data.sources=rows.jsonl") == 2
    assert "another build_data is at work there" in capsys.readouterr().err
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 5
    assert "build_data: stopped by SIGTERM; the same command goes on" in process.communicate()[1]
    result = result_of(caller / "run")
    assert result["status"] == "stopped" and "SIGTERM" in result["reason"]
    assert start("run_dir=run", "data.sources=rows.jsonl") == 0


KILLED = """
import os, signal
at, real = [{at}], os.replace
def replace(source, target):
    at[0] -= 1
    if at[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    real(source, target)
os.replace = replace
from build_data import *
"""


def test_killed_while_it_puts_a_file_in_place_and_run_again_it_leaves_the_same(caller):
    assert start("run_dir=whole", "data.sources=rows.jsonl") == 0
    for at in (1, 6, 14):  # of the files that are put in place: the first, among the rows, among the shards
        process = begin(caller, f"killed{at}", code=KILLED.format(at=at))
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert start(f"run_dir=killed{at}", "data.sources=rows.jsonl") == 0
        assert built(caller / f"killed{at}") == built(caller / "whole")
        assert not list((caller / f"killed{at}").rglob("*.partial"))


@pytest.mark.slow
def test_fifty_kills_at_random_and_a_run_each_leave_the_same(caller):
    """Kills at random in the time that a whole run takes, fifty that came in time; every build is then run again to its end."""
    write(caller / "rows.jsonl", arithmetic_demonstrations(1500, seed=0))
    words = ["data.sources=rows.jsonl", "data.held_out=0.2", "shards.rows_per_shard=100"]

    def started(run):
        process = begin(caller, run, *words[1:])
        process.stdout.readline()  # the first line, after the imports
        return process, time.monotonic()

    assert start("run_dir=whole", *words) == 0
    whole = built(caller / "whole")
    process, began = started("timed")
    process.communicate()
    duration, chance, killed = time.monotonic() - began, random.Random(0), 0
    for number in range(200):
        process, began = started(str(number))
        time.sleep(duration * chance.random())
        process.kill()
        process.communicate()
        if process.returncode == -signal.SIGKILL:
            killed += 1
        else:
            duration *= 0.8  # the machine is less busy than it was; that kill came too late
        assert start(f"run_dir={number}", *words) == 0
        assert built(caller / str(number)) == whole, number
        if killed == 50:
            return
    raise AssertionError(f"only {killed} kills came in time")


def test_it_needs_no_torch():
    program = "import sys, build_data; print(sorted({'torch', 'pyarrow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


CHAT = "{% for m in messages %}{% if m.role == 'user' %}Q{{ m.content }}{% else %}A{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
