"""Preference optimisation: pairs as steps of the Trainer, their loss, the reference's share of it, pairs from a verifier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from align.data import Cursor, EncodedPairs, Example
from align.model import Decoder
from align.objectives import dpo_loss
from align.rl._cache import ReferenceCache
from align.rl._errors import RlError
from align.rl._forward import forward_of, row_logprobs, to_tensors
from align.rl._policy import Reference
from align.rl._rewards import Reward
from align.rl._source import RlStep
from align.rollout import Sampler
from align.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """The objective on pairs."""

    loss: Annotated[Literal["sigmoid", "ipo", "hinge", "robust", "simpo"], "sigmoid is DPO; simpo needs no reference"] = "sigmoid"
    beta: Annotated[float, "how dear it is to leave the reference; ipo's τ"] = 0.1
    label_smoothing: Annotated[float, "share of the labels that are believed wrong (cDPO; robust corrects for it)"] = 0.0
    length_normalised: Annotated[bool, "log-ratios are divided by the lengths of the answers (sigmoid, hinge, robust)"] = False
    margin: Annotated[float, "simpo's γ"] = 0.0
    nll: Annotated[float, "coefficient of the mean negative log-likelihood of the chosen answers, beside the loss"] = 0.0


def check_preference(config: PreferenceConfig) -> None:
    """Raises RlError, naming the field, for values that no run can have or that would have no effect."""
    one = torch.zeros(1)
    reference = None if config.loss == "simpo" else one
    try:
        dpo_loss(one, one, reference, reference, **_options(config), chosen_lengths=one + 1, rejected_lengths=one + 1)
    except ValueError as error:
        raise RlError(f"preference: {error}") from None
    if config.loss == "robust" and config.label_smoothing == 0:
        raise RlError("preference.loss is robust with label_smoothing 0, which is sigmoid; set preference.label_smoothing")
    if config.nll < 0:
        raise RlError(f"preference.nll is {config.nll}; it must be at least 0")


def _options(config: PreferenceConfig) -> dict[str, Any]:
    return {
        "beta": config.beta, "loss": config.loss, "label_smoothing": config.label_smoothing,
        "length_normalised": config.length_normalised, "margin": config.margin,
    }  # fmt: skip


def pair_batch(pairs: Sequence[tuple[Example, Example]], *, pad_id: int) -> dict[str, Tensor]:
    """All chosen answers of the pairs, then all rejected ones: input_ids, targets (2P, T) int64, loss_mask (2P, T) bool, lengths (2P,).

    Rows are as long as their own tokens and padded on the right to the longest of this batch.
    """
    sides = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]
    width = max(len(side.ids) for side in sides) - 1
    shape = (len(sides), width)
    batch = {
        "input_ids": torch.full(shape, pad_id),
        "targets": torch.zeros(shape, dtype=torch.int64),
        "loss_mask": torch.zeros(shape, dtype=torch.bool),
        "lengths": torch.tensor([len(side.ids) - 1 for side in sides]),
    }
    for row, side in enumerate(sides):
        ids, size = torch.from_numpy(side.ids).long(), len(side.ids) - 1
        batch["input_ids"][row, :size], batch["targets"][row, :size] = ids[:-1], ids[1:]
        batch["loss_mask"][row, :size] = torch.from_numpy(side.mask[1:])
    return batch


class PairSource:
    """Gives the Trainer steps of `global_batch` pairs, in the Cursor's order; a step's units are its pairs."""

    def __init__(
        self, encoded: EncodedPairs, *, global_batch: int, micro_batch: int, seed: int, pad_id: int, cache: ReferenceCache | None = None,
        rank: int = 0, world: int = 1,
    ) -> None:  # fmt: skip
        """Raises RlError: global_batch is no multiple of ranks × micro_batch, or the cache is of other pairs."""
        if global_batch % (world * micro_batch):
            raise RlError(f"train.global_batch {global_batch} is not a multiple of ranks {world} × train.micro_batch {micro_batch}")
        if cache is not None and (cache.key.rows, cache.key.pairs) != (encoded.digest, encoded.kept):
            raise RlError("the reference cache is of other rows than those that are trained on; make it anew with //stages:reference")
        self._pairs, self._cache, self._pad_id = encoded.pairs, cache, pad_id
        self._global_batch, self._micro_batch, self._rank, self._world = global_batch, micro_batch, rank, world
        self._cursor = Cursor(len(encoded.pairs), seed=seed, digest=encoded.digest)

    @property
    def digest(self) -> str:
        return self._cursor.digest

    def next_step(self) -> RlStep:
        taken = self._cursor.take(self._global_batch)
        share = self._global_batch // self._world
        mine = taken[self._rank * share : (self._rank + 1) * share]
        batches = [self._batch(mine[at : at + self._micro_batch]) for at in range(0, share, self._micro_batch)]
        tokens = sum(len(side.ids) for index in taken for side in self._pairs[index])
        return RlStep(batches, len(taken), tokens, self._cursor.progress)

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self._cursor.state_dict(), "global_batch": self._global_batch}

    def load_state_dict(self, state: Mapping[str, Any], *, allow_change: tuple[str, ...] = ()) -> None:
        """Raises DataError: other rows or another seed; RlError: another global batch."""
        if state.get("global_batch") != self._global_batch and "global_batch" not in allow_change:
            raise RlError(f"the saved run has train.global_batch {state.get('global_batch')!r}, this one {self._global_batch}; restore it")
        self._cursor.load_state_dict(state.get("cursor") or {})

    def _batch(self, indices: list[int]) -> dict[str, Tensor]:
        batch = pair_batch([self._pairs[index] for index in indices], pad_id=self._pad_id)
        if self._cache is not None:
            sides = (self._cache.chosen, self._cache.rejected)
            batch["reference"] = torch.tensor([side[index] for side in sides for index in indices], dtype=torch.float32)
        return batch


class PreferenceObjective:
    """A model and its preference loss, in the form that align.train.Trainer asks for.

    The reference's log-probabilities come with the batch (from a cache), or from `reference`, a model that is there for the time of a with
    statement: a frozen copy, or the base of an adapter that is switched off.
    """

    def __init__(
        self, model: Decoder, config: PreferenceConfig, *, reference: Reference | None = None,
        forward_impl: str | None = None,
    ) -> None:  # fmt: skip
        check_preference(config)
        self.model: nn.Module = model
        self.forward_impl: str | None = forward_of(forward_impl)
        self._config, self._reference = config, reference
        self._impl = forward_of(forward_impl)

    def loss(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor | float, dict[str, Tensor | float]]:
        """The loss summed over pairs and their number. Logged, as means over pairs: margin, pair accuracy, rewards, log-probabilities."""
        config, mask, model = self._config, batch["loss_mask"], self.model
        summed = row_logprobs(model, batch, mask, forward_impl=self._impl).sum(1)  # type: ignore[arg-type]
        chosen, rejected = summed.chunk(2)
        lengths = mask.sum(1).chunk(2)
        references = self._references(batch, mask)
        terms = dpo_loss(chosen, rejected, *references, **_options(config), chosen_lengths=lengths[0], rejected_lengths=lengths[1])
        losses = terms.losses
        if config.nll:
            losses = losses - config.nll * chosen / lengths[0]
        right = (terms.chosen_rewards > terms.rejected_rewards).float()
        metrics: dict[str, Tensor | float] = {
            "margin": (terms.chosen_rewards - terms.rejected_rewards).sum(),
            "pair_accuracy": right.sum(),
            "chosen_reward": terms.chosen_rewards.sum(),
            "rejected_reward": terms.rejected_rewards.sum(),
            "chosen_logprob": chosen.detach().sum(),
            "rejected_logprob": rejected.detach().sum(),
        }
        return losses.sum(), float(len(losses)), metrics

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()

    def extra_state(self) -> dict[str, Any]:
        return {}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        if state:
            raise RlError(f"the checkpoint has extra state {sorted(state)}, which pairs do not need; resume it with its own stage")

    def _references(self, batch: Mapping[str, Tensor], mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if self._config.loss == "simpo":
            return None, None
        if "reference" in batch:
            chosen, rejected = batch["reference"].chunk(2)
            return chosen, rejected
        if self._reference is None:
            raise RlError(f"loss {self._config.loss} needs a reference: a cache, or an adapter over a frozen base")
        with self._reference() as reference, torch.no_grad():
            chosen, rejected = row_logprobs(reference, batch, mask, forward_impl=self._impl).sum(1).chunk(2)
        return chosen, rejected


@torch.no_grad()
def reference_logprobs(
    model: Decoder, encoded: EncodedPairs, *, micro_batch: int, pad_id: int, forward_impl: str | None = None,
    progress: Any = None,
) -> tuple[list[float], list[float]]:  # fmt: skip
    """(chosen, rejected): the summed log-probabilities of each pair's answers, in order, `micro_batch` pairs a forward.

    Pairs are sorted by length for it. In fp32 a row's number does not depend on its batch but for rounding.
    """
    device = model.output_weight.device
    order = sorted(range(len(encoded.pairs)), key=lambda index: -max(len(side.ids) for side in encoded.pairs[index]))
    sides: tuple[list[float], list[float]] = ([0.0] * len(order), [0.0] * len(order))
    for start in range(0, len(order), micro_batch):
        taken = order[start : start + micro_batch]
        batch = to_tensors(pair_batch([encoded.pairs[index] for index in taken], pad_id=pad_id), device)
        found = row_logprobs(model, batch, batch["loss_mask"], forward_impl=forward_of(forward_impl)).sum(1).tolist()
        for place, index in enumerate(taken):
            sides[0][index], sides[1][index] = found[place], found[len(taken) + place]
        if progress:
            progress(start + len(taken), len(order))
    return sides


def verified_pairs(
    rows: Sequence[Mapping[str, Any]],
    prompts_ids: Sequence[list[int]],
    sampler: Sampler,
    tokenizer: Tokenizer,
    reward: Reward,
    *,
    samples: int = 8,
    per_prompt: int = 2,
    max_new_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """On-policy pairs {"prompt", "chosen", "rejected"}: of `samples` answers to each prompt one with the highest reward over one with the
    lowest, up to `per_prompt` pairs of different answers; and how many prompts gave none ("all_alike", "cut_off").

    Answers that were cut off are left out: a pair would teach that stopping is optional.
    """
    found = sampler.generate(
        prompts_ids, n=samples, max_new_tokens=max_new_tokens, temperature=temperature,
        seeds=[(seed << 32) + index for index in range(len(prompts_ids))],
    )  # fmt: skip
    texts = [tokenizer.decode(sample.ids, skip_special=True) for sample in found]
    scored = reward.score([rows[index // samples] for index in range(len(found))], texts)
    pairs: list[dict[str, Any]] = []
    dropped = {"all_alike": 0, "cut_off": 0}
    for index, row in enumerate(rows):
        own = range(index * samples, (index + 1) * samples)
        whole = [(scored[at].reward, texts[at]) for at in own if not found[at].truncated]
        if not whole:
            dropped["cut_off"] += 1
            continue
        best, worst = max(reward for reward, _ in whole), min(reward for reward, _ in whole)
        if best == worst:
            dropped["all_alike"] += 1
            continue
        sides = [list(dict.fromkeys(text for reward, text in whole if reward == wanted)) for wanted in (best, worst)]
        prompt = row["messages"] if "messages" in row else row["prompt"]
        pairs += [{"prompt": prompt, "chosen": a, "rejected": b} for a, b in list(zip(*sides, strict=False))[:per_prompt]]
    return pairs, dropped


def frozen(model: Decoder) -> Reference:
    """The reference that a frozen copy is."""
    model.requires_grad_(False)
    return lambda: nullcontext(model)
