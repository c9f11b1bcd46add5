"""The fused Triton kernels. Importing this module imports triton; `_triton_backend` does so at first use.

One program steps one chunk: CHUNK elements that lie one after another in one parameter, a whole number of quantiser blocks. Which
parameter a program works on comes from `chunk_member` (program -> row of `records`); a record holds int64 words, see MEMBER_WORDS.

IEEE=True uses IEEE division and square root in the order of `_torch_backend.update` and must be launched with
enable_fp_fusion=False: then both give the same bits. IEEE=False contracts, folds the scale of a block into beta and takes the
hardware's approximate square root and reciprocal (relative error 2**-22) for the update. What a first step stores, where the moments
are single products, is the same in both: bf16 gradients make exact ties between codes common there. Triton's interpreter has no
inline PTX and runs IEEE=True only.

What bounds `adam8` on an H200 is not the traffic alone but the instructions on the way: at 10 bytes an element the device draws all the
power it may, and lowers its clock. So: both moments are decoded by one gather through shared memory, a code is found by one addition
(`_code`), both block maxima by one reduction, and what the memory must fetch is asked for before anything is computed.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

# Words of a record: addresses of the local parameter and gradient, first program of the member, state offset in chunks less that
# program, local elements, the two name words, flat index in the full parameter of the first local element.
MEMBER_WORDS = 8

TINY = tl.constexpr(2.0**-126)
WEYL, MIX1, MIX2 = tl.constexpr(0x9E3779B1), tl.constexpr(0x7FEB352D), tl.constexpr(0x846CA68B)


@triton.jit
def _sqrt(x):
    return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _reciprocal(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _pair_words(pair, key0, key1):
    """`_noise.pair_words` on uint32."""
    x = pair * WEYL + key0
    x = (x ^ (x >> 16)) * MIX1 + key1
    x = (x ^ (x >> 15)) * MIX2
    return x ^ (x >> 16)


@triton.jit
def _code(ordered, table):
    """The code of a value whose bits, made monotone, are `ordered` (int32): the third byte of a sum, see `_triton_backend.code_table`."""
    return ((ordered + tl.load(table + (ordered >> 16))) >> 16).to(tl.uint8)


@triton.jit
def _greater(a, b, c, d):
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def _scales(largest, IEEE: tl.constexpr):
    """`quant.scales` of blocks: (absmax as stored, its reciprocal, 0 for a block of zeros)."""
    absmax = tl.where(largest < TINY, 0.0, largest)
    divisor = tl.where(absmax > 0, absmax, 1.0)
    if IEEE:
        reciprocal = tl.div_rn(1.0, divisor)
    else:  # a contracted Newton step: the same bits as the division but for a few divisors, at a tenth of its instructions
        guess = _reciprocal(divisor)
        reciprocal = guess + guess * (1.0 - divisor * guess)
    return absmax, tl.where(absmax > 0, reciprocal, 0.0)


@triton.jit
def _key(name_word, step_word):
    return (name_word.to(tl.int32) ^ step_word).to(tl.uint32, bitcast=True)


@triton.jit
def _to_bf16(p, bits, STOCHASTIC: tl.constexpr):
    """By integers, so that the interpreter rounds as the GPU does; `bits` is the noise, int32 in [0, 65536)."""
    word = p.to(tl.int32, bitcast=True)
    if STOCHASTIC:
        word = word + bits
    else:
        word = word + 0x7FFF + ((word >> 16) & 1)
    return (word >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


# Codes are touched 8 at a time, as bf16 values are (16 bytes): one layout for all, no exchange through shared memory.
@triton.jit(do_not_specialize=["key0", "key1"], do_not_specialize_on_alignment=["m_codes", "v_codes"])
def adam8(
    chunk_member, records, m_codes, v_codes, m_absmax, v_absmax, maps, m_table, v_table,
    grad_scale, m_keep, m_new, v_keep, v_new, root, eps, decay, rate, key0, key1,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr,
    STOCHASTIC: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """One step of one chunk with 8-bit states; the scalars come from `_triton_backend.scalars`.

    `maps`: the signed map, then the unsigned one. EVEN: every member is a multiple of CHUNK. ALIGN: bytes that all addresses divide by.
    """
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    program = tl.program_id(0)
    record = records + tl.load(chunk_member + program).to(tl.int32) * 8
    base = (program - tl.load(record + 2)) * CHUNK
    slot = program + tl.load(record + 3)
    names = tl.load(record + 5)
    first = tl.load(record + 6)
    lane = tl.arange(0, CHUNK)
    params = tl.multiple_of(tl.load(record).to(tl.pointer_type(PARAM)) + base, ALIGN) + lane
    grads = tl.multiple_of(tl.load(record + 1).to(tl.pointer_type(GRAD)) + base, ALIGN) + lane
    m_code = tl.multiple_of(m_codes + slot * CHUNK, 8) + lane
    v_code = tl.multiple_of(v_codes + slot * CHUNK, 8) + lane
    block = slot * BLOCKS + tl.arange(0, BLOCKS)
    m_scale = tl.load(m_absmax + block)
    v_scale = tl.load(v_absmax + block)
    codes = tl.join(tl.load(m_code).to(tl.int32), tl.load(v_code).to(tl.int32) + 256)
    if EVEN:
        g = tl.load(grads).to(tl.float32)
        p = tl.load(params).to(tl.float32)
    else:
        left = (tl.load(record + 4) - base) // 64 * 64  # whole vectors are in or out
        g = tl.load(grads, mask=lane < left, other=0.0).to(tl.float32)
        p = tl.load(params, mask=lane < left, other=0.0).to(tl.float32)
    values = tl.gather(tl.load(maps + tl.arange(0, 512)), tl.reshape(codes, (2 * CHUNK,)), 0)
    m, v = tl.split(tl.reshape(values, (CHUNK, 2)))
    m = tl.reshape(m, (BLOCKS, BLOCK))
    v = tl.reshape(v, (BLOCKS, BLOCK))
    g = g * grad_scale
    if IEEE:
        m = tl.reshape(m * m_scale[:, None], (CHUNK,)) * m_keep + g * m_new
        v = tl.reshape(v * v_scale[:, None], (CHUNK,)) * v_keep + (g * v_new) * g
        p = p * decay - tl.div_rn(m, tl.sqrt_rn(v) * root + eps) * rate
    else:
        m = tl.reshape(m * (m_scale * m_keep)[:, None], (CHUNK,)) + g * m_new
        v = tl.reshape(v * (v_scale * v_keep)[:, None], (CHUNK,)) + (g * v_new) * g
        p = p * decay - (m * _reciprocal(_sqrt(v) * root + eps)) * rate

    if tl.bfloat16 == PARAM:
        bits = tl.zeros((CHUNK,), tl.int32)
        if STOCHASTIC:
            pair = ((first + base) >> 1).to(tl.uint32) + tl.arange(0, CHUNK // 2).to(tl.uint32)
            words = _pair_words(pair, _key(names, key0), _key(names >> 32, key1))
            bits = tl.interleave((words & 0xFFFF).to(tl.int32), (words >> 16).to(tl.int32))
        p = _to_bf16(p, bits, STOCHASTIC)
    if EVEN:
        tl.store(params, p)
    else:
        tl.store(params, p, mask=lane < left)

    m = tl.reshape(m, (BLOCKS, BLOCK))
    v = tl.reshape(v, (BLOCKS, BLOCK))
    if IEEE:  # the interpreter has no fast reduction of pairs
        m_largest, v_largest = tl.max(tl.abs(m), 1), tl.max(v, 1)
    else:
        m_largest, v_largest = tl.reduce((tl.abs(m), v), 1, _greater)
    m_scale, m_inverse = _scales(m_largest, IEEE)
    v_scale, v_inverse = _scales(v_largest, IEEE)
    tl.store(m_absmax + block, m_scale)
    tl.store(v_absmax + block, v_scale)
    m_bits = tl.reshape(m * m_inverse[:, None], (CHUNK,)).to(tl.int32, bitcast=True)
    v_bits = tl.reshape(v * v_inverse[:, None], (CHUNK,)).to(tl.int32, bitcast=True)
    tl.store(m_code, _code(m_bits ^ ((m_bits >> 31) & 0x7FFFFFFF), m_table))
    tl.store(v_code, _code(v_bits, v_table))


@triton.jit(do_not_specialize=["key0", "key1"])
def adam32(
    chunk_member, records, m_state, v_state,
    grad_scale, m_keep, m_new, v_keep, v_new, root, eps, decay, rate, key0, key1,
    CHUNK: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr, STOCHASTIC: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """One step of one chunk with fp32 states: parameters of any size, starting at any index."""
    program = tl.program_id(0)
    record = records + tl.load(chunk_member + program).to(tl.int32) * 8
    base = (program - tl.load(record + 2)) * CHUNK
    lane = tl.arange(0, CHUNK)
    here = lane < tl.load(record + 4) - base
    params = tl.load(record).to(tl.pointer_type(PARAM)) + base + lane
    grads = tl.load(record + 1).to(tl.pointer_type(GRAD)) + base + lane
    state = (program + tl.load(record + 3)) * CHUNK + lane
    g = tl.load(grads, mask=here, other=0.0).to(tl.float32) * grad_scale
    p = tl.load(params, mask=here, other=0.0).to(tl.float32)
    m = tl.load(m_state + state) * m_keep + g * m_new
    v = tl.load(v_state + state) * v_keep + (g * v_new) * g
    tl.store(m_state + state, m)
    tl.store(v_state + state, v)
    if IEEE:
        p = p * decay - tl.div_rn(m, tl.sqrt_rn(v) * root + eps) * rate
    else:
        p = p * decay - (m * _reciprocal(_sqrt(v) * root + eps)) * rate
    if tl.bfloat16 == PARAM:
        bits = tl.zeros((CHUNK,), tl.int32)
        if STOCHASTIC:
            names = tl.load(record + 5)
            index = (tl.load(record + 6) + base + lane).to(tl.uint32)
            words = _pair_words(index >> 1, _key(names, key0), _key(names >> 32, key1))
            bits = ((words >> ((index & 1) * 16)) & 0xFFFF).to(tl.int32)
        p = _to_bf16(p, bits, STOCHASTIC)
    tl.store(params, p, mask=here)


@triton.jit(do_not_specialize=["chunks"])
def square_sums(
    chunk_member,
    records,
    sums,
    chunks,
    CHUNK: tl.constexpr,
    UNROLL: tl.constexpr,
    GRAD: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """First stage of the norm: program i writes the sum of squares of chunks [i * UNROLL, (i + 1) * UNROLL), no atomics.

    In float64: sums of another order, by another sharding or the torch backend, then agree to 2**-50 or so, and the clip factor, an
    fp32 number, in practice to the bit.
    """
    program = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    total = tl.zeros((CHUNK,), tl.float64)
    for i in tl.static_range(UNROLL):
        chunk = program * UNROLL + i
        live = chunk < chunks
        record = records + tl.load(chunk_member + chunk, mask=live, other=0).to(tl.int32) * 8
        base = (chunk - tl.load(record + 2)) * CHUNK
        grads = tl.multiple_of(tl.load(record + 1).to(tl.pointer_type(GRAD)) + base, ALIGN) + lane
        if EVEN:
            g = tl.load(grads, mask=live & (lane >= 0), other=0.0).to(tl.float64)
        else:
            g = tl.load(grads, mask=live & (lane < tl.load(record + 4) - base), other=0.0).to(tl.float64)
        total += g * g
    tl.store(sums + program, tl.sum(total, 0))
