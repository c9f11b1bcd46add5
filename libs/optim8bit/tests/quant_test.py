"""Maps, rounding to the nearest code, blocks, and special values."""

import hashlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from align.optim8bit import OptimizerError, quant

# sha256 of bitsandbytes 0.50.2's create_dynamic_map(signed) as little-endian fp32 (torch 2.13.0, x86-64 with FMA).
BITSANDBYTES = {
    True: "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c",
    False: "305f002cc11278fb769d13b25b9fd0c7c83c8402c40a878fe086f4039fde6398",
}
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)


def paper_map(signed: bool) -> list[float]:
    """Section 2.1 of arXiv:2110.02861 in float64."""
    values = [0.0, 1.0]
    for i in range(7):
        n = 2**i if signed else 2 ** (i + 1)
        decade = [10.0 ** (i - 6) * (0.1 + 0.9 * (j + 0.5) / n) for j in range(n)]
        values += decade + ([-x for x in decade] if signed else [])
    return sorted(values)


def nearest(x: float, table: list[float]) -> set[int]:
    """The codes whose entries are nearest to x: two at a tie."""
    best = min(abs(x - t) for t in table)
    return {i for i, t in enumerate(table) if abs(x - t) == best}


@pytest.mark.parametrize("signed", [True, False])
def test_map_is_bitsandbytes_to_the_last_bit(signed):
    table = quant.dynamic_map(signed)
    assert table.dtype == torch.float32 and table.shape == (256,)
    assert hashlib.sha256(table.numpy().tobytes()).hexdigest() == BITSANDBYTES[signed]


@pytest.mark.parametrize("signed", [True, False])
def test_map_is_the_papers_to_four_ulp(signed):
    table = quant.dynamic_map(signed).double()
    exact = torch.tensor(paper_map(signed), dtype=torch.float64)
    assert ((table - exact).abs() <= 4 * 2.0**-24 * exact.abs()).all()
    assert (table.diff() > 0).all()
    assert table[quant.ZERO_CODE[signed]] == 0 and table[255] == 1


@pytest.mark.parametrize("signed", [True, False])
def test_every_bound_and_its_neighbours_take_the_nearest_code(signed):
    book = quant.codebook(signed)
    bound = book.bounds
    above, below = torch.nextafter(bound, torch.ones(1)), torch.nextafter(bound, torch.zeros(1))
    x = torch.cat([bound, above, below, book.values.abs(), torch.tensor([2.0**-149, 2.0**-126])])
    if signed:
        x = torch.cat([x, -x])
    table = book.values.double().tolist()
    codes = quant.encode(x, book).tolist()
    for value, code in zip(x.double().tolist(), codes, strict=True):
        assert code in nearest(value, table), value


@pytest.mark.parametrize("signed", [True, False])
def test_ties_go_to_the_smaller_magnitude(signed):
    """Where a midpoint of neighbours is an fp32 number, the value itself takes the inner code."""
    values = quant.codebook(signed).values[128 if signed else 0 :]
    middle = (values[:-1].double() + values[1:].double()) / 2
    exact = middle.float().double() == middle
    assert exact.any()
    codes = quant.encode(middle.float()[exact], quant.codebook(signed)).long()
    assert torch.equal(codes, torch.arange(len(values) - 1)[exact] + (128 if signed else 0))


@pytest.mark.parametrize("signed", [True, False])
def test_no_interval_of_the_table_holds_two_bounds(signed):
    """What makes one comparison enough."""
    book = quant.codebook(signed)
    intervals = book.bounds.view(torch.int32) >> book.shift
    assert len(intervals.unique()) == len(intervals)


@given(st.lists(FLOATS, min_size=1, max_size=200), st.sampled_from([64, 128]), st.booleans())
def test_round_trip_error_is_bounded_by_half_the_gap(values, block, signed):
    x = torch.tensor(values, dtype=torch.float32)
    x = x if signed else x.abs()
    codes, absmax = quant.quantise(x, block, signed=signed)
    back = quant.dequantise(codes, absmax, block, signed=signed)
    assert absmax.shape == (math.ceil(len(values) / block),)
    table = quant.dynamic_map(signed).double()
    gap = torch.maximum(table.diff()[codes.long().clamp(max=254)], table.diff()[(codes.long() - 1).clamp(min=0)])
    gap[codes == 0] = gap[codes == 0].maximum(torch.tensor(0.0143 if signed else 0.0, dtype=torch.float64))  # -1 takes -0.9929
    scale = absmax.double().repeat_interleave(block)[: len(values)]
    small = scale < 2.0**-126
    assert ((back.double() - x.double()).abs() <= torch.where(small, 2.0**-126, scale * (gap / 2 + 1e-6))).all()


@given(st.lists(FLOATS, min_size=2, max_size=64), st.booleans())
def test_codes_are_monotone_within_a_block(values, signed):
    x = torch.tensor(sorted(values), dtype=torch.float32)
    codes, _ = quant.quantise(x if signed else x.clamp_min(0), 64, signed=signed)
    assert (codes.int().diff() >= 0).all()


@given(st.lists(st.integers(0, 255), min_size=1, max_size=150), st.floats(2.0**-100, 2.0**100, width=32), st.booleans())
def test_codes_survive_decoding_and_encoding(codes, scale, signed):
    """A block whose largest magnitude is the positive one gives its own codes back."""
    given_codes = torch.tensor(codes, dtype=torch.uint8)
    given_codes[::64] = 255
    absmax = torch.full((math.ceil(len(codes) / 64),), scale)
    values = quant.dequantise(given_codes, absmax, 64, signed=signed)
    again, absmax_again = quant.quantise(values, 64, signed=signed)
    assert torch.equal(again, given_codes) and torch.equal(absmax_again, absmax)


@pytest.mark.parametrize("block", [64, 128, 256, 512, 1024, 2048, 4096])
@pytest.mark.parametrize("numel", [0, 1, 63, 4096, 4097, 10000])
def test_blocks_and_tails(block, numel):
    """Every block, the short last one too, equals the same elements quantised alone."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    codes, absmax = quant.quantise(x, block)
    assert codes.shape == x.shape and absmax.shape == (math.ceil(numel / block),)
    for i, part in enumerate(x.split(block) if numel else []):
        assert absmax[i] == part.abs().max()
        assert torch.equal(codes[i * block : (i + 1) * block], quant.quantise(part, block)[0])


def test_shape_and_dtype():
    x = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
    codes, absmax = quant.quantise(x.bfloat16(), 64)
    assert codes.shape == x.shape and quant.dequantise(codes, absmax, 64).shape == x.shape
    assert torch.equal(codes, quant.quantise(x.bfloat16().float(), 64)[0])


@pytest.mark.parametrize("signed", [True, False])
def test_zeros_denormals_and_large_values(signed):
    tiny, largest = 2.0**-126, float(torch.finfo(torch.float32).max)
    for fill, expected in ((0.0, 0.0), (-0.0, 0.0), (2.0**-149, 0.0), (tiny / 2, 0.0), (tiny, tiny), (largest, largest)):
        codes, absmax = quant.quantise(torch.full((64,), fill), 64, signed=signed)
        assert absmax.item() == expected
        assert (quant.dequantise(codes, absmax, 64, signed=signed) == expected).all()
        assert (codes == (quant.ZERO_CODE[signed] if expected == 0 else 255)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_value_poisons_its_block_and_no_other(bad):
    x = torch.ones(192)
    x[70] = bad
    codes, absmax = quant.quantise(x, 64)
    back = quant.dequantise(codes, absmax, 64)
    assert back[64:128].isnan().all() and (back[:64] == 1).all() and (back[128:] == 1).all()


def test_unsigned_takes_negative_values_as_zero():
    codes, absmax = quant.quantise(torch.tensor([-5.0, 1.0, 0.5]), 64, signed=False)
    assert absmax.item() == 1 and codes[0] == 0 and codes[1] == 255


@pytest.mark.parametrize("block", [0, 32, 100, 8192, 64.0, "64"])
def test_bad_block_sizes_are_named(block):
    with pytest.raises(OptimizerError, match=r"block_size .* power of two"):
        quant.quantise(torch.ones(3), block)


def test_codes_and_absmax_that_do_not_fit_are_refused():
    codes, absmax = quant.quantise(torch.ones(130), 64)
    with pytest.raises(OptimizerError, match="3 absmax values, not 2"):
        quant.dequantise(codes, absmax[:2], 64)
    with pytest.raises(OptimizerError, match="int32"):
        quant.dequantise(codes.int(), absmax, 64)
    with pytest.raises(OptimizerError, match="floating point"):
        quant.quantise(torch.ones(3, dtype=torch.int32), 64)
