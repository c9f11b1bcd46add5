"""A small model, its tokenizer and a sampler that says what it is told, for the tests of align.rl."""

from dataclasses import dataclass

import torch

from align.model import ModelConfig, init


def small_model(seed=0, *, dtype=torch.float32, layers=1, **more):
    config = ModelConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        **more,
    )
    return init(config, seed, dtype)


class Letters:
    """A tokenizer of numbers: token 7 reads "7 "."""

    pad_id, eos_id = 0, 2

    def decode(self, ids, *, skip_special=False):
        return "".join(f"{token} " for token in ids if not (skip_special and token in (self.pad_id, self.eos_id)))


@dataclass
class Said:
    prompt_ids: list
    ids: list
    logprobs: list
    truncated: bool
    weights_version: int


class Scripted:
    """Answers a prompt with `answer(prompt ids, seed, j) -> (token ids, truncated)` and remembers what it was asked."""

    weights_version = 0

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def generate(self, prompts_ids, *, n, max_new_tokens, temperature, seeds):
        out = []
        for prompt, seed in zip(prompts_ids, seeds, strict=True):
            self.asked.append((list(prompt), seed))
            for j in range(n):
                ids, truncated = self.answer(list(prompt), seed, j)
                out.append(Said(list(prompt), ids, [-0.5] * len(ids), truncated, self.weights_version))
        return out
