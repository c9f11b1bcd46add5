"""Reinforcement learning from verified answers (GRPO). Without arguments: the default SFT checkpoint learns to show its work."""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import _entry
from _common import GuardSection, build_model, check_fit, find, on_ranks
from _external import ExternalSection, check_external, sampler_of
from _fields import of_field
from _prompts import PromptSection, asked
from _rl import (
    Awaited,
    Evaluation,
    SampledEval,
    StartSection,
    TrainingRun,
    eval_problems,
    load_start,
    plan,
    preflight,
    reference_of,
)

from align.config import ConfigError, Invocation
from align.model import pick_forward_impl
from align.rl import (
    CollapseTripwire,
    GroupCredit,
    PolicyConfig,
    PolicyObjective,
    RolloutConfig,
    RolloutSource,
    Scorer,
    TripwireConfig,
    check_policy,
    check_rollout,
    forward_of,
    make_reward,
)
from align.train import CheckpointConfig, OptimizerConfig, ScheduleConfig, TrainConfig, TrainerConfig, TrainModule, reshard


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(TrainerConfig):
    """All of the stage's configuration; the defaults are those of the default run. A row is an answer."""

    run_dir: Annotated[Path | None, "where the run is written, relative to where you are; none: runs/grpo-<time> in the workspace"] = None
    model: StartSection = field(default_factory=StartSection)
    data: PromptSection = field(default_factory=PromptSection)
    reward: Annotated[str, "verify, lean (rows of lean:FILE), or path/file.py:function, called with prompt, completion and row"] = "verify"
    advantages: Annotated[Literal["group", "none"], "divide by the group's standard deviation (GRPO), or not (Dr.GRPO)"] = "group"
    forward_impl: Annotated[
        str | None,
        "sdpa_causal pads rows, cpu_per_document and varlen do not; invariant: strict sampling; none: cpu_per_document on the CPU, "
        "sdpa_causal on a GPU",
    ] = None
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    vllm: ExternalSection = field(default_factory=ExternalSection)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    tripwire: TripwireConfig = field(default_factory=TripwireConfig)
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(max_steps=60, global_batch=128, micro_batch=128, threads=1, log_every=10)
    )
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0))
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(name="constant", warmup_steps=20))
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every=20, keep=2))
    eval: SampledEval = field(default_factory=SampledEval)
    guard: GuardSection = field(default_factory=GuardSection)


class GrpoModule(PolicyObjective, TrainModule):
    """The policy objective as the Trainer takes it."""


def grpo(call: Invocation[GrpoConfig]) -> int:
    started, config = time.perf_counter(), call.config
    check_policy(config.policy)
    forward_of(config.forward_impl)
    world = config.launch.nproc * config.launch.nnodes
    check_rollout(config.rollout, global_batch=config.train.global_batch, micro_batch=config.train.micro_batch, world=world)
    check_external(config.vllm, config.rollout)
    if config.rollout.group < 2:
        raise ConfigError(f"rollout.group is {config.rollout.group}: an answer alone has nothing to be compared with; take at least 2")
    tripwire = CollapseTripwire(config.tripwire)

    # Load: prompts whose answers the verifier can read.
    loaded = load_start(call, "grpo")
    forward_impl = config.forward_impl or pick_forward_impl(packed=loaded.device.type == "cpu")
    kept = asked(config.data, loaded, max_new_tokens=config.rollout.max_new_tokens, verifier=config.reward == "verify")
    longest = max(len(ids) for _, ids in kept) + config.rollout.max_new_tokens
    problems = eval_problems(config.eval, loaded, chat=config.data.chat, system=config.data.system)

    # Preflight.
    share = config.rollout.max_new_tokens / longest
    projection = preflight(
        config,
        loaded,
        length=longest,
        rows=config.train.micro_batch,
        trained_share=share,
        forward_impl=forward_impl,
    )
    if call.dry_run:
        groups = config.train.global_batch // config.rollout.group
        return plan(
            projection, config, loaded.run_dir, f"steps    {config.train.max_steps} of {groups} prompts × {config.rollout.group} answers"
        )
    ignored = check_fit(projection, config.guard, loaded.run_dir)

    # Build.
    model = build_model(config.model, loaded.directory, loaded.config, config.seed, loaded.device)
    module = GrpoModule(
        model, config.policy, temperature=config.rollout.temperature, max_new_tokens=config.rollout.max_new_tokens,
        forward_impl=forward_impl,
    )  # fmt: skip
    module.parts["tripwire"] = tripwire
    scorer = Scorer(
        micro_batch=config.train.micro_batch, pad_id=loaded.pad_id, temperature=config.rollout.temperature,
        forward_impl=forward_impl, done=reshard,
    )  # fmt: skip
    credit = GroupCredit(
        model, config.policy, scorer, scale=config.advantages, group=config.rollout.group, inner_steps=config.rollout.inner_steps,
        reference=reference_of(config, loaded, model) if config.policy.kl else None,
    )  # fmt: skip
    with of_field("reward"):
        reward = Awaited(make_reward(config.reward, locate=find), loaded.alive)
    ranks = loaded.ranks
    try:
        source = RolloutSource(
            [row for row, _ in kept], [ids for _, ids in kept], config=config.rollout,
            sampler=sampler_of(config, loaded, model),
            tokenizer=loaded.tokenizer, reward=reward, credit=credit,
            global_batch=config.train.global_batch, micro_batch=config.train.micro_batch, alive=loaded.alive, seed=config.seed,
            per_answer=module.per_answer, rank=ranks.rank, world=ranks.world, gather=ranks.gather,
        )  # fmt: skip
        evaluation = Evaluation(config.eval, model, loaded.tokenizer, problems, seed=config.seed, last_step=config.train.max_steps)

        # Train, evaluate before and after, report.
        return TrainingRun(
            stage="grpo", call=call, loaded=loaded, module=module, loader=source, evaluation=evaluation, started=started, ignored=ignored,
            tripwire=tripwire, complete=lambda: source.numbers,
            next_command=lambda path: f"./bazelw run //stages:evaluate -- model.path={path} eval.temperature=1 eval.samples=4",
        ).run()  # fmt: skip
    finally:
        reward.close()


if __name__ == "__main__":
    sys.exit(_entry.run_stage("grpo", GrpoConfig, on_ranks(__file__, grpo), __doc__ or "", sys.argv[1:]))
