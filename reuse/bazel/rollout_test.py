"""A tiny model is sampled: tokens in, tokens out, the same whatever stands beside it in the batch."""

from align.model import ModelConfig, init
from align.rollout import NativeSampler

size = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
sampler = NativeSampler(init(ModelConfig(**size), seed=0), eos_ids=[2])
samples = sampler.generate([[1, 7, 9], [1, 8]], n=4, max_new_tokens=20, temperature=0.8, top_p=0.95, seeds=[10, 11])
assert len(samples) == 8
assert all(len(one.ids) == len(one.logprobs) <= 20 and max(one.logprobs) <= 0 for one in samples)
alone = sampler.generate([[1, 8]], n=2, max_new_tokens=20, temperature=0.8, top_p=0.95, seeds=[11])
assert alone[1].ids == samples[5].ids
