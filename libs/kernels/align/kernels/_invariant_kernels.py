"""Triton kernels whose results do not depend on the batch. Importing this module imports triton."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

LOWEST = tl.constexpr(-1.0e30)  # below every score; finite, so that a difference of two is 0 and not NaN


@triton.jit
def _dot(a, b, total, WIDE: tl.constexpr):
    """total + a · b. WIDE multiplies in fp32, which gives the same products: Triton's interpreter has none of bf16."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit(do_not_specialize=["rows"])  # one binary for any number of rows
def linear(
    x, weight, bias, out, rows, outputs,
    K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One M × N tile a program, over K from 0 up; GROUP row tiles share their columns of the weight in the cache."""
    program = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(rows, M), tl.cdiv(outputs, N)
    band = program // (GROUP * column_tiles)
    height = tl.minimum(row_tiles - band * GROUP, GROUP)
    inside_band = program % (GROUP * column_tiles)
    row = (band * GROUP + inside_band % height) * M + tl.arange(0, M)
    column = inside_band // height * N + tl.arange(0, N)
    lane = tl.arange(0, BLOCK)
    # rows and columns beyond the end read the first ones again: no mask in the loop
    left = x + tl.where(row < rows, row, 0).to(tl.int64)[:, None] * K + lane[None, :]
    right = weight + tl.where(column < outputs, column, 0).to(tl.int64)[None, :] * K + lane[:, None]
    total = tl.zeros((M, N), tl.float32)
    for k in range(0, K, BLOCK):
        if K % BLOCK == 0:
            a = tl.load(left + k)
            b = tl.load(right + k)
        else:
            a = tl.load(left + k, mask=(k + lane < K)[None, :], other=0.0)
            b = tl.load(right + k, mask=(k + lane < K)[:, None], other=0.0)
        total = _dot(a, b, total, WIDE)
    if BIAS:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    where = row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(out + where, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < outputs)[None, :])


@triton.jit(do_not_specialize=["window"])
def attention(
    q, keys, values, out, q_starts, lengths, table, page_stride, slot_stride, head_stride, table_stride, scale, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    PAGE: tl.constexpr, DECODE: tl.constexpr, PAGED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One (tile of queries, key head, sequence) a program. A tile holds all GROUP query heads of its queries: row r is query r // GROUP.

    Tiles of keys begin at multiples of KEYS from the sequence's beginning and are taken in order. A tile that a query does not see leaves
    its numbers as they are (times 1, plus 0), so it does not matter which queries share a tile.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    if DECODE:
        q_start = sequence
        count = 1
        length = tl.load(lengths + sequence).to(tl.int32)
    else:
        q_start = tl.load(q_starts + sequence).to(tl.int32)
        count = tl.load(q_starts + sequence + 1).to(tl.int32) - q_start
        length = count
    if tile * QUERIES < count * GROUP:
        r = tile * QUERIES + tl.arange(0, QUERIES)
        query = r // GROUP
        position = length - count + query
        lane = tl.arange(0, DIM)
        own = (query < count)[:, None] & (lane < D)[None, :]
        where_q = ((q_start + query).to(tl.int64) * HEADS + head * GROUP + r % GROUP)[:, None] * D + lane[None, :]
        x = tl.load(q + where_q, mask=own, other=0.0)
        total = tl.zeros((QUERIES, DIM), tl.float32)
        peak = tl.full((QUERIES,), LOWEST, tl.float32)
        weight = tl.zeros((QUERIES,), tl.float32)
        begin = 0
        if window > 0:
            begin = tl.maximum(length - count + tile * QUERIES // GROUP - window + 1, 0) // KEYS * KEYS
        end = tl.minimum(length, length - count + (tile * QUERIES + QUERIES - 1) // GROUP + 1)
        for start in range(begin, end, KEYS):
            at = start + tl.arange(0, KEYS)
            inside = at < length
            if PAGED:
                if PAGE % KEYS == 0:
                    page = tl.load(table + sequence * table_stride + start // PAGE).to(tl.int64)
                    place = page * page_stride + (start % PAGE + tl.arange(0, KEYS)).to(tl.int64) * slot_stride
                else:
                    pages = tl.load(table + sequence * table_stride + at // PAGE, mask=inside, other=0).to(tl.int64)
                    place = pages * page_stride + (at % PAGE).to(tl.int64) * slot_stride
            elif DECODE:
                place = sequence.to(tl.int64) * page_stride + at.to(tl.int64) * slot_stride
            else:
                place = (q_start + at).to(tl.int64) * slot_stride
            where = (place + head * head_stride)[:, None] + lane[None, :]
            here = inside[:, None] & (lane < D)[None, :]
            k = tl.load(keys + where, mask=here, other=0.0)
            seen = (at[None, :] <= position[:, None]) & inside[None, :]
            if window > 0:
                seen = seen & (at[None, :] > position[:, None] - window)
            scores = tl.where(seen, _dot(x, tl.trans(k), tl.zeros((QUERIES, KEYS), tl.float32), WIDE) * scale, LOWEST)
            higher = tl.maximum(peak, tl.max(scores, 1))
            shares = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)
            fade = tl.exp2(peak - higher)
            weight = weight * fade + tl.sum(shares, 1)
            v = tl.load(values + where, mask=here, other=0.0)
            total = _dot(shares.to(v.dtype), v, total * fade[:, None], WIDE)
            peak = higher
        total = total / tl.where(weight > 0, weight, 1.0)[:, None]
        tl.store(out + where_q, total.to(out.dtype.element_ty), mask=own)
