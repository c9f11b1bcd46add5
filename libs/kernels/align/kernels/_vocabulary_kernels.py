"""Triton kernels over rows of logits: cross-entropy with its gradient in place, log-probabilities. Importing this module imports triton."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

NEGATIVE = tl.constexpr(-2.0e38)  # stands for -inf where a difference of two could come up; times log2(e) it is still finite
LOG2E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _masses(base, vocabulary, center, lane, BLOCK: tl.constexpr):
    """Lane by lane: (largest logit, sum of exp(logit - center)); center comes in units of log 2."""
    peaks = tl.full((BLOCK,), NEGATIVE, tl.float32)
    totals = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        at = start + lane
        x = tl.load(base + at, mask=at < vocabulary, other=NEGATIVE).to(tl.float32)
        peaks = tl.maximum(peaks, x)
        totals += tl.exp2(x * LOG2E - center)
    return tl.max(peaks, 0), tl.sum(totals, 0)


@triton.jit
def cross_entropy_rows(
    logits, targets, mask, losses, lses, stride, vocabulary, smoothing, z_loss,
    BLOCK: tl.constexpr, HAS_MASK: tl.constexpr, SMOOTH: tl.constexpr, Z: tl.constexpr, GRADS: tl.constexpr,
    LOGPROB: tl.constexpr,
):  # fmt: skip
    """One row a program, read twice, the second time from the cache: a row in registers leaves room for one program on a core, and that
    one can't load while it computes (measured: no faster).

    Exponentials are the limit, so the first pass takes one of each logit: relative to the largest of the first block, and once more in the
    rare case that the largest of all is so much larger that fp32 could not hold the sum.
    """
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)
    kept = True
    if HAS_MASK:
        kept = tl.load(mask + row) != 0
    target = 0
    if kept:
        target = tl.load(targets + row).to(tl.int32)
    x = tl.load(base + lane, mask=lane < vocabulary, other=NEGATIVE).to(tl.float32)
    peak = tl.max(x, 0)
    center = tl.maximum(peak, NEGATIVE) * LOG2E
    peak, total = _masses(base, vocabulary, center, lane, BLOCK)
    if peak * LOG2E - center > 64:
        center = peak * LOG2E
        peak, total = _masses(base, vocabulary, center, lane, BLOCK)
    lse2 = center + tl.log2(total)
    lse = lse2 * LOG_2
    own = tl.load(base + target).to(tl.float32)
    if LOGPROB:
        tl.store(losses + row, tl.where(kept, own - lse, 0.0))
        tl.store(lses + row, lse)
    else:
        loss = lse - own
        if SMOOTH:
            plains = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, vocabulary, BLOCK):
                plains += tl.load(base + start + lane, mask=start + lane < vocabulary, other=0.0).to(tl.float32)
            loss = lse - (1 - smoothing) * own - smoothing * (tl.sum(plains, 0) / vocabulary)
        if Z:
            loss += z_loss * lse * lse
        tl.store(losses + row, tl.where(kept, loss, 0.0))
    if GRADS:
        tl.debug_barrier()  # every thread has read the target's logit before it is overwritten
        for start in range(0, vocabulary, BLOCK):
            at = start + lane
            x = tl.load(base + at, mask=at < vocabulary, other=NEGATIVE).to(tl.float32)
            slope = tl.exp2(x * LOG2E - lse2)
            if Z:
                slope *= 1 + 2 * z_loss * lse
            slope = tl.where(at == target, slope - 1 + smoothing, slope) if SMOOTH else tl.where(at == target, slope - 1, slope)
            slope = slope - smoothing / vocabulary if SMOOTH else slope
            tl.store(base + at, tl.where(kept, slope, 0.0).to(logits.dtype.element_ty), mask=at < vocabulary)


@triton.jit
def logprob_slope(
    logits, targets, mask, lses, upstream, stride, vocabulary, BLOCK: tl.constexpr, HAS_MASK: tl.constexpr
):  # fmt: skip
    """logits = upstream * (onehot - softmax), BLOCK of one row a program."""
    blocks = tl.cdiv(vocabulary, BLOCK)
    row = tl.program_id(0) // blocks
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    kept = True
    if HAS_MASK:
        kept = tl.load(mask + row) != 0
    target = 0
    if kept:
        target = tl.load(targets + row).to(tl.int32)
    base = logits + row.to(tl.int64) * stride
    x = tl.load(base + at, mask=at < vocabulary, other=NEGATIVE).to(tl.float32)
    slope = tl.where(at == target, 1.0, 0.0) - tl.exp2((x - tl.load(lses + row)) * LOG2E)
    slope = tl.where(kept, slope * tl.load(upstream + row).to(tl.float32), 0.0)
    tl.store(base + at, slope.to(logits.dtype.element_ty), mask=at < vocabulary)


@triton.jit
def _stir64(x):
    """SplitMix64's finaliser on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _reached(base, vocabulary, peak, heat, floor, step, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """Of the exponentials that are at least the float with bits floor + step, + 2 step, + 3 step: their number (COUNT), or their sum."""
    lane = tl.arange(0, BLOCK)
    KIND: tl.constexpr = tl.int32 if COUNT else tl.float32
    one = tl.zeros((BLOCK,), KIND)
    two = tl.zeros((BLOCK,), KIND)
    three = tl.zeros((BLOCK,), KIND)
    for start in range(0, vocabulary, BLOCK):
        at = start + lane
        x = tl.load(base + at, mask=at < vocabulary, other=NEGATIVE).to(tl.float32)
        e = tl.where(at < vocabulary, tl.exp((x - peak) / heat), -1.0)
        unit = tl.full((BLOCK,), 1, tl.int32) if COUNT else e
        one += tl.where(e >= _float(floor + step), unit, 0)
        two += tl.where(e >= _float(floor + 2 * step), unit, 0)
        three += tl.where(e >= _float(floor + 3 * step), unit, 0)
    return tl.sum(one, 0), tl.sum(two, 0), tl.sum(three, 0)


@triton.jit
def _floor_bits(e, wanted, COUNT: tl.constexpr):
    """Bits of the largest float that so many of `e`, or so much of their sum, are at least; if the number is met before, of a smaller one
    with none in between."""
    bits = 0
    step = 1 << 29
    while step > 0:
        unit = tl.full(e.shape, 1, tl.int32) if COUNT else e
        got = tl.sum(tl.where(e >= _float(bits + step), unit, 0), 0)
        bits = tl.where(got >= wanted, bits + step, bits)
        step = step // 2
        if COUNT:
            step = tl.where(got == wanted, 0, step)
    return bits


@triton.jit
def _race(base, words, first, end, peak, heat, greedy, floor, low, high, BLOCK: tl.constexpr):
    """Of tokens first .. end - 1: the best score, its token, the sum of kept exponentials, that of all at temperature 1; against `peak`."""
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -1.0, tl.float32)
    which = tl.zeros((BLOCK,), tl.int32)
    kept_mass = tl.zeros((BLOCK,), tl.float32)
    plain_mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, end, BLOCK):
        at = start + lane
        x = tl.load(base + at, mask=at < end, other=NEGATIVE).to(tl.float32)
        plain_mass += tl.exp(x - peak)
        e = tl.exp((x - peak) / heat)
        kept = tl.where(greedy, x == peak, e >= floor) & (at < end)
        kept_mass += tl.where(kept, e, 0.0)
        bits = (tl.load(words + at, mask=at < end, other=0).to(tl.uint32, bitcast=True) ^ low) * 0x7FEB352D
        bits = ((bits ^ (bits >> 15)) + high) * 0x846CA68B
        bits = ((bits ^ (bits >> 16)) * 0x9E3779B1) & 0x7FFFFFFF
        u = (bits.to(tl.float32) + 0.5) * (4.656612873077393e-10 * (1 - 1.1920928955078125e-07))
        rest = 1 - u
        noise = tl.where(rest == 1, u, tl.log(rest) * (u / (rest - 1)))  # -log1p(-u) to fp32's precision
        score = tl.where(kept, tl.where(greedy, 1.0, e / noise), -1.0)
        which = tl.where(score > best, at, which)
        best = tl.maximum(best, score)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, which, 0x7FFFFFFF), 0)
    return top, token, tl.sum(kept_mass, 0), tl.sum(plain_mass, 0)


@triton.jit
def sample(
    logits, words, keys, positions, temperatures, top_ks, top_ps, min_ps, tokens, owns, plains, partial, candidates, counters,
    stride, vocabulary, SHARE: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A row a program, with filters; or without in PARTS programs, SHARE tokens each, of which the one that ends last joins them
    (`counters` count, and are 0 again afterwards).

    A filter's threshold is found bit by bit: in registers, where they hold the row (WHOLE tokens of them), else two bits at a time in 15
    passes over the row, which stays in the cache.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    base = logits + row.to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + row)
    greedy = temperature == 0
    heat = tl.where(greedy, 1.0, temperature)
    first = part * SHARE
    end = tl.minimum(first + SHARE, vocabulary)
    peaks = tl.full((BLOCK,), NEGATIVE, tl.float32)
    for start in range(first, end, BLOCK):
        peaks = tl.maximum(peaks, tl.load(base + start + lane, mask=start + lane < end, other=NEGATIVE).to(tl.float32))
    peak = tl.max(peaks, 0)

    floor = 0.0
    if PARTS == 1:
        floor_bits = 0
        top_k = tl.minimum(tl.load(top_ks + row), vocabulary)
        top_p = tl.load(top_ps + row)
        if WHOLE > 0:
            if ((top_k > 0) | (top_p < 1)) & (temperature != 0):
                at = tl.arange(0, WHOLE)
                x = tl.load(base + at, mask=at < vocabulary, other=NEGATIVE).to(tl.float32)
                e = tl.where(at < vocabulary, tl.exp((x - peak) / heat), 0.0)
                if top_k > 0:
                    floor_bits = _floor_bits(e, top_k, True)
                if top_p < 1:
                    mass = tl.sum(tl.where(e >= _float(floor_bits), e, 0.0), 0)
                    if top_k > 0:  # equals of the k-th beyond the k-th do not count
                        mass -= (tl.sum((e >= _float(floor_bits)).to(tl.int32), 0) - top_k).to(tl.float32) * _float(floor_bits)
                    floor_bits = tl.maximum(floor_bits, _floor_bits(e, mass * top_p, False))
        else:
            if top_k > 0 and not greedy:
                for i in range(15):  # the largest floor that at least k reach: the k-th largest value
                    step = 1 << (28 - 2 * i)
                    n1, n2, n3 = _reached(base, vocabulary, peak, heat, floor_bits, step, BLOCK, True)
                    floor_bits += step * ((n1 >= top_k).to(tl.int32) + (n2 >= top_k).to(tl.int32) + (n3 >= top_k).to(tl.int32))
            if top_p < 1 and not greedy:
                # the step of 0 asks about the floor itself
                wanted, _m, _n = _reached(base, vocabulary, peak, heat, floor_bits, 0, BLOCK, False)
                if top_k > 0:
                    reaching, _k, _l = _reached(base, vocabulary, peak, heat, floor_bits, 0, BLOCK, True)
                    wanted -= (reaching - top_k).to(tl.float32) * _float(floor_bits)
                wanted *= top_p
                bits = 0
                for i in range(15):  # the largest floor whose mass reaches the share
                    step = 1 << (28 - 2 * i)
                    m1, m2, m3 = _reached(base, vocabulary, peak, heat, bits, step, BLOCK, False)
                    bits += step * ((m1 >= wanted).to(tl.int32) + (m2 >= wanted).to(tl.int32) + (m3 >= wanted).to(tl.int32))
                floor_bits = tl.maximum(floor_bits, bits)
        floor = tl.maximum(_float(floor_bits), tl.load(min_ps + row))

    key = _stir64(
        tl.load(keys + row).to(tl.uint64, bitcast=True) + tl.load(positions + row).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    )
    top, token, kept_mass, plain_mass = _race(
        base, words, first, end, peak, heat, greedy, floor, key.to(tl.uint32), (key >> 32).to(tl.uint32), BLOCK
    )
    last = True
    if PARTS > 1:
        at = (row * PARTS + part) * 4
        tl.store(partial + at, peak)
        tl.store(partial + at + 1, top)
        tl.store(partial + at + 2, kept_mass)
        tl.store(partial + at + 3, plain_mass)
        tl.store(candidates + row * PARTS + part, token)
        tl.debug_barrier()  # this program's stores, then the count
        last = tl.atomic_add(counters + row, 1, sem="acq_rel") == PARTS - 1
        if last:
            index = tl.arange(0, PADDED)
            here = index < PARTS
            of = (row * PARTS + index) * 4
            peaks_of = tl.load(partial + of, mask=here, other=NEGATIVE, cache_modifier=".cg")
            peak = tl.max(peaks_of, 0)
            fade = tl.exp((peaks_of - peak) / heat)
            scores = tl.load(partial + of + 1, mask=here, other=-1.0, cache_modifier=".cg")
            scores = tl.where(here, tl.where(greedy, tl.where(peaks_of == peak, 1.0, 0.0), scores * fade), -1.0)
            found = tl.load(candidates + row * PARTS + index, mask=here, other=0x7FFFFFFF, cache_modifier=".cg")
            token = tl.min(tl.where(scores == tl.max(scores, 0), found, 0x7FFFFFFF), 0)
            kept_mass = tl.sum(tl.load(partial + of + 2, mask=here, other=0.0, cache_modifier=".cg") * fade, 0)
            plain_mass = tl.sum(tl.load(partial + of + 3, mask=here, other=0.0, cache_modifier=".cg") * tl.exp(peaks_of - peak), 0)
            tl.store(counters + row, 0)
    if last:
        own = tl.load(base + token).to(tl.float32) - peak
        tl.store(tokens + row, token.to(tl.int64))
        tl.store(plains + row, own - tl.log(plain_mass))
        tl.store(owns + row, tl.where(greedy, 0.0, own / heat - tl.log(kept_mass)))
