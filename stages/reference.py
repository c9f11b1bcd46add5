"""Log-probabilities of the reference model on preference rows, kept in a file for //stages:dpo."""

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import _entry
import torch
from _common import ForwardSection, build_model, say
from _fields import of_field
from _life import show_forwards
from _pairs import PairSection, check_pairs, encode, made_here, pair_rows
from _rl import StartSection, load_start

from align.config import ConfigError, Invocation, dumps
from align.rl import CacheKey, ReferenceCache, forward_of, reference_logprobs, weights_sha256, write_cache
from align.tracking import Progress, RunDir, environment


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """All of the stage's configuration. What dpo is given must be the same: model, data, forward_impl."""

    run_dir: Annotated[Path | None, "where reference.cache (and pairs.jsonl) are written; none: runs/reference-<time> in the workspace"] = (
        None
    )
    seed: Annotated[int, "of the sampling, where pairs are made"] = 0
    model: StartSection = field(default_factory=StartSection)
    data: PairSection = field(default_factory=PairSection)
    forward_impl: Annotated[str | None, "attention: sdpa_causal pads rows, cpu_per_document and varlen do not; none: sdpa_causal"] = None
    train: ForwardSection = field(default_factory=lambda: ForwardSection(micro_batch=64))


def reference(call: Invocation[ReferenceConfig]) -> int:
    started, config = time.perf_counter(), call.config
    if call.resume or call.allow_change:
        raise ConfigError("reference has nothing to resume; start it anew")
    check_pairs(config.data)
    loaded = load_start(call, "reference")
    forward_of(config.forward_impl)
    if call.dry_run:
        if not made_here(config.data):
            encode(config.data, loaded, pair_rows(config.data, loaded, _no_model, seed=config.seed))
        say("dry run: nothing was written")
        return 0
    assert loaded.directory is not None
    model = build_model(config.model, loaded.directory, loaded.config, config.seed, loaded.device).eval()
    rows = pair_rows(config.data, loaded, lambda: model, seed=config.seed)
    encoded = encode(config.data, loaded, rows)
    with of_field("run_dir"):
        run = RunDir.create(
            loaded.run_dir,
            config_toml=dumps(config),
            env=environment({"stage": "reference", "threads": torch.get_num_threads(), "device": str(loaded.device)}),
        )
    if made_here(config.data):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (run.path / "pairs.jsonl").write_text(text, encoding="utf-8")
    progress = Progress(encoded.kept, every=max(encoded.kept // 4, 1), stream=sys.stderr)

    show_forwards(run.alive, model)
    chosen, rejected = reference_logprobs(
        model, encoded, micro_batch=config.train.micro_batch, pad_id=loaded.pad_id, forward_impl=config.forward_impl,
        progress=lambda done, total: progress.update(done),
    )  # fmt: skip
    key = cache_key(config, loaded.tokenizer.fingerprint, weights_sha256(loaded.directory), encoded.digest, encoded.kept)
    path = run.path / "reference.cache"
    write_cache(path, ReferenceCache(key, chosen, rejected))
    numbers = {"chosen_logprob": sum(chosen) / len(chosen), "rejected_logprob": sum(rejected) / len(rejected)}
    run.log(0, **numbers)
    run.finish(
        "done", stage="reference", steps=0, checkpoint=str(loaded.directory), metrics={"after": numbers}, pairs=encoded.kept,
        key=vars(key), cache=str(path), wall_s=time.perf_counter() - started,
    )  # fmt: skip
    source = f" data.source={run.path / 'pairs.jsonl'}" if made_here(config.data) else ""
    say(f"cache    {path}\nnext     ./bazelw run //stages:dpo -- reference={path}{source}")
    return 0


def cache_key(config: "ReferenceConfig", tokenizer: str, weights: str, rows: str, pairs: int) -> CacheKey:
    return CacheKey(
        arm=config.data.arm, weights=weights, tokenizer=tokenizer, rows=rows, pairs=pairs, max_length=config.data.max_length,
        forward_impl=forward_of(config.forward_impl), dtype=config.model.dtype,
    )  # fmt: skip


def _no_model() -> None:
    raise ConfigError("a plan makes no pairs")


if __name__ == "__main__":
    sys.exit(_entry.run_stage("reference", ReferenceConfig, reference, __doc__ or "", sys.argv[1:]))
