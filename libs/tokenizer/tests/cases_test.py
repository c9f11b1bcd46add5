"""Ids, offsets, decoding, streaming and chats against the reference's answers, for the tokenizers that load quickly."""

import pytest
from tokenizer_cases import wrong_cases, wrong_chats, wrong_streams

NAMES = ("mistral-7b-v0.3", "mistral-7b-v0.3-legacy", "smollm2", "gpt2")


@pytest.mark.parametrize("name", NAMES)
def test_texts(name):
    count, wrong, shown = wrong_cases(name)
    print(f"{name}: {count} texts, {sum(wrong.values())} wrong")
    assert count == 239 and not wrong, shown


@pytest.mark.parametrize("name", NAMES)
def test_streams(name):
    count, wrong = wrong_streams(name)
    print(f"{name}: {count} streams, {len(wrong)} wrong")
    assert count >= 58 and not wrong


@pytest.mark.parametrize("name", ("mistral-7b-v0.3", "smollm2"))
def test_chats(name):
    count, wrong = wrong_chats(name)
    print(f"{name}: {count} chats, {len(wrong)} wrong")
    assert count == 22 and not wrong
