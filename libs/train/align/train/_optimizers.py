"""The optimizers, and one step with any of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from align.optim8bit import AdamW8bit
from align.train._config import OptimizerConfig


def make_optimizer(config: OptimizerConfig, named_params: Iterable[tuple[str, nn.Parameter]], *, seed: int = 0) -> torch.optim.Optimizer:
    """adamw8bit (align.optim8bit) or adamw, in two groups: matrices with weight decay, 1-D parameters without.

    Args:
        named_params: `model.named_parameters()`; those that need no gradient are left out.
        seed: of the stochastic rounding.
    """
    named = [(name, parameter) for name, parameter in named_params if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [pair for pair in named if pair[1].ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [pair for pair in named if pair[1].ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "adamw":
        return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    return AdamW8bit(groups, lr=config.lr, betas=config.betas, eps=config.eps, max_grad_norm=config.max_grad_norm, seed=seed)


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW whose states are fp32 always; a parameter that is not fp32 has an fp32 master copy that the steps add up in.

    torch's own keeps the moments of a bf16 parameter in bf16, and a step below half an ulp of a weight is lost.
    """

    def __init__(self, params: Any, *, lr: float, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._pairs = [
            [(own, own if own.dtype == torch.float32 else own.detach().float()) for own in group["params"]] for group in self.param_groups
        ]
        self._inner = torch.optim.AdamW(
            [{**_hyper(group), "params": [wide for _, wide in pairs]} for group, pairs in zip(self.param_groups, self._pairs, strict=True)]
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step with the gradients in `.grad`."""
        if closure is not None:
            raise ValueError("AdamW.step takes no closure; call backward first")
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(_hyper(group))
        masters = [(own, wide) for pairs in self._pairs for own, wide in pairs if own is not wide]
        for own, wide in masters:
            wide.grad = None if own.grad is None else own.grad.float()
        self._inner.step()
        for own, wide in masters:
            own.copy_(wide)
            wide.grad = None

    def state_dict(self) -> dict[str, Any]:
        """torch's, with `master` beside the moments; tensors share memory with the optimizer."""
        state = self._inner.state_dict()
        wides = [wide if wide is not own else None for pairs in self._pairs for own, wide in pairs]
        return {
            "state": {
                number: {**state["state"].get(number, {}), **({} if wide is None else {"master": wide})}
                for number, wide in enumerate(wides)
            },
            "param_groups": [
                {**inner, **_hyper(group)} for inner, group in zip(state["param_groups"], self.param_groups, strict=True)
            ],
        }  # fmt: skip

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores moments, masters and hyperparameters, bit for bit."""
        wides = [wide for pairs in self._pairs for _, wide in pairs]
        moments = {}
        for number, saved in state_dict["state"].items():
            moments[number] = {key: value for key, value in saved.items() if key != "master"}
            if "master" in saved:
                wides[number].copy_(saved["master"])
        self._inner.load_state_dict({"state": moments, "param_groups": state_dict["param_groups"]})
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(_hyper(saved))


def _hyper(group: dict[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}


def apply_gradients(optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> tuple[float, bool]:
    """Clips and steps, or leaves everything as it is when the gradient is not finite.

    AdamW8bit does both inside its step; for other optimizers it is done here.

    Returns:
        (the global gradient norm before clipping, whether the step was applied)
    """
    if isinstance(optimizer, AdamW8bit):
        skipped = optimizer.skipped
        norm = optimizer.step()
        return norm, optimizer.skipped == skipped
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None]
    total: Tensor = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    norm = total.item()
    if not math.isfinite(norm):
        return norm, False
    if max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, total)
    optimizer.step()
    return norm, True
