"""Reinforcement and preferences: rewards, prompt source, objectives, reference caches, tripwire, reward and value heads."""

from align.rl._cache import CacheKey, ReferenceCache, read_cache, read_header, weights_sha256, write_cache
from align.rl._critic import Critic, CriticConfig, check_critic
from align.rl._errors import RewardError, RlError
from align.rl._forward import Scorer, forward_of, row_hidden, row_logprobs
from align.rl._path_bias import path_bias, read_path_bias
from align.rl._policy import GroupCredit, PolicyConfig, PolicyObjective, check_policy
from align.rl._ppo import PpoCredit, PpoObjective, StepRewardConfig
from align.rl._preferences import (
    PairSource,
    PreferenceConfig,
    PreferenceObjective,
    check_preference,
    frozen,
    pair_batch,
    reference_logprobs,
    verified_pairs,
)
from align.rl._rewards import FunctionReward, LeanReward, Reward, Scored, VerifyReward, make_reward, readable
from align.rl._rollouts import Rollout, as_batch
from align.rl._source import Credit, RlStep, RolloutConfig, RolloutSource, check_rollout
from align.rl._steps import (
    EncodedSteps,
    StepExample,
    StepObjective,
    StepScorer,
    StepSource,
    auc,
    encode_steps,
    load_score_head,
    score_steps,
    step_batch,
    step_end_ids,
)
from align.rl._tripwire import CollapseTripwire, TripwireConfig
from align.rl._watch import WatchedRun

__all__ = [
    "CacheKey",
    "CollapseTripwire",
    "Credit",
    "Critic",
    "CriticConfig",
    "EncodedSteps",
    "FunctionReward",
    "GroupCredit",
    "LeanReward",
    "PairSource",
    "PolicyConfig",
    "PolicyObjective",
    "PpoCredit",
    "PpoObjective",
    "PreferenceConfig",
    "PreferenceObjective",
    "ReferenceCache",
    "Reward",
    "RewardError",
    "RlError",
    "RlStep",
    "Rollout",
    "RolloutConfig",
    "RolloutSource",
    "Scored",
    "Scorer",
    "StepExample",
    "StepObjective",
    "StepRewardConfig",
    "StepScorer",
    "StepSource",
    "TripwireConfig",
    "VerifyReward",
    "WatchedRun",
    "as_batch",
    "auc",
    "check_critic",
    "check_policy",
    "check_preference",
    "check_rollout",
    "encode_steps",
    "forward_of",
    "frozen",
    "load_score_head",
    "make_reward",
    "pair_batch",
    "path_bias",
    "read_cache",
    "read_header",
    "read_path_bias",
    "readable",
    "reference_logprobs",
    "row_hidden",
    "row_logprobs",
    "score_steps",
    "step_batch",
    "step_end_ids",
    "verified_pairs",
    "weights_sha256",
    "write_cache",
]
