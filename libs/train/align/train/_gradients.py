"""Gradients of sharded and of replicated parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from align.train._ranks import Ranks


def local(tensor: Any) -> Tensor:
    """This rank's rows of a sharded tensor, sharing memory; a plain one, detached."""
    rows: Tensor = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
    return rows


def global_norm(parameters: Sequence[nn.Parameter], ranks: Ranks) -> float:
    """The L2 norm of the gradients over all ranks, the same bits on each; of a replicated gradient one copy counts."""
    own = {True: 0.0, False: 0.0}  # of what is sharded, of what is not
    for sharded in own:
        grads = [local(p.grad) for p in parameters if p.grad is not None and hasattr(p.grad, "to_local") == sharded]
        if grads:
            own[sharded] = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32).double().square() for g in grads]).sum().item()
    return math.sqrt(ranks.sums([own[True]])[0] + own[False])
