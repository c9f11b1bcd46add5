"""Counter-based noise for stochastic rounding: 16 bits for (seed, parameter name, applied step, flat index in the full parameter).

Nothing is drawn from a generator, so nothing has to be saved: a resume or another sharding sees the same bits. Two 32-bit keys
come from hashes on the host; the mixer is a Weyl sequence through two multiply-xorshift rounds (constants of Wellons'
"lowbias32") with the second key added half way, so that equal first keys don't make equal streams. One 32-bit word serves the two
elements of an even/odd pair. `_kernels.py` holds the same function for Triton.
"""

import hashlib

import torch

WEYL, MIX1, MIX2 = 0x9E3779B1, 0x7FEB352D, 0x846CA68B


def _words(data: bytes, person: bytes) -> tuple[int, int]:
    digest = hashlib.blake2b(data, digest_size=8, person=person).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def name_words(name: str) -> tuple[int, int]:
    """Two 32-bit words of a parameter's fully qualified name."""
    return _words(name.encode(), b"o8-name")


def step_words(seed: int, step: int) -> tuple[int, int]:
    """Two 32-bit words of (seed, applied step); any Python integers."""
    return _words(f"{seed}:{step}".encode(), b"o8-step")


def as_int32(word: int) -> int:
    """The int32 with the bits of a 32-bit word (torch has no arithmetic on uint32)."""
    return word - (1 << 32) if word & 0x80000000 else word


def _shift(x: torch.Tensor, by: int) -> torch.Tensor:
    return (x >> by) & ((1 << (32 - by)) - 1)  # logical, on int32


def pair_words(pair: torch.Tensor, key0: torch.Tensor | int, key1: torch.Tensor | int) -> torch.Tensor:
    """The 32-bit word (as int32) of each pair index (int32) under two keys (ints or int32 tensors that broadcast)."""
    x = pair * as_int32(WEYL) + key0
    x = (x ^ _shift(x, 16)) * as_int32(MIX1) + key1
    x = (x ^ _shift(x, 15)) * as_int32(MIX2)
    return x ^ _shift(x, 16)


def noise(words: torch.Tensor) -> torch.Tensor:
    """(n,) pair words -> (2n,) int32 in [0, 65536): low half for the even element, high half for the odd one."""
    return torch.stack([words & 0xFFFF, _shift(words, 16)], dim=-1).view(-1)


def stochastic_bf16(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round fp32 to bf16, up in magnitude with the probability of the remainder; `bits` int32 in [0, 65536), shape of x.

    Unbiased for every finite x; adding the noise to the bit pattern works because a float's bits are monotone in its magnitude.
    """
    rounded = (x.view(torch.int32) + bits) & -65536
    return rounded.view(torch.float32).bfloat16()
