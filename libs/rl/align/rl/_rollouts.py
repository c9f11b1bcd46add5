"""Answers that were sampled, and the micro-batches that they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Rollout:
    """One sampled answer. `logprobs` are under the distribution that it was drawn from; `per_token` holds more numbers a sampled token."""

    row: int  # of the prompt source
    group: int  # answers to one draw of a prompt share it
    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    truncated: bool
    text: str
    reward: float  # raw, as the reward function gave it
    reason: str
    trained: bool = True  # False: neither in the loss nor in its denominator
    per_token: dict[str, list[float]] = field(default_factory=dict)  # each as long as ids


def as_batch(rollouts: Sequence[Rollout], *, pad_id: int) -> dict[str, Tensor]:
    """One answer a row, right-padded: input_ids, targets (B, T) int64, loss_mask (B, T) bool, lengths (B,) of what is no padding,
    sampler_logprobs and every name of `per_token` (B, T) float32.

    Position t predicts targets[t]; a number of sampled token i stands where that token is the target.
    """
    width = max(len(each.prompt_ids) + len(each.ids) for each in rollouts) - 1
    shape = (len(rollouts), width)
    names = list(rollouts[0].per_token)
    batch: dict[str, Tensor] = {
        "input_ids": torch.full(shape, pad_id),
        "targets": torch.zeros(shape, dtype=torch.int64),
        "loss_mask": torch.zeros(shape, dtype=torch.bool),
        "lengths": torch.tensor([len(each.prompt_ids) + len(each.ids) - 1 for each in rollouts]),
        **{name: torch.zeros(shape) for name in ("sampler_logprobs", *names)},
    }
    for row, each in enumerate(rollouts):
        whole = [*each.prompt_ids, *each.ids]
        answer = slice(len(each.prompt_ids) - 1, len(whole) - 1)
        batch["input_ids"][row, : len(whole) - 1] = torch.tensor(whole[:-1])
        batch["targets"][row, : len(whole) - 1] = torch.tensor(whole[1:])
        batch["loss_mask"][row, answer] = each.trained
        batch["sampler_logprobs"][row, answer] = torch.tensor(each.logprobs)
        for name in names:
            batch[name][row, answer] = torch.tensor(each.per_token[name])
    return batch


def answer_mask(rollouts: Sequence[Rollout], width: int) -> Tensor:
    """(B, width) bool: where the sampled tokens of `as_batch` are targets, trained or not."""
    mask = torch.zeros(len(rollouts), width, dtype=torch.bool)
    for row, each in enumerate(rollouts):
        mask[row, len(each.prompt_ids) - 1 : len(each.prompt_ids) + len(each.ids) - 1] = True
    return mask
