"""What a sampler is asked and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from align.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled continuation. Tokens in, tokens out: nothing here went through text.

    prompt_ids: the prompt, P token ids.
    ids: the N >= 1 sampled token ids; a stop token, or the token that completed a stop string, is the last of them.
    logprobs: N log-probabilities of `ids` under the distribution they were drawn from, after temperature and filters; 0.0 at temperature 0.
    raw_logprobs: N log-probabilities of `ids` under softmax(logits): temperature 1 and no filter, what a trainer's forward computes.
    finish_reason: "stop" at a stop token or stop string, "length" when the token limit or the model's window came first.
    weights_version: the sampler's `weights_version` when the sample was drawn.
    """

    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    weights_version: int

    @property
    def truncated(self) -> bool:
        """Cut off by a limit: the model had not stopped."""
        return self.finish_reason == "length"


class Sampler(Protocol):
    """What the stages ask for samples; `NativeSampler` is one."""

    weights_version: int

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
    ) -> list[Sample]: ...
