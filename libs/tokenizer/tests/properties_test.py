"""What holds for every text and every stream of ids."""

import os
import pickle
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_cases import load, rows

from align.tokenizer import Decoder, Tokenizer, TokenizerError, vendored_dir
from align.tokenizer._units import Ids

NAMES = ("mistral-7b-v0.3", "mistral-7b-v0.3-legacy", "smollm2", "gpt2")

_PIECES = st.one_of(
    st.text(max_size=12),
    st.text("abc \n\t.,'0123\u00e9\u0301\u2581", max_size=30),
    st.sampled_from(["</s>", "<s>", "[INST]", "<|im_end|>", "<|endoftext|>", " ", "\n\n", "'s", "▁", "中文", "👍🏽", "\x16"]),
)
TEXTS = st.lists(_PIECES, max_size=5).map("".join)


@settings(max_examples=60)
@given(text=TEXTS)
def test_bytes_come_back_unless_the_report_says_so(text):
    for name in NAMES:
        tokenizer = load(name)
        report = tokenizer.loss_report(text)
        assert report.lossless == (tokenizer.decode_bytes(tokenizer.encode(text, special="literal")) == text.encode())
        assert report.lossless == (not report.losses)
        for loss in report.losses:
            assert loss.text == text[loss.start : loss.end] != ""
        if name == "gpt2":  # every byte is a token
            assert report.lossless
            assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode()


@settings(max_examples=60)
@given(data=st.data(), skip=st.booleans())
def test_streaming_is_the_whole_decode(data, skip):
    for name in NAMES:
        tokenizer = load(name)
        low = st.integers(0, min(tokenizer.vocab_size - 1, 1100))  # the byte and control tokens
        ids = data.draw(st.lists(st.one_of(low, st.integers(0, tokenizer.vocab_size - 1)), max_size=20))
        decoder = Decoder(tokenizer, skip_special=skip)
        assert "".join(map(decoder.push, ids)) + decoder.finish() == tokenizer.decode(ids, skip_special=skip)
        at = len(ids) // 2
        after = Decoder(tokenizer, skip_special=skip, prefix=ids[:at])
        shown, whole = tokenizer.decode(ids[:at], skip_special=skip), tokenizer.decode(ids, skip_special=skip)
        rest = "".join(map(after.push, ids[at:])) + after.finish()
        assert shown + rest == whole or "\ufffd" in shown + whole


@settings(max_examples=60)
@given(text=TEXTS, share=st.floats(0, 1))
def test_streaming_goes_on_after_any_prompt(text, share):
    for name in NAMES:
        tokenizer = load(name)
        ids = tokenizer.encode(text)
        at = int(share * len(ids))
        decoder = Decoder(tokenizer, prefix=ids[:at])
        shown, rest = tokenizer.decode(ids[:at]), "".join(map(decoder.push, ids[at:])) + decoder.finish()
        assert shown + rest == tokenizer.decode(ids) or "\ufffd" in shown


@settings(max_examples=60)
@given(text=TEXTS)
def test_offsets_tile_the_text(text):
    for name in NAMES:
        tokenizer = load(name)
        ids, chars = tokenizer.encode_with_offsets(text)
        assert ids == tokenizer.encode(text)
        assert all(0 <= start <= end <= len(text) for start, end in chars)
        assert [start for start, _ in chars] == sorted(start for start, _ in chars)
        same, spans = tokenizer.encode_with_offsets(text, unit="byte")
        assert same == ids
        if name == "gpt2":
            assert [start for start, _ in spans] == [0, *(end for _, end in spans)][: len(spans)]
            assert spans[-1][1] == len(text.encode()) if spans else not text
            for token, (start, end) in zip(ids, spans, strict=False):
                assert tokenizer.decode_bytes([token]) == text.encode()[start:end]


def test_byte_offsets_part_a_character():
    tokenizer = load("mistral-7b-v0.3")
    ids, spans = tokenizer.encode_with_offsets("a🫨b", unit="byte")
    assert [tokenizer.id_to_token(i) for i in ids] == ["▁a", "<0xF0>", "<0x9F>", "<0xAB>", "<0xA8>", "b"]
    assert spans == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)]
    assert tokenizer.encode_with_offsets("a🫨b").offsets == [(0, 1), (1, 2), (1, 2), (1, 2), (1, 2), (2, 3)]


def test_offsets_are_like_a_list_of_pairs():
    offsets = load("gpt2").encode_with_offsets("a b cé").offsets
    pairs = [(0, 1), (1, 3), (3, 5), (5, 6)]
    assert offsets == pairs and pairs == offsets and list(offsets) == pairs and repr(offsets) == f"Offsets({pairs})"
    assert offsets != pairs[1:] and offsets != [(0, 1), (1, 3), (3, 5), (5, 7)] and offsets != 3
    assert offsets[1:3] == pairs[1:3] and offsets[-1] == (5, 6) and (3, 5) in offsets and len(offsets) == 4
    assert list(offsets.starts) == [0, 1, 3, 5] and list(offsets.ends) == [1, 3, 5, 6]
    assert pickle.loads(pickle.dumps(offsets)) == offsets
    with pytest.raises(IndexError):
        offsets[4]


def test_unit_is_checked():
    with pytest.raises(TokenizerError, match="unit 'words' is neither"):
        load("gpt2").encode_with_offsets("a", unit="words")


def test_losses_have_reasons():
    mistral, smol = load("mistral-7b-v0.3"), load("smollm2")
    assert smol.loss_report("ju\x16st").losses == [(2, 3, "\x16", "dropped")]
    assert mistral.loss_report(" a▁b").losses == [(0, 1, " ", "space"), (2, 3, "▁", "mark")]


def test_drift():
    tokenizer = load("mistral-7b-v0.3")
    assert tokenizer.drift([1940, 1499]) == (False, 0, "hello", [7080, 29477])
    ids = tokenizer.encode("Hello world", add_special_tokens=True)
    assert tokenizer.drift(ids) == (True, None, "<s> Hello world", ids)
    assert tokenizer.drift([*ids, 1940, 1499]).at == 3
    gpt2 = load("gpt2")
    assert gpt2.drift([gpt2.token_to_id("l"), gpt2.token_to_id("o")]).same is False


def test_batches():
    tokenizer = load("smollm2")
    texts = [row["text"] for row in rows("cases") if row["tokenizer"] == "smollm2"][:60]
    single = [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch(texts) == single
    assert tokenizer.encode_batch(texts, processes=2) == single
    assert tokenizer.encode_batch([]) == []
    with pytest.raises(TokenizerError, match="processes 0"):
        tokenizer.encode_batch(texts, processes=0)
    with pytest.raises(TokenizerError, match="lone surrogate"):
        tokenizer.encode_batch(["a", "\ud800"], processes=2)


SCRIPT = """
import os, signal, sys
from align.tokenizer import Tokenizer, TokenizerError
worker, case = __name__ != "__main__", sys.argv[1]
if worker and case == "exits":
    os._exit(7)
if worker and case == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if worker and case == "at work":
    Tokenizer.encode = lambda *words, **more: os.kill(os.getpid(), signal.SIGKILL)
if worker and case == "raises":
    Tokenizer.encode = lambda *words, **more: 1 / 0
if case == "unguarded" or not worker:
    large = {"more": "than a pipe takes" * 10000}
    tokenizer = Tokenizer.from_dict({"model": {"type": "BPE", "vocab": {"a": 0, " ": 1}, "merges": []}}, large)
    try:
        tokenizer.encode_batch(["a " * 50000] * 8, processes=2)
    except (TokenizerError, ZeroDivisionError) as error:
        sys.stdout.write(f"{'worker' if worker else 'parent'} {error}\\n")  # at once: two workers write
        if worker:
            raise
"""


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("unguarded", "a worker of encode_batch ended with exit code 1 at its start: a script calls encode_batch with processes under `if"),
        ("exits", "a worker of encode_batch ended with exit code 7 at its start: a script calls"),
        ("killed", "a worker of encode_batch was ended by signal 9; where memory was short, take fewer processes"),
        ("at work", "a worker of encode_batch was ended by signal 9; where"),
        ("raises", "division by zero"),
    ],
)
def test_a_worker_that_dies_ends_the_batch_and_leaves_no_process(tmp_path, case, told):
    (tmp_path / "script.py").write_text(SCRIPT)
    program = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), case], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out = program.communicate(timeout=60)[0].splitlines()  # to the end of all that holds the pipes: no worker is left
    finally:
        if program.returncode is None:
            os.killpg(program.pid, signal.SIGKILL)
            program.communicate()
    assert program.returncode == 0 and out[-1].startswith(f"parent {told}")
    assert all(line.startswith("worker ") and 'if __name__ == "__main__":' in line for line in out[:-1])
    assert (len(out) > 1) == (case == "unguarded")


def test_pickle():
    tokenizer = load("mistral-7b-v0.3")
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode("Hello world") == [23325, 2294] and again.fingerprint == tokenizer.fingerprint


def test_a_full_cache_starts_anew():
    tokenizer = Tokenizer.load(vendored_dir())
    tokenizer._bpe.cache_words = 50
    tokenizer._ids = Ids(tokenizer._bpe, tokenizer._chunks)
    for row in rows("cases"):
        if row["tokenizer"] == "mistral-7b-v0.3":
            assert tokenizer.encode_with_offsets(row["text"]) == (row["ids"], [tuple(pair) for pair in row["offsets"]])
            assert len(tokenizer._ids.units.known) <= 50


@pytest.mark.parametrize("name", NAMES)
def test_long_words_merge_like_short_ones(name):
    """Above 48 symbols a heap takes over; both must find the same merges."""
    tokenizer = load(name)
    for text in ("a" * 300, "ab" * 60, "abcde" * 20, "=" * 200, "\u4e2d" * 60, "the" * 40):
        vocab = tokenizer._bpe.vocab
        known = [vocab[part] for part in tokenizer._bpe.first_symbols(tokenizer._bpe.written(text))]
        assert tokenizer._bpe.merged_long(list(known)) == tokenizer._bpe.merged(list(known))


def test_sentencepiece_file_gives_sentencepiece_ids():
    """tokenizer.model read by itself: the ids of the legacy form with control tokens as text, which are sentencepiece's own."""
    tokenizer = Tokenizer.load(vendored_dir() / "tokenizer.model")
    assert tokenizer._data["model"]["merges"] == [merge.split(" ") for merge in load("mistral-7b-v0.3")._data["model"]["merges"]]
    for row in rows("cases"):
        if row["tokenizer"] == "mistral-7b-v0.3-legacy":
            assert tokenizer.encode(row["text"], special="text") == row["ids_special_as_text"]
            assert tokenizer.decode(row["ids"]) == row["decoded"]


def slow_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Without caches, chunks, segments or proofs: the pre-tokenizer's words, each merged by scanning."""
    bpe, out = tokenizer._bpe, []
    for word, _ in tokenizer._pretokenizer.pieces(text, [(i, i + 1) for i in range(len(text))], True):
        parts = list(map(bpe.vocab.__getitem__, bpe.first_symbols(bpe.written(word))))
        out += bpe.merged(parts)
    return out


@settings(max_examples=60)
@given(texts=st.lists(TEXTS, min_size=1, max_size=6))
def test_caches_give_what_merging_each_word_gives(texts):
    """Many units at a time, with marks between them, long and short, in a new tokenizer's caches and in full ones."""
    for name in NAMES:
        tokenizer = load(name)
        tokenizer._ids = Ids(tokenizer._bpe, tokenizer._chunks)
        tokenizer._places = None
        for text in [*texts, " ".join(texts * 9)]:
            if any(token in text for token in tokenizer.added_tokens):
                continue
            want = slow_ids(tokenizer, text)
            assert tokenizer.encode(text) == want, (name, text)
            assert tokenizer.encode_with_offsets(text).ids == want


class _Overtaken(dict):
    """A table whose missing names another thread makes at the moment they are missed."""

    def __init__(self, known, meanwhile):
        super().__init__(known)
        self._meanwhile = [meanwhile]

    def __getitem__(self, name):
        if name not in self and self._meanwhile:
            self._meanwhile.pop()()
            raise KeyError(name)
        return super().__getitem__(name)


@pytest.mark.parametrize("name", NAMES)
def test_two_threads_may_meet_a_text_for_the_first_time_together(name):
    text = "Two threads, 12345 chunks,\r\nau même instant 中文."
    wanted = load(name).encode(text)
    offsets = load(name).encode_with_offsets(text).offsets
    tokenizer = pickle.loads(pickle.dumps(load(name)))
    tokenizer.encode_with_offsets("")
    for cache in (tokenizer._ids, tokenizer._places._cache):
        for table in (cache.units, cache.words):
            table.known = _Overtaken(table.known, lambda: tokenizer.encode_with_offsets(text))
    assert tokenizer.encode(text) == wanted
    assert tokenizer.encode_with_offsets(text).offsets == offsets
