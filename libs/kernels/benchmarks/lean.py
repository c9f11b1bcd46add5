"""A lean decoder on these ops, for the whole-step figure: joint projections, the residual sum in the norm, cuDNN attention."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from align import kernels


class Block(nn.Module):
    def __init__(self, m: SimpleNamespace, dim: int, **options: Any) -> None:
        super().__init__()
        self.m = m
        self.before, self.after = (nn.Parameter(torch.ones(m.size, **options)) for _ in range(2))
        self.qkv = nn.Linear(m.size, (m.heads + 2 * m.kv_heads) * dim, bias=False, **options)
        self.out = nn.Linear(m.heads * dim, m.size, bias=False, **options)
        self.gate_up = nn.Linear(m.size, 2 * m.inner, bias=False, **options)
        self.down = nn.Linear(m.inner, m.size, bias=False, **options)

    def forward(self, x: Tensor | None, residual: Tensor, tables: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if x is None:
            normed = kernels.rms_norm(residual, self.before)
        else:
            normed, residual = kernels.add_rms_norm(x, residual, self.before)
        q, k, v = kernels.rope_qkv(self.qkv(normed), *tables, heads=self.m.heads, kv_heads=self.m.kv_heads)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )  # fmt: skip
        normed, residual = kernels.add_rms_norm(self.out(mixed.transpose(1, 2).flatten(2)), residual, self.after)
        return self.down(kernels.swiglu_packed(self.gate_up(normed))), residual


class Lean(nn.Module):
    def __init__(self, m: SimpleNamespace, dim: int = 128, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        options = {"device": device, "dtype": dtype}
        self.embedding = nn.Embedding(m.vocabulary, m.size, **options)
        self.blocks = nn.ModuleList(Block(m, dim, **options) for _ in range(m.layers))
        self.norm = nn.Parameter(torch.ones(m.size, **options))
        self.head = nn.Linear(m.size, m.vocabulary, bias=False, **options)
        with torch.no_grad():
            for p in self.parameters():
                if p.ndim == 2:
                    p.normal_(0, 0.02)

    def loss(self, ids: Tensor, targets: Tensor, tables: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, residual = None, self.embedding(ids)
        for block in self.blocks:
            x, residual = block(x, residual, tables)
        normed, _ = kernels.add_rms_norm(x, residual, self.norm)  # type: ignore[arg-type]
        return kernels.linear_cross_entropy(normed, self.head.weight, targets) / targets.numel()


def cudnn() -> Any:
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
