"""Block-wise 8-bit quantisation with the dynamic maps of Dettmers et al. 2022 (arXiv:2110.02861, section 2).

A block is `block_size` consecutive elements. It is stored as one uint8 code an element and one fp32 `absmax`; an element
decodes to `map[code] * absmax`. The maps are frozen bits (`_maps.py`); the code of a value is the nearest map entry of
`value * (1 / absmax)`, with fp32 operations; half way between two entries it is the one nearer to zero.

Special values. A block whose largest magnitude is below 2**-126 (the smallest normal fp32) is stored as zero. A block that
holds an inf or a NaN gets `absmax` NaN and so decodes to NaN throughout: it can't pass for data.
"""

import functools
import hashlib
from dataclasses import dataclass

import torch

from align.optim8bit import _maps

MIN_BLOCK, MAX_BLOCK = 64, 4096
TINY = 2.0**-126  # below it 1 / absmax overflows
ZERO_CODE = {True: 127, False: 0}  # by signed


class OptimizerError(ValueError):
    """A parameter, gradient, state or setting that the optimizer can't take; the message names it and the way out."""

    exit_code = 2


@dataclass(frozen=True)
class Codebook:
    """One map and the table that finds codes, all on one device.

    values: (256,) fp32, ascending. bounds: (255,) or (128,) fp32, on the CPU: bounds[c] is the largest fp32 value that still rounds
    to magnitude c.
    table: (n,) int32 over intervals of floats with equal bits above `shift`, from `base` on. No interval holds more than one bound
    (a test says so). Entry = low `shift` bits of that bound << 8 | magnitude at the interval's lower edge, so one comparison finishes
    the search, exactly.
    """

    signed: bool
    values: torch.Tensor
    bounds: torch.Tensor
    table: torch.Tensor
    base: int
    shift: int


def _magnitudes(signed: bool) -> torch.Tensor:
    words = (_maps.SIGNED if signed else _maps.UNSIGNED).split()
    bits = torch.tensor([0] + [int(word, 16) for word in words], dtype=torch.int32)
    return bits.view(torch.float32)


def map_digest() -> str:
    """First 16 hex digits of the sha256 of both maps (little-endian fp32, signed then unsigned); states record it."""
    data = b"".join(dynamic_map(signed).numpy().tobytes() for signed in (True, False))
    return hashlib.sha256(data).hexdigest()[:16]


def dynamic_map(signed: bool = True) -> torch.Tensor:
    """The map's 256 values in ascending order, (256,) fp32 on the CPU, a new tensor every call."""
    magnitudes = _magnitudes(signed)
    if not signed:
        return magnitudes
    return torch.cat([-magnitudes[1:128].flip(0), magnitudes])


def _bounds(magnitudes: torch.Tensor) -> torch.Tensor:
    exact = (magnitudes[:-1].double() + magnitudes[1:].double()) / 2
    rounded = exact.float()
    return torch.where(rounded.double() > exact, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)


@functools.cache
def codebook(signed: bool, device: torch.device | str = "cpu") -> Codebook:
    """The map with its table on `device`; made once for each."""
    magnitudes = _magnitudes(signed)
    bounds = _bounds(magnitudes)
    shift = 17 if signed else 16  # 6 and 7 bits of mantissa: fine enough for 64 and 128 entries in the top decade
    bits = bounds.view(torch.int32)
    base = (int(bits[0]) >> shift) - 1  # every value below the first bound's interval takes entry 0
    top = int(torch.ones(1).view(torch.int32)) >> shift
    intervals = torch.arange(base, top + 1, dtype=torch.int32)
    lower = torch.bucketize((intervals << shift).view(torch.float32), bounds)
    last = (1 << shift) - 1
    inside = torch.full_like(intervals, last)  # no bound here: nothing compares greater
    inside[(bits >> shift) - base] = bits & last
    table = (inside << 8) | lower.int()
    return Codebook(signed, dynamic_map(signed).to(device), bounds, table.to(device), base, shift)


def encode(x: torch.Tensor, book: Codebook) -> torch.Tensor:
    """Codes (uint8, shape of x) of already scaled fp32 values, contiguous; magnitudes up to the one after 1.0; NaN has no code."""
    bits = x.view(torch.int32)
    magnitude = (bits & 0x7FFFFFFF) if book.signed else bits
    index = (magnitude >> book.shift).sub_(book.base).clamp_(0, book.table.numel() - 1)
    found = book.table.index_select(0, index.view(-1)).view(x.shape)
    inside = (magnitude & ((1 << book.shift) - 1)).bitwise_left_shift_(8)
    above = (found - inside).bitwise_right_shift_(31)  # -1 where inside > found, else 0; both are below 2**25
    code = found.bitwise_and_(255).sub_(above)
    if book.signed:
        sign = bits >> 31
        code = code.bitwise_xor_(sign).sub_(sign).add_(127).clamp_min_(0)  # there is no -1
    return code.to(torch.uint8)


def scales(absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(absmax as stored, its reciprocal): blocks under the smallest normal fp32 become 0, non-finite ones NaN with reciprocal 0."""
    absmax = torch.where(absmax < TINY, 0.0, absmax)
    usable = (absmax > 0) & (absmax < float("inf"))
    reciprocal = torch.where(usable, 1.0 / absmax, 0.0)
    return torch.where(usable | (absmax == 0), absmax, float("nan")), reciprocal


def check_block_size(block_size: int) -> None:
    if not (isinstance(block_size, int) and MIN_BLOCK <= block_size <= MAX_BLOCK and block_size & (block_size - 1) == 0):
        raise OptimizerError(f"block_size {block_size!r} is not a power of two from {MIN_BLOCK} to {MAX_BLOCK}; 2048 is the default")


def quantise(x: torch.Tensor, block_size: int = 2048, *, signed: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a tensor of any shape, blocks running over its flattened elements; the last block may be short.

    Returns (codes uint8 of x's shape, absmax fp32 (ceil(numel / block_size),)). With signed=False negative values count as 0.
    Raises OptimizerError for a block size that is not a power of two from 64 to 4096 or a tensor that is not floating point.
    """
    check_block_size(block_size)
    if not x.is_floating_point():
        raise OptimizerError(f"quantise takes floating point values, not {x.dtype}; convert the tensor first")
    flat = x.detach().reshape(-1).float()
    count = -(-flat.numel() // block_size)
    blocks = torch.nn.functional.pad(flat, (0, count * block_size - flat.numel())).view(count, block_size)
    if not signed:
        blocks = torch.where(blocks < 0, 0.0, blocks)
    absmax, reciprocal = scales(blocks.abs().amax(1) if count else blocks.new_empty(0))
    scaled = torch.where(torch.isnan(absmax)[:, None], 0.0, blocks * reciprocal[:, None])
    codes = encode(scaled, codebook(signed, x.device)).view(-1)[: flat.numel()]
    return codes.view(x.shape), absmax


def dequantise(codes: torch.Tensor, absmax: torch.Tensor, block_size: int = 2048, *, signed: bool = True) -> torch.Tensor:
    """The fp32 values of `quantise`'s codes and absmax, in the shape of `codes`. Raises OptimizerError when the two don't fit."""
    check_block_size(block_size)
    count = -(-codes.numel() // block_size)
    if codes.dtype != torch.uint8 or absmax.numel() != count:
        raise OptimizerError(
            f"{codes.numel()} codes of {codes.dtype} in blocks of {block_size} need uint8 and {count} absmax values, not {absmax.numel()}"
        )
    values = codebook(signed, codes.device).values.take(codes.reshape(-1).long())
    scale = absmax.float().repeat_interleave(block_size)[: codes.numel()]
    return (values * scale).view(codes.shape)
