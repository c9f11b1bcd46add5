"""The split: a function of what a row asks, and of nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.data import DataError, split_rows

ROWS = [{"prompt": f"What is {i}+{i}?", "completion": str(2 * i)} for i in range(2000)]


def keys(rows):
    return {row["prompt"] for row in rows}


def test_the_share_is_about_right_and_nothing_is_lost():
    train, held = split_rows(ROWS, 0.1)
    assert len(train) + len(held) == len(ROWS) and not keys(train) & keys(held)
    assert 150 < len(held) < 250  # binomial(2000, .1): 200 with a standard deviation of 13.4
    assert split_rows(ROWS, 0) == (ROWS, [])


@given(st.permutations(range(60)), st.integers(0, 60), st.sampled_from([0.05, 0.3, 0.9]))
def test_a_rows_side_does_not_depend_on_the_other_rows(order, count, share):
    held = keys(split_rows(ROWS[:60], share)[1])
    some = [ROWS[i] for i in order[:count]]
    assert keys(split_rows(some, share)[1]) == keys(some) & held


def test_copies_and_other_answers_are_on_one_side():
    for row in ROWS[:100]:
        copies = [
            row,
            {"prompt": row["prompt"].upper() + "  ", "completion": "another answer"},
            {"prompt": row["prompt"].replace(" ", "\n\t"), "chosen": "a", "rejected": "b"},
            {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": row["prompt"]}]},
            {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": "x"}]},
            {"prompt": [{"role": "user", "content": row["prompt"]}], "answer": "4"},
            {"text": row["prompt"]},
        ]
        assert min(map(len, split_rows(copies, 0.5))) == 0


def test_rows_that_ask_nothing_are_told_apart_by_the_whole():
    rows = [{"messages": [{"role": "system", "content": "Be short."}, {"role": "assistant", "content": str(i)}]} for i in range(200)]
    train, held = split_rows(rows, 0.5)
    assert min(len(train), len(held)) > 60


def test_a_message_without_content_asks_nothing():
    call = {"role": "user", "tool_calls": [{"id": "1"}]}
    assert sum(map(len, split_rows([{"messages": [call, {"role": "assistant", "content": "a"}]}], 0.5))) == 1


def test_a_larger_share_holds_the_smaller_and_a_salt_makes_another():
    small, large = (keys(split_rows(ROWS, share)[1]) for share in (0.05, 0.2))
    assert small < large
    assert keys(split_rows(ROWS, 0.2, salt="b")[1]) != large


@pytest.mark.parametrize("share", [-0.1, 1, 1.5, float("nan")])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(DataError, match=r"held_out .* must be at least 0 and less than 1"):
        split_rows(ROWS, share)
