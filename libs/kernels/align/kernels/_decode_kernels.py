"""Triton kernels of a decoding step: split-KV attention, and matrix times few rows. Importing this module imports triton."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from triton.language.extra import cuda  # type: ignore[import-untyped]

LOWEST = tl.constexpr(-1.0e30)  # below every score; finite, so that a difference of two is 0 and not NaN


@triton.jit
def _dot(a, b, total, WIDE: tl.constexpr):
    """total + a · b. WIDE multiplies in fp32, which gives the same products: Triton's interpreter has none of bf16."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _keys_of(lengths, row, window, KEYS: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr):
    """(first key, end, where the tiles begin, keys of a part, parts) of a row; a row without keys has one part, of none."""
    end = tl.load(lengths + row).to(tl.int32)
    begin = 0
    if window > 0:
        begin = tl.maximum(end - window, 0)
    first = begin // KEYS * KEYS
    if CHUNK > 0:
        share = CHUNK
    else:
        share = tl.maximum(tl.cdiv(tl.cdiv(end - first, SPLITS), KEYS), 1) * KEYS
    return begin, end, first, share, tl.maximum(tl.cdiv(end - first, share), 1)


@triton.jit
def _merge(
    parts, peaks, head, lane, count, number,
    D: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """(HEADS, DIM): the first `number` parts of heads `head` (HEADS,) joined, in their order."""
    part = tl.arange(0, PADDED)
    inside = (part < number)[None, :] & (head >= 0)[:, None]
    at = head[:, None] * SPLITS + part[None, :]
    highest = tl.max(tl.load(peaks + at, mask=inside, other=LOWEST, cache_modifier=".cg"), 1)
    mass = tl.zeros((HEADS,), tl.float32)
    total = tl.zeros((HEADS, DIM), tl.float32)
    for i in range(number):  # one after another: a sum over an axis has an order that depends on its layout
        index = head * SPLITS + i
        fade = tl.exp2(tl.load(peaks + index, mask=head >= 0, other=LOWEST, cache_modifier=".cg") - highest)
        mass += tl.load(peaks + count + index, mask=head >= 0, other=0.0, cache_modifier=".cg") * fade
        here = (head >= 0)[:, None] & (lane < D)[None, :]
        x = tl.load(parts + index.to(tl.int64)[:, None] * D + lane[None, :], mask=here, other=0.0, cache_modifier=".cg")
        total += x * fade[:, None]
    return total / tl.where(mass > 0, mass, 1.0)[:, None]


@triton.jit
def _fetch(at):
    """Asks for the 128 bytes at each address; nothing waits for them."""
    tl.inline_asm_elementwise("{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _projected(qkv, bias, at, inside, start, stride, PARTS: tl.constexpr, BIAS: tl.constexpr, dtype: tl.constexpr):
    """What a projection gave in lanes `at` of the row that begins at `start`, rounded to dtype. PARTS above 0: in so many parts in fp32,
    `stride` apart, to be added."""
    x = tl.load(qkv + start + at, mask=inside, other=0.0)
    if PARTS > 0:
        for part in tl.static_range(1, PARTS):
            x += tl.load(qkv + start + part * stride + at, mask=inside, other=0.0)
    if BIAS:
        x = x.to(tl.float32) + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    return x.to(dtype)


@triton.jit(do_not_specialize=["window", "count", "rows"])
def split(
    q, keys, values, lengths, table, out, parts, peaks, counters, bias, cos, sin,
    page_stride, slot_stride, head_stride, table_stride, scale, window, count, rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, PAGED: tl.constexpr, FUSED: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr, TURN: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One (key head, row, part of its keys) a program; all query heads of the key head at once. `scale` includes log2(e).

    TURN: `q` is the joint projection of queries, keys and values, of which this kernel turns its queries and the new key, files key and
    value as the row's last, and begins with them from registers.

    A row of one part is written at once. Of several parts, the program that ends last joins them (FUSED: `counters` count, and are 0 again
    afterwards), or `combine` does; in the order of the parts either way. PDL: started while the kernel before still runs, see
    `_step_kernels`; EARLY: lengths and table are read, and the first tile is asked for, before that has ended.
    """
    if PDL and not EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    row = tl.program_id(1)
    part = tl.program_id(2)
    begin, end, first, share, number = _keys_of(lengths, row, window, KEYS, SPLITS, CHUNK)
    lane = tl.arange(0, DIM)
    low = first + part * share
    high = tl.minimum(end, low + share)
    if TURN:  # the row of the tables for its last position; the lower half of a head is turned with minus the sine
        HALF: tl.constexpr = D // 2
        lower = lane < HALF
        partner = tl.where(lower, lane + HALF, lane - HALF)
        angle = (end - 1).to(tl.int64) * HALF + tl.where(lower, lane, lane - HALF)
        c = tl.load(cos + angle, mask=lane < D, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=lane < D, other=0.0).to(tl.float32)
        s = tl.where(lower, -s, s)
    if PDL and EARLY:
        if PAGED and PAGE % KEYS == 0 and part < number:  # the first tile of keys and values can already travel to the cache
            page = tl.load(table + row * table_stride + low // PAGE).to(tl.int64)
            line = tl.arange(0, KEYS)
            ahead = page * page_stride + (low % PAGE + line).to(tl.int64) * slot_stride + head * head_stride
            _fetch(keys + ahead)
            _fetch(values + ahead)
            if DIM * 2 > 128:
                _fetch(keys + ahead + 64)
                _fetch(values + ahead + 64)
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    if part < number:
        member = tl.arange(0, GROUP_PADDED)
        own = (member < GROUP)[:, None] & (lane < D)[None, :]
        query = (row * HEADS + head * GROUP + member)[:, None] * D + lane[None, :]
        total = tl.zeros((GROUP_PADDED, DIM), tl.float32)
        peak = tl.full((GROUP_PADDED,), LOWEST, tl.float32)
        weight = tl.zeros((GROUP_PADDED,), tl.float32)
        if TURN:
            dtype: tl.constexpr = keys.dtype.element_ty
            KV_HEADS: tl.constexpr = HEADS // GROUP
            WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
            from_row, stride = row.to(tl.int64) * WIDTH, rows.to(tl.int64) * WIDTH
            group = ((head * GROUP + member) * D)[:, None]
            straight = _projected(q, bias, group + lane[None, :], own, from_row, stride, PARTS, BIAS, dtype).to(tl.float32)
            across = _projected(q, bias, group + partner[None, :], own, from_row, stride, PARTS, BIAS, dtype).to(tl.float32)
            x = (straight * c[None, :] + across * s[None, :]).to(dtype)
            last = part == number - 1
            inside_lane = lane < D
            key = (HEADS + head) * D
            straight_k = _projected(q, bias, key + lane, inside_lane, from_row, stride, PARTS, BIAS, dtype).to(tl.float32)
            across_k = _projected(q, bias, key + partner, inside_lane, from_row, stride, PARTS, BIAS, dtype).to(tl.float32)
            new_k = (straight_k * c + across_k * s).to(dtype)
            new_v = _projected(q, bias, key + KV_HEADS * D + lane, inside_lane, from_row, stride, PARTS, BIAS, dtype)
            if PAGED:
                slot = tl.load(table + row * table_stride + (end - 1) // PAGE).to(tl.int64) * page_stride
            else:
                slot = row.to(tl.int64) * page_stride
            slot += ((end - 1) % PAGE).to(tl.int64) * slot_stride + head * head_stride
            tl.store(keys + slot + lane, new_k, mask=inside_lane & last)
            tl.store(values + slot + lane, new_v, mask=inside_lane & last)
            # A softmax over the new key alone, for the loop to go on from; nothing that was just written is read.
            peak = tl.where(last, tl.sum(x.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale, peak)
            weight = tl.where(last, 1.0, weight)
            total = tl.where(last, new_v.to(tl.float32)[None, :], total)
            high = tl.minimum(high, end - 1)
        else:
            x = tl.load(q + query, mask=own, other=0.0)
        for start in range(low, high, KEYS):
            at = start + tl.arange(0, KEYS)
            inside = (at >= begin) & (at < high)
            if PAGED:
                if PAGE % KEYS == 0:  # a tile lies in one page
                    page = tl.load(table + row * table_stride + start // PAGE).to(tl.int64)
                    place = page * page_stride + (start % PAGE + tl.arange(0, KEYS)).to(tl.int64) * slot_stride
                else:
                    pages = tl.load(table + row * table_stride + at // PAGE, mask=inside, other=0).to(tl.int64)
                    place = pages * page_stride + (at % PAGE).to(tl.int64) * slot_stride
            else:
                place = row.to(tl.int64) * page_stride + at.to(tl.int64) * slot_stride
            where = (place + head * head_stride)[:, None] + lane[None, :]
            here = inside[:, None] & (lane < D)[None, :]
            k = tl.load(keys + where, mask=here, other=0.0)
            scores = _dot(x, tl.trans(k), tl.zeros((GROUP_PADDED, KEYS), tl.float32), WIDE) * scale
            scores = tl.where(inside[None, :], scores, LOWEST)
            higher = tl.maximum(peak, tl.max(scores, 1))
            shares = tl.where(inside[None, :], tl.exp2(scores - higher[:, None]), 0.0)
            fade = tl.exp2(peak - higher)
            weight = weight * fade + tl.sum(shares, 1)
            v = tl.load(values + where, mask=here, other=0.0)
            total = _dot(shares.to(v.dtype), v, total * fade[:, None], WIDE)
            peak = higher
        if number == 1:
            total = total / tl.where(weight > 0, weight, 1.0)[:, None]
            tl.store(out + query, total.to(out.dtype.element_ty), mask=own)
        elif SPLITS > 1:
            index = (row * HEADS + head * GROUP + member) * SPLITS + part
            tl.store(parts + index.to(tl.int64)[:, None] * D + lane[None, :], total, mask=own)
            tl.store(peaks + index, peak, mask=member < GROUP)
            tl.store(peaks + count + index, weight, mask=member < GROUP)
            if FUSED:
                tl.debug_barrier()  # this program's stores, then the count
                counter = counters + row * (HEADS // GROUP) + head
                if tl.atomic_add(counter, 1, sem="acq_rel") == number - 1:
                    heads = tl.where(member < GROUP, row * HEADS + head * GROUP + member, -1)
                    mixed = _merge(parts, peaks, heads, lane, count, number, D, DIM, GROUP_PADDED, SPLITS, PADDED)
                    tl.store(out + query, mixed.to(out.dtype.element_ty), mask=own)
                    tl.store(counter, 0)


@triton.jit(do_not_specialize=["window", "count"])
def combine(
    lengths, parts, peaks, out, window, count,
    HEADS: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Joins the parts of one head of one row, where there are several."""
    head = tl.program_id(0)
    _, _, _, _, number = _keys_of(lengths, head // HEADS, window, KEYS, SPLITS, CHUNK)
    if number > 1:
        lane = tl.arange(0, DIM)
        heads = head + tl.arange(0, 1)
        mixed = _merge(parts, peaks, heads, lane, count, number, D, DIM, 1, SPLITS, PADDED)
        tl.store(out + heads[:, None] * D + lane[None, :], mixed.to(out.dtype.element_ty), mask=(lane < D)[None, :])


@triton.jit
def gemv_one(
    x, weight, addend, out, N, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """One x: ROWS outputs a program, on the plain cores."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    base = weight + n.to(tl.int64)[:, None] * K + lane[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for k in tl.range(0, K, BLOCK, num_stages=STAGES):
        if K % BLOCK == 0:
            w = tl.load(base + k, mask=(n < N)[:, None], other=0.0, eviction_policy="evict_first").to(tl.float32)
            part = tl.load(x + k + lane).to(tl.float32)
        else:
            inside = k + lane < K
            w = tl.load(base + k, mask=(n < N)[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32)
            part = tl.load(x + k + lane, mask=inside, other=0.0).to(tl.float32)
        total += w * part[None, :]
    y = tl.sum(total, 1)
    if ADD:
        y += tl.load(addend + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["B"])
def gemv_few(
    x, weight, addend, out, B, N, K: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Up to BATCH (16) x: ROWS outputs of each a program, on the tensor cores; the weight is the tall operand."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.arange(0, BATCH)
    lane = tl.arange(0, BLOCK)
    tall = weight + n.to(tl.int64)[:, None] * K + lane[None, :]
    flat = x + b[None, :] * K + lane[:, None]
    total = tl.zeros((ROWS, BATCH), tl.float32)
    for k in range(0, K, BLOCK):
        if K % BLOCK == 0:
            w = tl.load(tall + k, mask=(n < N)[:, None], other=0.0)
            part = tl.load(flat + k, mask=(b < B)[None, :], other=0.0)
        else:
            inside = k + lane < K
            w = tl.load(tall + k, mask=(n < N)[:, None] & inside[None, :], other=0.0)
            part = tl.load(flat + k, mask=(b < B)[None, :] & inside[:, None], other=0.0)
        total = _dot(w, part, total, WIDE)
    where = b[None, :] * N + n[:, None]
    here = (b < B)[None, :] & (n < N)[:, None]
    if ADD:
        total += tl.load(addend + where, mask=here, other=0.0).to(tl.float32)
    tl.store(out + where, total.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["tokens"])
def rope_to_cache(
    qkv, bias, cos, sin, positions, keys, values, table, rows, turned, tokens, table_stride, page_stride, slot_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    HAS_ROWS: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK heads of one token a program, queries, keys and values counted through; queries go to `turned`, the others to the cache. PARTS
    above 0: qkv are so many parts in fp32, `tokens` rows each, to be added. EARLY: all but qkv is read before the last kernel has ended."""
    if PDL and not EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.arange(0, PAIRS)
    row = token
    if HAS_ROWS:
        row = tl.load(rows + token)
    position = tl.load(positions + token)
    page = tl.load(table + row * table_stride + position // PAGE).to(tl.int64)
    slot = page * page_stride + (position % PAGE) * slot_stride
    c = tl.load(cos + position * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + position * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (pair < HALF)[None, :]
    if PDL and EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    lane = head[:, None] * (2 * HALF) + pair[None, :]
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * 2 * HALF
    source = qkv + token * WIDTH + lane
    a = tl.load(source, mask=inside, other=0.0)
    b = tl.load(source + HALF, mask=inside, other=0.0)
    if PARTS > 0:
        for part in tl.static_range(1, PARTS):
            a += tl.load(source + part * tokens * WIDTH, mask=inside, other=0.0)
            b += tl.load(source + part * tokens * WIDTH + HALF, mask=inside, other=0.0)
    if BIAS:
        a = a.to(tl.float32) + tl.load(bias + lane, mask=inside, other=0.0).to(tl.float32)
        b = b.to(tl.float32) + tl.load(bias + lane + HALF, mask=inside, other=0.0).to(tl.float32)
    a = a.to(turned.dtype.element_ty)
    b = b.to(turned.dtype.element_ty)
    low = a.to(tl.float32) * c[None, :] - b.to(tl.float32) * s[None, :]
    high = b.to(tl.float32) * c[None, :] + a.to(tl.float32) * s[None, :]
    low, high = low.to(a.dtype), high.to(a.dtype)
    is_q = inside & (head < HEADS)[:, None]
    is_k = inside & ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None]
    is_v = inside & (head >= HEADS + KV_HEADS)[:, None]
    to_q = turned + (token * HEADS + head)[:, None] * (2 * HALF) + pair[None, :]
    tl.store(to_q, low, mask=is_q)
    tl.store(to_q + HALF, high, mask=is_q)
    to_k = keys + slot + (head - HEADS)[:, None] * head_stride + pair[None, :]
    tl.store(to_k, low, mask=is_k)
    tl.store(to_k + HALF, high, mask=is_k)
    to_v = values + slot + (head - HEADS - KV_HEADS)[:, None] * head_stride + pair[None, :]
    tl.store(to_v, a, mask=is_v)
    tl.store(to_v + HALF, b, mask=is_v)
