"""Forwards over rows of answers, with or without their padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from align.model import FORWARD_IMPLS, Decoder, pick_forward_impl
from align.objectives import sequence_logprobs
from align.rl._errors import RlError
from align.rl._rollouts import Rollout, answer_mask, as_batch, fed
from align.rollout import SamplingParams

WITHOUT_PADDING = ("cpu_per_document", "varlen", "invariant")  # these are given the real tokens of all rows, one row after another
COLDEST = 2.0**-64  # logits divided by less leave fp32; by this, those that differ in fp32 lie so far apart already that one takes all


def forward_of(forward_impl: str | None) -> str:
    """The attention that is meant by a name of a configuration; None: the one for padded rows. Raises RlError for an unknown name."""
    name = forward_impl or pick_forward_impl()
    known = [each for each in FORWARD_IMPLS if each != "sdpa_cached"]
    if name not in known:
        raise RlError(f"forward_impl {name!r} is not known; it is one of {', '.join(known)}")
    return name


def row_hidden(model: Any, batch: Mapping[str, Tensor], *, forward_impl: str) -> Tensor:
    """Hidden states of right-padded rows: (B, T, D), or by an attention without padding those of the real tokens alone, (1, N, D), row
    after row.

    model: a Decoder, or what is called like one. batch: input_ids (B, T) and lengths (B,).
    """
    ids: Tensor = batch["input_ids"]
    if forward_impl not in WITHOUT_PADDING:
        hidden: Tensor = model(ids, forward_impl=forward_impl)
        return hidden
    lengths = batch["lengths"]
    real = real_tokens(batch)
    if forward_impl == "cpu_per_document" and "leaders" in batch:
        return _shared_prompts(model, batch, real)
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=ids.device)
    torch.cumsum(lengths, 0, out=bounds[1:])
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)[real]
    packed: Tensor = model(
        ids[real][None], position_ids=positions[None], cu_seqlens=bounds, max_seqlen=int(lengths.max()), forward_impl=forward_impl
    )
    return packed


def _shared_prompts(model: Any, batch: Mapping[str, Tensor], real: Tensor) -> Tensor:
    """As `row_hidden` without padding; the prompt of several rows is computed once."""
    ids, leaders = batch["input_ids"], batch["leaders"]
    at = torch.arange(ids.shape[1], device=ids.device)
    leads = (leaders == torch.arange(len(ids), device=ids.device))[:, None]
    begun = torch.minimum(batch["prompts"], batch["lengths"][leaders])[:, None]  # a leader without an answer lacks the prompt's last token
    own = real & (leads | (at >= begun))  # (B, T): computed for this row
    token = own.flatten().cumsum(0).view_as(own) - 1
    token = token.where(own, token[leaders])
    hidden: Tensor = model(
        ids[own][None],
        position_ids=at.expand_as(ids)[own][None],
        paths=token.where(real, -1)[batch["lengths"] > 0],
        forward_impl="cpu_per_document",
    )
    return hidden.index_select(1, token[real])


def real_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """(B, T) bool: what is no padding."""
    ids = batch["input_ids"]
    return torch.arange(ids.shape[1], device=ids.device) < batch["lengths"][:, None]


def row_logprobs(model: Decoder, batch: Mapping[str, Tensor], mask: Tensor, *, temperature: float = 1.0, forward_impl: str) -> Tensor:
    """(B, T) log-probabilities of the targets at a sampling temperature, 0 where the mask is False: fp32, whole logits never exist.

    The same numbers with and without padding, to rounding. Finite at every temperature that the sampler takes: one below 2^-64 counts as
    that, where all the probability is on the most likely token, or its equals, already. Raises RolloutError: it is none for a sampler.
    """
    hidden = row_hidden(model, batch, forward_impl=forward_impl)
    if temperature != 1.0:
        hidden = hidden / max(SamplingParams(temperature).divisor, COLDEST)  # the logits are linear in it
    if forward_impl not in WITHOUT_PADDING:
        return sequence_logprobs(hidden, model.output_weight, batch["targets"], mask)
    real = real_tokens(batch)
    strict = forward_impl == "invariant"
    flat = sequence_logprobs(hidden, model.output_weight, batch["targets"][real][None], mask[real][None], invariant=strict)
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(real, flat)


def to_tensors(batch: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    return {name: torch.as_tensor(value).to(device) for name, value in batch.items()}


class Scorer:
    """Asks models about sampled answers, without gradients, a micro-batch at a time in the Trainer's own order and shapes: so what it says
    of the weights that are trained is, to the bit, what their next forward says.
    """

    def __init__(
        self, *, micro_batch: int, pad_id: int, temperature: float = 1.0, forward_impl: str | None = None,
        done: Callable[[nn.Module], None] = lambda model: None,
    ) -> None:  # fmt: skip
        """done: called with a model after its forwards (`align.train.reshard`, of a sharded one)."""
        self._micro_batch, self._pad_id, self._temperature, self._done = micro_batch, pad_id, temperature, done
        self._impl = forward_of(forward_impl)

    def logprobs(self, model: Decoder, rollouts: Sequence[Rollout]) -> list[list[float]]:
        """Of every sampled token of every answer, trained or not."""

        def told(batch: Mapping[str, Tensor], mask: Tensor) -> Tensor:
            return row_logprobs(model, batch, mask, temperature=self._temperature, forward_impl=self._impl)

        return self.ask(model, rollouts, told)

    def after(self, model: Decoder, head: Callable[[Tensor], Tensor], rollouts: Sequence[Rollout]) -> list[list[float]]:
        """`head(hidden)` at the state after every sampled token: the model has read it."""
        longer = [
            replace(each, ids=[*each.ids, [*each.prompt_ids, *each.ids][-1]], logprobs=[*each.logprobs, 0.0], per_token={})
            for each in rollouts
        ]

        def told(batch: Mapping[str, Tensor], mask: Tensor) -> Tensor:
            return head(row_hidden(model, batch, forward_impl=pick_forward_impl()))

        return [values[1:] for values in self.ask(model, longer, told)]

    @torch.no_grad()
    def ask(
        self, model: nn.Module, rollouts: Sequence[Rollout], told: Callable[[Mapping[str, Tensor], Tensor], Tensor]
    ) -> list[list[float]]:
        """The masked-in numbers of `told(batch, mask)` (B, T), where the mask (B, T) holds the places that predict sampled tokens."""
        out: list[list[float]] = []
        device = next(model.parameters()).device
        for start in range(0, len(rollouts), self._micro_batch):
            whole = rollouts[start : start + self._micro_batch]
            trained = fed(whole)  # these together, as the trainer will
            found: dict[int, list[float]] = {}
            for places in (trained, [at for at in range(len(whole)) if at not in set(trained)]):
                part = [whole[at] for at in places]
                if not part and _sharing():
                    part = [whole[0]]  # a sharded model's forward waits for that of every rank, and others may have both kinds
                if part:
                    batch = to_tensors(as_batch(part, pad_id=self._pad_id), device)
                    mask = answer_mask(part, batch["input_ids"].shape[1]).to(device)
                    found.update(zip(places, per_answer(told(batch, mask), mask), strict=bool(places)))
            out += [found[at] for at in range(len(whole))]
        self._done(model)
        return out


def _sharing() -> bool:
    """Whether other ranks run the model at the same time."""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def per_answer(values: Tensor, mask: Tensor) -> list[list[float]]:
    """(B, T) to a list of the masked-in numbers of each row."""
    flat, counts = values[mask].tolist(), mask.sum(1).tolist()
    out, at = [], 0
    for count in counts:
        out.append(flat[at : at + count])
        at += count
    return out
