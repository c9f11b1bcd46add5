"""Training objectives as pure functions of tensors. They hold no state and never build the whole logits."""

from align.objectives._cross_entropy import chunked_cross_entropy, sequence_logprobs, sft_loss
from align.objectives._normalise import normalise

__all__ = ["chunked_cross_entropy", "normalise", "sequence_logprobs", "sft_loss"]
