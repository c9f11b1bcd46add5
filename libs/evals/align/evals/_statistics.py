"""Estimates over problems: unbiased pass@k and bootstrap intervals, on the standard library."""

import math
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Estimate(NamedTuple):
    """A mean over problems and its confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_interval(
    values: Sequence[float], *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0, bounds: tuple[float, float] = (0.0, 1.0)
) -> Estimate:
    """The mean of one value a problem, with its interval over problems.

    bounds: the values that are possible. Where every value is one of the two, as with one sample a problem, the interval is the exact
    binomial one (Clopper and Pearson 1934). Else it is a percentile bootstrap (Efron and Tibshirani 1993, chapter 13), which says nothing
    where all values are alike: the interval then reaches as far as the exact one of an outcome without exception does, to
    1 - ((1 - confidence) / 2)^(1/n) of the range. The same values and seed give the same interval.

    Raises:
        ValueError: no values, or a confidence that is not between 0 and 1.
    """
    if not values:
        raise ValueError("no values to take a mean of; no problem was judged")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence} must be between 0 and 1")
    count, tail = len(values), (1 - confidence) / 2
    mean = math.fsum(values) / count
    lowest, highest = bounds
    if set(values) <= {lowest, highest}:
        right = sum(value == highest for value in values)
        low, high = _binomial_low(right, count, tail), 1 - _binomial_low(count - right, count, tail)
        return Estimate(mean, lowest + (highest - lowest) * low, lowest + (highest - lowest) * high)
    if all(value == values[0] for value in values):
        reach = (highest - lowest) * (1 - tail ** (1 / count))
        return Estimate(mean, max(lowest, mean - reach), min(highest, mean + reach))
    draw = random.Random(seed).choices
    means = sorted(sum(draw(values, k=count)) / count for _ in range(resamples))
    return Estimate(mean, _quantile(means, tail), _quantile(means, 1 - tail))


def _binomial_low(right: int, count: int, tail: float) -> float:
    """The chance p at which `right` or more of `count` come with probability `tail`; found by halving."""
    low, high = 0.0, right / count
    for _ in range(60 if right else 0):
        p = (low + high) / 2
        logs = math.lgamma(count + 1) - math.lgamma(right + 1) - math.lgamma(count - right + 1)
        term = total = math.exp(logs + right * math.log(p) + (count - right) * math.log1p(-p))
        for i in range(right, count):  # terms fall: p is below right / count
            term *= (count - i) / (i + 1) * p / (1 - p)
            total += term
            if term <= 1e-17 * total:
                break
        low, high = (p, high) if total < tail else (low, p)
    return low


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def pass_at_k(counts: Iterable[tuple[int, int]], k: int, *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0) -> Estimate:
    """The probability that at least one of k samples of a problem is right, without bias (Chen et al. 2021, equation 1), and its interval.

    counts: (samples n, right ones c) of each problem; the estimate of a problem is 1 - C(n - c, k) / C(n, k), in exact integers.

    Raises:
        ValueError: no problems, k below 1 or above the samples of some problem, c outside 0 .. n.
    """
    values = []
    for problem, (samples, right) in enumerate(counts):
        if not 0 <= right <= samples:
            raise ValueError(f"problem {problem} has {right} right of {samples} samples")
        if not 1 <= k <= samples:
            raise ValueError(f"pass@{k} of problem {problem}, which has {samples} samples; take k from 1 to {samples} or draw more samples")
        total = math.comb(samples, k)
        values.append((total - math.comb(samples - right, k)) / total)
    return mean_interval(values, confidence=confidence, resamples=resamples, seed=seed)
