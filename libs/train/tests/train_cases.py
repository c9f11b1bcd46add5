"""A small decoder, documents, and runs of a few steps, for the tests of this library."""

import collections
import dataclasses
import hashlib
import json
import os
import random
import signal
import subprocess
import sys

import gpu_ranks
import torch

from align.checkpoint import load
from align.data import Encoded, Example, Loader
from align.model import ModelConfig, init
from align.tracking import Progress, RunDir, read_history
from align.train import OptimizerConfig, Ranks, ScheduleConfig, SftModule, TrainConfig, Trainer, TrainerConfig, find_latest

MODEL = ModelConfig(
    vocab_size=72, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip
STEPS = 5
DEVICE = os.environ.get("TRAIN_TEST_DEVICE", "cpu")


def documents(lengths=(12, 4, 12, 4, 12, 4, 12, 4), seed=0, trained=0.7):
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for length in lengths:
        ids = torch.randint(MODEL.vocab_size, (length,), generator=generator, dtype=torch.int32)
        mask = torch.rand(length, generator=generator) < trained
        mask[-1] = trained > 0
        examples.append(Example(ids.numpy(), mask.numpy()))
    digest = hashlib.sha256(repr([(example.ids.tolist(), example.mask.tolist()) for example in examples]).encode()).hexdigest()
    tokens = sum(lengths)
    return Encoded(
        examples, len(examples), collections.Counter(), 0, tokens, sum(int(example.mask[1:].sum()) for example in examples), digest
    )


class Noisy(SftModule):
    """An SFT loss that draws from both generators, holds state of its own, and acts before chosen calls of `loss`."""

    def __init__(self, model, at=None):
        super().__init__(model)
        self.at = at or {}
        self.calls = 0
        self.own = {"seen": 0, "sum": torch.zeros(2)}

    def loss(self, batch):
        self.calls += 1
        loss, weight, _ = super().loss(batch)
        self.own = {"seen": self.own["seen"] + 1, "sum": self.own["sum"] + random.random()}
        noise = 1 + 0.1 * torch.rand(()) + 0.1 * random.random()
        loss = self.at.get(self.calls, lambda value: value)(loss)
        return loss * noise, weight, {"seen": self.own["sum"][0]}

    def extra_state(self):
        return dict(self.own)

    def load_extra_state(self, state):
        self.own = dict(state)


def terminate(loss):
    os.kill(os.getpid(), signal.SIGTERM)
    return loss


def made(
    path, *, module=Noisy, at=None, dtype=torch.bfloat16, packing=True, data=None, model=MODEL, tokenizer=None, resume=None, ranks=None,
    **fields,
):  # fmt: skip
    """(trainer, run, module). Keyword arguments `section__field` set the configuration."""
    ranks = ranks or Ranks()
    config = TrainerConfig(
        train=TrainConfig(max_steps=STEPS, global_batch=4, micro_batch=2, deterministic=DEVICE == "cuda"),
        schedule=ScheduleConfig(warmup_steps=2),
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1),
    )
    trainer_arguments = {name: fields.pop(name) for name in ("evaluate", "progress", "may_change", "fallback_tokenizer") if name in fields}
    for name, value in fields.items():
        section, _, field = name.partition("__")
        changed = dataclasses.replace(getattr(config, section), **{field: value}) if field else value
        config = dataclasses.replace(config, **{section: changed})
    loader = Loader(
        data or documents(), global_batch=config.train.global_batch, micro_batch=config.train.micro_batch, max_length=16, packing=packing,
        seed=config.seed, rank=ranks.rank, world=ranks.world,
    )  # fmt: skip
    run = RunDir.create(path, config_toml="", env={}, resume_step=resume, write=ranks.main)
    it = module(init(model, seed=1, dtype=dtype).to(DEVICE), **({"at": at} if at else {}))
    trainer_arguments.setdefault("progress", Progress(config.train.max_steps, every=1, stream=None))
    return Trainer(config, it, loader=loader, run=run, tokenizer_files=tokenizer, ranks=ranks, **trainer_arguments), run, it


def run_to_the_end(path, **arguments):
    trainer, run, _ = made(path, **arguments)
    result = trainer.fit()
    run.close()  # other processes go on with it
    return result, run


def resumed(path, allow_change=(), ranks=None, **arguments):
    checkpoint = load(find_latest(path / "checkpoints", ranks or Ranks()))
    trainer, run, _ = made(path, resume=checkpoint.step, ranks=ranks, **arguments)
    result = trainer.fit(resume=checkpoint, allow_change=allow_change)
    run.close()
    return result, run


def state_of(result):
    """sha256 of every file of a checkpoint that must be equal: weights, optimizer, random numbers, counters, loader, extra state."""
    files = json.loads((result.checkpoint / "manifest.json").read_text())["files"]
    return {name: file["sha256"] for name, file in files.items()}


def logged(run):
    """history.jsonl without what depends on the clock."""
    lines = read_history(run.path / "history.jsonl")
    clock = ("time", "tokens_per_s", "step_s", "memory_gb", "save_stall_s", "mfu")
    return [{key: value for key, value in line.items() if key not in clock} for line in lines]


def on_ranks(world, program, *words, codes=None, devices=0):
    """Runs `program` (a Python file) on `world` ranks with these words; the exit codes must be `codes`, 0 where not given.

    devices: GPUs for ranks over NCCL, shared where there are too few; 0: gloo on the CPU.
    """
    port = gpu_ranks.free_port()
    shared = {"OMP_NUM_THREADS": "1", **({"TRAIN_TEST_DEVICE": "cuda"} if devices else {})}
    processes = [
        subprocess.Popen(
            [sys.executable, program, *map(str, words)], env={**os.environ, **shared, **gpu_ranks.environment(rank, world, port, devices)}
        )
        for rank in range(world)
    ]
    try:
        got = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert got == (codes or [0] * world)
