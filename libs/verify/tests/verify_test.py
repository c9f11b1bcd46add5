r"""The public surface: markers, modes, GSM8K answers, the bundled arithmetic task."""

import gzip
import json
from pathlib import Path

import pytest

from align.verify import equivalent, extract, grade, normalise, parse

DATA = Path(__file__).parent / "data"


def test_every_labelled_gsm8k_output():
    wrong, count = [], 0
    with gzip.open(DATA / "gsm8k_labelled.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            count += 1
            if grade(row["gold"], row["text"]).correct is not row["label"]:
                wrong.append(row)
    assert count == 5276 and not wrong


@pytest.mark.parametrize(
    ("text", "correct", "reason"),
    [
        (r"7+12=19. 19-4=15. \boxed{15}", True, "equal"),
        (r"7+12=19. 19-4=14. \boxed{14}", False, "different"),
        ("7+12=19. 19-4=15.", False, "no_answer"),
        ("15", False, "no_answer"),
        (r"\boxed{}", False, "no_answer"),
        (r"\boxed{15", False, "no_answer"),
        (r"15 \boxed{?}", False, "unreadable_answer"),
    ],
)
def test_arithmetic_task_in_marked_mode(text, correct, reason):
    verdict = grade("15", text, mode="marked")
    assert (verdict.correct, verdict.reason) == (correct, reason)


def test_final_mode_takes_the_last_number_and_says_so():
    verdict = grade("18", "She makes 9 * 2 = 18 dollars")
    assert (verdict.correct, verdict.reason) == (True, "bare")


def test_a_gold_that_cannot_be_read_is_never_a_reward():
    verdict = equivalent(r"\unknown", r"\unknown")
    assert (verdict.correct, verdict.reason) == (None, "unreadable_gold")
    assert not verdict


def test_an_unreadable_last_box_does_not_fall_back():
    assert grade("5", r"I guess $5$. Final: \boxed{\unknown}").reason == "unreadable_answer"


def test_thinking_does_not_count():
    assert extract(r"<think>\boxed{5}</think> I do not know.", mode="marked") is None


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match=r'mode "loose" is not one of "final", "marked"'.replace('"loose"', "'loose'")):
        grade("1", "1", mode="loose")


def test_parse_and_normalise():
    assert parse("27,648").node == ("q", 27648)
    assert parse(r"\left( 3, \frac{\pi}{2} \right)").kind == "tuple"
    assert normalise(r"$\text{Evelyn}$") == "Evelyn"
