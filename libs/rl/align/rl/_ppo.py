"""PPO on the rewards of a process reward model: credit for every token, and the loss of policy and critic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from align.model import Decoder
from align.objectives import aggregate, gae, kl, normalise, step_rewards, value_loss, whiten
from align.rl._critic import Critic, CriticConfig
from align.rl._errors import RlError
from align.rl._forward import Scorer
from align.rl._policy import PolicyConfig, PolicyObjective, Reference, note
from align.rl._rollouts import Rollout
from align.rl._steps import StepScorer


@dataclass(frozen=True, kw_only=True)
class StepRewardConfig:
    """How the scores of a process reward model become rewards."""

    how: Annotated[
        Literal["score", "change"], "score: each step earns its probability - baseline; change: what it adds to the step before"
    ] = "change"
    baseline: Annotated[float, "probability of being good that earns nothing"] = 0.5
    answer: Annotated[bool, "the end of the answer is scored too; only for a model that was trained with answer labels"] = True
    truncated: Annotated[float, "what an answer that was cut off gets at its last token, in place of a score"] = -0.5


class PpoCredit:
    """Rewards at the ends of steps, the KL from the reference at every token, advantages by GAE."""

    def __init__(
        self, model: Decoder, critic: Critic, prm: Decoder, scorer: StepScorer, *, scores: Scorer, config: StepRewardConfig,
        critic_config: CriticConfig, policy: PolicyConfig, step_ends: list[bool], eos_ids: list[int], reference: Reference | None,
        inner_steps: int = 1,
    ) -> None:  # fmt: skip
        """scores: asks the models. step_ends: `step_end_ids`. Raises RlError: a KL without a reference, or the reverse."""
        if (policy.kl > 0) != (reference is not None):
            raise RlError(f"policy.kl is {policy.kl} and the reference model {'given' if reference else 'absent'}; they go together")
        self._model, self._critic, self._prm, self._scorer, self._scores = model, critic, prm, scorer, scores
        self._config, self._critic_config, self._policy, self._reference = config, critic_config, policy, reference
        self._eos = set(eos_ids)
        # A model's vocabulary may be longer than its tokenizer's: what has no text ends no step.
        self._step_ends = {token for token, ends in enumerate(step_ends) if ends}
        self._need_old = inner_steps > 1 or policy.kl > 0

    def annotate(self, rollouts: list[Rollout]) -> None:
        if self._need_old:
            note(rollouts, "old_logprobs", self._scores.logprobs(self._model, rollouts))
        if self._reference is not None:
            with self._reference() as model:
                note(rollouts, "reference_logprobs", self._scores.logprobs(model, rollouts))
        note(rollouts, "old_values", self._scores.ask(self._model, rollouts, lambda batch, mask: self._critic.values(batch)))
        note(rollouts, "step_scores", self._scores.after(self._prm, self._scorer, rollouts))

    def assign(self, rollouts: list[Rollout], rewards: list[float]) -> dict[str, float]:
        """`rewards` are the verifier's, for the log: they teach nothing here."""
        config, width = self._config, max(1, *(len(each.ids) for each in rollouts))
        mask = torch.zeros(len(rollouts), width, dtype=torch.bool)
        names = ["step_scores", "old_values"] + (["old_logprobs", "reference_logprobs"] if self._reference is not None else [])
        table = {name: torch.zeros(mask.shape, dtype=torch.float64) for name in names}
        ends = torch.zeros_like(mask)
        for row, each in enumerate(rollouts):
            size = len(each.ids)
            mask[row, :size] = True
            for name in names:
                table[name][row, :size] = torch.tensor(each.per_token[name], dtype=torch.float64)
            ends[row, :size] = torch.tensor(self._ends(each))
        earned = step_rewards(table["step_scores"].sigmoid(), ends, how=config.how, baseline=config.baseline)
        for row, each in enumerate(rollouts):
            if each.truncated and each.ids:
                earned[row, len(each.ids) - 1] = config.truncated
        paid = earned
        numbers = {"prm_reward": float(earned.sum()) / len(rollouts)}
        numbers["step_score"] = float(table["step_scores"].sigmoid()[ends].mean()) if ends.any() else 0.0
        if self._policy.kl and self._policy.kl_in != "loss":
            spent = kl(table["old_logprobs"], table["reference_logprobs"], mask, estimator=self._policy.kl_estimator)
            paid = earned - self._policy.kl * spent
            numbers["reward_kl"] = float(spent.sum() / mask.sum().clamp(min=1))
        trained = mask & torch.tensor([each.trained for each in rollouts])[:, None]
        advantages, returns = gae(paid, table["old_values"], mask, gamma=self._critic_config.gamma, lam=self._critic_config.lam)
        numbers |= _explained(table["old_values"], returns, mask)
        advantages = whiten(advantages, trained) if self._critic_config.whiten else advantages
        for row, each in enumerate(rollouts):
            size = len(each.ids)
            each.per_token["advantages"] = advantages[row, :size].tolist()
            each.per_token["returns"] = returns[row, :size].tolist()
            del each.per_token["step_scores"]
        return numbers

    def _ends(self, each: Rollout) -> list[bool]:
        last = len(each.ids) - 1
        ended = self._config.answer and not each.truncated
        return [(token in self._step_ends and token not in self._eos) or (ended and at == last) for at, token in enumerate(each.ids)]


def _explained(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    """Share of the returns' variance that the critic explains."""
    spread = returns[mask].var() if mask.sum() > 1 else 0.0
    return {"explained_variance": float(1 - (returns - values)[mask].var() / spread) if spread > 0 else 0.0}


class PpoObjective(PolicyObjective):
    """The policy's clipped loss, and the critic's with a backward of its own."""

    def __init__(self, model: Decoder, critic: Critic, config: PolicyConfig, critic_config: CriticConfig, **options: Any) -> None:
        """options: as PolicyObjective."""
        super().__init__(model, config, **options)
        self._critic, self._critic_config, self._over = critic, critic_config, config.over

    def loss(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor | float, dict[str, Tensor | float]]:
        """The policy's loss as in PolicyObjective; the value loss is normalised by the batch's "units" and its gradient added here."""
        mask, config = batch["loss_mask"], self._critic_config
        over = "sequences" if self.per_answer else "tokens"
        with self._critic.fitting():
            values = self._critic.values(batch)
            old = {"old_values": batch["old_values"], "clip": config.clip} if config.clip is not None else {}
            fit = aggregate(value_loss(values, batch["returns"], mask, **old), mask, over=over)  # type: ignore[arg-type]
            if torch.is_grad_enabled():
                (config.coefficient * normalise(fit, batch["units"])).backward()  # type: ignore[no-untyped-call]
        loss, units, metrics = super().loss(batch)
        return loss, units, {**metrics, "value_loss": fit.detach()}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.model.named_parameters()
        yield from ((f"critic.{name}", parameter) for name, parameter in self._critic.named_parameters())

    def extra_state(self) -> dict[str, Any]:
        return {**super().extra_state(), **{f"critic.{name}": value.detach() for name, value in self._critic.state_dict().items()}}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        own = {name.removeprefix("critic."): value for name, value in state.items() if name.startswith("critic.")}
        if own.keys() != self._critic.state_dict().keys():
            raise RlError("the checkpoint's critic has other layers; restore critic.targets and critic.rank")
        self._critic.load_state_dict(own)
        super().load_extra_state({name: value for name, value in state.items() if not name.startswith("critic.")})
