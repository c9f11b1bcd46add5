"""Copies and contamination: found whatever their form, nothing else removed, every removal accounted for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.data import Contamination, DataError, SeenRows, bundled, decontaminate, dedupe_rows, gsm8k_rows

ROW = {"prompt": "What is 2+2?", "completion": "Four."}
WORDS = st.lists(st.sampled_from("abcdefghij"), max_size=40)


def test_the_first_of_alike_rows_stays():
    rows = [ROW, {**ROW, "id": 1}, {"prompt": "what  is\n2+2?", "completion": "ＦＯＵＲ."}, {**ROW, "completion": "4"}, dict(ROW)]
    exact, normalised = dedupe_rows(rows, by="exact"), dedupe_rows(rows)
    assert (exact.rows, exact.copies) == (rows[:4], [(4, 0)])
    assert (normalised.rows, normalised.copies) == ([rows[0], rows[3]], [(1, 0), (2, 0), (4, 0)])
    with pytest.raises(DataError, match="by 'fuzzy' is not known; it is exact or normalised"):
        dedupe_rows(rows, by="fuzzy")


def test_kinds_are_compared_by_their_own_fields():
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    shouted = {"messages": [{"role": "user", "content": "HI"}, {"role": "assistant", "content": "hello"}], "source": "b"}
    swapped = {"messages": [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Hello"}]}
    steps = {"prompt": "a", "steps": ["b", "c"], "labels": [1, 0]}
    rows = [chat, shouted, swapped, steps, {**steps, "labels": [1, 1]}, {"other": 1}, {"other": 2}]
    assert dedupe_rows(rows).copies == [(1, 0)]


@given(st.lists(st.sampled_from("aAbB c"), max_size=12))
def test_a_second_pass_finds_nothing_and_a_first_is_never_a_copy(texts):
    rows = [{"text": text} for text in texts]
    done = dedupe_rows(rows)
    assert not dedupe_rows(done.rows).copies
    copies = {copy for copy, _ in done.copies}
    assert all(first < copy and first not in copies for copy, first in done.copies)
    assert done.rows == [row for index, row in enumerate(rows) if index not in copies]


@given(st.lists(st.sampled_from("aAbB c"), max_size=12), st.sampled_from(["exact", "normalised"]))
def test_one_row_at_a_time_is_the_same(texts, by):
    rows, seen = [{"text": text} for text in texts], SeenRows(by=by)
    firsts = [seen.first(row) for row in rows]
    assert [(index, first) for index, first in enumerate(firsts) if first is not None] == dedupe_rows(rows, by=by).copies


QUESTION = "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?"


@pytest.mark.parametrize(
    "row",
    [
        {"text": f"Homework:\n{QUESTION.upper()}\nGood luck"},
        {"prompt": "x", "completion": QUESTION.replace(" ", "\n ").replace(".", " ...")},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": QUESTION}]},
        {"prompt": [{"role": "user", "content": QUESTION}], "answer": "3"},
        {"prompt": "x", "steps": ["y", QUESTION], "labels": [1, 1]},
        {"text": QUESTION[:70]},  # 13 words and more of it
    ],
)
def test_a_question_is_found_in_any_row_and_any_form(row):
    clean = {"text": "A shirt takes 3 bolts of red cotton and twice as much white linen. How many bolts in all?"}
    done = decontaminate([clean, row], {"gsm8k": [{"prompt": QUESTION}], "other": [{"prompt": "one two three four five six"}]})
    assert done.rows == [clean]
    (hit,) = done.hits
    assert (hit.row, hit.test, hit.item) == ("row 1", "gsm8k", 0)
    assert hit.words == "a robe takes 2 bolts of blue fiber and half that much white"
    assert "| gsm8k | 1 | 1 | 0 |\n| other | 0 | 0 | 0 |" in done.report()


def test_short_questions_are_found_whole_and_very_short_ones_are_counted():
    tests = {"t": [{"prompt": "What is two plus two?"}, {"prompt": "2+2?"}]}
    done = decontaminate([{"text": "Say, what is two plus two? Four"}, {"text": "what is two plus three?"}, {"text": "2+2? 4"}], tests)
    assert [hit.item for hit in done.hits] == [0] and len(done.rows) == 2 and done.unchecked == {"t": 1}
    with pytest.raises(DataError, match="n 4 must be at least 5"):
        decontaminate([], tests, n=4)


@given(st.lists(WORDS, max_size=6), st.lists(WORDS, max_size=6), st.integers(5, 8))
def test_exactly_the_rows_with_a_common_run_go(texts, questions, n):
    """Against the definition, by brute force."""
    rows, tests = [{"text": " ".join(words)} for words in texts], {"t": [{"text": " ".join(words)} for words in questions]}
    done = decontaminate(rows, tests, n=n)

    def runs(words, size):
        return {tuple(words[at : at + size]) for at in range(len(words) - size + 1)}

    dirty = {
        index
        for index, words in enumerate(texts)
        if any(len(q) >= 5 and runs(q, min(n, len(q))) & runs(words, min(n, len(q))) for q in questions)
    }
    assert done.rows == [row for index, row in enumerate(rows) if index not in dirty]
    search = Contamination(tests, n=n)
    assert [search.find(row, place="row") is not None for row in rows] == [index in dirty for index in range(len(rows))]
    for hit in done.hits:
        words = hit.words.split()
        assert tuple(words) in runs(texts[int(hit.row.split()[1])], len(words)) & runs(questions[hit.item], len(words))
    assert {hit.row for hit in done.hits} == {f"row {index}" for index in dirty}


def touched(count):
    """(line of the train file, index in the test set) of GSM8K's first `count` train rows that the test set touches."""
    train, test = gsm8k_rows(bundled("gsm8k_train"))[:count], gsm8k_rows(bundled("gsm8k_test"))
    assert dedupe_rows(train + test).copies == []
    return [(int(hit.row.rpartition(":")[2]), hit.item) for hit in decontaminate(train, {"gsm8k_test": test}).hits]


def test_gsm8k_train_rows_that_touch_its_test_set():
    assert touched(500) == [(21, 632), (407, 581)]


@pytest.mark.slow
def test_gsm8k_has_no_copies_and_four_of_its_train_rows_touch_its_test_set():
    assert touched(7473) == [(21, 632), (407, 581), (1315, 602), (5163, 602)]
