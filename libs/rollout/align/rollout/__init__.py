"""Rollout: prompts in, samples out, as token ids with log-probabilities that can be trusted."""

from align.rollout._native import NativeSampler
from align.rollout._sampling import RolloutError, SamplingParams
from align.rollout._types import Sample, Sampler

__all__ = ["NativeSampler", "RolloutError", "Sample", "Sampler", "SamplingParams"]
