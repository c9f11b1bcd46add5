"""Triton kernels of a decoding step's products and of what joins them. Importing this imports triton.

With PDL a kernel is started while the one before it still runs: it asks for memory that nobody writes, waits for the other to end, and
goes on (programmatic dependent launch, CUDA programming guide).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from triton.language.extra import cuda  # type: ignore[import-untyped]

from align.kernels._decode_kernels import _dot, _fetch


@triton.jit
def _begin(weight, column, first, K: tl.constexpr, LINES: tl.constexpr):
    """Asks for LINES times 128 bytes of these rows of the weight, then waits for the kernel before."""
    if LINES > 0:
        line = tl.arange(0, LINES) * (128 // (weight.dtype.element_ty.primitive_bitwidth // 8))
        _fetch(weight + column.to(tl.int64)[:, None] * K + first + line[None, :])
    cuda.gdc_wait()
    cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["rows"])
def step_linear(
    x, weight, out, rows, outputs,
    K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr, GATED: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """One M × N tile over SHARE of the inputs a program; where that is not all, out is fp32, the parts one after another. GATED: silu of
    the first half of the outputs times the second."""
    row_tiles = tl.cdiv(rows, M)
    row = tl.program_id(0) % row_tiles * M + tl.arange(0, M)
    column = tl.program_id(0) // row_tiles * N + tl.arange(0, N)
    first = tl.program_id(1) * SHARE
    there = tl.where(column < outputs, column, 0)  # rows and columns beyond the end read the first ones again: no mask in the loop
    if PDL:
        _begin(weight, there, first, K, LINES)
    lane = first + tl.arange(0, BLOCK)
    left = x + tl.where(row < rows, row, 0).to(tl.int64)[:, None] * K + lane[None, :]
    right = weight + there.to(tl.int64)[None, :] * K + lane[:, None]
    total = tl.zeros((M, N), tl.float32)
    other = tl.zeros((M, N), tl.float32)
    for k in range(0, SHARE, BLOCK):
        if K % SHARE == 0 and SHARE % BLOCK == 0:
            a = tl.load(left + k)
            b = tl.load(right + k)
            if GATED:
                c = tl.load(right + outputs.to(tl.int64) * K + k)
        else:
            inside = (k + lane < K) & (k + lane < first + SHARE)
            a = tl.load(left + k, mask=inside[None, :], other=0.0)
            b = tl.load(right + k, mask=inside[:, None], other=0.0)
            if GATED:
                c = tl.load(right + outputs.to(tl.int64) * K + k, mask=inside[:, None], other=0.0)
        total = _dot(a, b, total, WIDE)
        if GATED:
            other = _dot(a, c, other, WIDE)
    if GATED:
        total = total * tl.sigmoid(total) * other
    where = (tl.program_id(1) * rows + row).to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(out + where, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < outputs)[None, :])


@triton.jit(do_not_specialize=["rows"])
def sum_rms_norm(
    parts, bias, residual, weight, y, h, rows, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """h = residual + all parts + bias, y = its norm; a row a program. EARLY: all but parts is read before the last kernel has ended."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    if PDL and not EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    w = tl.load(weight + column, mask=inside, other=0.0)
    other = tl.load(residual + row * D + column, mask=inside, other=0.0)
    if PDL and EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    total = other.to(tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + (part * rows + row) * D + column, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    total = total.to(other.dtype)
    tl.store(h + row * D + column, total, mask=inside)
    value = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / D + eps)
    tl.store(y + row * D + column, (value * scale * w.to(tl.float32)).to(other.dtype), mask=inside)


@triton.jit
def step_vector(
    x, weight, bias, residual, norm, out, outputs, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    SCALE: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """One x, on the plain cores: ROWS outputs a program. SCALE: x is normed here, by every program for itself; ADD: the residual."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = tl.where(n < outputs, n, 0)
    if PDL:
        _begin(weight, there, 0, K, LINES)
    lane = tl.arange(0, BLOCK)
    base = weight + there.to(tl.int64)[:, None] * K + lane[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    other = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for k in tl.range(0, K, BLOCK, num_stages=STAGES):
        inside = k + lane < K
        w = tl.load(base + k, mask=inside[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32)
        part = tl.load(x + k + lane, mask=inside, other=0.0).to(tl.float32)
        if SCALE:
            squares += part * part
            part = part * tl.load(norm + k + lane, mask=inside, other=0.0).to(tl.float32)
        total += w * part[None, :]
        if GATED:
            c = tl.load(base + outputs.to(tl.int64) * K + k, mask=inside[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32)
            other += c * part[None, :]
    y = tl.sum(total, 1)
    if SCALE:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y = y * scale
    if BIAS:
        y += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
    if GATED:
        z = tl.sum(other, 1)
        if SCALE:
            z = z * scale
        y = y * tl.sigmoid(y) * z
    if ADD:
        y += tl.load(residual + n, mask=n < outputs, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < outputs)
