"""Triton kernels that stream rows once: RMSNorm, RoPE, SwiGLU, scaling. Importing this module imports triton."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from triton.language.extra import cuda  # type: ignore[import-untyped]


@triton.jit
def _below(index, limit, SURE: tl.constexpr):
    """index < limit; SURE: known to be, so that the mask of a load or store is a constant and costs nothing."""
    if SURE:
        return tl.full(index.shape, True, tl.int1)
    return index < limit


@triton.jit
def _follow(PDL: tl.constexpr):
    """PDL: a kernel starts while the one before still runs, waits here for its end, and lets the next one start; see `_step_kernels`."""
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["rows"])  # a batch of another size must not compile again
def rms_norm(
    x, residual, weight, y, h, rstd, rows, eps, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    _follow(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    is_row, is_column = _below(row, rows, ROWS == 1), _below(column, D, BLOCK == D)
    inside = is_row[:, None] & is_column[None, :]
    at = row.to(tl.int64)[:, None] * D + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0)
    if ADD:
        other = tl.load(residual + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
        tl.store(h + at, value, mask=inside)
    value = value.to(tl.float32)
    w = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)
    tl.store(rstd + row, scale, mask=is_row)
    tl.store(y + at, (value * scale[:, None] * w[None, :]).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_backward(
    dy, dh, h, weight, rstd, dx, partial, rows,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr, HAS_DH: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program p takes row groups p, p + PROGRAMS, ... and writes its sum of dy * normed to partial[p]."""
    _follow(PDL)
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    is_column = _below(column, D, BLOCK == D)
    w = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for group in tl.range(program, tl.cdiv(rows, ROWS), PROGRAMS, num_stages=STAGES):
        row = group * ROWS + tl.arange(0, ROWS)
        is_row = _below(row, rows, ROWS == 1)
        inside = is_row[:, None] & is_column[None, :]
        at = row.to(tl.int64)[:, None] * D + column[None, :]
        grad = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row, mask=is_row, other=0.0)[:, None]
        normed = tl.load(h + at, mask=inside, other=0.0).to(tl.float32) * scale
        total += grad * normed
        g = grad * w[None, :]
        out = (g - normed * (tl.sum(g * normed, 1) / D)[:, None]) * scale
        if HAS_DH:
            out += tl.load(dh + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=inside)
    tl.store(partial + program * BLOCK + column, tl.sum(total, 0))


@triton.jit
def sum_rows(
    values, out, ROWS: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[c] = the sum of values[:, c] (fp32, rows STRIDE apart)."""
    _follow(PDL)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((BLOCK_ROWS, COLUMNS), tl.float32)
    for first in range(0, ROWS, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        inside = (row < ROWS)[:, None] & (column < D)[None, :]
        total += tl.load(values + row[:, None] * STRIDE + column[None, :], mask=inside, other=0.0)
    tl.store(out + column, tl.sum(total, 0).to(out.dtype.element_ty), mask=column < D)


@triton.jit
def _turn(
    source, to, source_stride, to_stride, token, c, s,
    HEADS: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotates all heads of one token; PADDED and PAIRS are HEADS and HALF made powers of two."""
    head = tl.arange(0, PADDED)
    pair = tl.arange(0, PAIRS)
    inside = _below(head, HEADS, PADDED == HEADS)[:, None] & _below(pair, HALF, PAIRS == HALF)[None, :]
    at = head[:, None] * (2 * HALF) + pair[None, :]
    a = tl.load(source + token * source_stride + at, mask=inside, other=0.0)
    b = tl.load(source + token * source_stride + at + HALF, mask=inside, other=0.0)
    low = a.to(tl.float32) * c[None, :] - b.to(tl.float32) * s[None, :]
    high = b.to(tl.float32) * c[None, :] + a.to(tl.float32) * s[None, :]
    tl.store(to + token * to_stride + at, low.to(a.dtype), mask=inside)
    tl.store(to + token * to_stride + at + HALF, high.to(a.dtype), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def rope(
    q, k, v, q_to, k_to, v_to, q_stride, k_stride, v_stride, q_to_stride, k_to_stride, v_to_stride, cos, sin, positions, tokens,
    Q_HEADS: tl.constexpr, Q_PADDED: tl.constexpr, K_HEADS: tl.constexpr, K_PADDED: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    TOKENS: tl.constexpr, HAS_POSITIONS: tl.constexpr, COPY_V: tl.constexpr, BACK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotates q and k by the tables' row of each token's position (BACK: the other way round) and copies v; TOKENS tokens a program."""
    _follow(PDL)
    pair = tl.arange(0, PAIRS)
    for i in tl.static_range(TOKENS):
        token = (tl.program_id(0) * TOKENS + i).to(tl.int64)
        if token < tokens:
            position = token
            if HAS_POSITIONS:
                position = tl.load(positions + token).to(tl.int64)
            is_pair = _below(pair, HALF, PAIRS == HALF)
            c = tl.load(cos + position * HALF + pair, mask=is_pair, other=0.0).to(tl.float32)
            s = tl.load(sin + position * HALF + pair, mask=is_pair, other=0.0).to(tl.float32)
            if BACK:
                s = -s
            _turn(q, q_to, q_stride, q_to_stride, token, c, s, Q_HEADS, Q_PADDED, HALF, PAIRS)
            _turn(k, k_to, k_stride, k_to_stride, token, c, s, K_HEADS, K_PADDED, HALF, PAIRS)
            if COPY_V:
                lane = tl.arange(0, K_PADDED * PAIRS * 2)
                here = _below(lane, K_HEADS * 2 * HALF, K_PADDED * PAIRS == K_HEADS * HALF)
                tl.store(v_to + token * v_to_stride + lane, tl.load(v + token * v_stride + lane, mask=here), mask=here)


@triton.jit
def swiglu(gate, up, out, gate_stride, up_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out = silu(gate) * up; BLOCK columns of one row a program."""
    _follow(PDL)
    blocks = tl.cdiv(SIZE, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = _below(column, SIZE, SIZE % BLOCK == 0)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(
    grad, gate, up, dgate, dup, gate_stride, up_stride, dgate_stride, dup_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    _follow(PDL)
    blocks = tl.cdiv(SIZE, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = _below(column, SIZE, SIZE % BLOCK == 0)
    dy = tl.load(grad + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    tl.store(dup + row * dup_stride + column, (dy * silu).to(dup.dtype.element_ty), mask=inside)
    slope = sigmoid + silu * (1 - sigmoid)
    tl.store(dgate + row * dgate_stride + column, (dy * u * slope).to(dgate.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["factor"])
def scale(x, factor, size, BLOCK: tl.constexpr):
    """x *= factor[0] in fp32, in place; nothing is touched where the factor is 1."""
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
        tl.store(x + at, (value * by).to(x.dtype.element_ty), mask=at < size)
