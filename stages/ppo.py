"""PPO on a process reward model. Without arguments: trains one for the default task, then the default SFT checkpoint learns from it."""

import json
import math
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import _entry
import prm as prm_stage
from _common import GuardSection, build_model, check_fit, find, model_config_of, model_directory, on_ranks, say
from _external import ExternalSection, check_external, sampler_of
from _fields import of_field
from _life import show_forwards
from _prompts import PromptSection, asked
from _rl import Evaluation, Loaded, SampledEval, StartSection, TrainingRun, eval_problems, load_start, plan, preflight, reference_of

from align.checkpoint import load as load_checkpoint
from align.config import ConfigError, Invocation
from align.model import Decoder
from align.rl import (
    CollapseTripwire,
    Critic,
    CriticConfig,
    PolicyConfig,
    PpoCredit,
    PpoObjective,
    RolloutConfig,
    RolloutSource,
    Scorer,
    StepRewardConfig,
    StepScorer,
    TripwireConfig,
    VerifyReward,
    check_critic,
    check_policy,
    check_rollout,
    forward_of,
    load_score_head,
    read_path_bias,
    step_end_ids,
    weights_sha256,
)
from align.train import (
    CheckpointConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    TrainerConfig,
    TrainModule,
    add_lora,
    find_latest,
    reshard,
)


@dataclass(frozen=True, kw_only=True)
class PrmSection(prm_stage.HeadSection):
    """Which process reward model judges, and where."""

    path: Annotated[Path | None, "its checkpoint or run directory; none: trained first, as //stages:prm does by default"] = None
    step_end: Annotated[str, "what the text of a step ends with"] = "."
    reward: StepRewardConfig = field(default_factory=StepRewardConfig)


@dataclass(frozen=True, kw_only=True)
class PpoConfig(TrainerConfig):
    """All of the stage's configuration; the defaults are those of the default run. A row is an answer."""

    run_dir: Annotated[Path | None, "where the run is written, relative to where you are; none: runs/ppo-<time> in the workspace"] = None
    model: StartSection = field(default_factory=StartSection)
    data: PromptSection = field(default_factory=PromptSection)
    prm: PrmSection = field(default_factory=PrmSection)
    critic: CriticConfig = field(default_factory=CriticConfig)
    path_bias: Annotated[Path | None, "report of //stages:path_bias on model.path; of another checkpoint it is refused"] = None
    path_bias_limit: Annotated[float, "largest mean difference of sampler and trainer, nats a token, that the report may show"] = 0.01
    forward_impl: Annotated[
        str | None, "sdpa_causal pads rows, cpu_per_document and varlen do not; invariant: strict sampling; none: sdpa_causal"
    ] = None
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(group=1))
    vllm: ExternalSection = field(default_factory=ExternalSection)
    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(kl=0.2, kl_in="reward", kl_estimator="k1", clip_high=0.2))
    tripwire: TripwireConfig = field(default_factory=TripwireConfig)
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(max_steps=30, global_batch=128, micro_batch=128, threads=1, log_every=10)
    )
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0))
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(name="constant", warmup_steps=10))
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every=10, keep=2))
    eval: SampledEval = field(default_factory=SampledEval)
    guard: GuardSection = field(default_factory=GuardSection)


class PpoModule(PpoObjective, TrainModule):
    """The objective of policy and critic as the Trainer takes it."""


def ppo(call: Invocation[PpoConfig]) -> int:
    started, config = time.perf_counter(), call.config
    check(config)
    tripwire = CollapseTripwire(config.tripwire)

    # Load: prompts with answers, so that true accuracy can be shown beside the reward model's.
    loaded = load_start(call, "ppo")
    kept = asked(config.data, loaded, max_new_tokens=config.rollout.max_new_tokens, verifier=True)
    longest = max(len(ids) for _, ids in kept) + config.rollout.max_new_tokens
    problems = eval_problems(config.eval, loaded, chat=config.data.chat, system=config.data.system)
    projection = preflight(
        config, loaded, length=longest, rows=config.train.micro_batch, trained_share=config.rollout.max_new_tokens / longest
    )
    if call.dry_run:
        return plan(projection, config, loaded.run_dir, f"steps    {config.train.max_steps} of {config.train.global_batch} answers")
    ignored = check_fit(projection, config.guard, loaded.run_dir)
    if config.path_bias is not None and loaded.directory is not None:
        with of_field("path_bias"):
            read_path_bias(
                find(config.path_bias), weights=weights_sha256(loaded.directory), forward_impl=forward_of(config.forward_impl),
                dtype=config.model.dtype, limit=config.path_bias_limit,
            )  # fmt: skip

    # Build: the policy with its critic, the reward model, the reference.
    ends = step_end_ids(loaded.tokenizer, config.prm.step_end)  # before a reward model is trained: no token may end so
    if config.prm.path is None and (code := train_reward_model(config, loaded)):
        return code
    judge, scorer, has_answer = reward_model(config, loaded)
    if config.prm.reward.answer and not has_answer:
        raise ConfigError("prm.reward.answer is true, but the reward model was trained without answer labels; set prm.reward.answer=false")
    model = build_model(config.model, loaded.directory, loaded.config, config.seed, loaded.device)
    reference = reference_of(config, loaded, model) if config.policy.kl else None
    if config.lora.rank:
        add_lora(model, config.lora, config.seed)  # before the critic, whose additions act on the layers as they are
    critic = Critic(model, config.critic, seed=config.seed)
    module = PpoModule(
        model, critic, config.policy, config.critic, temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens, forward_impl=config.forward_impl,
    )  # fmt: skip
    module.parts["tripwire"] = tripwire
    scores = Scorer(
        micro_batch=config.train.micro_batch, pad_id=loaded.pad_id, temperature=config.rollout.temperature,
        forward_impl=config.forward_impl, done=reshard,
    )  # fmt: skip
    credit = PpoCredit(
        model, critic, judge, scorer, scores=scores, config=config.prm.reward, critic_config=config.critic, policy=config.policy,
        step_ends=ends, eos_ids=loaded.eos_ids, reference=reference,
        inner_steps=config.rollout.inner_steps,
    )  # fmt: skip
    show_forwards(loaded.alive, judge)
    source = RolloutSource(
        [row for row, _ in kept], [ids for _, ids in kept], config=config.rollout,
        sampler=sampler_of(config, loaded, model),
        tokenizer=loaded.tokenizer,
        reward=VerifyReward(), credit=credit, global_batch=config.train.global_batch, micro_batch=config.train.micro_batch,
        alive=loaded.alive, seed=config.seed, per_answer=module.per_answer, judge_dead=False,
        rank=loaded.ranks.rank, world=loaded.ranks.world, gather=loaded.ranks.gather,
    )  # fmt: skip
    evaluation = Evaluation(config.eval, model, loaded.tokenizer, problems, seed=config.seed, last_step=config.train.max_steps)

    # Train, evaluate before and after, report.
    return TrainingRun(
        stage="ppo", call=call, loaded=loaded, module=module, loader=source, evaluation=evaluation, started=started, ignored=ignored,
        tripwire=tripwire, complete=lambda: told(source.numbers),
        next_command=lambda path: f"./bazelw run //stages:evaluate -- model.path={path} eval.temperature=1 eval.samples=4",
    ).run()  # fmt: skip


def check(config: PpoConfig) -> None:
    """What can't be trained is refused before any weight is read."""
    check_policy(config.policy)
    check_critic(config.critic)
    forward_of(config.forward_impl)
    world = config.launch.nproc * config.launch.nnodes
    check_rollout(config.rollout, global_batch=config.train.global_batch, micro_batch=config.train.micro_batch, world=world)
    check_external(config.vllm, config.rollout)
    idle = RolloutConfig(group=1)
    for name in ("dead_retries", "mask_dead_groups", "overlong_buffer"):
        if getattr(config.rollout, name) != getattr(idle, name):
            raise ConfigError(f"rollout.{name} is set, and has no effect in ppo, whose credit comes from the reward model; leave it out")
    if config.rollout.overlong == "penalty":
        raise ConfigError("rollout.overlong is penalty, which lowers a reward that ppo does not learn from; set prm.reward.truncated")
    if config.prm.path is None and config.model.path != StartSection().path:
        raise ConfigError("prm.path is unset, and a reward model is trained here for the default model alone; train one with //stages:prm")
    for name in ("baseline", "truncated"):
        if not math.isfinite(value := getattr(config.prm.reward, name)):
            raise ConfigError(f"prm.reward.{name} is {value}; it must be a finite number")
    labels(config)


def labels(config: PpoConfig) -> list[int] | None:
    """The reward model's label tokens. Raises ConfigError: an LM head without them."""
    if config.prm.head == "value":
        return None
    own = prm_stage.ARITHMETIC_LABELS
    if config.prm.path is None and config.prm.label_token_ids not in (None, own):
        why = "the reward model that is trained here has"
        raise ConfigError(f"prm.label_token_ids is {config.prm.label_token_ids}; {why} {own}: leave it out")
    if config.prm.label_token_ids is not None:
        return prm_stage.two_labels(config.prm.label_token_ids)
    if config.prm.path is None:
        return own
    raise ConfigError("prm.head is lm: prm.label_token_ids must name the good and the bad label's token, as //stages:prm was given them")


def train_reward_model(config: PpoConfig, loaded: Loaded) -> int:
    """Trains the run's own reward model, or the rest of it. The exit code: 5, stopped by a signal, ends this stage too."""
    own = loaded.run_dir / "prm"
    if find_latest(own / "checkpoints", loaded.ranks) is not None and finished_training(own):
        return 0
    say("no prm.path: training a reward model first")
    first = replace(prm_stage.PrmConfig(), run_dir=own, seed=config.seed, model=config.model, launch=config.launch)
    first = replace(first, train=replace(first.train, micro_batch=first.train.global_batch // loaded.ranks.world))
    first = replace(first, prm=prm_stage.HeadSection(head=config.prm.head))
    return prm_stage.prm(Invocation(first, None, dry_run=False, resume=(own / "history.jsonl").exists(), allow_change=[]))


def finished_training(run: Path) -> bool:
    """Whether a run has come to its end; one that was stopped or failed has not."""
    try:
        return bool(json.loads((run / "stage_result.json").read_bytes())["status"] == "done")
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False


def reward_model(config: PpoConfig, loaded: Loaded) -> tuple[Decoder, StepScorer, bool]:
    """(the frozen reward model, its head, whether it can judge the end of an answer)."""
    directory = model_directory(config.prm.path if config.prm.path is not None else loaded.run_dir / "prm", "prm.path")
    model_config = model_config_of(directory, "prm.path")
    section = replace(config.model, path=directory)
    model = build_model(section, directory, model_config, config.seed, loaded.device, "prm.path").eval()
    model.requires_grad_(False)
    scorer = StepScorer(model, labels(config)).requires_grad_(False)
    with of_field("prm.path"):
        checkpoint = load_checkpoint(directory, verify=False)
    about = checkpoint.trainer_state["extra"].get("prm")
    wanted = {"head": config.prm.head, "label_token_ids": labels(config)}
    if about is None:
        raise ConfigError(f"prm.path {directory} is no reward model; train one with //stages:prm, and name its run")
    if {name: about[name] for name in wanted} != wanted:
        raise ConfigError(f"prm.path {directory} is a reward model of {about}, this run asks {wanted}; set prm.head, prm.label_token_ids")
    if config.prm.head == "value":
        tensors = {name.removeprefix("extra."): value for name, value in checkpoint.tensors.items() if name.startswith("extra.score_head.")}
        load_score_head(scorer, tensors)
    return model, scorer, bool(about["answer_labels"])


def told(numbers: dict[str, float]) -> dict[str, Any]:
    """The log's names: the verifier judges, and what is learned from is the reward model's."""
    names = {"reward": "accuracy", "reward_std": "accuracy_std"}
    return {names.get(name, name): value for name, value in numbers.items() if not name.startswith("dead_")}


if __name__ == "__main__":
    sys.exit(_entry.run_stage("ppo", PpoConfig, on_ranks(__file__, ppo), __doc__ or "", sys.argv[1:]))
