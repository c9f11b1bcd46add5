"""A small language model trained by AdamW8bit and by fp32 AdamW: final losses, and both roundings of bf16 at a small learning rate.

Run: PYTHONPATH=libs/optim8bit python3 libs/optim8bit/benchmarks/learning.py, or as a section of gpu.py. Rows are JSON lines:
[section, what, value, unit, limit or null, note]. Minutes on a CPU, half a minute on a GPU.
"""

import json
import statistics
from collections.abc import Callable
from typing import Any

import torch

from align.optim8bit import AdamW8bit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = DEVICE == "cpu"


def row(what: str, value: float, limit: float | None = None, note: str = "") -> None:
    print(json.dumps(["learning", what, value, "", limit, note]), flush=True)


class Net(torch.nn.Module):
    """A small causal transformer, plain torch, tied to nothing of align."""

    def __init__(self, vocabulary: int = 256, width: int = 256, layers: int = 4):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.position = torch.nn.Parameter(torch.randn(128, width) * 0.02)
        block = torch.nn.TransformerEncoderLayer
        self.layers = torch.nn.ModuleList(block(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(layers))
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.position[: ids.shape[1]]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x)).float()


def sequences(number: int, seed: int) -> torch.Tensor:
    """(number, 65): a fixed random second-order chain over 256 symbols with 4 successors each, a tenth of them noise."""
    table = torch.randint(0, 256, (256, 256, 4), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 16, (number, 65), generator=generator)
    pick, noise = torch.randint(0, 4, (number, 65), generator=generator), torch.rand(number, 65, generator=generator) < 0.1
    anything = torch.randint(0, 256, (number, 65), generator=generator)
    for t in range(2, 65):
        ids[:, t] = torch.where(noise[:, t], anything[:, t], table[ids[:, t - 2] % 16, ids[:, t - 1] % 16, pick[:, t]])
    return ids


def train(make: Callable[[list], Any], dtype: torch.dtype, seed: int, lr: float, steps: int) -> list[float]:
    """Held-out losses, one after every tenth of the steps; linear warm-up and decay."""
    torch.manual_seed(seed)
    net = (Net() if not TINY else Net(256, 32, 1)).to(dtype).to(DEVICE)
    optimizer = make(list(net.named_parameters()))
    data, held = sequences(64 * steps, seed + 1).to(DEVICE), sequences(512, 999).to(DEVICE)
    losses = []
    for step in range(steps):
        now = lr * min(1.0, (step + 1) / 20, (steps - step) / steps * 1.25)
        for group in optimizer.param_groups:
            group["lr"] = now
        batch = data[64 * step : 64 * step + 64]
        loss = torch.nn.functional.cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        for p in net.parameters():
            p.grad = None
        loss.backward()
        optimizer.step()
        if (step + 1) % (steps // 10) == 0:
            with torch.no_grad():
                losses.append(torch.nn.functional.cross_entropy(net(held[:, :-1]).flatten(0, 1), held[:, 1:].flatten()).item())
    return losses


def adamw(named: list, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], betas=(0.9, 0.95), weight_decay=0.1, **options)


def ours(named: list, **options: Any) -> AdamW8bit:
    return AdamW8bit(named, betas=(0.9, 0.95), weight_decay=0.1, **options)


def learning() -> None:
    """Held-out loss, mean of three seeds: fp32 AdamW against 8 bits; then bf16 with a small learning rate, both roundings."""
    steps, seeds = (400, 3) if not TINY else (10, 1)
    final = {}
    for name, make, dtype in (
        ("fp32 AdamW", adamw, torch.float32),
        ("AdamW8bit, fp32 parameters", ours, torch.float32),
        ("AdamW8bit, bf16 parameters", ours, torch.bfloat16),
    ):
        final[name] = [train(make, dtype, seed, 1e-3, steps)[-1] for seed in range(seeds)]
        row(
            f"held-out loss, {name}, {seeds} seeds",
            statistics.mean(final[name]),
            None,
            str([round(x, 4) for x in final[name]]),
        )
    base = final["fp32 AdamW"]
    allowed = max(0.005 * statistics.mean(base), max(base) - min(base))
    for name in list(final)[1:]:
        row(
            f"mean loss over fp32 AdamW's, {name}",
            statistics.mean(final[name]) - statistics.mean(base),
            allowed if not TINY else None,
        )
    for stochastic in (True, False):
        losses = train(lambda named, s=stochastic: ours(named, stochastic_rounding=s), torch.bfloat16, 0, 2e-5, steps)
        name = "stochastic" if stochastic else "to nearest"
        row(f"bf16, lr 2e-5, rounding {name}: last held-out loss", losses[-1], None, str([round(x, 3) for x in losses]))
    losses = train(adamw, torch.float32, 0, 2e-5, steps)
    row("fp32 AdamW, lr 2e-5: last held-out loss", losses[-1], None, str([round(x, 3) for x in losses]))


if __name__ == "__main__":
    learning()
