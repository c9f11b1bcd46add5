"""An optimizer that steps each block as soon as the backward has its gradients, and frees them at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from align.optim8bit import AdamW8bit
from align.train._errors import TrainError
from align.train._gradients import global_norm
from align.train._ranks import Ranks


class InBackward(torch.optim.Optimizer):
    """Several optimizers, one for each part of a model, as one. A part is stepped by the hook of its last gradient.

    No gradient outlives its block, so that the memory of a step is that of the weights, the states, the activations and one block's
    gradients. `step` is then only the report of what the backward did. The state is that of one optimizer over all parameters in the same
    two groups, so a run may be resumed with and without `in_backward`.
    """

    def __init__(
        self,
        parts: list[list[tuple[str, nn.Parameter]]],
        groups: list[dict[str, Any]],
        make: Callable[[list[tuple[str, nn.Parameter]]], Any],
        ranks: Ranks,
    ) -> None:
        """parts: named parameters that are stepped together. groups: all of them, as one optimizer would group them. make: makes the
        optimizer of some of them, grouped in the same way."""
        super().__init__(groups, {"lr": 0.0})
        self._ranks = ranks
        self._parts = [make(part) for part in parts]
        self._squares: list[Tensor | float] = []
        self._waiting = [len(part) for part in parts]
        for number, part in enumerate(parts):
            for _, parameter in part:
                parameter.register_post_accumulate_grad_hook(self._hook(number, len(part)))  # type: ignore[no-untyped-call]

    def _hook(self, number: int, size: int) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            self._waiting[number] -= 1
            if self._waiting[number] == 0:
                self._waiting[number] = size
                self._step_part(self._parts[number])

        return arrived

    def _step_part(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.param_groups[0]["lr"]  # one rate for all
        if isinstance(optimizer, AdamW8bit):
            norm = optimizer.step()
        else:
            norm = global_norm([p for group in optimizer.param_groups for p in group["params"]], self._ranks)
            if math.isfinite(norm):
                optimizer.step()
        if not math.isfinite(norm):
            raise TrainError(
                "a gradient is not finite, and optimizer.in_backward has stepped other blocks already, so the step can't be skipped; "
                "resume from the last checkpoint, without optimizer.in_backward if it happens again"
            )
        self._squares.append(norm * norm)
        optimizer.zero_grad(set_to_none=True)

    def step(self, closure: Callable[[], float] | None = None) -> float:  # type: ignore[override]
        """The gradient norm of the backward that has just stepped everything."""
        norm = math.sqrt(sum(float(square) for square in self._squares))
        self._squares.clear()
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing is left to clear."""

    def state_dict(self) -> dict[str, Any]:
        """As one optimizer's over all parameters, keyed by their names."""
        entries: dict[str, Any] = {}
        rest: dict[str, Any] = {}
        for optimizer in self._parts:
            state = optimizer.state_dict()
            names = _names(optimizer)
            keys = [key for group in state["param_groups"] for key in group["params"]]
            entries |= {name: state["state"][key] for name, key in zip(names, keys, strict=True) if key in state["state"]}
            rest = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
            hyper = {key: value for key, value in state["param_groups"][0].items() if key not in ("params", "param_names")}
        groups = [{"params": list(group["param_names"]), **hyper, "weight_decay": group["weight_decay"]} for group in self.param_groups]
        order = [name for group in self.param_groups for name in group["param_names"]]
        return {**rest, "state": {name: entries[name] for name in order if name in entries}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict` gave."""
        for optimizer in self._parts:
            own, names = optimizer.state_dict(), _names(optimizer)
            keys = [key for group in own["param_groups"] for key in group["params"]]
            state = {key: state_dict["state"][name] for name, key in zip(names, keys, strict=True) if name in state_dict["state"]}
            rest = {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}
            optimizer.load_state_dict({**own, **rest, "state": state})


def _names(optimizer: Any) -> list[str]:
    return [name for group in optimizer.param_groups for name in group["param_names"]]
