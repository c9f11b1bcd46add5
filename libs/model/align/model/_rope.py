"""Rotary positions: frequencies with linear, llama3 and yarn scaling, and the rotation itself."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from align.model._config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Returns the angle per position of each rotated pair, fp32 (head_dim / 2) on the CPU, and the factor on cosine and sine.

    Sources: RoFormer (Su et al. 2021, section 3.2.2); linear: Chen et al. 2023; yarn: Peng et al. 2023, sections 3.2 and 3.4; llama3: the
    model's release code. The order of operations is that of transformers, so that the fp32 values are equal.
    """
    dim, theta, scaling = config.head_dim, config.rope_theta, config.rope_scaling or {}
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim)
    plain = 1.0 / powers
    kind = scaling.get("rope_type")
    if kind == "linear":
        return plain / scaling["factor"], 1.0
    original = scaling.get("original_max_position_embeddings", config.max_position_embeddings)
    if kind == "llama3":
        return _llama3(plain, scaling, original), 1.0
    if kind == "yarn":
        return _yarn(plain, powers, dim, theta, scaling, original)
    return plain, 1.0


def _llama3(plain: Tensor, scaling: Mapping[str, Any], original: int) -> Tensor:
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > original / low, plain / factor, plain)
    smooth = (original / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    medium = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(medium, smoothed, scaled)


def _yarn(plain: Tensor, powers: Tensor, dim: int, theta: float, scaling: Mapping[str, Any], original: int) -> tuple[Tensor, float]:
    factor = scaling["factor"]

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1)

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp would divide by zero
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    interpolated = 1.0 / (factor * powers)
    return interpolated * (1 - kept) + plain * kept, float(attention_factor)


def angles(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tables for `rotate` at positions (B or 1, T): cosine, and sine with its first half negated, each (B or 1, T, 1, Dh); fp32 inside."""
    angle = (positions.to(torch.float32)[..., None] * frequencies)[:, :, None]
    cos, sin = angle.cos() * factor, angle.sin() * factor
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + Dh/2) of x (B, T, H, Dh) by the angles of the tables from `angles`."""
    rotated: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


class _Rotate(torch.autograd.Function):
    """Saves nothing but the tables: the gradient of a rotation is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return torch.addcmul(grad * cos, grad.roll(grad.shape[-1] // 2, -1), sin, value=-1), None, None
