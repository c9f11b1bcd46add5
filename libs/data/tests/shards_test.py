"""Shards: the documents come back bit for bit; what is not what was written is refused by name; a crash leaves nothing wrong."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.data import (
    DataError,
    Example,
    Loader,
    arithmetic_demonstrations,
    arithmetic_tokenizer_config,
    arithmetic_tokenizer_json,
    build_shards,
    encode_rows,
    open_shards,
)
from align.data import _shards as private
from align.data import _workers as workers
from align.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_dict(arithmetic_tokenizer_json(), arithmetic_tokenizer_config())
ROWS = arithmetic_demonstrations(40, seed=0)


def build(directory, rows=ROWS, **options):
    return build_shards(rows, TOKENIZER, directory, **({"kind": "completion", "max_length": 50, "rows_per_shard": 16} | options))


def files(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def same(one, two):
    return one.ids.dtype == two.ids.dtype and one.ids.tolist() == two.ids.tolist() and one.mask.tolist() == two.mask.tolist()


DOCUMENTS = st.lists(
    st.lists(st.tuples(st.integers(0, 70_000), st.booleans()), min_size=1, max_size=30).map(
        lambda pairs: Example(np.array([p[0] for p in pairs], np.int32), np.array([p[1] for p in pairs], np.bool_))
    ),
    max_size=20,
)


@settings(max_examples=12)  # each writes and syncs files
@given(st.lists(DOCUMENTS, min_size=1, max_size=4), st.integers(1, 200))
def test_documents_come_back(tmp_path_factory, shards, chunk):
    directory = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private, "CHUNK", chunk)
        entries = [private.write_shard(directory, index, examples, {}) for index, examples in enumerate(shards)]
        private.write_manifest(directory, {}, {}, entries)
        opened = open_shards(directory)
        everything = [example for examples in shards for example in examples]
        assert len(opened.examples) == opened.documents == len(everything)
        for index in reversed(range(len(everything))):  # any order, not only the one of writing
            assert same(opened.examples[index], everything[index])
        assert opened.lengths.tolist() == [len(example.ids) for example in everything]
        assert opened.trained.tolist() == [example.mask[1:].sum() for example in everything]
        opened.verify()
    assert (opened.tokens, opened.trained_tokens) == (opened.lengths.sum(), opened.trained.sum())


def test_the_format_is_pinned(tmp_path):
    """The bytes of a small shard by hand: a change of format needs a new number."""
    private.write_shard(
        tmp_path,
        7,
        [
            Example(np.array([1, 2, 700], np.int32), np.array([0, 1, 1], np.bool_)),
        ],
        {},
    )
    content = (tmp_path / "shard-00007.bin").read_bytes()
    header = b"alignshd" + bytes([1, 0, 0, 0, 2, 0, 0, 0]) + (1).to_bytes(8, "little") + (3).to_bytes(8, "little")
    sections = [header, bytes([1, 0, 2, 0, 0xBC, 2]), bytes([0b110]), bytes([3, 0, 0, 0]), bytes([2, 0, 0, 0])]
    assert content == b"".join(section.ljust(64, b"\0") for section in sections)


def test_a_build_is_encode_rows_in_blocks(tmp_path):
    shards, encoded = build(tmp_path), encode_rows(ROWS, TOKENIZER, kind="completion", max_length=50)
    assert all(same(*pair) for pair in zip(shards.examples, encoded.examples, strict=True))
    counts = shards.manifest["counts"]
    assert counts == {
        "rows": 40,
        "kept": encoded.kept,
        "documents": encoded.kept,
        "dropped": dict(encoded.dropped),
        "truncated": encoded.truncated,
        "tokens": encoded.tokens,
        "trained_tokens": encoded.trained_tokens,
    }
    assert encoded.truncated and len(shards.manifest["shards"]) == 3
    assert shards.manifest["settings"]["tokenizer"] == TOKENIZER.fingerprint


def test_the_loader_takes_shards_as_it_takes_encoded_rows(tmp_path):
    options = {"global_batch": 4, "micro_batch": 2, "max_length": 128, "packing": True, "seed": 0}
    loader = Loader(build(tmp_path), **options)
    state = loader.state_dict()
    steps = [loader.next_step() for _ in range(6)]
    again = Loader(open_shards(tmp_path), **options)
    again.load_state_dict(json.loads(json.dumps(state)))
    for step in steps:
        other = again.next_step()
        assert (step.documents, step.trained_tokens) == (other.documents, other.trained_tokens)
        for one, two in zip(step.micro_batches, other.micro_batches, strict=True):
            assert (one.input_ids == two.input_ids).all() and (one.loss_mask == two.loss_mask).all()


def test_any_number_of_processes_makes_the_same_files(tmp_path):
    seen = []
    build(tmp_path / "one", progress=lambda rows, tokens: seen.append(rows))
    build(tmp_path / "two", processes=2)
    assert files(tmp_path / "one") == files(tmp_path / "two") and seen == [16, 32, 40]


@pytest.mark.parametrize("processes", [1, 2])
def test_every_row_that_is_encoded_is_a_sign_of_life(tmp_path, monkeypatch, processes):
    monkeypatch.setattr(workers, "SIGN_S", 0.0)
    signs, seen = [], []
    build(tmp_path, processes=processes, alive=lambda: signs.append(1), progress=lambda rows, tokens: seen.append(len(signs) >= rows))
    assert len(signs) == len(ROWS) and all(seen)


SCRIPT = """
import os, signal, sys
from align.data import DataError, _build, arithmetic_demonstrations, arithmetic_tokenizer_config, arithmetic_tokenizer_json, build_shards
from align.tokenizer import Tokenizer
worker, case = __name__ != "__main__", sys.argv[1]
if worker and case == "at work":
    _build.encode_block = lambda *words: os.kill(os.getpid(), signal.SIGKILL)
if case == "unguarded" or not worker:
    tokenizer = Tokenizer.from_dict(arithmetic_tokenizer_json(), arithmetic_tokenizer_config() | {"more": "than a pipe takes" * 10000})
    rows = [row | {"other": "than a pipe takes" * 10000} for row in arithmetic_demonstrations(20, seed=0)]
    if case == "rows":
        rows[13] = {"prompt": 1}
    try:
        build_shards(iter(rows), tokenizer, sys.argv[2], kind="completion", max_length=50, rows_per_shard=2, processes=2)
    except (DataError, TypeError) as error:
        sys.stdout.write(f"{'worker' if worker else 'parent'} {error}\\n")  # at once: two workers write
        if worker:
            raise
"""


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("unguarded", "a worker of build_shards ended with exit code 1 at its start: a script calls build_shards with processes under `if"),
        (
            "at work",
            "a worker of build_shards was ended by signal 9; where memory was short, take fewer processes, or fewer rows_per_shard",
        ),
        ("rows", ""),
    ],
)
def test_a_process_that_dies_ends_the_build_and_leaves_none(tmp_path, case, told):
    (tmp_path / "script.py").write_text(SCRIPT)
    program = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), case, str(tmp_path / "shards")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out = program.communicate(timeout=60)[0].splitlines()  # to the end of all that holds the pipes: no process is left
    finally:
        if program.returncode is None:
            os.killpg(program.pid, signal.SIGKILL)
            program.communicate()
    assert program.returncode == 0 and out[-1].startswith(f"parent {told}")
    assert all(line.startswith("worker ") and 'if __name__ == "__main__":' in line for line in out[:-1])
    assert (len(out) > 1) == (case == "unguarded")


def test_one_flipped_bit_anywhere_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(private, "CHUNK", 256)
    build(tmp_path / "good")
    name, size = "shard-00001.bin", len((tmp_path / "good" / "shard-00001.bin").read_bytes())
    for at in range(0, size, 61):
        bad = tmp_path / f"bad{at}"
        shutil.copytree(tmp_path / "good", bad)
        content = bytearray((bad / name).read_bytes())
        content[at] ^= 1 << at % 8
        (bad / name).write_bytes(content)
        shards = open_shards(bad)  # opening reads no shard
        with pytest.raises(DataError, match=rf"shard-00001.bin: the bytes from {at // 256 * 256} on are not those that were written"):
            shards.verify()
        with pytest.raises(DataError, match=name):
            list(shards.lengths), list(shards.trained), list(shards.examples)


def test_what_was_changed_is_refused_by_name(tmp_path):
    build(tmp_path)

    def refuse(message, **options):
        with pytest.raises(DataError, match=message):
            open_shards(tmp_path, **options)

    refuse("made with another tokenizer", fingerprint="0" * 64)
    shard, manifest = tmp_path / "shard-00002.bin", tmp_path / "manifest.json"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    refuse(f"shard-00002.bin: has {len(content) - 1} bytes, not {len(content)}")
    shard.unlink()
    refuse("shard-00002.bin: is missing; build the shards again")
    written = manifest.read_text()
    for text, message in (
        (written.replace('"max_length": 50', '"max_length": 51'), "manifest.json: is damaged"),
        (written.replace('"format": 1', '"format": 2'), "manifest.json: format 2, this version reads 1"),
        (written[:-9], "manifest.json: is damaged"),
        ("[]", "manifest.json: is damaged"),
    ):
        manifest.write_text(text)
        refuse(message)
    manifest.unlink()
    refuse("has no manifest.json; it is no directory of shards, or they are not finished yet")
    with pytest.raises(DataError, match="holds no whole shard"):
        (tmp_path / "empty").mkdir()
        open_shards(tmp_path / "empty", partial=True)


def test_shards_can_be_read_while_others_are_written(tmp_path):
    counts = []

    def look(rows, tokens):
        shards = open_shards(tmp_path, partial=True, fingerprint=TOKENIZER.fingerprint)
        shards.verify()
        counts.append(shards.manifest.get("counts", {}).get("rows") or sum(1 for _ in shards.examples))

    build(tmp_path, progress=look)
    assert counts == [16, 32, 40]


def test_a_directory_of_other_rows_or_settings_is_left_alone(tmp_path):
    build(tmp_path)
    before = files(tmp_path)
    for message, options in (
        (r"made with other settings \(max_length was 50 and is now 60\)", {"max_length": 60}),
        ("shard-00002.bin: is damaged, or made of other rows", {"rows": ROWS[:39]}),
        ("holds shards of another number of rows", {"rows": ROWS[:32]}),
        ("shard-00000.bin: is damaged, or made of other rows", {"rows": ROWS[::-1]}),
        ("rows_per_shard 0 and processes 1 must be at least 1", {"rows_per_shard": 0}),
    ):
        with pytest.raises(DataError, match=message):
            build(tmp_path, **options)
        assert files(tmp_path) == before
    assert build(tmp_path).documents == 40
    with pytest.raises(DataError, match="no rows are left of 1"):
        build(tmp_path / "none", rows=[{"prompt": "a", "completion": ""}])
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be made \(Not a directory\)"):
        build(tmp_path / "file" / "shards")


def test_a_crash_at_any_write_and_a_second_run_give_the_same_files(tmp_path, monkeypatch):
    """Crashes before, in the middle of and after each of the writes; then the same call again."""
    build(tmp_path / "whole")
    whole = files(tmp_path / "whole")
    replace, calls = os.replace, 0

    def crash(source, target):
        nonlocal calls
        calls += 1
        if calls == at:
            if torn:
                Path(source).write_bytes(b"torn")
            else:
                replace(source, target)
            raise KeyboardInterrupt
        replace(source, target)

    for at in range(1, len(whole) + 1):
        for torn in (False, True):
            directory, calls = tmp_path / f"{at}{torn}", 0
            monkeypatch.setattr(os, "replace", crash)
            with pytest.raises(KeyboardInterrupt):
                build(directory)
            monkeypatch.setattr(os, "replace", replace)
            build(directory)
            assert {name: content for name, content in files(directory).items() if not name.startswith(".")} == whole
