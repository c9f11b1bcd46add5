"""Reinforcement and preferences on one GPU: whole optimizer steps through the Trainer, and where their time goes.

    python3 stages/benchmarks/rl_gpu.py [--only NAME,...] [--minutes M] [--out DIR] [--weights DIR] [--tiny]

libs/* and stages on PYTHONPATH. `grpo-*`: random weights in bf16, 32 prompts of 256 random tokens × 8 answers of 768 (none stops),
8-bit Adam, full checkpointing; tok_s is NeMo-RL's: prompt and generated tokens over the time of the step. Answers are decoded and graded,
then paid by a hash, so that no group is dead. `-kl` holds a reference model, `-release` gives up the sampler's cache between its turns.
`dpo-*`: pairs of documents of 256 to 1,024 random tokens without padding, reference log-probabilities from a cache; real tokens over time.
`smollm2`: SFT, then GRPO on GSM8K with --weights (HF layout, or a GGUF file, which is converted): the accuracy on all of GSM8K's test set
before and after each, with 95 % intervals. Each case is a process of its own; rows are printed as they come, and written to
DIR/rl_gpu.jsonl. --tiny: small shapes, on a CPU too.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from align.data import EncodedPairs, Example
from align.model import Decoder, ModelConfig, convert_gguf
from align.rl import (
    CacheKey,
    GroupCredit,
    PairSource,
    PolicyConfig,
    PolicyObjective,
    PreferenceConfig,
    PreferenceObjective,
    ReferenceCache,
    Rollout,
    RolloutConfig,
    RolloutSource,
    Scored,
    Scorer,
    VerifyReward,
    frozen,
)
from align.rollout import NativeSampler, Sample
from align.tokenizer import vendored
from align.tracking import Progress, RunDir, read_history
from align.train import CheckpointConfig, OptimizerConfig, ScheduleConfig, TrainConfig, Trainer, TrainerConfig, TrainModule

CUDA = torch.cuda.is_available()
STAGES = Path(__file__).absolute().parents[1]
VOCABULARY = 32768
SIZES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 176},
    "1.44B": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 7168},
    "7.25B": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    },
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "grpo-1.44B": {"kind": "grpo", "size": "1.44B", "rows": 32},
    "grpo-1.44B-kl": {"kind": "grpo", "size": "1.44B", "rows": 32, "kl": 0.05},
    "grpo-7.25B": {"kind": "grpo", "size": "7.25B", "rows": 16},
    "grpo-7.25B-kl": {"kind": "grpo", "size": "7.25B", "rows": 16, "kl": 0.05},
    "grpo-7.25B-kl-release": {"kind": "grpo", "size": "7.25B", "rows": 16, "kl": 0.05, "release": True},
    "dpo-7.25B": {"kind": "dpo", "size": "7.25B", "rows": 8, "checkpointing": "none"},
    "dpo-7.25B-full": {"kind": "dpo", "size": "7.25B", "rows": 16, "checkpointing": "full"},
    "dpo-1.44B": {"kind": "dpo", "size": "1.44B", "rows": 16, "checkpointing": "none"},
    "smollm2": {"kind": "smollm2"},
}
DEFAULT = ["grpo-1.44B", "grpo-1.44B-kl", "grpo-7.25B", "grpo-7.25B-kl", "dpo-7.25B"]


@dataclass(frozen=True)
class Shape:
    """Sizes of the work: as asked for on a GPU, or small."""

    prompts: int = 32
    group: int = 8
    prompt: int = 256
    new: int = 768
    pairs: int = 32
    longest: int = 1024


TINY = Shape(prompts=4, group=4, prompt=12, new=20, pairs=8, longest=48)


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


class Clock:
    """Seconds of named phases, the device's work included."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        wait()
        began = time.perf_counter()
        yield
        wait()
        self.seconds[name] += time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


class TimedSampler:
    def __init__(self, sampler: NativeSampler, clock: Clock, *, release: bool) -> None:
        self._sampler, self._clock, self._release, self.weights_version = sampler, clock, release, 0

    def generate(self, prompts_ids: Sequence[Sequence[int]], **options: Any) -> list[Sample]:
        self._sampler.weights_version = self.weights_version
        with self._clock.phase("sampling"):
            found = self._sampler.generate(prompts_ids, **options)
        if self._release:
            self._sampler.release()
        return found


class HashedReward:
    """What the verifier would do and cost; then 0 or 1 by a hash, since random weights are never right."""

    def __init__(self, clock: Clock) -> None:
        self._verifier, self._clock = VerifyReward(), clock

    def score(self, rows: Sequence[Mapping[str, Any]], completions: Sequence[str]) -> list[Scored]:
        with self._clock.phase("reward"):
            self._verifier.score(rows, completions)
        return [Scored(float(random.Random(text).random() < 0.5), "hash") for text in completions]

    def close(self) -> None:
        self._verifier.close()


class TimedCredit:
    def __init__(self, credit: GroupCredit, clock: Clock) -> None:
        self._credit, self._clock = credit, clock

    def annotate(self, rollouts: list[Rollout]) -> None:
        with self._clock.phase("logprobs"):
            self._credit.annotate(rollouts)

    def assign(self, rollouts: list[Rollout], rewards: list[float]) -> dict[str, float]:
        return self._credit.assign(rollouts, rewards)


class TimedLoader:
    """A loader that keeps the phases of each step, and the time from drawing a step to having it."""

    def __init__(self, loader: Any, clock: Clock) -> None:
        self._loader, self._clock, self.phases = loader, clock, list[dict[str, float]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def next_step(self) -> Any:
        self._clock.take()
        with self._clock.phase("drawing"):
            step = self._loader.next_step()
        self.phases.append(self._clock.take())
        return step


class Policy(PolicyObjective, TrainModule):
    pass


class Preference(PreferenceObjective, TrainModule):
    pass


def build(size: str) -> Decoder:
    """Random weights, made on the device."""
    config = ModelConfig(vocab_size=VOCABULARY, max_position_embeddings=32768, rope_theta=1e6, **SIZES[size])
    with torch.device("cuda" if CUDA else "cpu"):
        model = Decoder(config, torch.bfloat16 if CUDA else torch.float32)
    generator = torch.Generator("cuda" if CUDA else "cpu").manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.02, generator=generator)
            else:
                parameter.fill_(1.0)
    return model


def copy_of(model: Decoder) -> Decoder:
    with torch.device(model.output_weight.device):
        other = Decoder(model.config, model.output_weight.dtype)
    other.load_state_dict(model.state_dict())
    return other.eval()


def trained(
    module: TrainModule, loader: TimedLoader, *, batch: int, rows: int, checkpointing: str, steps: int, minutes: float
) -> list[Any]:
    """The history of `steps` optimizer steps, nothing saved; ends early, after a whole step, when the minutes are over."""
    folder = Path(tempfile.mkdtemp(prefix="rl-gpu-"))
    run = RunDir.create(folder / "run", config_toml="", env={})
    config = TrainerConfig(
        train=TrainConfig(
            max_steps=steps, global_batch=batch, micro_batch=rows, log_every=10**6, max_hours=minutes / 60,
            checkpointing=checkpointing,  # type: ignore[arg-type]
        ),
        optimizer=OptimizerConfig(name="adamw8bit", lr=1e-6, max_grad_norm=1.0),
        schedule=ScheduleConfig(name="constant", warmup_steps=0), checkpoint=CheckpointConfig(every=0),
    )  # fmt: skip
    trainer = Trainer(config, module, loader=loader, run=run, progress=Progress(steps, every=10**6, stream=None))
    trainer._save = lambda numbers: setattr(trainer, "_saved", folder)  # type: ignore[method-assign]
    trainer.fit()
    lines = read_history(run.path / "history.jsonl")
    shutil.rmtree(folder, ignore_errors=True)
    return lines


def grpo(case: dict[str, Any], shape: Shape, size: str, steps: int, minutes: float) -> dict[str, Any]:
    model, clock, answers = build(size), Clock(), shape.prompts * shape.group
    rows = min(case["rows"], answers)
    prompts = random_ids((4 * shape.prompts, shape.prompt), torch.Generator().manual_seed(0)).tolist()
    rollout = RolloutConfig(group=shape.group, max_new_tokens=shape.new, batch=answers, dead_retries=0)
    policy = PolicyConfig(kl=case.get("kl", 0.0))
    scorer = Scorer(micro_batch=rows, pad_id=0)
    credit = GroupCredit(
        model, policy, scorer, scale="group", group=shape.group, reference=frozen(copy_of(model)) if policy.kl else None
    )  # fmt: skip
    sampler = TimedSampler(NativeSampler(model, eos_ids=[], max_batch=answers), clock, release=case.get("release", False))
    source = RolloutSource(
        [{"prompt": str(index), "answer": "7"} for index in range(len(prompts))], prompts, config=rollout, sampler=sampler,
        tokenizer=vendored("mistral-7b-v0.3"), reward=HashedReward(clock), credit=TimedCredit(credit, clock), global_batch=answers,
        micro_batch=rows, seed=0,
    )  # fmt: skip
    loader = TimedLoader(source, clock)
    module = Policy(model, policy, temperature=1.0, max_new_tokens=shape.new)
    lines = trained(module, loader, batch=answers, rows=rows, checkpointing="full", steps=steps, minutes=minutes)
    warm = list(zip(lines, loader.phases, strict=True))[1 if len(lines) > 1 else 0 :]
    step_s = sum(line["step_s"] for line, _ in warm) / len(warm)
    spent = {name: sum(phases.get(name, 0.0) for _, phases in warm) / len(warm) for name in ("sampling", "reward", "logprobs", "drawing")}
    spent["other"] = spent.pop("drawing") - sum(spent.values())  # decoding, advantages, batches
    spent["update"] = step_s - sum(spent.values())
    return {
        "tok_s": round(lines[-1]["tokens"] / step_s), "step_s": round(step_s, 3), "tokens": lines[-1]["tokens"],
        **{f"share_{name}": round(seconds / step_s, 4) for name, seconds in spent.items()},
        "sampled_tok_s": round(answers * shape.new / spent["sampling"]), "first_step_s": round(lines[0]["step_s"], 2),
        "ratio": [line["ratio"] for line in lines], "mismatch": lines[-1]["mismatch"], "kl": lines[-1].get("kl"),
        "grad_norm": lines[-1]["grad_norm"], "steps_measured": len(warm),
    }  # fmt: skip


def random_ids(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def random_pairs(shape: Shape, count: int) -> EncodedPairs:
    """Two documents of a quarter to the whole of the longest length; the first quarter of the shortest is the prompt they share."""
    chance, pairs = torch.Generator().manual_seed(0), []
    least = shape.longest // 4
    for _ in range(count):
        prompt = random_ids((least // 2,), chance)
        sides = []
        for length in torch.randint(least, shape.longest + 1, (2,), generator=chance).tolist():
            ids = torch.cat([prompt, random_ids((length - len(prompt),), chance)])
            sides.append(Example(ids.int().numpy(), (torch.arange(length) >= len(prompt)).numpy()))
        pairs.append((sides[0], sides[1]))
    tokens = sum(len(side.ids) for pair in pairs for side in pair)
    trained_tokens = sum(int(side.mask.sum()) for pair in pairs for side in pair)
    return EncodedPairs(pairs, count, Counter(), 0, tokens, trained_tokens, "random")


def dpo(case: dict[str, Any], shape: Shape, size: str, steps: int, minutes: float) -> dict[str, Any]:
    model, clock, rows = build(size), Clock(), min(case["rows"], shape.pairs)
    encoded = random_pairs(shape, 4 * shape.pairs)
    implementation = "varlen" if CUDA else "cpu_per_document"
    key = CacheKey(
        arm="random", weights="random", tokenizer="random", rows=encoded.digest, pairs=encoded.kept, max_length=shape.longest,
        forward_impl=implementation, dtype="bfloat16",
    )  # fmt: skip
    sums = [[-10.4 * int(side.mask.sum()) for side in sides] for sides in zip(*encoded.pairs, strict=True)]
    cache = ReferenceCache(key, *sums)
    loader = TimedLoader(PairSource(encoded, global_batch=shape.pairs, micro_batch=rows, seed=0, pad_id=0, cache=cache), clock)
    module = Preference(model, PreferenceConfig(), forward_impl=implementation)
    lines = trained(module, loader, batch=shape.pairs, rows=rows, checkpointing=case["checkpointing"], steps=steps, minutes=minutes)
    warm = lines[2:] or lines[-1:]
    seconds = sum(line["step_s"] for line in warm)
    return {
        "real_tok_s": round(sum(line["tokens"] for line in warm) / seconds), "step_s": round(seconds / len(warm), 3),
        "tokens": lines[-1]["tokens"], "mean_length": round(encoded.tokens / encoded.kept / 2, 1), "steps_measured": len(warm),
        "checkpointing": case["checkpointing"], "pairs_a_forward": rows, "grad_norm": lines[-1]["grad_norm"],
        "mfu": warm[-1].get("mfu"),
    }  # fmt: skip


def smollm2(weights: Path | None, tiny: bool, out: Path, sft_steps: int, grpo_steps: int) -> dict[str, Any]:
    """The stages as a user starts them; their own numbers."""
    if tiny:
        judged = ["eval.problems=6", "eval.max_new_tokens=24"]
        first = ["train.max_steps=3", "train.global_batch=4", "train.micro_batch=4", "schedule.warmup_steps=0", *judged]
        second = ["train.max_steps=2", "train.global_batch=8", "train.micro_batch=8", "rollout.group=4",
                  "rollout.max_new_tokens=24", "schedule.warmup_steps=0", "data.rows=20", "eval.samples=1", *judged]  # fmt: skip
    else:
        if weights is None:
            raise SystemExit("smollm2 needs --weights: a directory in HF layout or a GGUF file")
        if weights.suffix == ".gguf":
            converted = out / "smollm2"
            convert_gguf(weights, converted)
            weights = converted
        judged = ["eval.source=gsm8k_test", "eval.problems=1319", "eval.max_new_tokens=320", "eval.batch=256"]
        shared = [f"model.path={weights}", "model.dtype=bfloat16", "checkpoint.every=0", *judged]
        first = ["--config", str(STAGES / "configs/sft_smollm2.toml"), *shared, "data.rows=none", f"train.max_steps={sft_steps}",
                 "train.global_batch=32", "train.micro_batch=32", "schedule.warmup_steps=20",
                 "optimizer.lr=1e-4", f"eval.every={max(1, sft_steps // 4)}"]  # fmt: skip
        second = ["--config", str(STAGES / "configs/grpo_smollm2.toml"), *shared, f"train.max_steps={grpo_steps}", "train.global_batch=256",
                  "train.micro_batch=64", "rollout.batch=256", "eval.greedy=true", "optimizer.lr=5e-6",
                  f"eval.every={max(1, grpo_steps // 4)}"]  # fmt: skip
    row: dict[str, Any] = {}
    for name, words in (("sft", first), ("grpo", second)):
        start = [] if name == "sft" or tiny else [f"model.path={out / 'sft'}"]
        began = time.perf_counter()
        command = [sys.executable, str(STAGES / f"{name}.py"), f"run_dir={out / name}", *words, *start]
        code = subprocess.run(command, check=False).returncode
        if code not in (0, 4):  # 4: stopped by a tripwire, which is a result
            raise SystemExit(f"{name} ended with exit code {code}")
        told = json.loads((out / name / "stage_result.json").read_text(encoding="utf-8"))
        lines = read_history(out / name / "history.jsonl")
        row[name] = {
            "status": told["status"], "steps": told["steps"], **told["metrics"], "wall_s": round(time.perf_counter() - began, 1),
            "last_loss": lines[-1]["loss"], "tok_s": lines[-1]["tokens_per_s"], "step_s": lines[-1]["step_s"],
            "reward": [lines[0].get("reward"), lines[-1].get("reward")],
        }  # fmt: skip
    return row


def one(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    case, shape = CASES[name], TINY if arguments.tiny else Shape()
    if case["kind"] == "smollm2":
        row = smollm2(arguments.weights, arguments.tiny, arguments.out.absolute(), arguments.sft_steps, arguments.grpo_steps)
    else:
        run = {"grpo": grpo, "dpo": dpo}[case["kind"]]
        steps = arguments.steps or (3 if case["kind"] == "grpo" else 12)
        row = run(case, shape, "tiny" if arguments.tiny else case["size"], steps, arguments.minutes)
        if CUDA:
            row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return {"case": name, **row, "torch": torch.__version__, "device": torch.cuda.get_device_name() if CUDA else "cpu"}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(DEFAULT), help=f"cases: {', '.join(CASES)}")
    parser.add_argument("--minutes", type=float, default=60.0, help="no case begins after this, and a training ends after its step")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a case is ended")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "rl_gpu", help="folder of rl_gpu.jsonl and of the runs")
    parser.add_argument("--steps", type=int, help="optimizer steps of a case, the first not measured; default: 3 of GRPO, 12 of DPO")
    parser.add_argument("--sft-steps", type=int, default=460, help="of smollm2; 234 are an epoch")
    parser.add_argument("--grpo-steps", type=int, default=40, help="of smollm2")
    parser.add_argument("--weights", type=Path, help="SmolLM2-135M-Instruct")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.one:
        row = one(arguments.one, arguments)
        print(json.dumps(row), flush=True)
        with open(arguments.out / "rl_gpu.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return 0
    end, failed = time.monotonic() + 60 * arguments.minutes, 0
    for name in arguments.only.split(","):
        if name not in CASES:
            raise SystemExit(f"--only names {name}; there are {', '.join(CASES)}")
        left = end - time.monotonic()
        if left <= 0:
            print(json.dumps({"case": name, "not_run": f"after {arguments.minutes:g} minutes"}), flush=True)
            continue
        command = [sys.executable, __file__, *argv, "--one", name]
        limit = left if CASES[name]["kind"] == "smollm2" else min(left, arguments.limit)
        try:
            code = subprocess.run(command, check=False, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            code = 124
        if code:
            failed += 1
            print(json.dumps({"case": name, "failed": code}), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
