"""pass@k is the unbiased estimate, and a pair of results is compared problem by problem."""

from dataclasses import replace
from math import comb

from align.evals import Item, compare, pass_at_k

counts = [(8, 0), (8, 1), (8, 4), (8, 8)]
expected = sum(1 - comb(n - c, 4) / comb(n, 4) for n, c in counts) / len(counts)  # Chen et al. 2021, equation 1
assert abs(pass_at_k(counts, k=4).value - expected) < 1e-12

before = [Item(i, 0, None, f"problem {i}", "1", "", None, i % 2 == 0, "equal", 5, "stop") for i in range(100)]
after = [replace(item, correct=item.correct or item.problem < 40) for item in before]
difference = compare(before, after)
assert [flip.problem for flip in difference.flips][:3] == [1, 3, 5]
