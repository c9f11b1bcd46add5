"""Triton kernels over rows of logits: cross-entropy with its gradient in place, log-probabilities. Importing this module imports triton."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

NEGATIVE = tl.constexpr(-3.0e38)  # stands for -inf where a difference of two could come up


@triton.jit
def cross_entropy_rows(
    logits, targets, mask, losses, lses, stride, vocabulary, smoothing, z_loss,
    BLOCK: tl.constexpr, ONE: tl.constexpr, HAS_MASK: tl.constexpr, SMOOTH: tl.constexpr, Z: tl.constexpr, GRADS: tl.constexpr,
    LOGPROB: tl.constexpr,
):  # fmt: skip
    """One row a program. ONE: the row fits in registers, so it is read once; else a second pass reads it again for the gradient."""
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)
    kept = True
    if HAS_MASK:
        kept = tl.load(mask + row) != 0
    target = 0
    if kept:
        target = tl.load(targets + row).to(tl.int32)
    if ONE:
        x = tl.load(base + lane, mask=lane < vocabulary, other=NEGATIVE).to(tl.float32)
        peak = tl.max(x, 0)
        total = tl.sum(tl.exp(x - peak), 0)
        plain = tl.sum(tl.where(lane < vocabulary, x, 0.0), 0) if SMOOTH else 0.0
    else:
        peaks = tl.full((BLOCK,), NEGATIVE, tl.float32)
        totals = tl.zeros((BLOCK,), tl.float32)
        plains = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocabulary, BLOCK):
            at = start + lane
            x = tl.load(base + at, mask=at < vocabulary, other=NEGATIVE).to(tl.float32)
            higher = tl.maximum(peaks, x)
            totals = totals * tl.exp(peaks - higher) + tl.exp(x - higher)
            peaks = higher
            if SMOOTH:
                plains += tl.where(at < vocabulary, x, 0.0)
        peak = tl.max(peaks, 0)
        total = tl.sum(totals * tl.exp(peaks - peak), 0)
        plain = tl.sum(plains, 0) if SMOOTH else 0.0
    lse = peak + tl.log(total)
    own = tl.load(base + target).to(tl.float32)
    if LOGPROB:
        tl.store(losses + row, tl.where(kept, own - lse, 0.0))
        tl.store(lses + row, lse)
    else:
        loss = lse - own
        if SMOOTH:
            loss = lse - (1 - smoothing) * own - smoothing * (plain / vocabulary)
        if Z:
            loss += z_loss * lse * lse
        tl.store(losses + row, tl.where(kept, loss, 0.0))
    if GRADS:
        tl.debug_barrier()  # every thread has read the target's logit before it is overwritten
        weight = 1.0 / total
        if Z:
            weight *= 1 + 2 * z_loss * lse
        if ONE:
            slope = tl.exp(x - peak) * weight
            slope = tl.where(lane == target, slope - 1 + smoothing, slope) if SMOOTH else tl.where(lane == target, slope - 1, slope)
            slope = slope - smoothing / vocabulary if SMOOTH else slope
            tl.store(base + lane, tl.where(kept, slope, 0.0).to(logits.dtype.element_ty), mask=lane < vocabulary)
        else:
            for start in range(0, vocabulary, BLOCK):
                at = start + lane
                x = tl.load(base + at, mask=at < vocabulary, other=NEGATIVE).to(tl.float32)
                slope = tl.exp(x - peak) * weight
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
    slope = tl.where(at == target, 1.0, 0.0) - tl.exp(x - tl.load(lses + row))
    slope = tl.where(kept, slope * tl.load(upstream + row).to(tl.float32), 0.0)
    tl.store(base + at, slope.to(logits.dtype.element_ty), mask=at < vocabulary)


@triton.jit
def _stir64(x):
    """SplitMix64's finaliser on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _above(base, vocabulary, peak, heat, floor, BLOCK: tl.constexpr):
    """(number, sum) of the exponentials that are at least `floor`."""
    lane = tl.arange(0, BLOCK)
    number = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        at = start + lane
        x = tl.load(base + at, mask=at < vocabulary, other=NEGATIVE).to(tl.float32)
        e = tl.exp((x - peak) / heat)
        inside = (e >= floor) & (at < vocabulary)
        number += inside.to(tl.int32)
        mass += tl.where(inside, e, 0.0)
    return tl.sum(number, 0), tl.sum(mass, 0)


@triton.jit
def sample(
    logits, words, keys, positions, temperatures, top_ks, top_ps, min_ps, tokens, owns, plains, stride, vocabulary, BLOCK: tl.constexpr
):  # fmt: skip
    """One row a program. Thresholds are found by bisection over the bits of a float: 30 passes over the row, which stays in the cache."""
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + row)
    greedy = temperature == 0
    heat = tl.where(greedy, 1.0, temperature)
    peaks = tl.full((BLOCK,), NEGATIVE, tl.float32)
    for start in range(0, vocabulary, BLOCK):
        peaks = tl.maximum(peaks, tl.load(base + start + lane, mask=start + lane < vocabulary, other=NEGATIVE).to(tl.float32))
    peak = tl.max(peaks, 0)

    floor_bits = 0
    top_k = tl.minimum(tl.load(top_ks + row), vocabulary)
    top_p = tl.load(top_ps + row)
    if top_k > 0 and not greedy:
        for i in range(30):  # the largest floor that at least k reach: the k-th largest value
            trial = floor_bits | (1 << (29 - i))
            number, _m = _above(base, vocabulary, peak, heat, trial.to(tl.float32, bitcast=True), BLOCK)
            floor_bits = tl.where(number >= top_k, trial, floor_bits)
    if top_p < 1 and not greedy:
        floor_k = floor_bits.to(tl.float32, bitcast=True)
        reaching, wanted = _above(base, vocabulary, peak, heat, floor_k, BLOCK)
        if top_k > 0:  # equals of the k-th beyond the k-th do not count
            wanted -= (reaching - top_k).to(tl.float32) * floor_k
        wanted *= top_p
        bits = 0
        for i in range(30):  # the largest floor whose mass reaches the share
            trial = bits | (1 << (29 - i))
            _n, mass = _above(base, vocabulary, peak, heat, trial.to(tl.float32, bitcast=True), BLOCK)
            bits = tl.where(mass >= wanted, trial, bits)
        floor_bits = tl.maximum(floor_bits, bits)
    floor = tl.maximum(floor_bits.to(tl.float32, bitcast=True), tl.load(min_ps + row))
    floor = tl.where(greedy, 1.0, floor)  # exp(0): the most likely alone

    key = _stir64(
        tl.load(keys + row).to(tl.uint64, bitcast=True) + tl.load(positions + row).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    )
    low = key.to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    best = tl.full((BLOCK,), -1.0, tl.float32)
    which = tl.zeros((BLOCK,), tl.int32)
    kept_mass = tl.zeros((BLOCK,), tl.float32)
    plain_mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        at = start + lane
        x = tl.load(base + at, mask=at < vocabulary, other=NEGATIVE).to(tl.float32)
        plain_mass += tl.exp(x - peak)
        e = tl.exp((x - peak) / heat)
        kept = (e >= floor) & (at < vocabulary)
        kept_mass += tl.where(kept, e, 0.0)
        bits = (tl.load(words + at, mask=at < vocabulary, other=0).to(tl.uint32, bitcast=True) ^ low) * 0x7FEB352D
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
    own = tl.load(base + token).to(tl.float32) - peak
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(plains + row, own - tl.log(tl.sum(plain_mass, 0)))
    tl.store(owns + row, tl.where(greedy, 0.0, own / heat - tl.log(tl.sum(kept_mass, 0))))
