"""How far forward implementations disagree about log-probabilities on a checkpoint; //stages:ppo can be given the report."""

import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import _entry
import torch
from _common import ForwardSection, build_model, say
from _fields import GENERATED, check_most, of_field
from _life import LivingSampler, show_forwards
from _rl import StartSection, load_start

from align.config import ConfigError, Invocation, caller_path, dumps
from align.data import arithmetic_rows, bundled, gsm8k_rows, read_rows
from align.evals import encode_prompt
from align.model import pick_forward_impl
from align.rl import Rollout, forward_of, path_bias, weights_sha256
from align.rollout import NativeSampler
from align.tracking import RunDir, environment


@dataclass(frozen=True, kw_only=True)
class PathBiasConfig:
    """All of the stage's configuration."""

    run_dir: Annotated[Path | None, "where path_bias.json is written; none: runs/path_bias-<time> in the workspace"] = None
    seed: Annotated[int, "of the sampling"] = 0
    model: StartSection = field(default_factory=StartSection)
    source: Annotated[str, "arithmetic, gsm8k_train, or a JSONL file of {prompt, answer}: the prompts that are answered"] = "arithmetic"
    prompts: Annotated[int, "how many"] = 64
    max_new_tokens: Annotated[int, "longest answer"] = 64
    temperature: Annotated[float, "of the sampling, and of the log-probabilities"] = 1.0
    implementations: Annotated[list[str], "which attention implementations are compared, with the sampler's and with each other"] = field(
        default_factory=lambda: [pick_forward_impl(), pick_forward_impl(packed=True)]
    )
    train: ForwardSection = field(default_factory=ForwardSection)


def measure(call: Invocation[PathBiasConfig]) -> int:
    started, config = time.perf_counter(), call.config
    if call.resume or call.allow_change:
        raise ConfigError("path_bias has nothing to resume; start it anew")
    for name, value in (("prompts", config.prompts), ("max_new_tokens", config.max_new_tokens), ("temperature", config.temperature)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value}; it must be above 0, and finite")
    if not config.implementations:
        raise ConfigError("implementations is empty; name one at least, such as sdpa_causal")
    for name in config.implementations:
        forward_of(name)
    loaded = load_start(call, "path_bias")
    rows = asked_rows(config)
    say(f"prompts  {len(rows)} of {config.source}")
    if call.dry_run:
        say("dry run: nothing was written")
        return 0
    assert loaded.directory is not None
    model = build_model(config.model, loaded.directory, loaded.config, config.seed, loaded.device).eval()
    with of_field("run_dir"):
        run = RunDir.create(
            loaded.run_dir,
            config_toml=dumps(config),
            env=environment({"stage": "path_bias", "threads": torch.get_num_threads(), "device": str(loaded.device)}),
        )
    show_forwards(run.alive, model)
    sampler = LivingSampler(NativeSampler(model, eos_ids=loaded.eos_ids), run.alive)
    samples = sampler.generate(
        [encode_prompt(loaded.tokenizer, row) for row in rows], max_new_tokens=config.max_new_tokens, temperature=config.temperature,
        seeds=[(config.seed << 32) + index for index in range(len(rows))],
    )  # fmt: skip
    rollouts = [
        Rollout(index, index, sample.prompt_ids, sample.ids, sample.logprobs, sample.truncated, "", 0.0, "")
        for index, sample in enumerate(samples)
    ]
    found = path_bias(
        model, rollouts, config.implementations, micro_batch=config.train.micro_batch, pad_id=loaded.pad_id, temperature=config.temperature
    )
    report = {
        "weights": weights_sha256(loaded.directory),
        "dtype": config.model.dtype,
        "device": str(loaded.device),
        "torch": torch.__version__,
        "tokens": sum(len(each.ids) for each in rollouts),
        "differences": found,
    }
    path = run.path / "path_bias.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    numbers = {name.replace(" - ", "_"): value["mean_size"] for name, value in found.items()}
    run.log(0, **numbers)
    run.finish(
        "done", stage="path_bias", steps=0, checkpoint=str(loaded.directory), metrics={"after": numbers}, report=str(path),
        wall_s=time.perf_counter() - started,
    )  # fmt: skip
    for name, value in found.items():
        say(f"  {name:<40} mean {value['bias']:+.2e}  size {value['mean_size']:.2e}  largest {value['largest']:.2e} nats a token")
    say(f"report   {path}\nnext     ./bazelw run //stages:ppo -- path_bias={path}")
    return 0


def asked_rows(config: PathBiasConfig) -> list[dict[str, Any]]:
    if config.source == "arithmetic":
        check_most("prompts", config.prompts, GENERATED)
        with of_field("prompts"):
            return list(arithmetic_rows(config.prompts, seed=0, held_out=False))
    if config.source == "gsm8k_train":
        return list(gsm8k_rows(bundled("gsm8k_train"))[: config.prompts])
    with of_field("source"):
        return list(read_rows(caller_path(config.source), kind="answer").rows[: config.prompts])


if __name__ == "__main__":
    sys.exit(_entry.run_stage("path_bias", PathBiasConfig, measure, __doc__ or "", sys.argv[1:]))
