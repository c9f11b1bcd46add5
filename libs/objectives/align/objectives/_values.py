"""Advantages from a value function, and the loss that fits it. All tensors are (B, T), one answer a row."""

from __future__ import annotations

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates (Schulman et al. 2016, arXiv:1506.02438, eq. 16) and returns (advantages + values).

    Only masked-in tokens take part: the successor of a token is the next one of them, whatever stands between (a tool's output, padding),
    and nothing follows the last. No gradient.

    Args:
        rewards: (B, T) received on taking the token. values: (B, T) predicted before it. mask: (B, T) bool.
        gamma, lam: from 0 to 1.

    Returns:
        (advantages, returns), (B, T), 0 where masked.

    Raises:
        ValueError: shapes that differ, gamma or lam out of range.
    """
    if not rewards.shape == values.shape == mask.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)}, values {tuple(values.shape)}, mask {tuple(mask.shape)} must be alike")
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}; it must be from 0 to 1")
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    rewards, values = torch.where(mask, rewards.detach(), zero), torch.where(mask, values.detach(), zero)
    advantages = torch.zeros_like(values)
    following = next_value = torch.zeros_like(values[:, 0])
    for t in range(values.shape[1] - 1, -1, -1):
        here = mask[:, t]
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * following
        following = torch.where(here, advantage, following)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = torch.where(here, advantage, zero)
    return advantages, torch.where(mask, advantages + values, zero)


def whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """x with mean 0 and variance 1 (of n) over the masked-in entries of the whole tensor; 0 where masked, or where there is no spread.

    x, mask and result have one shape, any; the dtype is that of x.
    """
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    count = mask.sum().clamp(min=1)
    kept = torch.where(mask, x, zero)
    centred = torch.where(mask, kept - kept.sum() / count, zero)
    variance = (centred**2).sum() / count
    return centred * (variance + eps).rsqrt()


def value_loss(values: Tensor, returns: Tensor, mask: Tensor, *, old_values: Tensor | None = None, clip: float | None = None) -> Tensor:
    """(B, T) half the squared error, 0 where masked: ½(V − R)², or with a clip ½max((V − R)², (clip(V, V_old ± clip) − R)²).

    The clipped form is that of OpenAI's baselines (ppo2, `vf_loss`): a value may not move further than `clip` from `old_values`.

    Raises:
        ValueError: shapes that differ, or one of `old_values` and `clip` without the other.
    """
    if not values.shape == returns.shape == mask.shape:
        raise ValueError(f"values {tuple(values.shape)}, returns {tuple(returns.shape)}, mask {tuple(mask.shape)} must be alike")
    if (clip is None) != (old_values is None) or (clip is not None and not clip > 0):
        raise ValueError(f"clip {clip} with old_values {'absent' if old_values is None else 'given'}: give both, clip above 0, or neither")
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    values, returns = torch.where(mask, values, zero), torch.where(mask, returns, zero).detach()
    error = (values - returns) ** 2
    if clip is not None and old_values is not None:
        old = torch.where(mask, old_values, zero).detach()
        error = torch.maximum(error, (old + (values - old).clamp(-clip, clip) - returns) ** 2)
    return torch.where(mask, error / 2, zero)
