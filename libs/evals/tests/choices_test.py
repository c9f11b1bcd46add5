"""Multiple choice by log-likelihood, and an evaluation that goes on where it stopped."""

import json

import pytest
from evals_cases import ROWS, TOKENIZER, FakeSampler

from align.evals import EvalError, accuracy, choice_accuracy, choice_rows, read_items

CHOICES = [
    {"prompt": "The sky is", "choices": ["blue", "green"], "answer": 0, "level": "easy"},
    {"prompt": "Two and two are ", "choices": ["five", "four", "a lot"], "answer": "B", "level": "easy"},
    {"prompt": "Birds", "choices": [" fly", " swim"], "answer": " fly", "level": "hard"},
]


class Scores:
    """Log-probabilities by the continuation's text; remembers what it was asked."""

    def __init__(self, by_text):
        self.by_text, self.asked = by_text, []

    def __call__(self, prompts, continuations):
        pairs = [(TOKENIZER.decode(p, skip_special=True), TOKENIZER.decode(c)) for p, c in zip(prompts, continuations, strict=True)]
        self.asked += pairs
        return [self.by_text[c.strip()] for _, c in pairs]


LIKELY = {"blue": -4.0, "green": -5.0, "five": -2.0, "four": -3.0, "a lot": -9.0, "fly": -1.0, "swim": -1.0}


def test_the_likeliest_choice_is_taken_and_prompt_and_choice_are_joined_by_one_space():
    score = Scores(LIKELY)
    result = choice_accuracy(score, TOKENIZER, CHOICES, normalise="none")
    assert (
        score.asked[0] == ("The sky is", " blue") and score.asked[2] == ("Two and two are ", "five") and score.asked[5] == ("Birds", " fly")
    )
    assert [item.output for item in result.items] == ["blue", "five", " fly"]  # a tie: the first
    assert result.accuracy == pytest.approx(2 / 3) and result.by_group == {"easy": 0.5, "hard": 1.0}
    assert [item.gold for item in result.items] == ["blue", "four", " fly"]


@pytest.mark.parametrize(("normalise", "chosen"), [("none", "yes"), ("tokens", "certainly"), ("characters", "certainly")])
def test_a_long_choice_is_not_unlikely_for_its_length(normalise, chosen):
    rows = [{"prompt": "Is it?", "choices": ["yes", "certainly"], "answer": 1}]
    result = choice_accuracy(Scores({"yes": -6.0, "certainly": -9.0}), TOKENIZER, rows, normalise=normalise)
    assert result.items[0].output == chosen and result.accuracy == (chosen == "certainly")


def test_chunks_and_messages_change_nothing():
    rows = [{**row, "messages": [{"role": "user", "content": row["prompt"]}]} for row in CHOICES for _ in range(5)]
    whole, seen = choice_accuracy(Scores(LIKELY), TOKENIZER, rows, normalise="none"), []
    parts = choice_accuracy(
        Scores(LIKELY), TOKENIZER, rows, normalise="none", chunk=4, progress=lambda done, total: seen.append((done, total))
    )
    assert whole == parts and seen == [(4, 15), (8, 15), (12, 15), (15, 15)]
    score = Scores(LIKELY)
    choice_accuracy(score, TOKENIZER, rows[:1], normalise="none")
    assert score.asked[0] == ("The sky is>", "blue")


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"choices": ["a", "b"], "answer": 0}, "prompt"),
        ({"prompt": "x", "choices": ["a"], "answer": 0}, "two or more"),
        ({"prompt": "x", "choices": "ab", "answer": 0}, "two or more"),
        ({"prompt": "x", "choices": ["a", ""], "answer": 0}, "two or more"),
        ({"prompt": "x", "choices": ["a", "b"], "answer": 2}, "answer 2 is none of 2"),
        ({"prompt": "x", "choices": ["a", "b"], "answer": True}, "answer True"),
        ({"prompt": "x", "choices": ["a", "b"], "answer": "C"}, "answer 'C'"),
        ({"prompt": "x", "choices": ["a", "b"]}, "answer None"),
        ([], "expected is an object"),
        ({"prompt": 5, "choices": ["a", "b"], "answer": 0}, "expected is an object"),
        ({"messages": "x", "choices": ["a", "b"], "answer": 0}, "expected is an object"),
        ({"prompt": "x", "choices": ["a", "\ud800"], "answer": 0}, "holds a lone surrogate"),
    ],
)
def test_a_wrong_row_is_named_with_its_line(tmp_path, row, wanted):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(CHOICES[0]) + "\n\n" + json.dumps(row) + "\n")
    with pytest.raises(EvalError, match=rf"rows\.jsonl:3: .*{wanted}"):
        choice_rows(path)
    path.write_text(json.dumps(CHOICES[0]) + "\n")
    assert choice_rows(path) == CHOICES[:1]


@pytest.mark.parametrize("read", [choice_rows, read_items])
def test_a_line_nested_too_deeply_is_named(tmp_path, read):
    (tmp_path / "rows.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(EvalError, match=r"rows\.jsonl:1: "):
        read(tmp_path / "rows.jsonl")


SCRIPT = {row["prompt"]: ["\\boxed{7}", "\\boxed{0}"] for row in ROWS}


@pytest.mark.parametrize("stop", range(9))
def test_an_evaluation_goes_on_where_it_stopped(stop):
    options = {"samples": 2, "temperature": 1.0, "max_new_tokens": 20, "chunk": 1}
    kept = []
    whole = accuracy(FakeSampler(SCRIPT), TOKENIZER, ROWS, keep=kept.extend, **options)
    assert kept == whole.items
    again, sampler = [], FakeSampler(SCRIPT)
    assert accuracy(sampler, TOKENIZER, ROWS, done=kept[:stop], keep=again.extend, **options) == whole
    assert again == whole.items[stop // 2 * 2 :] and len(sampler.calls) == len(ROWS) - stop // 2


def test_another_evaluations_items_are_refused():
    kept = []
    options = {"temperature": 0, "max_new_tokens": 20}
    accuracy(FakeSampler(SCRIPT), TOKENIZER, ROWS, keep=kept.extend, **options)
    with pytest.raises(EvalError, match=r"item 0 .* start the evaluation anew"):
        accuracy(FakeSampler(SCRIPT), TOKENIZER, ROWS[::-1], done=kept, **options)
    with pytest.raises(EvalError, match="item 2 "):
        accuracy(FakeSampler(SCRIPT), TOKENIZER, ROWS[:2], done=kept, **options)
