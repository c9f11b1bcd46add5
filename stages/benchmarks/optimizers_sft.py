"""The same SFT of SmolLM2-135M on GSM8K under several optimizers: held-out loss, time of a step, memory; both roundings at a small lr.

Run: python3 stages/benchmarks/optimizers_sft.py --model models/smollm2-135m-instruct [--steps 150] [--seeds 3] [--out DIR]
(libs/* on PYTHONPATH). Each training is a process of its own. Other 8-bit optimizers run where they are installed; their names stand in
source text only. The model's weights: ./bazelw run //tools:fetch_weights -- smollm2-135m-instruct. Rows are printed as they come and
written to DIR/optimizers_sft.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from align.data import Loader, bundled, chat_rows, encode_rows, gsm8k_rows, split_rows
from align.model import load
from align.objectives import normalise, sft_loss
from align.optim8bit import AdamW8bit
from align.tokenizer import Tokenizer
from align.train import to_device

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BETAS, DECAY = (0.9, 0.95), 0.01


def fp32_adamw(named: list, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=lr, betas=BETAS, weight_decay=DECAY)


def ours(named: list, lr: float, stochastic: bool = True) -> AdamW8bit:
    return AdamW8bit(named, lr=lr, betas=BETAS, weight_decay=DECAY, stochastic_rounding=stochastic)


# name: (source that ends in an expression for the optimizer's maker, dtype of the parameters)
OPTIMIZERS = {
    "fp32 AdamW, fp32 parameters": ("", "optimizers_sft.fp32_adamw", "float32"),
    "AdamW8bit, bf16": ("", "optimizers_sft.ours", "bfloat16"),
    "AdamW8bit, bf16, round to nearest": ("", "lambda named, lr: optimizers_sft.ours(named, lr, False)", "bfloat16"),
    "bitsandbytes AdamW8bit, bf16": (
        "import bitsandbytes as b",
        "lambda named, lr: b.optim.AdamW8bit([p for _, p in named], lr=lr, betas=(0.9, 0.95), weight_decay=0.01)",
        "bfloat16",
    ),
    "torchao AdamW8bit, bf16, stochastic rounding": (
        "from torchao.optim import AdamW8bit as A",
        "lambda named, lr: A([p for _, p in named], lr=lr, betas=(0.9, 0.95), weight_decay=0.01, bf16_stochastic_round=True)",
        "bfloat16",
    ),
}


def train(make: Callable[[list, float], Any], dtype: str, model: str, steps: int, lr: float, seed: int) -> None:
    """Print one JSON line: held-out losses at every tenth of the steps, milliseconds of an optimizer step, peak memory above the model."""
    torch.manual_seed(seed)
    if DEVICE == "cpu":
        torch.set_num_threads(2)
    directory = Path(model)
    tokenizer = Tokenizer.load(directory)
    rows = chat_rows(gsm8k_rows(bundled("gsm8k_train")))
    train_rows, held_rows = split_rows(rows, 0.05)
    encoded, held = (encode_rows(part, tokenizer, kind="messages", max_length=512) for part in (train_rows, held_rows))
    options = {"max_length": 512, "packing": False, "seed": seed, "pad_id": tokenizer.pad_id or 0}
    loader = Loader(encoded, global_batch=16, micro_batch=16, **options)
    net = load(directory, dtype=getattr(torch, dtype), device=DEVICE)
    held_steps = list(held_batches(Loader(held, global_batch=16, micro_batch=16, **(options | {"seed": 0}))))
    optimizer = make(list(net.named_parameters()), lr)
    losses, times = [], []
    for step in range(steps):
        now = lr * min(1.0, (step + 1) / max(1, steps // 10))
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(now)
            else:
                group["lr"] = now
        whole = loader.next_step()
        for micro in whole.micro_batches:
            batch = to_device(micro, torch.device(DEVICE))
            normalise(loss_sum(net, batch), whole.trained_tokens).backward()
        synchronise()
        begin = time.perf_counter()
        optimizer.step()
        synchronise()
        times.append((time.perf_counter() - begin) * 1e3)
        for p in net.parameters():
            p.grad = None
        if (step + 1) % max(1, steps // 10) == 0:
            losses.append(held_loss(net, held_steps))
    memory = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
    print(json.dumps({"losses": losses, "step_ms": statistics.median(times), "peak_gib": memory}), flush=True)


def held_batches(loader: Loader) -> Any:
    """The batches of one epoch."""
    while True:
        step = loader.next_step()
        if step.epoch > 1.0:
            return
        yield from step.micro_batches


def loss_sum(net: Any, batch: dict[str, Any]) -> torch.Tensor:
    names = ("position_ids", "cu_seqlens", "max_seqlen")
    hidden = net(batch["input_ids"], **{n: batch[n] for n in names if batch.get(n) is not None})
    return sft_loss(hidden, net.output_weight, batch["targets"], batch["loss_mask"])


@torch.no_grad()
def held_loss(net: Any, batches: list[Any]) -> float:
    total, tokens = 0.0, 0
    for micro in batches:
        batch = to_device(micro, torch.device(DEVICE))
        total += loss_sum(net, batch).item()
        tokens += int(batch["loss_mask"].sum())
    return total / tokens


def synchronise() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def run(name: str, options: argparse.Namespace, lr: float, seed: int) -> dict[str, Any]:
    before, maker, dtype = OPTIMIZERS[name]
    arguments = f"{dtype!r}, {str(options.model)!r}, {options.steps}, {lr}, {seed}"
    source = f"import optimizers_sft\n{before}\noptimizers_sft.train({maker}, {arguments})"
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    if done.returncode:
        return {"name": name, "lr": lr, "seed": seed, "error": (done.stderr.strip().splitlines() or ["no message"])[-1][:200]}
    return {"name": name, "lr": lr, "seed": seed, **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--small-lr", type=float, default=1e-6, help="where round to nearest stalls")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time; their step times mean something at 1 only")
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    big = [n for n in OPTIMIZERS if "nearest" not in n]
    small = [n for n in OPTIMIZERS if "torchao" not in n]
    plan = [(n, options.lr, seed) for n in big for seed in range(options.seeds)] + [(n, options.small_lr, 0) for n in small]
    with ThreadPoolExecutor(options.jobs) as jobs:
        for made in jobs.map(lambda item: run(item[0], options, *item[1:]), plan):
            rows.append(made)
            print(json.dumps(made), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "optimizers_sft.json").write_text(json.dumps(rows, indent=1))
    for name, lr in dict.fromkeys((n, lr) for n, lr, _ in plan):
        last = [r["losses"][-1] for r in rows if (r["name"], r["lr"]) == (name, lr) and "losses" in r]
        if last:
            print(f"{name:46s} lr {lr:g}: held-out loss {statistics.mean(last):.5f}, {len(last)} seeds, spread {max(last) - min(last):.5f}")


if __name__ == "__main__":
    main()
