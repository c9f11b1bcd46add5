"""Policy gradients on sampled answers: advantages within a group, the clipped ratio, the distance from a reference.

All tensors are (B, T), one answer a row. Where the mask is False nothing is read: values are replaced by `where` before any arithmetic.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Level = Literal["token", "sequence", "gspo"]
Correction = Literal["none", "truncate", "mask"]
Over = Literal["tokens", "sequences", "constant"]
Estimator = Literal["k1", "k2", "k3"]
_LARGEST_LOG_RATIO = 20.0  # e^20 in the loss is plainly a blow-up and still far from overflow


class PolicyTerms(NamedTuple):
    """What `policy_loss` gives, each (B, T). All but `loss` are detached and unclamped, for the log."""

    loss: Tensor  # 0 where masked
    log_ratio: Tensor  # log π/π_old of the chosen level
    clipped: Tensor  # bool: the gradient of this token was cut off by the clip
    correction: Tensor  # the importance weight that the loss was multiplied by; 1 without one


def group_advantages(rewards: Tensor, *, scale: Literal["group", "none"] = "group", eps: float = 1e-4) -> Tensor:
    """How much better an answer was than the others to its prompt.

    (r − mean) / (std + eps) in each group with scale "group" (GRPO: Shao et al. 2024, arXiv:2402.03300, section 4.1.2; std with n − 1),
    r − mean with "none" (Dr.GRPO: Liu et al. 2025, arXiv:2503.20783). In a group whose rewards are all equal every advantage is exactly 0.

    Args:
        rewards: (groups, n), n ≥ 2.

    Returns:
        (groups, n), the dtype of `rewards`.

    Raises:
        ValueError: a reward that is not finite, or groups of one, whose advantages would all be 0.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards are {tuple(rewards.shape)}; expected (groups, n) with n at least 2, else every advantage is 0")
    if not torch.isfinite(rewards).all():
        group, sample = (~torch.isfinite(rewards)).nonzero()[0].tolist()
        raise ValueError(f"the reward of sample {sample} of group {group} is {rewards[group, sample].item()}; a reward must be finite")
    if scale not in ("group", "none"):
        raise ValueError(f"scale {scale!r} is not known; it is group (GRPO) or none (Dr.GRPO)")
    centred = rewards - rewards.mean(1, keepdim=True)
    if scale == "group":
        centred = centred / (rewards.std(1, keepdim=True) + eps)
    return torch.where(dead_groups(rewards)[:, None], torch.zeros_like(centred), centred)


def dead_groups(rewards: Tensor) -> Tensor:
    """(groups,) bool: all rewards of the group are equal, so that it says nothing about what was better."""
    return rewards.amax(1) == rewards.amin(1)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    level: Level = "token",
    sampler_logprobs: Tensor | None = None,
    correction: Correction = "none",
    correction_cap: float = 2.0,
) -> PolicyTerms:
    """−min(ρA, clip(ρ, 1 − clip_low, 1 + clip_high)A) at every token (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    A `clip_high` above `clip_low` is DAPO's clip-higher (Yu et al. 2025, arXiv:2503.14476, section 3.1). Sum it with `aggregate`.

    Args:
        logprobs: (B, T) of the sampled tokens under the policy that is trained, at the sampling temperature; carries the gradient.
        old_logprobs: (B, T) the same before the first of the updates on these samples, by the same forward; equal to `logprobs` then.
        advantages: (B, T) or (B, 1).
        mask: (B, T) bool, True at the sampled tokens that are trained.
        level: "token": ρ is each token's ratio. "sequence": the ratio of the whole answer, the product of its tokens'. "gspo": their
            geometric mean (Zheng et al. 2025, arXiv:2507.18071, eq. 7).
        sampler_logprobs: (B, T) what the sampler says it drew with; its forward may differ from the trainer's.
        correction: the loss is multiplied by w = exp(old − sampler), without gradient: "truncate" takes min(w, cap) (truncated importance
            sampling), "mask" drops tokens with w outside [1/cap, cap] (as IcePop does).
        correction_cap: ≥ 1.

    Raises:
        ValueError: shapes that differ, a clip out of its range, a correction without sampler_logprobs or the reverse.
    """
    _check_policy(logprobs, old_logprobs, mask, clip_low, clip_high, level, correction, correction_cap, sampler_logprobs)
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    difference = torch.where(mask, logprobs, zero) - torch.where(mask, old_logprobs, zero).detach()
    if level == "token":
        log_ratio = difference
    else:
        total = difference.sum(1, keepdim=True)
        total = total / mask.sum(1, keepdim=True).clamp(min=1) if level == "gspo" else total
        log_ratio = torch.where(mask, total, zero)
    # Beyond ±20 the value stays and so does the direction of the gradient: the clamp's own gradient would be 0.
    bounded = log_ratio + (log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO) - log_ratio).detach()
    ratio = bounded.exp()
    gain = torch.where(mask, advantages.expand_as(mask), zero).detach()
    plain, cut = ratio * gain, ratio.clamp(1 - clip_low, 1 + clip_high) * gain
    loss = -torch.minimum(plain, cut)
    weight = torch.ones_like(loss)
    if sampler_logprobs is not None and correction != "none":
        drift = torch.where(mask, old_logprobs, zero) - torch.where(mask, sampler_logprobs, zero)
        weight = drift.clamp(max=_LARGEST_LOG_RATIO).exp().detach()
        if correction == "truncate":
            weight = weight.clamp(max=correction_cap)
        else:
            weight = torch.where((weight <= correction_cap) & (weight >= 1 / correction_cap), weight, zero)
        loss = loss * weight
    return PolicyTerms(torch.where(mask, loss, zero), log_ratio.detach(), mask & (cut < plain).detach(), weight)


def kl(logprobs: Tensor, reference: Tensor, mask: Tensor, *, estimator: Estimator = "k3", old_logprobs: Tensor | None = None) -> Tensor:
    """(B, T) an estimate of KL(π ‖ reference) at every sampled token; 0 where masked. In fp32 (fp64 for fp64 input).

    With d = log π − log π_ref: k1 = d, k2 = d²/2, k3 = e^−d − 1 + d (Schulman 2020, joschu.net/blog/kl-approx.html). k1 and k3 have the
    right mean, k2 a bias; only k2's own gradient is that of the KL: k1's is 0 in the mean, and k3's that of KL(reference ‖ π).

    Args:
        old_logprobs: (B, T) under the policy that sampled. With it the estimate is multiplied by π/π_old, whose gradient is the missing
            score-function term: then the mean of the gradient of k1 and k3 is the KL's own, on policy and off. Not for k2.

    Raises:
        ValueError: an unknown estimator, shapes that differ, old_logprobs with k2.
    """
    if logprobs.shape != reference.shape or logprobs.shape != mask.shape:
        raise ValueError(f"logprobs {tuple(logprobs.shape)}, reference {tuple(reference.shape)}, mask {tuple(mask.shape)} must be alike")
    if estimator not in ("k1", "k2", "k3"):
        raise ValueError(f"estimator {estimator!r} is not known; it is k1, k2 or k3")
    if estimator == "k2" and old_logprobs is not None:
        raise ValueError("k2's own gradient is the KL's already; leave old_logprobs out, or take k3")
    zero = torch.zeros((), dtype=torch.promote_types(logprobs.dtype, torch.float32), device=logprobs.device)
    policy = torch.where(mask, logprobs.to(zero.dtype), zero)
    d = policy - torch.where(mask, reference.to(zero.dtype), zero).detach()
    if estimator == "k1":
        estimate = d
    elif estimator == "k2":
        estimate = d**2 / 2
    else:
        estimate = (-d).clamp(max=_LARGEST_LOG_RATIO).expm1() + d
    if old_logprobs is not None:
        drift = policy - torch.where(mask, old_logprobs.to(zero.dtype), zero).detach()
        estimate = estimate * (drift + (drift.clamp(max=_LARGEST_LOG_RATIO) - drift).detach()).exp()
    return torch.where(mask, estimate, zero)


def aggregate(per_token: Tensor, mask: Tensor, *, over: Over = "tokens", length: int | None = None) -> Tensor:
    """The sum over the units that `count_units` counts; divide it by those of the whole step, with `normalise`.

    over: "tokens": every token weighs the same (DAPO). "sequences": every answer weighs the same, its tokens by 1/length (GRPO as
    published). "constant": every answer's sum is divided by `length`, one number for all (Dr.GRPO).

    Raises:
        ValueError: "constant" without a length ≥ 1, or a length with another.
    """
    if (over == "constant") != (length is not None) or (length is not None and length < 1):
        raise ValueError(f"over {over!r} with length {length}: constant needs a length of at least 1, the others take none")
    summed = torch.where(mask, per_token, torch.zeros((), dtype=per_token.dtype, device=per_token.device)).sum(1)
    if over == "sequences":
        return (summed / mask.sum(1).clamp(min=1)).sum()
    return summed.sum() if length is None else summed.sum() / length


def count_units(mask: Tensor, *, over: Over = "tokens") -> Tensor:
    """0-d int64: trained tokens, or answers with a trained token."""
    return mask.sum() if over == "tokens" else mask.any(1).sum()


def _check_policy(logprobs: Tensor, old: Tensor, mask: Tensor, low: float, high: float, level: str, correction: str, cap: float,
                  sampler: Tensor | None) -> None:  # fmt: skip
    if logprobs.shape != old.shape or logprobs.shape != mask.shape or mask.dtype != torch.bool:
        raise ValueError(f"logprobs {tuple(logprobs.shape)}, old {tuple(old.shape)}, mask {mask.dtype} {tuple(mask.shape)}: expected alike")
    if not 0 < low < 1 or not high > 0:
        raise ValueError(f"clip_low {low} must be between 0 and 1, clip_high {high} above 0")
    if level not in ("token", "sequence", "gspo"):
        raise ValueError(f"level {level!r} is not known; it is token, sequence or gspo")
    if correction not in ("none", "truncate", "mask"):
        raise ValueError(f"correction {correction!r} is not known; it is none, truncate or mask")
    if not cap >= 1:
        raise ValueError(f"correction_cap is {cap}; it must be at least 1")
    if (correction != "none") != (sampler is not None):
        raise ValueError(
            f"correction {correction!r} with sampler_logprobs {'absent' if sampler is None else 'given'}: give both or neither"
        )
