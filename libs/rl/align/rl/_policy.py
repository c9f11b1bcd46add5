"""Group-relative policy optimisation: which answers were better, and the loss that makes them likelier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from align.model import Decoder
from align.objectives import aggregate, count_units, group_advantages, kl, policy_loss
from align.rl._errors import RlError
from align.rl._forward import Scorer, forward_of, row_logprobs
from align.rl._rollouts import Rollout

_LARGEST = torch.finfo(torch.float32).max

Reference = Callable[[], AbstractContextManager[Decoder]]


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The objective on sampled answers."""

    clip_low: Annotated[float, "the ratio is clipped at 1 - this"] = 0.2
    clip_high: Annotated[float, "and at 1 + this; above clip_low it is DAPO's clip-higher"] = 0.28
    level: Annotated[
        Literal["token", "sequence", "gspo"], "whose ratio: each token's, the whole answer's, or the geometric mean of its tokens (GSPO)"
    ] = "token"
    over: Annotated[
        Literal["tokens", "sequences", "constant"],
        "what weighs the same: every token, every answer (GRPO as published), or answers divided by max_new_tokens (Dr.GRPO)",
    ] = "tokens"
    correction: Annotated[
        Literal["none", "truncate", "mask"], "importance weights between the trainer's and the sampler's forward: off, cut off, or dropped"
    ] = "none"
    correction_cap: Annotated[float, "the largest weight; mask also drops those below its inverse"] = 2.0
    kl: Annotated[float, "coefficient of the KL from the model that training started from; 0: no reference is held"] = 0.0
    kl_estimator: Annotated[Literal["k1", "k2", "k3"], "Schulman's estimators; k1 and k3 in the loss get the score-function term"] = "k3"
    kl_in: Annotated[Literal["loss", "reward", "both"], "where the KL is counted; both only when asked for by name"] = "loss"


def check_policy(config: PolicyConfig) -> None:
    """Raises RlError, naming the field, for values that no run can have."""
    for name, value, fits, range_ in (
        ("clip_low", config.clip_low, 0 < config.clip_low < 1, "between 0 and 1"),
        ("clip_high", config.clip_high, 0 < config.clip_high < _LARGEST, "above 0, and within fp32"),
        ("correction_cap", config.correction_cap, 1 <= config.correction_cap < _LARGEST, "at least 1, and within fp32"),
        ("kl", config.kl, 0 <= config.kl < _LARGEST, "at least 0, and within fp32"),
    ):
        if not fits:
            raise RlError(f"policy.{name} is {value}; it must be {range_}")
    if config.kl == 0 and config.kl_in != "loss":
        raise RlError(f"policy.kl_in is {config.kl_in}, but policy.kl is 0: nothing would be counted; set policy.kl")


def note(rollouts: list[Rollout], name: str, values: list[list[float]]) -> None:
    """Writes numbers of the sampled tokens into the rollouts."""
    for each, own in zip(rollouts, values, strict=True):
        each.per_token[name] = own


class GroupCredit:
    """Advantages within each group. Models are asked only where the options need it: old log-probabilities for several inner steps,
    the correction or a KL in the reward, reference ones for a KL.
    """

    def __init__(
        self, model: Decoder, config: PolicyConfig, scorer: Scorer, *, scale: Literal["group", "none"], group: int, inner_steps: int = 1,
        reference: Reference | None = None,
    ) -> None:  # fmt: skip
        """reference: gives the reference model for the time of a with statement. Raises RlError: it is needed and absent; a group of 1."""
        check_policy(config)
        if group < 2:
            raise RlError(f"rollout.group is {group}: an answer alone is neither better nor worse than its group; take at least 2")
        if (config.kl > 0) != (reference is not None):
            raise RlError(f"policy.kl is {config.kl} and the reference model {'given' if reference else 'absent'}; they go together")
        self._model, self._reference, self._config, self._scorer = model, reference, config, scorer
        self._scale, self._group = scale, group
        self._need_old = inner_steps > 1 or (config.kl > 0 and config.kl_in != "loss")

    def annotate(self, rollouts: list[Rollout]) -> None:
        if self._need_old:
            note(rollouts, "old_logprobs", self._scorer.logprobs(self._model, rollouts))
        if self._reference is not None:
            with self._reference() as model:
                note(rollouts, "reference_logprobs", self._scorer.logprobs(model, rollouts))

    def assign(self, rollouts: list[Rollout], rewards: list[float]) -> dict[str, float]:
        numbers: dict[str, float] = {}
        if self._config.kl and self._config.kl_in != "loss":
            spent = [_summed_kl(each, self._config) for each in rollouts]
            rewards = [reward - self._config.kl * each for reward, each in zip(rewards, spent, strict=True)]
            numbers["reward_kl"] = sum(spent) / max(sum(len(each.ids) for each in rollouts), 1)
        table = torch.tensor(rewards, dtype=torch.float64).view(-1, self._group)
        advantages = group_advantages(table, scale=self._scale).flatten().tolist()
        for each, advantage in zip(rollouts, advantages, strict=True):
            each.per_token["advantages"] = [advantage] * len(each.ids)
        return numbers


def _summed_kl(each: Rollout, config: PolicyConfig) -> float:
    old, reference = (torch.tensor([each.per_token[name]], dtype=torch.float64) for name in ("old_logprobs", "reference_logprobs"))
    return float(kl(old, reference, torch.ones_like(old, dtype=torch.bool), estimator=config.kl_estimator).sum())


class PolicyObjective:
    """A model and its policy loss, in the form that align.train.Trainer asks for (model, loss, named_parameters, extra state).

    The old log-probabilities are the trainer's own of the first step on the answers, so the ratio is exactly 1 there.
    """

    def __init__(
        self, model: Decoder, config: PolicyConfig, *, temperature: float, max_new_tokens: int,
        forward_impl: str | None = None,
    ) -> None:  # fmt: skip
        check_policy(config)
        self.model: nn.Module = model
        self.forward_impl: str | None = forward_of(forward_impl)
        self._config, self._temperature, self._length = config, temperature, max_new_tokens
        self._impl = forward_of(forward_impl)
        self.parts: dict[str, Any] = {}
        """What is saved beside the weights, by name: objects with state_dict and load_state_dict, such as the tripwire."""

    @property
    def per_answer(self) -> bool:
        """Whether the loss's units are answers."""
        return self._config.over != "tokens"

    def loss(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor | float, dict[str, Tensor | float]]:
        """The summed loss and its units. Logged, as means over these: kl, clipped, ratio, mismatch with the sampler."""
        config, mask = self._config, batch["loss_mask"]
        model: Any = self.model
        logprobs = row_logprobs(model, batch, mask, temperature=self._temperature, forward_impl=self._impl)
        old = batch.get("old_logprobs", logprobs.detach())
        sampler = batch["sampler_logprobs"]
        terms = policy_loss(
            logprobs, old, batch["advantages"], mask, clip_low=config.clip_low, clip_high=config.clip_high, level=config.level,
            sampler_logprobs=None if config.correction == "none" else sampler, correction=config.correction,
            correction_cap=config.correction_cap,
        )  # fmt: skip
        per_token = terms.loss
        measured: dict[str, Tensor] = {
            "clipped": terms.clipped.float(),
            "ratio": terms.log_ratio.exp(),
            "mismatch": (logprobs.detach() - sampler).abs() if "old_logprobs" not in batch else (old - sampler).abs(),
        }
        if config.correction != "none":
            measured["correction"] = terms.correction
        if "reference_logprobs" in batch:
            reference = batch["reference_logprobs"]
            measured["kl"] = kl(logprobs.detach(), reference, mask, estimator="k3")
            if config.kl_in != "reward":
                score = None if config.kl_estimator == "k2" else old
                per_token = per_token + config.kl * kl(logprobs, reference, mask, estimator=config.kl_estimator, old_logprobs=score)
        over = config.over
        loss = aggregate(per_token, mask, over=over, length=self._length if over == "constant" else None)
        means = {name: aggregate(value, mask, over="sequences" if self.per_answer else "tokens") for name, value in measured.items()}
        return loss, count_units(mask, over=over), {**means}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()

    def extra_state(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Raises RlError: the saved parts are not this objective's."""
        if state.keys() != self.parts.keys():
            raise RlError(
                f"the checkpoint holds {sorted(state)} beside the weights, this run {sorted(self.parts)}; resume it with its own stage"
            )
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
