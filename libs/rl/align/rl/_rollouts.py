"""Answers that were sampled, and the micro-batches that they become."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

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
    trained: bool = True  # False, as of an answer without tokens: neither in the loss nor in its denominator
    per_token: dict[str, list[float]] = field(default_factory=dict)  # each as long as ids


def as_batch(rollouts: Sequence[Rollout], *, pad_id: int) -> dict[str, Tensor]:
    """One answer a row, right-padded: input_ids, targets (B, T) int64, loss_mask (B, T) bool, lengths (B,) of what is no padding,
    prompts (B,) of what is prompt, leaders (B,) the first row with the same prompt, sampler_logprobs and every name of `per_token` (B, T)
    float32.

    Position t predicts targets[t]; a number of sampled token i stands where that token is the target. A row has one token at least: a
    prompt of one token with an empty answer is read though it predicts nothing, since a model reads something.
    """
    lengths = torch.tensor([max(len(each.prompt_ids) + len(each.ids) - 1, 1) for each in rollouts])
    width = int(lengths.max())
    real, answers = torch.arange(width) < lengths[:, None], answer_mask(rollouts, width)
    first: dict[tuple[int, ...], int] = {}
    whole = [[*each.prompt_ids, *each.ids] for each in rollouts]

    def placed(lists: Iterable[Sequence[float]], mask: Tensor, empty: Tensor) -> Tensor:
        return empty.masked_scatter(mask, torch.tensor([*chain.from_iterable(lists)], dtype=empty.dtype))

    return {
        "input_ids": placed((ids[:-1] or ids for ids in whole), real, torch.full(real.shape, pad_id)),
        "targets": placed((ids[1:] or [0] for ids in whole), real, torch.zeros(real.shape, dtype=torch.int64)),
        "loss_mask": answers & torch.tensor([each.trained for each in rollouts])[:, None],
        "lengths": lengths,
        "prompts": torch.tensor([len(each.prompt_ids) for each in rollouts]),
        "leaders": torch.tensor([first.setdefault(tuple(each.prompt_ids), row) for row, each in enumerate(rollouts)]),
        "sampler_logprobs": placed((each.logprobs for each in rollouts), answers, torch.zeros(real.shape)),
        **{name: placed((each.per_token[name] for each in rollouts), answers, torch.zeros(real.shape)) for name in rollouts[0].per_token},
    }


def fed(rollouts: Sequence[Rollout]) -> list[int]:
    """Which answers of a micro-batch the trainer is given: those that are trained, and one at least, so that every rank runs its model."""
    return [at for at, each in enumerate(rollouts) if each.trained] or [0]


def answer_mask(rollouts: Sequence[Rollout], width: int) -> Tensor:
    """(B, width) bool: where the sampled tokens of `as_batch` are targets, trained or not."""
    at, begin = torch.arange(width), torch.tensor([len(each.prompt_ids) - 1 for each in rollouts])[:, None]
    return (at >= begin) & (at < begin + torch.tensor([len(each.ids) for each in rollouts])[:, None])
