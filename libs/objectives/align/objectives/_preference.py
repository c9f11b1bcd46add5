"""Losses over pairs of a chosen and a rejected answer."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PreferenceLoss = Literal["sigmoid", "ipo", "hinge", "robust", "simpo"]
PREFERENCE_LOSSES = ("sigmoid", "ipo", "hinge", "robust", "simpo")


class PreferenceTerms(NamedTuple):
    """What `dpo_loss` gives, each (P,), one number a pair. The rewards are detached and are for the log."""

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor | None = None,
    reference_rejected: Tensor | None = None,
    *,
    beta: float,
    loss: PreferenceLoss = "sigmoid",
    label_smoothing: float = 0.0,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
    length_normalised: bool = False,
    margin: float = 0.0,
) -> PreferenceTerms:
    """The loss of each pair, from the summed log-probabilities of its two answers under policy and reference.

    With r = log π/π_ref of an answer and δ = r(chosen) − r(rejected):

    - sigmoid: −log σ(βδ) (Rafailov et al. 2023, arXiv:2305.18290, eq. 7)
    - hinge: max(0, 1 − βδ) (Liu et al. 2023, arXiv:2309.06657)
    - ipo: (δ − 1/(2β))², with r divided by the answer's length, as its authors' code has it (Azar et al. 2023, arXiv:2310.12036, eq. 17)
    - robust: ((1 − ε)L(δ) − εL(−δ)) / (1 − 2ε) with L the sigmoid loss: unbiased when a share ε of the labels is flipped
      (Chowdhury et al. 2024, arXiv:2403.00409)
    - simpo: −log σ(βδ − margin), where r is the mean log-probability under the policy alone (Meng et al. 2024, arXiv:2405.14734)

    Args:
        chosen, rejected: (P,) summed log-probabilities under the policy.
        reference_chosen, reference_rejected: (P,) the same under the reference; None for simpo, which has none.
        beta: > 0. For ipo it is the paper's τ.
        label_smoothing: ε, the share of labels believed wrong, 0 ≤ ε < 1/2. sigmoid, ipo, hinge and simpo take the expected loss
            (1 − ε)L(δ) + εL(−δ), which for sigmoid is cDPO; robust corrects for it.
        chosen_lengths, rejected_lengths: (P,) numbers of summed tokens, ≥ 1; ipo, simpo and length_normalised need them.
        length_normalised: divide the log-ratios by the lengths for sigmoid, hinge and robust too.
        margin: simpo's γ, in units of βδ.

    Raises:
        ValueError: a parameter out of its range or without effect on this loss, or something missing that it needs.
    """
    _check(loss, beta, label_smoothing, length_normalised, margin)
    by_length = length_normalised or loss in ("ipo", "simpo")
    if by_length and (chosen_lengths is None or rejected_lengths is None):
        raise ValueError(f"loss {loss!r} divides by lengths: give chosen_lengths and rejected_lengths")
    if loss == "simpo":
        if reference_chosen is not None or reference_rejected is not None:
            raise ValueError("simpo has no reference: leave reference_chosen and reference_rejected out")
        ratios = [chosen, rejected]
    elif reference_chosen is None or reference_rejected is None:
        raise ValueError(f"loss {loss!r} compares with a reference: give reference_chosen and reference_rejected")
    else:
        ratios = [chosen - reference_chosen, rejected - reference_rejected]
    if by_length and chosen_lengths is not None and rejected_lengths is not None:
        ratios = [ratio / lengths for ratio, lengths in zip(ratios, (chosen_lengths, rejected_lengths), strict=True)]
    delta = ratios[0] - ratios[1]
    straight, flipped = _pair_loss(loss, delta, beta, margin), _pair_loss(loss, -delta, beta, margin)
    share = label_smoothing
    if loss == "robust":
        losses = ((1 - share) * straight - share * flipped) / (1 - 2 * share)
    else:
        losses = (1 - share) * straight + share * flipped if share else straight
    return PreferenceTerms(losses, (beta * ratios[0]).detach(), (beta * ratios[1]).detach())


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, *, margin: float = 0.0) -> Tensor:
    """(P,) −log σ(chosen − rejected − margin): two scores of a reward model on the answers of a pair (Bradley and Terry 1952)."""
    return -F.logsigmoid(chosen - rejected - margin)


def _pair_loss(loss: str, delta: Tensor, beta: float, margin: float) -> Tensor:
    if loss == "ipo":
        return (delta - 1 / (2 * beta)) ** 2
    if loss == "hinge":
        return torch.relu(1 - beta * delta)
    return -F.logsigmoid(beta * delta - margin)


def _check(loss: str, beta: float, label_smoothing: float, length_normalised: bool, margin: float) -> None:
    if loss not in PREFERENCE_LOSSES:
        raise ValueError(f"loss {loss!r} is not known; it is one of {', '.join(PREFERENCE_LOSSES)}")
    if not beta > 0:
        raise ValueError(f"beta is {beta}; it must be above 0")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; it is a share of wrong labels, from 0 to below 0.5")
    if margin and loss != "simpo":
        raise ValueError(f"margin {margin} has no effect on loss {loss!r}; it is simpo's")
    if length_normalised and loss in ("ipo", "simpo"):
        raise ValueError(f"loss {loss!r} divides by the length already; leave length_normalised out")
