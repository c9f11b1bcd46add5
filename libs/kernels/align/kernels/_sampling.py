"""From logits to a token in one kernel: temperature, top-k, top-p, min-p, and noise that is a function of (key, position, token).

The race e / E, with e = exp((logit - max) / temperature) and E standard exponential noise, is won by token i with its probability. The
noise is that of `align.rollout`: a 64-bit key mixed by the finaliser of SplitMix64 (Steele, Lea and Flood 2014) with the position, then
stirred with a word of the token by 32-bit multiplications. No generator: it can be captured in a CUDA graph, and a request sees the same
noise in any batch.
"""

import functools

import torch
from torch import Tensor

from align.kernels import _runtime
from align.kernels._runtime import KernelError

# Rows without filters, each by several programs. share: tokens of one; of the vocabulary alone, so that bits don't depend on the batch.
SAMPLE = {"block": 2048, "warps": 16, "share": 8192}
SAMPLE_ROW = {"block": 8192, "warps": 16}  # a program a row
WHOLE = 32768  # tokens of a row that a program holds in registers, to look for thresholds
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def sample(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    counters: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One token a row.

    Args:
        logits: (B, V), any float dtype, rows contiguous; computed with in fp32.
        keys: (B,), int64: the key of each row's sample. positions: (B,), int64: where in its sequence the token will stand.
        temperature: (B,), fp32; 0 takes the most likely token, the first of equals, and the filters do nothing.
        top_k: (B,), int32: keep the k most likely tokens and their equals; 0 is off.
        top_p: (B,), fp32: of these, the most likely until their share reaches top_p, the crossing one and its equals included; 1 is off.
        min_p: (B,), fp32: keep tokens at least min_p times as likely as the most likely one; 0 is off.
        counters: for rows without filters alone (not checked, and filters are not read): int32 zeros, at least B of them, kept by the
            caller for all calls on one stream, and zeros again after each. With them several programs on the GPU read a row. Another order
            of summing: the last bits of the log-probabilities, and a draw whose first two are closer than that, may differ from those
            without.

    Returns:
        tokens (B,) int64; their log-probability under what was sampled from, after temperature and filters; and under softmax(logits): both
        (B,) fp32.

    Raises:
        KernelError: shapes or dtypes do not fit. The numbers are not checked: that would wait for the GPU.
    """
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise KernelError(f"logits {tuple(logits.shape)}: expected (B, V), V above 0")
    wanted = {
        "keys": (keys, torch.int64), "positions": (positions, torch.int64), "temperature": (temperature, torch.float32),
        "top_k": (top_k, torch.int32), "top_p": (top_p, torch.float32), "min_p": (min_p, torch.float32),
    }  # fmt: skip
    for name, (value, dtype) in wanted.items():
        if value.shape != logits.shape[:1] or value.dtype != dtype:
            raise KernelError(f"{name} is {value.dtype} {tuple(value.shape)}, expected {dtype} ({logits.shape[0]},)")
    if counters is not None and (counters.dtype != torch.int32 or counters.numel() < len(logits)):
        raise KernelError(f"counters {counters.dtype} {tuple(counters.shape)}: expected int32, at least {len(logits)}")
    drawn: tuple[Tensor, Tensor, Tensor] = torch.ops.align.sample(logits, keys, positions, temperature, top_k, top_p, min_p, counters)
    return drawn


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64."""
    for shift, multiplier in _MIX:
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _signed(multiplier, 64)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@functools.lru_cache(maxsize=8)
def token_words(vocabulary: int, device: torch.device) -> Tensor:
    """(V,) int32: a fixed word for each token."""
    return _mix(torch.arange(1, vocabulary + 1) * _signed(_GOLDEN, 64)).to(torch.int32).to(device)


def reference_noise(keys: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Standard exponential variates (B, V), fp64: the kernel's but for fp32's rounding."""
    mixed = _mix(keys + positions * _signed(_GOLDEN, 64))
    low, high = (mixed & 0xFFFFFFFF)[:, None], ((mixed >> 32) & 0xFFFFFFFF)[:, None]
    bits = (token_words(vocabulary, keys.device).long() & 0xFFFFFFFF) ^ low
    bits = bits * 0x7FEB352D & 0xFFFFFFFF
    bits = (bits ^ (bits >> 15)) + high & 0xFFFFFFFF
    bits = bits * 0x846CA68B & 0xFFFFFFFF
    bits = (bits ^ (bits >> 16)) * 0x9E3779B1 & 0x7FFFFFFF
    return -torch.log1p(-(bits.double() + 0.5) * (2.0**-31 * (1 - 2.0**-23)))


def reference(
    logits: Tensor, keys: Tensor, positions: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    x, greedy = logits.double(), temperature == 0
    shifted = x - x.amax(1, keepdim=True)
    # exp in fp32, as in the kernel: the filters' thresholds are values of it
    e = (shifted.float() / torch.where(greedy, 1.0, temperature)[:, None]).exp().double()
    ranked = e.sort(1, descending=True).values
    place = torch.arange(e.shape[1], device=e.device)
    kept_k = torch.where(top_k > 0, top_k, e.shape[1])[:, None].clamp(max=e.shape[1])
    ranked = torch.where(place < kept_k, ranked, 0)
    floor = torch.where(top_k > 0, ranked.gather(1, kept_k.long() - 1)[:, 0], 0)
    inside = (ranked.cumsum(1) - ranked < top_p.double()[:, None] * ranked.sum(1, keepdim=True)) & (place < kept_k)
    inside[:, 0] = True
    floor = torch.where(top_p < 1, ranked.gather(1, inside.sum(1, keepdim=True) - 1)[:, 0], floor)
    floor = torch.maximum(floor, torch.where(min_p > 0, min_p.double(), 0))
    kept = torch.where(e >= floor[:, None], e, 0)
    kept = torch.where(greedy[:, None], torch.where(place == x.argmax(1, keepdim=True), 1.0, 0.0), kept)
    tokens = (kept / reference_noise(keys, positions, e.shape[1])).argmax(1)
    chosen = tokens[:, None]
    own = (kept.gather(1, chosen).log() - kept.sum(1, keepdim=True).log())[:, 0]
    plain = (shifted.gather(1, chosen) - shifted.logsumexp(1, keepdim=True))[:, 0]
    return tokens, own.float(), plain.float()


@_runtime.op("sample", mutates=("counters",))
def _sample(
    logits: Tensor, keys: Tensor, positions: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    counters: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if not _runtime.use_kernel(logits):
        return reference(logits, keys, positions, temperature, top_k, top_p, min_p)
    from align.kernels import _vocabulary_kernels

    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    own, plain = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    op, default = ("sample_row", SAMPLE_ROW) if counters is None else ("sample", SAMPLE)
    c = _runtime.config(logits, op, _runtime.power_of_two(vocabulary), default)
    share = vocabulary if counters is None else min(c["share"], vocabulary)
    parts, block = _runtime.cdiv(vocabulary, share), min(c["block"], _runtime.power_of_two(share))
    partial = own if parts == 1 else torch.empty(rows * parts * 4, dtype=torch.float32, device=logits.device)
    candidates = tokens if parts == 1 else torch.empty(rows * parts, dtype=torch.int32, device=logits.device)
    if rows:
        with _runtime.on(logits):
            _vocabulary_kernels.sample[(rows, parts)](
                logits, token_words(vocabulary, logits.device), keys, positions, temperature, top_k, top_p, min_p, tokens, own, plain,
                partial, candidates, tokens if counters is None else counters, logits.stride(0), vocabulary,
                SHARE=share, PARTS=parts, PADDED=_runtime.power_of_two(parts), BLOCK=block,
                WHOLE=_runtime.power_of_two(vocabulary) if vocabulary <= WHOLE else 0, num_warps=max(1, min(c["warps"], block // 128)),
            )  # fmt: skip
    return tokens, own, plain


@_runtime.fake("sample")
def _(
    logits: Tensor, keys: Tensor, positions: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    counters: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows = logits.shape[:1]
    return (
        logits.new_empty(rows, dtype=torch.int64),
        logits.new_empty(rows, dtype=torch.float32),
        logits.new_empty(rows, dtype=torch.float32),
    )
