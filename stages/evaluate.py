"""Judges a checkpoint on problems with answers: greedy or sampled accuracy, each answer's verdict, pass@k; or by the likeliest choice.

Two results on the same problems: ./bazelw run //stages:evaluate -- --compare A B (run directories or items.jsonl files).
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import _entry
import torch
from _common import (
    JudgeSection,
    ModelSection,
    accuracies,
    build_model,
    check_judged,
    check_prompts,
    check_template,
    check_vocabulary,
    flat,
    judge,
    judged_rows,
    load_tokenizer,
    model_config_of,
    model_directory,
    pick_device,
    say,
    use_threads,
    weights_digest,
    with_intervals,
    write_through,
)
from _fields import of_field
from _life import awaited, show_forwards

from align.config import ConfigError, Invocation, caller_path, dumps, load, workspace_root
from align.data import lean_rows
from align.evals import EvalError, EvalResult, Item, Judge, Judgement, choice_accuracy, choice_rows, compare, read_items, write_items
from align.model import Decoder
from align.objectives import sequence_logprobs
from align.rl import LeanReward
from align.tokenizer import Tokenizer
from align.tracking import Progress, RunDir, environment

LEAN = "lean:"
LEAN_AT_ONCE = 32  # statements between what is kept: proofs take seconds each
MAY_CHANGE = ("run_dir", "threads", "show", "eval.batch", "model.path", "model.device")  # on a resume; the weights are compared by bytes


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel(ModelSection):
    """Which checkpoint is judged."""

    path: Annotated[Path, "checkpoint in HF layout, or a run directory: then its newest checkpoint"] = Path("stages/assets/arithmetic_sft")


@dataclass(frozen=True, kw_only=True)
class ProblemSection(JudgeSection):
    """Problems with answers, judged by align.verify, or statements, whose proofs a Lean kernel judges."""

    source: Annotated[
        str, "arithmetic (held-out problems), gsm8k_test, math500, a JSONL file of {prompt, answer}, or lean:FILE, one of Lean statements"
    ] = "arithmetic"


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """All of the stage's configuration; the defaults judge the checked-in checkpoint of the default SFT run."""

    run_dir: Annotated[Path | None, "where results are written, relative to where you are; none: runs/evaluate-<time> in the workspace"] = (
        None
    )
    seed: Annotated[int, "of the sampling"] = 0
    threads: Annotated[int, "CPU threads of torch; 0 leaves torch's own choice"] = 0
    model: EvaluatedModel = field(default_factory=EvaluatedModel)
    eval: ProblemSection = field(default_factory=ProblemSection)
    chat: Annotated[bool, "ask through the model's chat template"] = False
    system: Annotated[str | None, "system message, with chat"] = None
    choices: Annotated[bool, "eval.source is a JSONL file of {prompt, choices, answer}: the likeliest choice is the model's answer"] = False
    normalise: Annotated[
        Literal["none", "tokens", "characters"], "with choices: what a log-likelihood is divided by before it is compared"
    ] = "characters"
    show: Annotated[int, "sample answers printed at the end"] = 3


def evaluate(call: Invocation[EvaluateConfig]) -> int:
    started, config = time.perf_counter(), call.config
    if call.allow_change:
        raise ConfigError(f"evaluate has no --allow-change; on a resume {', '.join(MAY_CHANGE)} may differ")
    if call.resume and config.choices:
        raise ConfigError("with choices=true there is nothing to resume; start it anew")
    if call.resume and config.run_dir is None:
        raise ConfigError("--resume needs run_dir=, the directory of the evaluation that stopped")
    check_judged(config.eval)
    if config.show < 0 or not config.eval.problems:
        name, value = ("show", config.show) if config.show < 0 else ("eval.problems", config.eval.problems)
        raise ConfigError(f"{name} is {value}; it must be at least {int(name != 'show')}")
    if config.system is not None and not config.chat:
        raise ConfigError("system is set without chat=true; a bare prompt has no place for it")
    use_threads(config.threads)

    # Load.
    directory = model_directory(config.model.path)
    model_config = model_config_of(directory)
    tokenizer = load_tokenizer(config.model, directory)
    check_vocabulary(tokenizer, model_config, config.model)
    if config.chat:
        check_template(tokenizer, "chat=true", directory)
    rows = asked_rows(config)
    if not config.choices:
        check_prompts(rows, tokenizer, model_config, config.eval)
    how = "greedy" if config.eval.temperature == 0 else f"{config.eval.samples} samples at temperature {config.eval.temperature:g}"
    say(f"model    {directory}\nproblems {len(rows)} of {config.eval.source}, {'by the likeliest choice' if config.choices else how}")
    if call.dry_run:
        say("dry run: nothing was written")
        return 0
    device = pick_device(config.model, model_config)
    weights = weights_digest(directory)
    with of_field("run_dir"):
        folder = caller_path(config.run_dir) if config.run_dir else workspace_root() / "runs" / time.strftime("evaluate-%Y%m%d-%H%M%S")
    if call.resume:
        refuse_other(folder, config, weights)
    model = build_model(config.model, directory, model_config, config.seed, device).eval()
    env = environment({"stage": "evaluate", "threads": torch.get_num_threads(), "device": str(device), "weights": weights})
    with of_field("run_dir"):
        run = RunDir.create(folder, config_toml=dumps(config), env=env, resume_step=-1 if call.resume else None)

    # Judge. What is judged is kept at once, so that a resume asks only the rest.
    partial = run.path / "items.partial.jsonl"
    done = whole_items(partial) if call.resume else []
    if done:
        say(f"resumed  {len(done)} answers are there")
    progress = Progress(len(rows), every=256, stream=sys.stderr)

    def advance(count: int, total: int) -> None:
        progress.update(count)

    show_forwards(run.alive, model)
    if config.choices:
        judged = choice_accuracy(scorer(model, tokenizer), tokenizer, rows, normalise=config.normalise, progress=advance)
    else:
        with ExitStack() as opened:
            file = opened.enter_context(partial.open("a", encoding="utf-8"))
            more = {}
            if config.eval.source.startswith(LEAN):
                more = {"judge": opened.enter_context(kernel(run.alive)), "chunk": LEAN_AT_ONCE}

            def keep(items: list[Item]) -> None:
                write_through(file, (asdict(item) for item in items))

            judged = judge(
                model, tokenizer, rows, config.eval, seed=config.seed, alive=run.alive, progress=advance, done=done, keep=keep, **more
            )  # fmt: skip

    # Report.
    write_items(run.path / "items.jsonl", judged.items)
    partial.unlink(missing_ok=True)
    report(run, judged, config, directory, started)
    return 0


def report(run: RunDir, judged: EvalResult, config: EvaluateConfig, directory: Path, started: float) -> None:
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if 1 < k <= config.eval.samples and not config.choices]
    passes = {f"pass_at_{k}": judged.pass_at_k(k) for k in ks}
    values = with_intervals({"accuracy": judged.interval}) | accuracies(judged) | with_intervals(passes)
    values |= {"truncated": judged.truncated, "mean_tokens": judged.mean_tokens}
    run.log(0, **values)
    run.eval(0, **values)
    for item in judged.items[: config.show]:
        run.sample(
            0, prompt=item.prompt, output=item.output, answer=item.gold, parsed=item.answer, correct=item.correct, reason=item.reason
        )
    run.finish(
        "done",
        stage="evaluate",
        steps=0,
        checkpoint=str(directory),
        metrics={"after": values},
        unreadable=judged.unreadable,
        wall_s=time.perf_counter() - started,
    )
    for name, value in values.items():
        if not name.endswith(("_low", "_high")):
            ends = [values[f"{name}_{end}"] for end in ("low", "high") if f"{name}_{end}" in values]
            say(f"  {name:<16} {value:8.3f}" + ("   95 % interval {:.3f} to {:.3f}".format(*ends) if ends else ""))
    say("  verdicts         " + json.dumps(dict(Counter(item.reason for item in judged.items).most_common())))
    for item in judged.items[: config.show]:
        say(f"\n  {item.prompt}\n  -> {item.output}   [{'right' if item.correct else f'wrong ({item.reason}), wanted {item.gold}'}]")
    say(f"\nitems    {run.path / 'items.jsonl'}\nreport   {run.path / 'report.html'}")


def asked_rows(config: EvaluateConfig) -> list[dict[str, Any]]:
    section = config.eval
    if not config.choices and not section.source.startswith(LEAN):
        return judged_rows(section, chat=config.chat, system=config.system)
    with of_field("eval.source"):
        path = caller_path(section.source if config.choices else section.source.removeprefix(LEAN))
        rows: list[dict[str, Any]] = (choice_rows(path) if config.choices else lean_rows(path))[: section.problems]
    if not config.chat:
        return rows
    opening = [{"role": "system", "content": config.system}] if config.system is not None else []
    return [row if "messages" in row else {**row, "messages": [*opening, {"role": "user", "content": row["prompt"]}]} for row in rows]


@contextmanager
def kernel(alive: Callable[[], None]) -> Iterator[Judge]:
    """Judges proofs by Lean, in a pool that lives as long as the with statement. Raises ToolchainNotFound, naming the set-up command."""
    with closing(LeanReward.started()) as lean:

        def judge(rows: Sequence[dict[str, Any]], proofs: Sequence[str]) -> list[Judgement]:
            return [Judgement(None, reward == 1.0, reason) for reward, reason in awaited(lambda: lean.score(rows, proofs), alive)]

        yield judge


def scorer(model: Decoder, tokenizer: Tokenizer) -> Any:
    """Summed log-probabilities of continuations, 32 a forward, rows of like length together."""
    device, pad = model.output_weight.device, tokenizer.pad_id or 0

    @torch.inference_mode()
    def score(prompts: Sequence[list[int]], continuations: Sequence[list[int]]) -> list[float]:
        sums = [0.0] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(continuations[i]))
        for start in range(0, len(order), 32):
            some = order[start : start + 32]
            longest = max(len(prompts[i]) + len(continuations[i]) for i in some)
            ids = torch.full((len(some), longest), pad, dtype=torch.int64)
            mask = torch.zeros((len(some), longest), dtype=torch.bool)
            for row, i in enumerate(some):
                whole, begin = [*prompts[i], *continuations[i]], len(prompts[i])
                ids[row, : len(whole)] = torch.tensor(whole)
                mask[row, begin : len(whole)] = True
            ids, mask = ids.to(device), mask.to(device)
            logprobs = sequence_logprobs(model(ids[:, :-1]), model.output_weight, ids[:, 1:], mask[:, 1:])
            for i, value in zip(some, logprobs.double().sum(1).tolist(), strict=True):
                sums[i] = value
        return sums

    return score


def refuse_other(folder: Path, config: EvaluateConfig, weights: str) -> None:
    """A resume goes on with the same weights, rows and settings, or not at all. Raises ConfigError naming what differs."""
    try:
        before, env = load(EvaluateConfig, folder / "config.toml"), json.loads((folder / "env.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder}: nothing to resume there ({error}); leave --resume out to begin") from None
    old, new = flat(before), flat(config)
    different = [key for key in old if old[key] != new[key] and key not in MAY_CHANGE]
    if different:
        shown = "; ".join(f"{key} was {old[key]!r}, is {new[key]!r}" for key in different)
        raise ConfigError(f"{folder}: {shown}; resume with the same settings, or begin another run_dir")
    if env.get("weights") != weights:
        raise ConfigError(f"{folder}: {config.model.path} has other weights now than when the evaluation began; begin another run_dir")


def whole_items(partial: Path) -> list[Item]:
    """The items that were kept; a torn last line is cut away."""
    if not partial.exists():
        return []
    data = partial.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    partial.write_bytes(whole)
    return read_items(partial) if whole else []


def compared(a: str, b: str) -> int:
    """Prints which of two results is better, and every problem that flipped."""
    files = [path / "items.jsonl" if (path := caller_path(name)).is_dir() else path for name in (a, b)]
    difference = compare(*(read_items(file) for file in files))
    say(f"A        {files[0]}\nB        {files[1]}\n{difference}")
    for flip in difference.flips:
        say(f"\n  problem {flip.problem}: {flip.score_a:.2f} -> {flip.score_b:.2f}   wanted {flip.item_a.gold}\n  {flip.item_a.prompt}")
        say(f"  A -> {flip.item_a.output}\n  B -> {flip.item_b.output}")
    return 0


def main(argv: list[str]) -> int:
    if argv[:1] != ["--compare"]:
        return _entry.run_stage("evaluate", EvaluateConfig, evaluate, __doc__ or "", argv)
    try:
        if len(argv) != 3:
            raise EvalError("--compare takes two results: run directories or items.jsonl files")
        return compared(argv[1], argv[2])
    except (EvalError, ConfigError, _entry.OutputLost) as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
