"""The optimizers, and one step with any of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from align.optim8bit import AdamW8bit
from align.train._config import OptimizerConfig
from align.train._gradients import global_norm, local
from align.train._in_backward import InBackward
from align.train._offload import OffloadAdamW
from align.train._ranks import Ranks


def make_optimizer(
    config: OptimizerConfig,
    named_params: Iterable[tuple[str, nn.Parameter]],
    *,
    seed: int = 0,
    parts: Sequence[nn.Module] = (),
    ranks: Ranks = Ranks(),  # noqa: B008
) -> torch.optim.Optimizer:
    """adamw8bit (align.optim8bit), adamw or offload_adamw, in two groups: matrices with weight decay, 1-D parameters without.

    Args:
        named_params: `model.named_parameters()`; those that need no gradient are left out.
        seed: of the stochastic rounding.
        parts: with `config.in_backward`, the modules that are stepped each on its own, such as a decoder's blocks.
    """
    named = [(name, parameter) for name, parameter in named_params if parameter.requires_grad]
    if not config.in_backward:
        return _plain(config, named, seed)
    of_part = {id(parameter): number for number, part in enumerate(parts) for parameter in part.parameters()}
    # What belongs to no part (embedding, last norm, head) is stepped one by one.
    divided: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for number, (name, parameter) in enumerate(named):
        divided.setdefault(of_part.get(id(parameter), -1 - number), []).append((name, parameter))
    return InBackward(list(divided.values()), _groups(config, named), lambda some: _plain(config, some, seed), ranks)


def _groups(config: OptimizerConfig, named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [
        {"params": [pair for pair in named if pair[1].ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [pair for pair in named if pair[1].ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _plain(config: OptimizerConfig, named: list[tuple[str, nn.Parameter]], seed: int) -> torch.optim.Optimizer:
    groups = _groups(config, named)
    if config.name == "adamw":
        return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    if config.name == "offload_adamw":
        return OffloadAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, pinned_staging_gb=config.pinned_staging_gb)
    return AdamW8bit(groups, lr=config.lr, betas=config.betas, eps=config.eps, max_grad_norm=config.max_grad_norm, seed=seed)


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW whose states are fp32 always; a parameter that is not fp32 has an fp32 master copy that the steps add up in.

    torch's own keeps the moments of a bf16 parameter in bf16, and a step below half an ulp of a weight is lost. A sharded parameter is
    stepped on this rank's rows.
    """

    def __init__(self, params: Any, *, lr: float, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        # (parameter, its local rows, the fp32 tensor that is stepped: those rows themselves, or a master copy of them)
        self._parts = [[(own, local(own), _stepped(local(own))) for own in group["params"]] for group in self.param_groups]
        self._inner = torch.optim.AdamW(
            [{**_hyper(group), "params": [wide for *_, wide in parts]} for group, parts in zip(self.param_groups, self._parts, strict=True)]
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step with the gradients in `.grad`."""
        if closure is not None:
            raise ValueError("AdamW.step takes no closure; call backward first")
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(_hyper(group))
        parts = [part for group in self._parts for part in group]
        for own, _, wide in parts:
            wide.grad = None if own.grad is None else local(own.grad).float()
        self._inner.step()
        for _, rows, wide in parts:
            if rows.dtype != torch.float32:
                rows.copy_(wide)
            wide.grad = None

    def state_dict(self) -> dict[str, Any]:
        """torch's, with `master` beside the moments; tensors are of this rank's rows and share memory with the optimizer."""
        state = self._inner.state_dict()
        wides = [wide if rows.dtype != torch.float32 else None for group in self._parts for _, rows, wide in group]
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
        wides = [wide for group in self._parts for *_, wide in group]
        moments = {}
        for number, saved in state_dict["state"].items():
            moments[number] = {key: value for key, value in saved.items() if key != "master"}
            if "master" in saved:
                wides[number].copy_(saved["master"])
        self._inner.load_state_dict({"state": moments, "param_groups": state_dict["param_groups"]})
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(_hyper(saved))


def _stepped(rows: Tensor) -> Tensor:
    return rows if rows.dtype == torch.float32 else rows.float()


def _hyper(group: dict[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}


def apply_gradients(optimizer: torch.optim.Optimizer, max_grad_norm: float | None, ranks: Ranks = Ranks()) -> tuple[float, bool]:  # noqa: B008
    """Clips and steps, or leaves everything as it is when the gradient is not finite; on every rank alike.

    AdamW8bit does both inside its step; for other optimizers it is done here.

    Returns:
        (the global gradient norm before clipping, whether the step was applied)
    """
    if isinstance(optimizer, InBackward):
        return optimizer.step(), True
    if isinstance(optimizer, AdamW8bit):
        skipped = optimizer.skipped
        norm = optimizer.step()
        return norm, optimizer.skipped == skipped
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None]
    norm = global_norm(parameters, ranks)
    if not math.isfinite(norm):
        return norm, False
    if max_grad_norm is not None and norm > max_grad_norm:
        for parameter in parameters:
            local(parameter.grad).mul_(max_grad_norm / (norm + 1e-6))
    optimizer.step()
    return norm, True
