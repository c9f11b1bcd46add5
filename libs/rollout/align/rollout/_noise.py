"""Counter-based sampling noise: a pure function of (request seed, sample index, position, token id).

Nothing is drawn from a generator, so a request sees the same noise whatever it is batched with, in any order, on any device, and again
after a restart. Seed, sample and position are mixed to 64 bits with the finaliser of SplitMix64 (Steele, Lea and Flood 2014); the token id
is stirred in by 32-bit multiplications and xor-shifts, which wrap the same way on every device.
"""

from __future__ import annotations

import torch

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: consecutive counters land far apart


def _signed(value: int, bits: int) -> int:
    """The two's complement reading of the low `bits` bits: torch has no unsigned multiplication."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _mix(value: int) -> int:
    """SplitMix64's finaliser on a Python integer."""
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def sample_key(seed: int, index: int) -> int:
    """The key of sample `index` of a request with `seed` (any integer, taken modulo 2^64), as a signed 64-bit integer."""
    return _signed(_mix(_mix(seed) + index * _GOLDEN), 64)


def _constant(value: int, bits: int) -> torch.Tensor:
    """A 0-d tensor: elementwise operations take it faster than a Python number, on any device."""
    return torch.tensor(_signed(value, bits), dtype=torch.int64 if bits == 64 else torch.int32)


_STEP = _constant(_GOLDEN, 64)
# Each round: shift, mask that makes the shift a logical one (torch's is arithmetic), multiplier.
_ROUNDS_64 = [
    (_constant(30, 64), _constant((1 << 34) - 1, 64), _constant(0xBF58476D1CE4E5B9, 64)),
    (_constant(27, 64), _constant((1 << 37) - 1, 64), _constant(0x94D049BB133111EB, 64)),
]
_LAST_SHIFT, _LAST_MASK = _constant(31, 64), _constant((1 << 33) - 1, 64)
_MULTIPLIERS = [_constant(value, 32) for value in (0x7FEB352D, 0x846CA68B, 0x9E3779B1)]
_SHIFT_15, _MASK_17 = _constant(15, 32), _constant((1 << 17) - 1, 32)
_SHIFT_16, _MASK_16 = _constant(16, 32), _constant((1 << 16) - 1, 32)
_MASK_31 = _constant((1 << 31) - 1, 32)
_HALF = torch.tensor(0.5)
_SCALE = torch.tensor(-(2.0**-31) * (1 - 2.0**-23))  # the last factor keeps u below 1


def _mix_tensor(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on an int64 tensor."""
    for shift, mask, multiplier in _ROUNDS_64:
        x = (x ^ ((x >> shift) & mask)) * multiplier
    return x ^ ((x >> _LAST_SHIFT) & _LAST_MASK)


def token_keys(sample_keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The keys of the tokens at `positions`, counted from the start of the prompt, of samples with these keys; both int64, broadcast."""
    return _mix_tensor(sample_keys + positions * _STEP)


class Noise:
    """Exponential noise for up to `rows` rows of a vocabulary at a time, in buffers that are allocated once."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._tokens = _mix_tensor(torch.arange(1, vocab_size + 1, dtype=torch.int64) * _STEP).to(torch.int32).to(device)  # (V,)
        self._bits = torch.empty(rows, vocab_size, dtype=torch.int32, device=device)
        self._shifted = torch.empty_like(self._bits)
        self._noise = torch.empty(rows, vocab_size, dtype=torch.float32, device=device)

    def negative_exponential(self, keys: torch.Tensor) -> torch.Tensor:
        """Minus a standard exponential variate for each row and token, all < 0.

        keys: (n,) int64 of `token_keys`. Returns (n, V) float32, valid until the next call.
        """
        n = keys.shape[0]
        key = keys.view(torch.int32).view(n, 2)
        low, high = key[:, :1], key[:, 1:]  # (n, 1) each
        bits, shifted, noise = self._bits[:n], self._shifted[:n], self._noise[:n]
        torch.bitwise_xor(self._tokens, low, out=bits).mul_(_MULTIPLIERS[0])
        torch.bitwise_right_shift(bits, _SHIFT_15, out=shifted).bitwise_and_(_MASK_17)
        bits.bitwise_xor_(shifted).add_(high).mul_(_MULTIPLIERS[1])
        torch.bitwise_right_shift(bits, _SHIFT_16, out=shifted).bitwise_and_(_MASK_16)
        bits.bitwise_xor_(shifted).mul_(_MULTIPLIERS[2])
        # u = (31 bits + 1/2) / 2^31, then log(1 - u): a float is relatively precise near u = 0, where the race between tokens is decided.
        noise.copy_(bits.bitwise_and_(_MASK_31))
        return noise.add_(_HALF).mul_(_SCALE).log1p_()
