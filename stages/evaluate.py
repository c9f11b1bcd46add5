"""Judges a checkpoint on problems with answers: greedy or sampled accuracy, each answer's verdict, pass@k."""

import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from _common import (
    JudgeSection,
    ModelSection,
    accuracies,
    build_model,
    check_vocabulary,
    judge,
    judged_rows,
    load_tokenizer,
    model_directory,
    pick_device,
    run_stage,
    say,
)

from align.config import ConfigError, Invocation, caller_path, dumps, workspace_root
from align.evals import EvalError, write_items
from align.model import load_config
from align.tracking import Progress, RunDir, environment


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel(ModelSection):
    """Which checkpoint is judged."""

    path: Annotated[Path, "checkpoint in HF layout, or a run directory: then its newest checkpoint"] = Path("stages/assets/arithmetic_sft")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """All of the stage's configuration; the defaults judge the checked-in checkpoint of the default SFT run."""

    run_dir: Annotated[Path | None, "where results are written, relative to where you are; none: runs/evaluate-<time> in the workspace"] = (
        None
    )
    seed: Annotated[int, "of the sampling"] = 0
    threads: Annotated[int, "CPU threads of torch; 0 leaves torch's own choice"] = 0
    model: EvaluatedModel = field(default_factory=EvaluatedModel)
    eval: JudgeSection = field(default_factory=JudgeSection)
    chat: Annotated[bool, "ask through the model's chat template"] = False
    system: Annotated[str | None, "system message, with chat"] = None
    show: Annotated[int, "sample answers printed at the end"] = 3


def evaluate(call: Invocation[EvaluateConfig]) -> int:
    started, config = time.perf_counter(), call.config
    if call.resume or call.allow_change:
        raise ConfigError("evaluate has nothing to resume; start it anew")
    if config.threads:
        torch.set_num_threads(config.threads)
    if config.eval.temperature == 0 and config.eval.samples > 1:
        raise EvalError(f"eval.samples={config.eval.samples} at eval.temperature=0 would all be alike; add eval.temperature=1")

    # Load.
    directory = model_directory(config.model.path)
    model_config = load_config(directory)
    tokenizer = load_tokenizer(config.model, directory)
    check_vocabulary(tokenizer, model_config, config.model)
    rows = judged_rows(config.eval, chat=config.chat, system=config.system)
    how = "greedy" if config.eval.temperature == 0 else f"{config.eval.samples} samples at temperature {config.eval.temperature:g}"
    say(f"model    {directory}\nproblems {len(rows)} of {config.eval.source}, {how}")
    if call.dry_run:
        say("dry run: nothing was written")
        return 0
    device = pick_device(config.model, model_config)
    model = build_model(config.model, directory, model_config, config.seed, device).eval()
    run = RunDir.create(
        caller_path(config.run_dir) if config.run_dir else workspace_root() / "runs" / time.strftime("evaluate-%Y%m%d-%H%M%S"),
        config_toml=dumps(config),
        env=environment({"threads": torch.get_num_threads(), "device": str(device)}),
    )

    # Judge.
    progress = Progress(len(rows), every=256, stream=sys.stderr)

    def told(done: int, total: int) -> None:
        run.alive()
        progress.update(done)

    judged = judge(model, tokenizer, rows, config.eval, seed=config.seed, progress=told)

    # Report.
    write_items(run.path / "items.jsonl", judged.items)
    numbers = {"accuracy": judged.accuracy, **accuracies(judged), "truncated": judged.truncated, "mean_tokens": judged.mean_tokens}
    low, high = judged.interval.low, judged.interval.high
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if 1 < k <= config.eval.samples]
    passes = {f"pass_at_{k}": judged.pass_at_k(k).value for k in ks}
    run.log(0, **numbers, **passes)
    run.eval(0, **numbers, accuracy_low=low, accuracy_high=high, **passes)
    for item in judged.items[: config.show]:
        run.sample(
            0, prompt=item.prompt, output=item.output, answer=item.gold, parsed=item.answer, correct=item.correct, reason=item.reason
        )
    run.finish(
        "done",
        stage="evaluate",
        steps=0,
        checkpoint=str(directory),
        metrics={"after": {**numbers, **passes}},
        unreadable=judged.unreadable,
        wall_s=time.perf_counter() - started,
    )
    for name, value in {**numbers, **passes}.items():
        say(f"  {name:<16} {value:8.3f}" + (f"   95 % interval {low:.3f} to {high:.3f}" if name == "accuracy" else ""))
    say("  verdicts         " + json.dumps(dict(Counter(item.reason for item in judged.items).most_common())))
    for item in judged.items[: config.show]:
        say(f"\n  {item.prompt}\n  -> {item.output}   [{'right' if item.correct else f'wrong ({item.reason}), wanted {item.gold}'}]")
    say(f"\nitems    {run.path / 'items.jsonl'}\nreport   {run.path / 'report.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(run_stage("evaluate", EvaluateConfig, evaluate, __doc__ or "", sys.argv[1:]))
