"""What benchmarks of training steps share: models with random weights, a loader of random ids, memory by guard and by the system."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from align.guard import Projection, RunShape, project
from align.model import Decoder, ModelConfig

CUDA = torch.cuda.is_available()
LENGTH, VOCABULARY = (4096, 32768) if CUDA else (64, 512)  # on a CPU only to see that it runs
DTYPE = torch.bfloat16 if CUDA else torch.float32
SIZES = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256},
    "1.44B": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 7168},
    "7.25B": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    },
}  # fmt: skip


@dataclass
class Step:
    micro_batches: list[dict[str, Any]]
    trained_tokens: int
    tokens: int
    epoch: float


class Random:
    """A loader of random ids: `rows` a rank and step, every token trained; documents[r] of equal length in row r."""

    digest = "random"

    def __init__(self, rows: int, rank: int, world: int, documents: list[int] | None = None) -> None:
        self._rows, self._rank, self._world, self._documents = rows, rank, world, documents
        self._step = 0

    def next_step(self) -> Step:
        generator = torch.Generator().manual_seed(self._step * self._world + self._rank)
        ids = torch.randint(VOCABULARY, (self._rows, LENGTH + 1), generator=generator)
        self._step += 1
        trained = torch.ones(ids[:, 1:].shape, dtype=torch.bool).numpy()
        batch: dict[str, Any] = {"input_ids": ids[:, :-1].numpy(), "targets": ids[:, 1:].numpy(), "loss_mask": trained}
        if self._documents:
            ends, positions = [0], []
            for count in self._documents:
                for _ in range(count):
                    ends.append(ends[-1] + LENGTH // count)
                    positions.append(torch.arange(LENGTH // count))
            batch["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32).numpy()
            batch["position_ids"] = torch.cat(positions).view(self._rows, LENGTH).numpy()
            batch["max_seqlen"] = LENGTH
        tokens = self._rows * LENGTH * self._world
        return Step([batch], tokens, tokens, 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: Any, *, allow_change: tuple[str, ...] = ()) -> None:
        self._step = state["step"]


def model_config(size: str) -> ModelConfig:
    return ModelConfig(vocab_size=VOCABULARY, max_position_embeddings=32768, rope_theta=1e6, **SIZES[size])


def build(size: str, device: torch.device) -> Decoder:
    """Random weights, normal with deviation .02, made on the device; bf16, on a CPU fp32."""
    with torch.device(device):
        model = Decoder(model_config(size), DTYPE)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1.0)
    return model


def projection(size: str, rows: int, **run: Any) -> Projection:
    """What guard says of a run; `run` are fields of RunShape."""
    config = model_config(size)
    with torch.device("meta"):
        shapes = [tuple(parameter.shape) for parameter in Decoder(config).parameters()]
    return project(RunShape.of(
        shapes, layers=config.num_hidden_layers, hidden=config.hidden_size, intermediate=config.intermediate_size,
        heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, head_dim=config.head_dim, vocabulary=config.vocab_size,
        device="cuda" if CUDA else "cpu", weight_bytes=DTYPE.itemsize, micro_batch=rows, length=LENGTH,
        snapshot_weights=True, gather_copies=1, **run,
    ))  # fmt: skip


def resident_gib(field: str = "VmRSS") -> float:
    """This process's memory as the system counts it: VmRSS now, VmHWM the most since `forget_peak`. GiB."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 2**20
    return 0.0


def forget_peak() -> None:
    with contextlib.suppress(OSError):  # a system without it has the peak since the start
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
