"""Packing: a partition into rows that fit, and a tight one."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.data import Cursor, DataError, efficiency, pack


@given(st.lists(st.integers(1, 50), max_size=200), st.integers(50, 80), st.integers(1, 60))
def test_every_document_is_in_one_row_and_every_row_fits(lengths, row_length, window):
    rows = pack(lengths, row_length, window=window)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= row_length for row in rows)
    assert all(len({i // window for i in row}) == 1 for row in rows)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200))
def test_at_most_four_thirds_of_the_optimum(lengths):
    """A small document opens a row only when all others are over three quarters full; the large ones alone are BFD (Johnson 1973)."""
    assert len(pack(lengths, 50)) <= 4 / 3 * len(pack_optimum(lengths, 50)) + 4


def test_a_row_of_many_documents_is_a_fair_sample():
    """Rows of some fifty documents: each row's mean length is as far from the mean as chance has it, not the length of its neighbours."""
    lengths = np.random.default_rng(0).integers(20, 73, 4096)
    rows = pack(lengths.tolist(), 2048)
    means = np.array([lengths[row].mean() for row in rows[:-2]])  # the last rows take what is left
    chance = lengths.std() / np.sqrt(2048 / lengths.mean())
    assert abs(means - lengths.mean()).max() < 4.5 * chance


def pack_optimum(lengths, row_length):
    """A lower bound: the sum's, or one row for each document over half a row."""
    return range(max(-(-sum(lengths) // row_length), sum(2 * length > row_length for length in lengths)))


def test_the_fullest_row_that_still_takes_it():
    # 6 and 5 open rows with 4 and 5 free; 4 goes to the first, where it fits exactly, 3 to the second, the short 2 there too.
    assert pack([2, 3, 4, 5, 6], 10) == [[4, 2], [3, 1, 0]]
    assert efficiency([2, 3, 4, 5, 6], pack([2, 3, 4, 5, 6], 10), 10) == 1.0
    assert pack([], 10) == [] and efficiency([], [], 10) == 1.0
    assert pack([7, 7], 10) == [[0], [1]] and efficiency([7, 7], [[0], [1]], 10) == 0.7


def test_what_does_not_fit_is_refused():
    with pytest.raises(DataError, match=r"document 1 has 11 tokens, a row takes 1 to 10; truncate or drop"):
        pack([3, 11], 10)
    with pytest.raises(DataError, match="document 0 has 0 tokens"):
        pack([0], 10)
    with pytest.raises(DataError, match="row_length 0 and window 4096 must be at least 1"):
        pack([1], 0)


@pytest.mark.parametrize("seed", range(3))
def test_gsm8k_chats_fill_rows_of_2048(seed):
    lengths = np.load(Path(__file__).parent / "data" / "gsm8k_chat_lengths.npy")
    order = Cursor(len(lengths), seed=seed, digest="gsm8k").take(len(lengths))
    shuffled = lengths[order].tolist()
    assert efficiency(shuffled, pack(shuffled, 2048), 2048) > 0.98
    assert efficiency(shuffled, pack(shuffled, 2048, window=512), 2048) > 0.97
