import itertools
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.evals import mean_interval, pass_at_k


@given(data=st.data(), samples=st.integers(1, 7))
def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_right_one(data, samples):
    right, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    draws = list(itertools.combinations([True] * right + [False] * (samples - right), k))
    assert pass_at_k([(samples, right)], k).value == pytest.approx(sum(map(any, draws)) / len(draws))


@given(chance=st.fractions(0, 1), samples=st.integers(1, 12), data=st.data())
def test_pass_at_k_is_unbiased(chance, samples, data):
    """Its expectation over a binomial number of right samples is exactly 1 - (1 - p)^k."""
    k = data.draw(st.integers(1, samples))
    expectation = sum(
        math.comb(samples, right) * chance**right * (1 - chance) ** (samples - right) * Fraction(pass_at_k([(samples, right)], k).value)
        for right in range(samples + 1)
    )
    assert float(expectation) == pytest.approx(float(1 - (1 - chance) ** k), abs=1e-12)


def test_pass_at_k_stays_exact_where_factorials_overflow():
    assert pass_at_k([(100_000, 1)], 50_000).value == pytest.approx(0.5)
    assert pass_at_k([(2000, 1000)], 1000).value == 1.0
    assert pass_at_k([(4, 1), (4, 4)], 2).value == pytest.approx((0.5 + 1) / 2)


def test_pass_at_1_is_the_accuracy():
    counts = [(8, right) for right in range(9)]
    assert pass_at_k(counts, 1).value == pytest.approx(0.5)


def coverage(problems, k, samples, runs):
    """Share of simulated evaluations whose interval holds the true pass@k of the population, problems being Beta(1, 2) hard."""
    truth = 1 - math.prod((2 + i) / (3 + i) for i in range(k))  # 1 - E (1 - p)^k
    hits = 0
    for run in range(runs):
        draws = random.Random(f"{problems} {k} {run}")
        chances = [draws.betavariate(1, 2) for _ in range(problems)]
        counts = [(samples, sum(draws.random() < chance for _ in range(samples))) for chance in chances]
        estimate = pass_at_k(counts, k, resamples=250, seed=run)
        hits += estimate.low <= truth <= estimate.high
    return hits / runs


@pytest.mark.parametrize(("k", "samples"), [(1, 1), (1, 4), (4, 8)])
def test_intervals_cover_at_the_nominal_rate(k, samples):
    assert coverage(problems=100, k=k, samples=samples, runs=100) >= 0.88  # .95, less 3.2 standard errors


def test_wider_confidence_gives_wider_intervals_and_the_seed_fixes_them():
    draws = random.Random(0)
    values = [draws.random() for _ in range(50)]
    narrow, wide = mean_interval(values, confidence=0.5), mean_interval(values, confidence=0.99)
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high
    assert narrow == mean_interval(values, confidence=0.5) != mean_interval(values, confidence=0.5, seed=1)
    assert narrow.value == pytest.approx(sum(values) / 50)


def test_an_outcome_without_exception_still_has_an_interval():
    """1 - .025^(1/20) = .168: with 20 of 20 right, the exact binomial interval begins at .832."""
    assert mean_interval([1.0] * 20) == pytest.approx((1.0, 0.832, 1.0), abs=5e-4)
    assert mean_interval([0.0] * 20) == pytest.approx((0.0, 0.0, 0.168), abs=5e-4)
    assert mean_interval([0.0] * 20, bounds=(-1.0, 1.0)) == pytest.approx((0.0, -0.337, 0.337), abs=5e-4)
    assert str(mean_interval([1.0] * 20)) == "1.000 [0.832, 1.000]"


def binary(right, count, **options):
    return mean_interval([1.0] * right + [0.0] * (count - right), **options)


def at_least(right, count, p):
    """P(X >= right), X binomial, by its definition."""
    return math.fsum(math.comb(count, i) * p**i * (1 - p) ** (count - i) for i in range(right, count + 1))


@pytest.mark.parametrize(
    ("right", "count", "low", "high"), [(10, 20, 0.27196, 0.72804), (19, 20, 0.75127, 0.99873), (0, 10, 0.0, 0.30850), (1, 1, 0.025, 1.0)]
)
def test_one_sample_a_problem_has_clopper_and_pearson_s_interval(right, count, low, high):
    assert binary(right, count)[1:] == pytest.approx((low, high), abs=1e-5)


@given(st.integers(1, 200), st.data(), st.sampled_from([0.5, 0.8, 0.95, 0.999]))
def test_its_ends_are_where_the_tails_are_of_that_size(count, data, confidence):
    right = data.draw(st.integers(0, count))
    _, low, high = binary(right, count, confidence=confidence)
    assert right == 0 or at_least(right, count, low) == pytest.approx((1 - confidence) / 2, rel=1e-9)
    assert right == count or 1 - at_least(right + 1, count, high) == pytest.approx((1 - confidence) / 2, rel=1e-6)


@pytest.mark.parametrize("count", [5, 20, 60])
def test_it_covers_every_chance_and_a_right_answer_more_never_lowers_an_end(count):
    """The percentile bootstrap held .968 in 87 % of evaluations of 100 problems, and began at .85 with 19 of 20 right, at .832 with all."""
    ends = [binary(right, count)[1:] for right in range(count + 1)]
    assert all(below[0] < above[0] and below[1] < above[1] for below, above in itertools.pairwise(ends))
    for p in [i / 500 for i in range(1, 500)]:
        inside = [math.comb(count, i) * p**i * (1 - p) ** (count - i) for i, (low, high) in enumerate(ends) if low <= p <= high]
        assert math.fsum(inside) >= 0.95 - 1e-12


def test_it_is_quick_and_exact_for_many_problems():
    """The normal approximation is close there: .5 ± 1.96 / sqrt(4 n)."""
    assert binary(500_000, 1_000_000)[1:] == pytest.approx((0.5 - 0.00098, 0.5 + 0.00098), abs=2e-6)
    assert binary(999_999, 1_000_000).low == pytest.approx(1 - 5.5716e-6, abs=1e-9)  # half the .975 quantile of chi-square with 4 degrees


@pytest.mark.parametrize(
    ("counts", "k", "message"),
    [
        ([], 1, "no values"),
        ([(4, 1), (2, 1)], 3, "pass@3 of problem 1, which has 2 samples"),
        ([(4, 1)], 0, "pass@0"),
        ([(4, 5)], 1, "problem 0 has 5 right of 4"),
    ],
)
def test_impossible_counts_are_refused(counts, k, message):
    with pytest.raises(ValueError, match=message):
        pass_at_k(counts, k)
    with pytest.raises(ValueError, match="confidence 95"):
        mean_interval([1.0], confidence=95)
