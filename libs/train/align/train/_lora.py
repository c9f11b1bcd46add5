"""LoRA (Hu et al. 2021, arXiv:2106.09685): low-rank additions to frozen linear layers, with PEFT's adapter files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from align.train._config import LoraConfig
from align.train._errors import TrainError

PREFIX = "base_model.model."  # of PEFT's names


class LoraLinear(nn.Module):
    """x Wᵀ + b + (x Aᵀ) Bᵀ · alpha / rank. W and b are the linear layer's own parameters, frozen, under their own names.

    A (rank, in) and B (out, rank) are fp32. x meets A in x's dtype, so that nothing but the base's own input is kept for the backward; the
    rest is computed in fp32. B is 0 at first, and then the layer is the base, bit for bit.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        device = base.weight.device
        bound = 1 / math.sqrt(base.in_features)  # nn.Linear's own initialisation, as PEFT's
        start = torch.empty(rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(start.to(device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, device=device))
        self.scaling = alpha / rank

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        out = F.linear(x, self.weight, self.bias)
        low: Tensor = F.linear(x, self.lora_A.to(x.dtype)).float()
        return out + (F.linear(low, self.lora_B) * self.scaling).to(out.dtype)

    def merged(self) -> Tensor:
        """W + B A · alpha / rank in W's dtype; of a sharded W all ranks must ask together."""
        weight: Any = self.weight.detach()
        full: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        return (full.float() + (self.lora_B.detach() @ self.lora_A.detach()) * self.scaling).to(full.dtype)


def add_lora(model: nn.Module, config: LoraConfig, seed: int) -> None:
    """Freezes the model and puts a LoraLinear in the place of every linear layer whose last name is one of `config.targets`.

    Raises:
        TrainError: a target that no layer is named.
    """
    if lora_layers(model):
        return
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    found = set()
    for name, module in list(model.named_modules()):
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and last in config.targets:
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, last, LoraLinear(module, config.rank, config.alpha, generator))
            found.add(last)
    if missing := sorted(set(config.targets) - found):
        linear = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear | LoraLinear)})
        raise TrainError(f"lora.targets names {missing[0]}, which is no linear layer of the model; it has {', '.join(linear)}")


def lora_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """The layers with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def lora_parameters(model: nn.Module) -> list[nn.Parameter]:
    """A and B of every layer, in the model's order."""
    return [parameter for layer in lora_layers(model).values() for parameter in (layer.lora_A, layer.lora_B)]


def base_names(model: nn.Module) -> Iterator[str]:
    """The names of the model's own weights, without the adapter's."""
    return (name for name in model.state_dict() if not name.endswith((".lora_A", ".lora_B")))


def merged_weights(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """For every weight of the model a function that gives it with the adapter merged into it."""
    state: Mapping[str, Any] = model.state_dict()
    layers = {f"{name}.weight": layer for name, layer in lora_layers(model).items()}

    def plain(tensor: Any) -> Callable[[], Tensor]:
        return lambda: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    return {name: layers[name].merged if name in layers else plain(state[name]) for name in base_names(model)}


def adapter_config(config: LoraConfig) -> dict[str, Any]:
    """PEFT's adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base_name,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": list(config.targets),
        "modules_to_save": None,
    }


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """PEFT's adapter_model.safetensors."""
    return {
        f"{PREFIX}{name}.lora_{kind}.weight": getattr(layer, f"lora_{kind}").detach()
        for name, layer in lora_layers(model).items()
        for kind in "AB"
    }


@torch.no_grad()
def load_adapter(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies PEFT's tensors into the model's adapter: lora_A (rank, inputs) and lora_B (outputs, rank) of each layer, by PEFT's names.

    Raises:
        TrainError: the adapter is of other layers or another rank.
    """
    own = adapter_tensors(model)
    if odd := sorted(set(own) ^ set(tensors)):
        raise TrainError(f"the adapter {'lacks' if odd[0] in own else 'has'} {odd[0]} ({len(odd)} such); set lora.targets as it was")
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise TrainError(f"{name} is {tuple(tensors[name].shape)} in the adapter and {tuple(tensor.shape)} here; set lora.rank to that")
        tensor.copy_(tensors[name])


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """Puts plain linear layers with the merged weights back; what was frozen stays frozen. Not for sharded models."""
    for name, layer in lora_layers(model).items():
        linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        linear.weight, linear.bias = layer.weight, layer.bias
        linear.weight.copy_(layer.merged())
        setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], linear)


def sum_replicated(parameters: Sequence[nn.Parameter], world: int) -> None:
    """Sums the gradients of replicated parameters over all ranks, in one flat all-reduce; where one has none, it counts as 0."""
    if world == 1 or not parameters:
        return
    import torch.distributed as dist

    flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)
    for parameter, part in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
