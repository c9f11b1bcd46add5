"""NativeSampler: prompts are read in batches, all running samples get a token at a time, finished ones leave and waiting ones enter."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import SupportsIndex

import torch

from align.model import Decoder
from align.rollout._engine import Engine, engine_for
from align.rollout._paged_run import PagedRun
from align.rollout._run import Request, Run
from align.rollout._sampling import RolloutError, SamplingParams
from align.rollout._stops import StopStrings
from align.rollout._types import Sample
from align.tokenizer import Tokenizer


class NativeSampler:
    """Samples from a model in this process, reading its parameters in place: what the trainer has just written is what is sampled from.

    The same request (prompt, seed, parameters) gives the same tokens whatever it is batched with, in any order and with any `max_batch`:
    the noise is a function of (seed, sample index, position, token) alone, and in float32 the logits are equal but for rounding, about
    1e-6. A tie closer than that can still go either way.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        eos_ids: Sequence[int],
        max_batch: int = 128,
        kv_budget_gb: float | None = None,
        strict: bool = False,
        paged: bool | None = None,
    ) -> None:
        """eos_ids: tokens that end every sample. max_batch: samples decoded at once; it bounds the cache, not what `generate` accepts.

        kv_budget_gb: GiB of the paged cache; requests beyond it wait. None: what a call needs, at most 60 % of the GPU's free memory.
        strict: log-probabilities bit-equal to those of the trainer's forward `invariant`, whatever the batch; slower.
        paged: the engine with a paged cache and captured steps, or the simple one. None: the former on a GPU in half precision, and for
        `strict`.

        Raises:
            RolloutError: an id outside the vocabulary, max_batch below 1, a budget not above 0, or one for the simple engine.
        """
        if max_batch < 1:
            raise RolloutError(f"max_batch {max_batch} must be at least 1")
        if kv_budget_gb is not None and not 0 < kv_budget_gb < math.inf:
            raise RolloutError(f"kv_budget_gb {kv_budget_gb} must be a finite number above 0, or None for what is needed and free")
        half = model.output_weight.is_cuda and model.output_weight.dtype in (torch.bfloat16, torch.float16)
        self._paged = (half or strict or kv_budget_gb is not None) if paged is None else paged
        if not self._paged and (strict or kv_budget_gb is not None):
            raise RolloutError("strict and kv_budget_gb are of the paged engine; leave out paged=False")
        self._model, self._max_batch, self._kv_budget_gb, self._strict = model, max_batch, kv_budget_gb, strict
        self._engine: Engine | None = None
        self._eos_ids = _checked_ids(eos_ids, model.config.vocab_size, "eos_ids")
        self.weights_version = 0
        """Recorded in each Sample; whoever changes the weights sets it, to the optimizer step for one."""

    @torch.inference_mode()
    def generate(
        self,
        prompts_ids: Sequence[Sequence[int]],
        *,
        n: int = 1,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        stop_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        tokenizer: Tokenizer | None = None,
        seeds: Sequence[int] | None = None,
        on_token: Callable[[int, int], None] | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> list[Sample]:
        """n samples for each prompt, prompt by prompt: the samples of prompt i are items i * n to (i + 1) * n - 1.

        n: each prompt is read once for its n samples.
        max_new_tokens: a sample that reaches it, or the model's window, finishes with "length".
        temperature, top_p, top_k, min_p: see `SamplingParams`. stop_ids: further tokens that end a sample.
        stop_strings: a sample ends with the token that completes one of them in its decoded text; they need the tokenizer.
        seeds: one integer a prompt; sample j of it depends on (seed, j), so a larger n adds samples and changes none. None: drawn from
        torch's default generator.
        on_token: called with a sample's index in the result and its next token as they are drawn, for streaming; what it raises ends
        the call. It costs a wait for the GPU a token.
        on_step: called every few steps, and waits for nothing: a sign of life.

        Raises:
            RolloutError: a parameter out of its range, an empty prompt, an id outside the vocabulary, a prompt that fills the model's
            window, logits that are not finite.
        """
        n, max_new_tokens, top_k = _integer(n, "n"), _integer(max_new_tokens, "max_new_tokens"), _integer(top_k, "top_k")
        params = SamplingParams(temperature, top_p, top_k, min_p)
        for name, value in (("n", n), ("max_new_tokens", max_new_tokens)):
            if value < 1:
                raise RolloutError(f"{name} {value} must be at least 1")
        if isinstance(stop_strings, str):
            raise RolloutError(f"stop_strings is the text {stop_strings!r}, of which each letter would end a sample; give a list of texts")
        if stop_strings and tokenizer is None:
            raise RolloutError("stop_strings were given without a tokenizer; pass tokenizer=")
        if "" in stop_strings:
            raise RolloutError("stop_strings holds an empty string, which every text contains; remove it")
        vocab_size, window = self._model.config.vocab_size, self._model.config.max_length
        prompts = [_checked_ids(prompt, vocab_size, f"prompt {index}") for index, prompt in enumerate(prompts_ids)]
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise RolloutError(f"prompt {index} is empty; give at least a bos token")
            if len(prompt) >= window:
                raise RolloutError(f"prompt {index} has {len(prompt)} tokens; the model's window is {window} with one to sample; cut it")
        if seeds is None:
            seeds = torch.randint(2**63 - 1, (len(prompts),)).tolist()
        elif len(seeds) != len(prompts):
            raise RolloutError(f"{len(seeds)} seeds for {len(prompts)} prompts; give one a prompt")
        seeds = [_integer(seed, f"seed {index}") for index, seed in enumerate(seeds)]
        if not prompts:
            return []
        requests = [Request(prompt, seed, min(max_new_tokens, window - len(prompt))) for prompt, seed in zip(prompts, seeds, strict=True)]
        stops = [*self._eos_ids, *_checked_ids(stop_ids, vocab_size, "stop_ids")]
        watch = partial(StopStrings, list(stop_strings), tokenizer) if stop_strings and tokenizer else None
        if not self._paged:
            return Run(self._model, requests, n, params, self._max_batch, stops, watch, on_token, on_step).samples(self.weights_version)
        kept, self._engine = self._engine, None  # one that has given its memory to another that could not be made is of no use
        self._engine = engine_for(
            self._model,
            kept,
            rows=self._max_batch,
            longest=max(len(request.prompt) + request.limit for request in requests),
            samples=len(requests) * n,
            kv_budget_gb=self._kv_budget_gb,
            strict=self._strict,
        )
        paged = PagedRun(self._engine, requests, n, params, self._max_batch, stops, watch, on_token, on_step)
        return paged.samples(self.weights_version)

    def release(self) -> None:
        """Frees the cache and the captured steps, for a training phase to use the memory; the next `generate` makes them anew."""
        self._engine = None


def _checked_ids(ids: Sequence[int], vocab_size: int, what: str) -> list[int]:
    out = [_integer(token, what) for token in ids]
    if out and not 0 <= min(out) <= max(out) < vocab_size:
        wrong = next(token for token in out if not 0 <= token < vocab_size)
        raise RolloutError(f"{what} holds token id {wrong}; the model's vocabulary is {vocab_size} tokens; use the model's own tokenizer")
    return out


def _integer(value: SupportsIndex, what: str) -> int:
    """As Python's own: numpy's and torch's wrap at 64 bits, which would be another seed; a float cut to an integer another request."""
    try:
        return operator.index(value)
    except TypeError:
        raise RolloutError(f"{what} has {value!r} where an integer must be") from None
