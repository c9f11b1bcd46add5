"""Two results on the same problems: is one better, by how much, and which problems flipped."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from align.evals._items import EvalError, Item, problem_scores
from align.evals._statistics import Estimate, mean_interval


@dataclass(frozen=True)
class Flip:
    """A problem that A and B answered differently: the share of right samples of each, and a sample that shows it."""

    problem: int
    score_a: float
    score_b: float
    item_a: Item
    item_b: Item


@dataclass(frozen=True)
class Comparison:
    """B against A, problem by problem.

    problems: judged in both. accuracy_a, accuracy_b: over these. difference: B - A, with its bootstrap interval over problems.
    better, worse: problems on which B is above, below A. p_value: two-sided exact sign test on these (one sample a problem: McNemar's).
    flips: these problems, the worse ones first.
    """

    problems: int
    accuracy_a: float
    accuracy_b: float
    difference: Estimate
    better: int
    worse: int
    p_value: float
    flips: list[Flip]

    def __str__(self) -> str:
        return (
            f"A {self.accuracy_a:.3f}, B {self.accuracy_b:.3f} on {self.problems} problems; B - A = {self.difference}; "
            f"B better on {self.better}, worse on {self.worse}; p = {self.p_value:.2g}"
        )


def sign_test(better: int, worse: int) -> float:
    """Two-sided exact p-value that as uneven a split, or a more uneven one, comes from a fair coin: twice the smaller tail, at most 1."""
    total = better + worse
    tail = ways = 1
    for i in range(min(better, worse)):
        ways = ways * (total - i) // (i + 1)  # C(total, i + 1)
        tail += ways
    return min(1.0, 2 * tail / (1 << total))


def compare(a: Sequence[Item], b: Sequence[Item], *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0) -> Comparison:
    """Pairs two results by problem.

    Raises:
        EvalError: results of different problems (the message names the first that differs), or none judged in both.
    """
    asked_a, asked_b = ({item.problem: item for item in reversed(items)} for items in (a, b))
    if alone := asked_a.keys() ^ asked_b.keys():
        side = "A" if min(alone) in asked_a else "B"
        raise EvalError(f"problem {min(alone)} is only in {side}; compare results on the same rows")
    for problem, item in asked_a.items():
        if (item.prompt, item.gold) != (asked_b[problem].prompt, asked_b[problem].gold):
            raise EvalError(f"problem {problem} has another prompt or answer in B; compare results on the same rows")
    scores_a, scores_b = problem_scores(a), problem_scores(b)
    both = [problem for problem in sorted(scores_a) if problem in scores_b]
    if not both:
        raise EvalError("no problem was judged in both results")
    pairs = {problem: (_share(scores_a[problem]), _share(scores_b[problem])) for problem in both}
    flips = [
        Flip(problem, in_a, in_b, _example(a, problem, in_a > in_b), _example(b, problem, in_b > in_a))
        for problem, (in_a, in_b) in pairs.items()
        if in_a != in_b
    ]
    worse = sum(flip.score_b < flip.score_a for flip in flips)
    return Comparison(
        problems=len(both),
        accuracy_a=math.fsum(in_a for in_a, _ in pairs.values()) / len(both),
        accuracy_b=math.fsum(in_b for _, in_b in pairs.values()) / len(both),
        difference=mean_interval(
            [in_b - in_a for in_a, in_b in pairs.values()], confidence=confidence, resamples=resamples, seed=seed, bounds=(-1.0, 1.0)
        ),
        better=len(flips) - worse,
        worse=worse,
        p_value=sign_test(len(flips) - worse, worse),
        flips=sorted(flips, key=lambda flip: (flip.score_b - flip.score_a, flip.problem)),
    )


def _share(score: tuple[int, int]) -> float:
    samples, right = score
    return right / samples


def _example(items: Sequence[Item], problem: int, wanted: bool) -> Item:
    """The first sample of the problem that was judged as wanted, else its first."""
    mine = [item for item in items if item.problem == problem]
    return next((item for item in mine if item.correct is wanted), mine[0])
