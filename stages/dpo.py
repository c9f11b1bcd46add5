"""Preference optimisation (DPO and its kin). Without arguments: the default SFT checkpoint learns from pairs of its own answers."""

import json
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import _entry
from _common import GuardSection, build_model, check_fit, find, on_ranks, say
from _fields import of_field
from _pairs import PairSection, check_pairs, encode, made_here, pair_rows
from _rl import Evaluation, Loaded, SampledEval, StartSection, TrainingRun, eval_problems, load_start, plan, preflight, reference_of
from reference import cache_key

from align.config import ConfigError, Invocation
from align.data import EncodedPairs
from align.model import Decoder
from align.rl import (
    PairSource,
    PreferenceConfig,
    PreferenceObjective,
    ReferenceCache,
    check_preference,
    forward_of,
    read_cache,
    read_header,
    reference_logprobs,
    weights_sha256,
)
from align.train import CheckpointConfig, OptimizerConfig, ScheduleConfig, TrainConfig, TrainerConfig, TrainModule


@dataclass(frozen=True, kw_only=True)
class DpoConfig(TrainerConfig):
    """All of the stage's configuration; the defaults are those of the default run. A row is a pair."""

    run_dir: Annotated[Path | None, "where the run is written, relative to where you are; none: runs/dpo-<time> in the workspace"] = None
    model: StartSection = field(default_factory=StartSection)
    data: PairSection = field(default_factory=PairSection)
    reference: Annotated[Path | None, "cache of //stages:reference; none: made here before training, or a LoRA run's own base"] = None
    forward_impl: Annotated[
        str | None, "attention: sdpa_causal pads rows, cpu_per_document and varlen do not; none: the cache's, else sdpa_causal"
    ] = None
    preference: PreferenceConfig = field(default_factory=lambda: PreferenceConfig(beta=0.3))
    train: TrainConfig = field(default_factory=lambda: TrainConfig(max_steps=60, global_batch=48, micro_batch=48, threads=1, log_every=10))
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0))
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(name="constant", warmup_steps=10))
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every=20, keep=2))
    eval: SampledEval = field(default_factory=SampledEval)
    guard: GuardSection = field(default_factory=GuardSection)


class DpoModule(PreferenceObjective, TrainModule):
    """The preference objective as the Trainer takes it."""


def dpo(call: Invocation[DpoConfig]) -> int:
    started, config = time.perf_counter(), call.config
    check_preference(config.preference)
    check_pairs(config.data)
    if config.preference.loss == "simpo" and config.reference is not None:
        raise ConfigError("preference.loss is simpo, which has no reference; leave reference out")
    if config.train.global_batch % (config.launch.nproc * config.launch.nnodes * config.train.micro_batch):
        raise ConfigError(
            f"train.global_batch {config.train.global_batch} is not a multiple of ranks {config.launch.nproc * config.launch.nnodes} × "
            f"train.micro_batch {config.train.micro_batch}"
        )

    # Load: pairs, and which forward their reference was made by.
    loaded = load_start(call, "dpo")
    problems = eval_problems(config.eval, loaded, chat=config.data.chat, system=config.data.system)
    if config.reference is not None and config.forward_impl is None:
        with of_field("reference"):
            config = replace(config, forward_impl=read_header(find(config.reference)).forward_impl)
    forward_of(config.forward_impl)
    projection = preflight(config, loaded, length=config.data.max_length, rows=2 * config.train.micro_batch, trained_share=0.5)
    if call.dry_run:
        if not made_here(config.data):
            encode(config.data, loaded, pair_rows(config.data, loaded, _no_model, seed=config.seed))
        return plan(projection, config, loaded.run_dir, f"steps    {config.train.max_steps} of {config.train.global_batch} pairs")
    ignored = check_fit(projection, config.guard, loaded.run_dir)

    # Build: the pairs that are made here are kept in the run's directory, for a resume.
    model = build_model(config.model, loaded.directory, loaded.config, config.seed, loaded.device)
    kept = loaded.run_dir / "pairs.jsonl"
    rows = pair_rows(config.data, loaded, lambda: model, seed=config.seed, kept=kept if call.resume else None)
    encoded = encode(config.data, loaded, rows)
    cache = reference_cache(config, loaded, model, encoded)
    source = PairSource(
        encoded, global_batch=config.train.global_batch, micro_batch=config.train.micro_batch, seed=config.seed, pad_id=loaded.pad_id,
        cache=cache, rank=loaded.ranks.rank, world=loaded.ranks.world,
    )  # fmt: skip
    from_base = config.lora.rank > 0 and cache is None and config.preference.loss != "simpo"
    module = DpoModule(
        model, config.preference, forward_impl=config.forward_impl, reference=reference_of(config, loaded, model) if from_base else None
    )
    evaluation = Evaluation(config.eval, model, loaded.tokenizer, problems, seed=config.seed, last_step=config.train.max_steps)

    # Train, evaluate before and after, report.
    run = TrainingRun(
        stage="dpo", call=replace_config(call, config), loaded=loaded, module=module, loader=source, evaluation=evaluation,
        started=started, ignored=ignored, fields={"pairs": encoded.kept, "arm": config.data.arm},
        next_command=lambda path: f"./bazelw run //stages:grpo -- model.path={path}",
    )  # fmt: skip
    if made_here(config.data):
        run.keep["pairs.jsonl"] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return run.run()


def reference_cache(config: DpoConfig, loaded: Loaded, model: Decoder, encoded: EncodedPairs) -> ReferenceCache | None:
    """The cache that is named, if it is of this very run; else one made now, of the model as it is before training."""
    if config.preference.loss == "simpo":
        return None
    assert loaded.directory is not None
    if config.reference is None and config.lora.rank:
        return None
    weights = weights_sha256(loaded.directory)
    key = cache_key(config, loaded.tokenizer.fingerprint, weights, encoded.digest, encoded.kept)  # type: ignore[arg-type]
    if config.reference is not None:
        with of_field("reference"):
            return read_cache(find(config.reference), key)
    say("reference made here, for this run")
    chosen, rejected = reference_logprobs(
        model, encoded, micro_batch=config.train.micro_batch, pad_id=loaded.pad_id, forward_impl=config.forward_impl
    )
    return ReferenceCache(key, chosen, rejected)


def replace_config(call: Invocation[DpoConfig], config: DpoConfig) -> Invocation[Any]:
    return replace(call, config=config)


def _no_model() -> Decoder:
    raise ConfigError("a plan makes no pairs")


if __name__ == "__main__":
    sys.exit(_entry.run_stage("dpo", DpoConfig, on_ranks(__file__, dpo), __doc__ or "", sys.argv[1:]))
