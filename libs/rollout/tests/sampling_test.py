import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollout_cases import CASES, biased, chi_square_z, exact, some_logits

from align import kernels
from align.rollout import RolloutError
from align.rollout._noise import Noise, sample_key, token_keys
from align.rollout._sampling import SamplingParams, draw

CPU = torch.device("cpu")
MASK_32, MASK_64 = (1 << 32) - 1, (1 << 64) - 1


def mix(x):
    """SplitMix64's finaliser, written down a second time from the paper."""
    x &= MASK_64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK_64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK_64
    return x ^ x >> 31


def noise_bits(seed, index, position, token):
    key = mix(mix(mix(seed) + index * 0x9E3779B97F4A7C15) + position * 0x9E3779B97F4A7C15)
    low, high = key & MASK_32, key >> 32
    x = ((mix((token + 1) * 0x9E3779B97F4A7C15) & MASK_32) ^ low) * 0x7FEB352D & MASK_32
    x = ((x ^ x >> 15) + high) * 0x846CA68B & MASK_32
    x = (x ^ x >> 16) * 0x9E3779B1 & MASK_32
    return x & 0x7FFFFFFF


@given(seed=st.integers(-(2**70), 2**70), index=st.integers(0, 2**40), position=st.integers(0, 2**40), token=st.integers(0, 199))
def test_noise_is_the_stated_function_of_seed_sample_position_and_token(seed, index, position, token):
    noise = Noise(2, 200, CPU).negative_exponential(token_keys(torch.tensor([0, sample_key(seed, index)]), torch.tensor([5, position])))
    uniform = (noise_bits(seed, index, position, token) + 0.5) / 2**31
    # u is at most 1 - 2^-23, and a float32 u there is 2^-24 coarse, so the logarithm of 1 - u is taken loosely at that end.
    assert float(noise[1, token]) == pytest.approx(math.log1p(-uniform), rel=1e-5, abs=2**-24 / (1 - uniform + 2**-23))


def test_noise_is_negative_finite_and_standard_exponential():
    keys = torch.tensor([sample_key(11, index) for index in range(2000)])
    noise = -Noise(2000, 512, CPU).negative_exponential(token_keys(keys, torch.tensor(3))).double()
    assert bool(torch.isfinite(noise).all()) and float(noise.min()) > 0
    count = noise.numel()
    assert float(noise.mean()) == pytest.approx(1, abs=4 / math.sqrt(count))
    assert float(noise.var()) == pytest.approx(1, abs=4 * math.sqrt(8 / count))
    ranked = (-torch.expm1(-noise)).flatten().sort().values  # Kolmogorov-Smirnov against the uniform distribution
    assert float((ranked - (torch.arange(count) + 0.5) / count).abs().max()) * math.sqrt(count) < 1.95  # p = 0.001


def test_noise_of_neighbouring_tokens_samples_positions_and_seeds_is_uncorrelated():
    rows, vocab = 1500, 300
    noise = Noise(rows, vocab, CPU)

    def scores(keys, positions):
        return (torch.exp(noise.negative_exponential(token_keys(keys, positions))).double() - 0.5) * math.sqrt(12)

    one = scores(torch.full((rows,), sample_key(4, 0)), torch.arange(rows))
    samples = scores(torch.tensor([sample_key(4, index) for index in range(rows)]), torch.full((rows,), 9))
    seeds = scores(torch.tensor([sample_key(seed, 0) for seed in range(rows)]), torch.full((rows,), 9))
    for block in (one, samples, seeds):
        for a, b in ((block[1:], block[:-1]), (block[:, 1:], block[:, :-1]), (block[7:], block[:-7]), (block[:, 16:], block[:, :-16])):
            assert abs(float((a * b).mean())) * math.sqrt(a.numel()) < 4.5
        tokens = (block.T @ block / math.sqrt(rows)).fill_diagonal_(0)
        assert float(tokens.abs().max()) < 6  # the largest of 45,000 normal variates
    assert abs(float((samples * seeds).mean())) * math.sqrt(rows * vocab) < 4.5


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_exact_distribution(case):
    logits = some_logits(64)
    probs = exact(logits.tolist(), *CASES[case])
    assert abs(chi_square_z(logits, case, 100_000, probs)[0]) < 4


def test_a_bias_of_two_percent_is_seen():
    logits = some_logits(64)
    assert chi_square_z(logits, "plain", 400_000, biased(exact(logits.tolist(), *CASES["plain"])))[0] > 5


@given(
    seed=st.integers(0, 2**32),
    temperature=st.floats(0.05, 5),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 40),
    min_p=st.floats(0, 1),
)
def test_log_probs_are_those_of_the_token_drawn(seed, temperature, top_p, top_k, min_p):
    vocab = 30
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    noise = Noise(4, vocab, CPU).negative_exponential(token_keys(torch.tensor(sample_key(seed, 0)), torch.arange(4)))
    tokens, logprobs, raw = draw(logits, SamplingParams(temperature, top_p, top_k, min_p), noise)
    for row in range(4):
        values, token = logits[row].tolist(), int(tokens[row])
        assert float(raw[row]) == pytest.approx(math.log(exact(values, 1.0, 1.0, 0, 0.0)[token]), abs=1e-5)
        # Where a filter's edge falls on a token to within rounding, the exact distribution may be one token longer or shorter.
        near = [exact(values, temperature, min(1.0, top_p * (1 + e)), top_k, min_p * (1 + e)) for e in (-1e-5, 0, 1e-5)]
        assert any(probs[token] and abs(float(logprobs[row]) - math.log(probs[token])) < 1e-5 for probs in near)


def test_temperature_zero_takes_the_most_likely_token():
    logits = torch.randn(5, 50)
    tokens, logprobs, raw = draw(logits, SamplingParams(temperature=0), None)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert logprobs.tolist() == [0.0] * 5
    assert torch.allclose(raw, logits.log_softmax(-1).amax(-1), atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-15, 1e-30, 1e-40, 1e-45, 5e-324])
def test_the_smallest_temperatures_take_the_most_likely_token_or_one_of_its_equals(temperature):
    logits = torch.tensor([[1.0, 3.0, 2.0, -1e9, 3.0], [-7.0, -50.0, -8.0, -9.0, -9.0]])
    keys = torch.arange(400)
    for row, likely in enumerate(([1, 4], [0])):
        noise = Noise(len(keys), 5, CPU).negative_exponential(token_keys(keys, torch.tensor(1)))
        tokens, logprobs, raw = draw(logits[row].expand(len(keys), 5), SamplingParams(temperature), noise)
        assert set(tokens.tolist()) == set(likely)
        assert logprobs.tolist() == pytest.approx([-math.log(len(likely))] * len(keys), abs=1e-6)
        torch.testing.assert_close(raw, logits[row].log_softmax(-1)[tokens])


def test_equally_likely_tokens_stay_together_and_one_token_always_stays():
    logits = torch.tensor([[2.0, 2.0, 2.0, 0.0]])
    noise = Noise(1, 4, CPU)
    seen = {int(draw(logits, SamplingParams(top_k=1), noise.negative_exponential(torch.tensor([sample_key(0, i)])))[0]) for i in range(100)}
    assert seen == {0, 1, 2}
    tokens, logprobs, _ = draw(
        torch.tensor([[0.0, 5.0, 1.0, 2.0]]), SamplingParams(top_p=1e-6), noise.negative_exponential(torch.tensor([1]))
    )
    assert tokens.tolist() == [1] and logprobs.tolist() == [0.0]


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"), [(1, 0.5, 1), (2, 0.5, 1), (3, 0.5, 1), (4, 0.5, 4), (0, 0.5, 4), (2, 0.7, 4), (2, 1.0, 4)]
)
def test_the_share_of_top_p_is_of_k_tokens_in_both_engines(top_k, top_p, kept):
    """Of .4, .2, .2, .2: two make .6, of which .5 is less than the first; .7 is more, and with the second come its equals."""
    rows = 4000
    logits, keys, positions = torch.tensor([0.4, 0.2, 0.2, 0.2]).log().expand(rows, -1).contiguous(), torch.arange(rows), torch.zeros(rows)
    tokens, _, _ = draw(
        logits, SamplingParams(1.0, top_p, top_k), Noise(rows, 4, CPU).negative_exponential(token_keys(keys, positions.long()))
    )
    options = torch.ones(rows), torch.full((rows,), top_k, dtype=torch.int32), torch.full((rows,), top_p), torch.zeros(rows)
    assert torch.equal(kernels.sample(logits, keys, positions.long(), *options)[0], tokens)
    assert sorted(set(tokens.tolist())) == list(range(kept))


def test_logits_in_bf16_are_normalised_in_fp32():  # R073
    logits = (torch.randn(3, 32000, generator=torch.Generator().manual_seed(0)) * 4).bfloat16()
    noise = Noise(3, 32000, CPU).negative_exponential(torch.tensor([1, 2, 3]))
    tokens, logprobs, raw = draw(logits, SamplingParams(), noise)
    wanted = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert float((logprobs - wanted).abs().max()) < 1e-5 and float((raw - wanted).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.01}, "top_p 1.01"),
        ({"top_k": -1}, "top_k -1"),
        ({"min_p": 1.5}, "min_p 1.5"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(values, words):
    with pytest.raises(RolloutError, match=words) as error:
        SamplingParams(**values)
    assert error.value.exit_code == 2
