import doctest
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from evals_cases import ROWS, SCRIPT, TOKENIZER, FakeSampler, make_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from align.evals import EvalError, Item, Judgement, accuracy, compare, encode_prompt, read_items, sign_test, write_items


def test_greedy_accuracy_by_level_with_a_record_of_each_item():
    sampler = FakeSampler(SCRIPT)
    result = accuracy(sampler, TOKENIZER, ROWS, temperature=0, max_new_tokens=30)
    assert result.accuracy == 0.75 and result.by_group == {"1": 1.0, "2": 0.5}
    assert [(item.output, item.answer, item.correct, item.reason) for item in result.items] == [
        (r"3+4=7. \boxed{7}", "7", True, "equal"),
        (r"\boxed{0.0}", "0.0", True, "equal"),
        ("3", None, False, "no_answer"),
        (r"\boxed{0.5}", "0.5", True, "equal"),
    ]
    assert result.items[0] == Item(0, 0, "1", "3+4?", "7", r"3+4=7. \boxed{7}", "7", True, "equal", 17, "stop")
    assert sampler.calls[0][:3] == (1, 30, 0)
    low, high = result.interval.low, result.interval.high
    assert 0 <= low < 0.75 < high <= 1


def test_each_group_has_its_interval():
    """Over its own problems: 1 of 2 right is nearly anything, 2 of 2 reaches down to .158 (.025^(1/2))."""
    rows = [{"prompt": f"{i}+0?", "answer": str(i), "level": 1 if i < 2 else 2} for i in range(4)]
    right = FakeSampler({f"{i}+0?": [rf"\boxed{{{0 if i == 1 else i}}}"] for i in range(4)})
    result = accuracy(right, TOKENIZER, rows, temperature=0, max_new_tokens=30)
    assert result.by_group == {"1": 0.5, "2": 1.0}
    assert result.group_intervals["1"] == pytest.approx((0.5, 1 - 0.975**0.5, 0.975**0.5))
    assert result.group_intervals["2"] == pytest.approx((1.0, 0.025**0.5, 1.0))


def test_a_judge_of_ones_own_sees_rows_and_outputs_in_pairs():
    seen = []

    def judge(rows, outputs):
        seen.append([(row["prompt"], output) for row, output in zip(rows, outputs, strict=True)])
        return [Judgement("x", "7" in output, "seven" if "7" in output else "other") for output in outputs]

    result = accuracy(FakeSampler(SCRIPT), TOKENIZER, ROWS, samples=2, temperature=1.0, max_new_tokens=30, judge=judge, chunk=3)
    assert list(map(len, seen)) == [6, 2]
    assert [pair for chunk in seen for pair in chunk] == [(item.prompt, item.output) for item in result.items]
    assert all(item.correct == ("7" in item.output) and item.answer == "x" for item in result.items)
    assert {item.reason for item in result.items} == {"seven", "other"}


def test_mode_final_takes_an_unmarked_number():
    result = accuracy(FakeSampler(SCRIPT), TOKENIZER, ROWS, temperature=0, max_new_tokens=30, mode="final")
    assert result.accuracy == 1.0 and result.items[2].reason == "bare"


def test_sampled_accuracy_counts_problems_not_samples():
    result = accuracy(FakeSampler(SCRIPT), TOKENIZER, ROWS, samples=3, temperature=1.0, max_new_tokens=30)
    assert result.counts == [(3, 1), (3, 2), (3, 2), (3, 3)]
    assert result.accuracy == pytest.approx((1 / 3 + 2 / 3 + 2 / 3 + 1) / 4)
    assert result.by_group["1"] == pytest.approx(0.5)
    # of 3 samples 1, 2, 2, 3 right: two drawn from them hold a right one with probability 2/3, 1, 1, 1
    assert result.pass_at_k(2).value == pytest.approx((2 / 3 + 3) / 4)
    assert [(item.problem, item.sample) for item in result.items[:4]] == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_chunks_and_fewer_rows_change_no_seed_and_progress_is_told():
    whole, parts, seen = FakeSampler(SCRIPT), FakeSampler(SCRIPT), []
    a = accuracy(whole, TOKENIZER, ROWS, temperature=1.0, max_new_tokens=30, seed=3)
    b = accuracy(parts, TOKENIZER, ROWS, temperature=1.0, max_new_tokens=30, seed=3, chunk=3, progress=lambda *told: seen.append(told))
    assert a == b and seen == [(3, 4), (4, 4)]
    assert whole.calls[0][3] == parts.calls[0][3] + parts.calls[1][3]
    assert len(set(whole.calls[0][3])) == 4
    other = FakeSampler(SCRIPT)
    accuracy(other, TOKENIZER, ROWS, temperature=1.0, max_new_tokens=30, seed=4)
    assert not set(other.calls[0][3]) & set(whole.calls[0][3])


def test_a_row_whose_answer_cannot_be_read_counts_nowhere():
    rows = [*ROWS, {"prompt": "3+4?", "answer": "\\frac{1", "level": 3}]
    result = accuracy(FakeSampler(SCRIPT), TOKENIZER, rows, temperature=0, max_new_tokens=30)
    assert result.accuracy == 0.75 and result.unreadable == 1 and len(result.items) == 5
    assert result.items[4].correct is None and result.items[4].reason == "unreadable_gold"
    assert math.isnan(result.by_group["3"]) and all(map(math.isnan, result.group_intervals["3"]))


def test_truncation_and_length_are_reported():
    result = accuracy(FakeSampler(SCRIPT), TOKENIZER, ROWS, temperature=0, max_new_tokens=12)
    assert result.truncated == 0.25 and result.items[0].finish_reason == "length"
    assert result.mean_tokens == (13 + 12 + 2 + 12) / 4


def test_prompts_are_encoded_as_in_front_of_a_trained_completion():
    text = TOKENIZER.encode("3+4?")
    assert encode_prompt(TOKENIZER, ROWS[0]) == [95, *text]  # one bos and no eos
    assert encode_prompt(TOKENIZER, {"prompt": "<s>3+4?"}) == [95, *text]
    assert encode_prompt(make_tokenizer(bos=False), ROWS[0]) == text
    assert encode_prompt(TOKENIZER, {"messages": [{"role": "user", "content": "3+4?"}]}) == [95, *text, *TOKENIZER.encode(">")]


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        ([], {}, "no rows"),
        (ROWS, {"samples": 0}, "samples 0"),
        (ROWS, {"samples": 4, "temperature": 0}, "samples 4 at temperature 0"),
        ([*ROWS, {"prompt": "x"}], {}, r"row 4 .*\['prompt'\]"),
        ([{"answer": "1"}], {}, "row 0"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(rows, words, message):
    with pytest.raises(EvalError, match=message) as error:
        accuracy(FakeSampler(SCRIPT), TOKENIZER, rows, **{"temperature": 1.0, "max_new_tokens": 8, **words})
    assert error.value.exit_code == 2


ITEMS = st.builds(
    Item,
    problem=st.integers(0, 5), sample=st.integers(0, 3), group=st.none() | st.text(), prompt=st.text(), gold=st.text(), output=st.text(),
    answer=st.none() | st.text(), correct=st.none() | st.booleans(), reason=st.text(), tokens=st.integers(0, 9), finish_reason=st.text(),
)  # fmt: skip


@given(items=st.lists(ITEMS))
def test_items_survive_the_file(tmp_path_factory, items):
    path = tmp_path_factory.mktemp("items") / "items.jsonl"
    write_items(path, items)
    assert read_items(path) == items
    assert [entry.name for entry in path.parent.iterdir()] == ["items.jsonl"]


def test_files_that_are_no_results_are_refused_with_line_and_field(tmp_path):
    item = Item(0, 0, None, "p", "1", "o", None, True, "equal", 3, "stop")
    path = tmp_path / "a.jsonl"
    write_items(path, [item, item])
    good = path.read_text().splitlines()
    for bad, message in (
        ('{"problem": 1}', r"a\.jsonl:3: field sample is missing"),
        (good[0].replace('"tokens": 3', '"tokens": true'), r":3: field tokens is True"),
        (good[0].replace('"correct": true', '"correct": 1'), r":3: field correct is 1"),
        ("[1]", ":3: list instead of an object"),
        ('{"problem": ', ":3: "),
    ):
        path.write_text("\n".join([*good, bad]))
        with pytest.raises(EvalError, match=message):
            read_items(path)
    with pytest.raises(EvalError, match=r"nowhere\.jsonl: can't be read"):
        read_items(tmp_path / "nowhere.jsonl")
    with pytest.raises(EvalError, match="can't be written"):
        write_items(tmp_path / "no" / "a.jsonl", [item])


def result_of(chances, seed, samples=1):
    draws = random.Random(seed)
    return [
        Item(problem, sample, None, f"p{problem}", "1", "", None, draws.random() < chance, "", 1, "stop")
        for problem, chance in enumerate(chances)
        for sample in range(samples)
    ]


def test_a_known_difference_is_seen_and_a_null_one_is_not():
    chances = [random.Random(0).betavariate(1, 1) for _ in range(400)]
    higher = [min(1, chance + 0.15) for chance in chances]
    found = [compare(result_of(chances, seed), result_of(higher, 1000 + seed), resamples=200) for seed in range(12)]
    assert sum(one.p_value < 0.05 for one in found) >= 11
    assert sum(one.difference.low > 0 for one in found) >= 11
    truth = (sum(higher) - sum(chances)) / 400
    assert sum(one.difference.low <= truth <= one.difference.high for one in found) >= 9
    null = [compare(result_of(chances, seed), result_of(chances, 1000 + seed), resamples=200) for seed in range(30)]
    assert sum(one.p_value < 0.05 for one in null) <= 4
    assert sum(one.difference.low > 0 or one.difference.high < 0 for one in null) <= 5


def test_what_flipped_is_listed_with_both_outputs():
    a = [Item(i, 0, None, f"p{i}", "1", f"a{i}", None, right, "", 1, "stop") for i, right in enumerate([True, True, False, False, None])]
    b = [Item(i, 0, None, f"p{i}", "1", f"b{i}", None, right, "", 1, "stop") for i, right in enumerate([True, False, True, True, True])]
    one = compare(a, b)
    assert (one.problems, one.better, one.worse) == (4, 2, 1)
    assert (one.accuracy_a, one.accuracy_b, one.difference.value) == (0.5, 0.75, 0.25)
    assert [(flip.problem, flip.score_a, flip.score_b, flip.item_a.output, flip.item_b.output) for flip in one.flips] == [
        (1, 1.0, 0.0, "a1", "b1"), (2, 0.0, 1.0, "a2", "b2"), (3, 0.0, 1.0, "a3", "b3"),
    ]  # fmt: skip
    assert one.p_value == 1.0 and "B better on 2, worse on 1" in str(one)
    back = compare(b, a)
    assert (back.better, back.worse, back.p_value) == (1, 2, 1.0)


def test_several_samples_are_paired_by_problem():
    a, b = result_of([0.0, 1.0, 0.5], 0, samples=4), result_of([1.0, 1.0, 0.5], 1, samples=4)
    one = compare(a, b)
    assert one.flips[-1].problem == 0 and (one.flips[-1].score_a, one.flips[-1].score_b) == (0.0, 1.0)
    assert one.flips[-1].item_b.correct and not one.flips[-1].item_a.correct


def test_results_of_different_rows_are_not_compared():
    a = result_of([1.0, 1.0], 0)
    with pytest.raises(EvalError, match="problem 1 is only in A"):
        compare(a, a[:1])
    with pytest.raises(EvalError, match="problem 1 has another prompt"):
        compare(a, [a[0], replace(a[1], gold="2")])
    with pytest.raises(EvalError, match="no problem was judged"):
        compare([replace(item, correct=None) for item in a], a)


@given(better=st.integers(0, 60), worse=st.integers(0, 60))
def test_the_sign_test_sums_the_binomial_distribution(better, worse):
    total = better + worse
    coin = [math.comb(total, i) for i in range(total + 1)]
    as_uneven = sum(ways for i, ways in enumerate(coin) if abs(2 * i - total) >= abs(better - worse))
    assert sign_test(better, worse) == pytest.approx(as_uneven / 2**total)
    assert sign_test(better, worse) == sign_test(worse, better)


def test_the_sign_test_at_large_counts():
    assert sign_test(0, 0) == 1.0
    assert sign_test(5000, 5000) == pytest.approx(1.0)
    assert sign_test(5000, 5400) == pytest.approx(9.1e-5, rel=0.05)  # normal approximation with continuity correction
    assert 0 <= sign_test(0, 20000) < 1e-300


def test_the_readme_runs():
    failed, tried = doctest.testfile(str(Path(__file__).parents[1] / "README.md"), module_relative=False)
    assert failed == 0 and tried > 5
