"""Random LaTeX strings: no exception, and every pair within 50 ms. A million of them were run once (README)."""

import pytest
from verify_limits import run_fuzz


def test_fuzzed_pairs():
    run_fuzz(1_500, 1)


@pytest.mark.slow
def test_twenty_thousand_fuzzed_pairs():
    run_fuzz(20_000, 2)
