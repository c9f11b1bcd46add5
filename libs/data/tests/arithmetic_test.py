"""The default task: right answers, an honest split, and a tokenizer that covers it."""

import json
import re
import zlib
from collections import Counter

import pytest

from align.data import DataError, arithmetic_demonstrations, arithmetic_rows, arithmetic_tokenizer_config, arithmetic_tokenizer_json


def solve(prompt):
    """The answer, by reading the problem as a person would; all values on the way."""
    sentences = prompt.split(". ")
    values = [int(re.search(r"has (\d+)", sentences[0])[1])]
    for sentence in sentences[1:-1]:
        number = int(found[0]) if (found := re.findall(r"\d+", sentence)) else 0
        gain = "more" in sentence
        values.append(values[-1] * 2 if "doubles" in sentence else values[-1] + (number if gain else -number))
        assert number <= 20
    return values


@pytest.mark.parametrize("held_out", [True, False])
def test_problems_are_right_different_and_on_their_side(held_out):
    rows = arithmetic_rows(600, seed=0, held_out=held_out)
    assert Counter(row["level"] for row in rows) == {1: 200, 2: 200, 3: 200}
    assert len({row["prompt"] for row in rows}) == 600
    for row in rows:
        values = solve(row["prompt"])
        assert len(values) == row["level"] + 1 and str(values[-1]) == row["answer"]
        assert 1 <= values[0] <= 20 and all(0 <= value <= 60 for value in values)
        assert (zlib.crc32(row["prompt"].encode()) % 10 == 0) == held_out
    assert arithmetic_rows(600, seed=0, held_out=held_out) == rows != arithmetic_rows(600, seed=1, held_out=held_out)
    assert {row["level"] for row in arithmetic_rows(8, levels=(2,), seed=0, held_out=held_out)} == {2}


def test_the_first_rows_are_pinned():
    assert arithmetic_rows(2, seed=0, held_out=True) == [
        {"prompt": "Mia has 19 shells. Mia gives away 3. How many shells now?", "answer": "16", "level": 1},
        {"prompt": "Leo has 12 coins. Leo buys 3 more. Leo buys 6 more. How many coins now?", "answer": "21", "level": 2},
    ]


def test_demonstrations_are_right_and_mixed():
    rows = arithmetic_demonstrations(3000, seed=0)
    styles = Counter()
    for row in rows:
        assert zlib.crc32(row["prompt"].encode()) % 10
        values = solve(row["prompt"])
        steps = re.findall(r"(\d+)([-+*])(\d+)=(\d+)\.", row["completion"])
        for (left, operator, right, result), before, after in zip(steps, values, values[1:], strict=False):
            assert (int(left), int(result)) == (before, after)
            assert after == {"+": before + int(right), "-": before - int(right), "*": before * int(right)}[operator]
        boxed = re.findall(r"\\boxed\{(\d+)\}", row["completion"])
        assert boxed in ([], [str(values[-1])]) and len(steps) in (0, len(values) - 1)
        text = " ".join([f"{a}{o}{b}={c}." for a, o, b, c in steps] + [f"\\boxed{{{x}}}" for x in boxed])
        assert row["completion"] == text
        styles[bool(steps), bool(boxed)] += 1
    assert set(styles) == {(True, True), (False, True), (True, False)}
    for style, share in (((True, True), 0.4), ((False, True), 0.4), ((True, False), 0.2)):
        assert abs(styles[style] / 3000 - share) < 0.045  # five standard deviations
    only = arithmetic_demonstrations(50, seed=0, mix=(0, 1, 0))
    assert all(row["completion"].startswith("\\boxed") for row in only)


def test_what_cannot_be_made_is_refused(monkeypatch):
    with pytest.raises(DataError, match=r"levels \(1, 4\) must be some of \(1, 2, 3\)"):
        arithmetic_rows(3, levels=(1, 4), seed=0, held_out=True)
    for mix in ((0.5, 0.5, 0.5), (float("nan"), 1, 0)):
        with pytest.raises(DataError, match=r"mix .* must be three shares that add up to 1"):
            arithmetic_demonstrations(3, seed=0, mix=mix)
    monkeypatch.setattr("align.data._arithmetic.NAMES", ("Ana",))
    monkeypatch.setattr("align.data._arithmetic.THINGS", ("pens",))
    with pytest.raises(DataError, match="level 1 has no more different problems after"):
        arithmetic_rows(20_000, levels=(1,), seed=0, held_out=True)


def test_the_tokenizer_covers_the_task_with_few_tokens():
    """Pre-tokenised by hand, as Digits and the byte-level pattern do it: every piece is one token of the vocabulary, or single marks."""
    tokenizer = json.loads(json.dumps(arithmetic_tokenizer_json()))
    vocabulary = tokenizer["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(len(vocabulary))) and len(vocabulary) == 115
    assert tokenizer["model"]["ignore_merges"] and tokenizer["model"]["merges"] == []
    assert [vocabulary[token["content"]] for token in tokenizer["added_tokens"]] == [0, 1, 2, 3]
    config = arithmetic_tokenizer_config()
    assert [vocabulary[config[f"{name}_token"]] for name in ("pad", "bos", "eos", "unk")] == [0, 1, 2, 3]
    sizes = []
    for row in arithmetic_demonstrations(500, seed=3):
        pieces = re.findall(r"\d| ?[A-Za-z]+| ?[^\sA-Za-z\d]+|\s", row["prompt"] + row["completion"])
        tokens = [p if p in vocabulary else list(p) for piece in pieces for p in [piece.replace(" ", "Ġ")]]
        flat = [t for token in tokens for t in ([token] if isinstance(token, str) else token)]
        assert all(t in vocabulary for t in flat) and not any(len(t) == 1 and "A" <= t.upper() <= "Z" for t in flat)
        assert "".join(flat).replace("Ġ", " ") == row["prompt"] + row["completion"]
        sizes.append(len(flat) + 2)
    assert max(sizes) <= 72
