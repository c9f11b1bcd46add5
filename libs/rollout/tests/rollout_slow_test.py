"""The checks of native_test and sampling_test at full size."""

import pytest
from rollout_cases import ARCHITECTURES, CASES, biased, check_greedy, check_memory, chi_square_z, exact, some_logits

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_is_the_argmax_of_full_forwards_on_500_prompts(name):
    check_greedy(name, 500)


@pytest.mark.parametrize("case", CASES)
def test_a_million_draws_on_512_symbols_follow_the_exact_distribution(case):
    logits = some_logits(512)
    probs = exact(logits.tolist(), *CASES[case])
    right, wrong = chi_square_z(logits, case, 1_000_000, probs, biased(probs))
    assert abs(right) < 4 and wrong > 5


def test_memory_does_not_grow_over_a_thousand_calls():
    check_memory(1000)
