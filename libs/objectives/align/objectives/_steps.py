"""Process reward models: scores of the steps of an answer, their loss, and the rewards that a policy gets for them."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

StepReward = Literal["score", "change"]


def label_logits(hidden: Tensor, weight: Tensor, good_id: int, bad_id: int) -> Tensor:
    """(...) log-odds of the good against the bad label token, in fp32 (fp64 for fp64): what an LM head says of a step.

    hidden: (..., D) at the step's last token. weight: (V, D) the output embedding. The two logits alone are computed; their sigmoid is
    softmax over the two labels (Wang et al. 2024, arXiv:2312.08935).
    """
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    pair = hidden @ weight[[good_id, bad_id]].t()
    good, bad = pair.to(wide).unbind(-1)
    return good - bad


def step_loss(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """0-d sum over the masked-in steps of the binary cross-entropy, (...) logits against (...) labels from 0 to 1; divide by `normalise`.

    Raises:
        ValueError: shapes that differ.
    """
    if not logits.shape == labels.shape == mask.shape:
        raise ValueError(f"logits {tuple(logits.shape)}, labels {tuple(labels.shape)}, mask {tuple(mask.shape)} must be alike")
    zero = torch.zeros((), dtype=logits.dtype, device=logits.device)
    kept, wanted = torch.where(mask, logits, zero), torch.where(mask, labels.to(logits.dtype), zero)
    losses = F.binary_cross_entropy_with_logits(kept, wanted, reduction="none")
    return torch.where(mask, losses, zero).sum()


def step_rewards(scores: Tensor, step_ends: Tensor, *, how: StepReward = "score", baseline: float = 0.0) -> Tensor:
    """(B, T) rewards at the last token of each step, 0 elsewhere.

    how: "score": score − baseline at every step. "change": score minus that of the step before (the first: minus baseline), so that the
    rewards of an answer add up to its last score − baseline, and more steps alone earn nothing.

    scores: (B, T), read where `step_ends` (B, T) bool is True.
    """
    zero = torch.zeros((), dtype=scores.dtype, device=scores.device)
    kept = torch.where(step_ends, scores, zero)
    if how == "score":
        return torch.where(step_ends, kept - baseline, zero)
    if how != "change":
        raise ValueError(f"how {how!r} is not known; it is score or change")
    # The score of the step before: the last value at an end strictly before t.
    index = torch.arange(scores.shape[1], device=scores.device).expand_as(step_ends)
    last = torch.where(step_ends, index, -1).cummax(1).values
    before = F.pad(last[:, :-1], (1, 0), value=-1)
    previous = torch.where(before >= 0, kept.gather(1, before.clamp(min=0)), torch.full_like(kept, baseline))
    return torch.where(step_ends, kept - previous, zero)
