"""From logits to a token: temperature, top-k, top-p, min-p, and the log-probabilities of what was drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_SMALLEST, _LARGEST = torch.finfo(torch.float32).smallest_normal, torch.finfo(torch.float32).max
_COLD = 2.0**-64  # temperatures below it: logits divided by them could leave fp32


class RolloutError(ValueError):
    """A request that can't be served as asked: the message names the value and the way out."""

    exit_code = 2


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn from softmax(logits / temperature).

    temperature: > 0, or 0 for the most likely token (then the three filters have nothing to do).
    top_k: keep the k most likely tokens; 0 = off. Tokens as likely as the k-th stay.
    top_p: of the k most likely, keep the most likely tokens until their share reaches top_p, the one that crosses it included; 1 = off
    (Holtzman et al. 2020). What equals the k-th is no part of that share.
    min_p: keep tokens at least min_p times as likely as the most likely one (Nguyen et al. 2024); 0 = off.

    Each filter is a threshold on the probability, so equally likely tokens stay or go together, and the most likely token always stays.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RolloutError(f"temperature {self.temperature} must be a finite number >= 0 (0 takes the most likely token)")
        if not 0 < self.top_p <= 1:
            raise RolloutError(f"top_p {self.top_p} must be above 0 and at most 1 (1 = off)")
        if self.top_k < 0:
            raise RolloutError(f"top_k {self.top_k} must be >= 0 (0 = off)")
        if not 0 <= self.min_p <= 1:
            raise RolloutError(f"min_p {self.min_p} must be between 0 (= off) and 1")

    @property
    def divisor(self) -> float:
        """The temperature as fp32 can divide by it: 0, or a normal number."""
        return min(max(self.temperature, _SMALLEST), _LARGEST) if self.temperature else 0.0

    @property
    def filtered(self) -> bool:
        """Whether any token can be cut off."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def draw(
    logits: torch.Tensor, params: SamplingParams, negative_noise: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token a row, with its log-probabilities.

    logits: (n, V), any float type; computed with in float32. negative_noise: (n, V) of `Noise.negative_exponential`, None at temperature 0.
    Returns tokens (n,) int64 and two float32 (n,): their log-probability under the sampling distribution, and under softmax(logits).

    The race E / p with E standard exponential is won by token i with probability p_i (the Gumbel-max trick, one logarithm less).
    """
    logits = logits.float()
    if params.temperature == 0:
        tokens = _largest(logits)
        raw = _logprobs(logits, tokens.unsqueeze(-1))
        return tokens, torch.zeros_like(raw), raw
    if negative_noise is None:
        raise TypeError("negative_noise is needed at temperature > 0")
    plain = params.temperature == 1
    scaled = logits - logits.amax(-1, keepdim=True) if params.temperature < _COLD else logits
    probs = torch.softmax(scaled if plain else scaled / params.divisor, -1)
    kept = _filter(probs, params) if params.filtered else probs
    tokens = _largest(negative_noise / kept)  # a token of probability 0 is at -inf
    chosen = tokens.unsqueeze(-1)
    logprobs = kept.gather(-1, chosen).squeeze(-1).log()
    if params.filtered:
        logprobs = logprobs - kept.sum(-1).log()
    if plain:
        unfiltered = probs.gather(-1, chosen).squeeze(-1).log() if params.filtered else logprobs
    else:
        unfiltered = _logprobs(logits, chosen)
    return tokens, logprobs, unfiltered


def _largest(scores: torch.Tensor) -> torch.Tensor:
    """(n, V) to (n,) int64: where each row is largest, first where it is NaN. On a CPU by numpy, at a fourth of the time."""
    return scores.max(-1).indices if scores.is_cuda else torch.from_numpy(scores.numpy().argmax(-1))


def _logprobs(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """(n,) of the tokens `chosen` (n, 1). A CPU is twice as fast by all of them; on a GPU they would be another (n, V)."""
    if logits.is_cuda:
        return logits.gather(-1, chosen).squeeze(-1) - logits.logsumexp(-1)
    return logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)


def _filter(probs: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """probs (n, V) with what the filters cut off set to 0, not normalised again."""
    floor = probs.new_zeros(probs.shape[0], 1)
    top_k = min(params.top_k, probs.shape[-1])
    if top_k or params.top_p < 1:
        ranked = probs.topk(top_k, -1).values if top_k else probs.sort(-1, descending=True).values  # (n, k or V), falling
        if params.top_p < 1:
            before = ranked.cumsum(-1) - ranked  # the share of all tokens ranked above each
            inside = before < params.top_p * ranked.sum(-1, keepdim=True)
            inside[:, 0] = True
            floor = ranked.gather(-1, inside.sum(-1, keepdim=True) - 1)
        else:
            floor = ranked[:, -1:]
    if params.min_p > 0:
        floor = torch.maximum(floor, params.min_p * probs.amax(-1, keepdim=True))
    return torch.where(probs >= floor, probs, 0.0)
