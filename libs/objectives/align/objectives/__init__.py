"""Training objectives as pure functions of tensors. They hold no state and never build the whole logits."""

from align.objectives._cross_entropy import chunked_cross_entropy, sequence_logprobs, sft_loss
from align.objectives._normalise import normalise
from align.objectives._policy import PolicyTerms, aggregate, count_units, dead_groups, group_advantages, kl, policy_loss
from align.objectives._preference import PREFERENCE_LOSSES, PreferenceTerms, bradley_terry_loss, dpo_loss
from align.objectives._steps import label_logits, step_loss, step_rewards
from align.objectives._values import gae, value_loss, whiten

__all__ = [
    "PREFERENCE_LOSSES",
    "PolicyTerms",
    "PreferenceTerms",
    "aggregate",
    "bradley_terry_loss",
    "chunked_cross_entropy",
    "count_units",
    "dead_groups",
    "dpo_loss",
    "gae",
    "group_advantages",
    "kl",
    "label_logits",
    "normalise",
    "policy_loss",
    "sequence_logprobs",
    "sft_loss",
    "step_loss",
    "step_rewards",
    "value_loss",
    "whiten",
]
