"""Reinforcement and preferences: rewards, prompt source, objectives, reference caches, tripwire, reward and value heads."""

from align.rl._errors import RewardError, RlError
from align.rl._forward import Scorer, row_hidden, row_logprobs
from align.rl._policy import GroupCredit, PolicyConfig, PolicyObjective, check_policy
from align.rl._rewards import FunctionReward, Reward, Scored, VerifyReward, make_reward, readable
from align.rl._rollouts import Rollout, as_batch
from align.rl._source import Credit, RlStep, RolloutConfig, RolloutSource, check_rollout
from align.rl._tripwire import CollapseTripwire, TripwireConfig
from align.rl._watch import WatchedRun

__all__ = [
    "CollapseTripwire",
    "Credit",
    "FunctionReward",
    "GroupCredit",
    "PolicyConfig",
    "PolicyObjective",
    "Reward",
    "RewardError",
    "RlError",
    "RlStep",
    "Rollout",
    "RolloutConfig",
    "RolloutSource",
    "Scored",
    "Scorer",
    "TripwireConfig",
    "VerifyReward",
    "WatchedRun",
    "as_batch",
    "check_policy",
    "check_rollout",
    "make_reward",
    "readable",
    "row_hidden",
    "row_logprobs",
]
