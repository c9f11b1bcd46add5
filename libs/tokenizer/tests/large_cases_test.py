"""The same as cases_test.py for the large vocabularies (Qwen3, Qwen2.5, tekken), and tekken.json itself."""

import base64
import json

import pytest
from tokenizer_cases import load, rows, wrong_cases, wrong_chats, wrong_streams

from align.tokenizer import Tokenizer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ("qwen3", "mistral-tekken-240911"))
def test_texts_and_streams(name):
    count, wrong, shown = wrong_cases(name)
    print(f"{name}: {count} texts, {sum(wrong.values())} wrong")
    assert count == 239 and not wrong, shown
    count, wrong = wrong_streams(name)
    print(f"{name}: {count} streams, {len(wrong)} wrong")
    assert count >= 58 and not wrong


@pytest.mark.parametrize("name, expected", (("qwen3", 20), ("qwen2.5", 22)))
def test_chats(name, expected):
    count, wrong = wrong_chats(name)
    print(f"{name}: {count} chats, {len(wrong)} wrong")
    assert count == expected and not wrong


def test_literal_leaves_no_added_token():
    """Hugging Face's flag lets <think> through, because it is not marked special; `literal` does not."""
    tokenizer = load("qwen3")
    think = tokenizer.token_to_id("<think>")
    assert tokenizer.encode("a<think>b", special="text") == [64, think, 65]
    assert think not in tokenizer.encode("a<think>b", special="literal")
    assert tokenizer.decode(tokenizer.encode("a<think>b", special="literal")) == "a<think>b"


def test_normal_form_is_reported():
    tokenizer = load("qwen3")
    report = tokenizer.loss_report("ae\u0301 \uf900b")
    assert not report.lossless
    assert [(loss.start, loss.end, loss.reason) for loss in report.losses] == [(1, 3, "normalised"), (4, 5, "normalised")]
    assert tokenizer.loss_report("a\u00e9b").lossless


def test_tekken_file_gives_the_same_ids(tmp_path):
    """A tekken.json made back from the converted file."""
    converted = load("mistral-tekken-240911")
    plain = bytes(range(33, 127)) + bytes(range(161, 173)) + bytes(range(174, 256))  # GPT-2's byte alphabet, written out anew
    moved = [b for b in range(256) if b not in plain]
    byte_of = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(moved)}
    special = set(converted.added_tokens)
    tokens = [token for token in converted._bpe.vocab if token not in special]
    data = {
        "config": {
            "pattern": converted._data["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"],
            "default_vocab_size": 131072,
            "default_num_special_tokens": 1000,
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(bytes(byte_of[c] for c in token)).decode(), "token_str": None}
            for i, token in enumerate(tokens)
        ],
        "special_tokens": [{"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(converted.added_tokens)],
    }
    assert [token for token, _ in sorted(converted._bpe.vocab.items(), key=lambda item: item[1])][1000:] == tokens
    path = tmp_path / "tekken.json"
    path.write_text(json.dumps(data), "utf-8")
    tokenizer = Tokenizer.load(path)
    for row in rows("cases"):
        if row["tokenizer"] == "mistral-tekken-240911":
            assert tokenizer.encode(row["text"]) == row["ids"]
            assert tokenizer.decode(row["ids"]) == row["decoded"]
