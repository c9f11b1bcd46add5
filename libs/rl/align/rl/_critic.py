"""The value function of PPO: low-rank additions and a scalar head over the policy's own trunk, of which there is one copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from align.model import Decoder, pick_forward_impl
from align.rl._errors import RlError
from align.rl._forward import row_hidden


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value function."""

    rank: Annotated[int, "of its additions to the trunk's linear layers"] = 8
    alpha: Annotated[float, "they are scaled by alpha / rank"] = 16.0
    targets: Annotated[list[str], "which linear layers, by their last name"] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    clip: Annotated[float | None, "a value may not move further than this from its old one in one batch; none: no clip"] = 0.2
    coefficient: Annotated[float, "weight of the value loss"] = 1.0
    gamma: Annotated[float, "discount; must be 1: the rewards of an answer are worth the same wherever they stand"] = 1.0
    lam: Annotated[float, "λ of the generalised advantage estimate"] = 0.95
    whiten: Annotated[bool, "advantages get mean 0 and variance 1 over the batch"] = True


def check_critic(config: CriticConfig) -> None:
    """Raises RlError, naming the field."""
    if config.gamma != 1.0:
        raise RlError(f"critic.gamma is {config.gamma}; it must be 1: step rewards are not discounted by the tokens between them")
    for name, value, fits, range_ in (
        ("rank", config.rank, 1 <= config.rank <= 2**16, "from 1 to 65536"),
        ("alpha", config.alpha, config.alpha > 0, "above 0"),
        ("clip", config.clip, config.clip is None or config.clip > 0, "above 0, or none"),
        ("coefficient", config.coefficient, config.coefficient > 0, "above 0"),
        ("lam", config.lam, 0 <= config.lam <= 1, "from 0 to 1"),
    ):
        if not fits:
            raise RlError(f"critic.{name} is {value}; it must be {range_}")


class Critic(nn.Module):
    """V(prompt, answer so far). Its own parameters are the additions (B starts at 0) and a head that starts at 0: the first value is 0.

    The additions act only inside of `values`; there the trunk's weights are constants. Everything is fp32.
    """

    def __init__(self, model: Decoder, config: CriticConfig, *, seed: int) -> None:
        """The additions start from the seed alone. Raises RlError: a target that no linear layer is named."""
        super().__init__()
        check_critic(config)
        self._model, self._on, self._scaling = (model,), False, config.alpha / config.rank
        device = model.output_weight.device
        generator = torch.Generator().manual_seed(seed)
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        found = set()
        for name, module in model.named_modules():
            last = name.rpartition(".")[2]
            if last in config.targets and hasattr(module, "in_features"):
                inputs, outputs, key = int(module.in_features), int(module.out_features), name.replace(".", "_")
                bound = 1 / math.sqrt(inputs)
                start = torch.empty(config.rank, inputs).uniform_(-bound, bound, generator=generator).to(device)
                self.down[key], self.up[key] = (
                    nn.Parameter(start.to(device)),
                    nn.Parameter(torch.zeros(outputs, config.rank, device=device)),
                )
                module.register_forward_hook(self._addition(key))
                found.add(last)
        if missing := sorted(set(config.targets) - found):
            raise RlError(f"critic.targets names {missing[0]}, which is no linear layer of the model")
        self.weight = nn.Parameter(torch.zeros(model.config.hidden_size, device=device))
        self.bias = nn.Parameter(torch.zeros((), device=device))

    def values(self, batch: Mapping[str, Tensor]) -> Tensor:
        """(B, T): the value before the token that each position predicts, of right-padded rows."""
        with self._active():
            hidden = row_hidden(self._model[0], batch, forward_impl=pick_forward_impl())
        return hidden.float() @ self.weight + self.bias

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """For the time of a loss and its backward: additions on (also where a block is computed again), the trunk constant."""
        with self._active():
            yield

    @contextmanager
    def _active(self) -> Iterator[None]:
        if self._on:
            yield
            return
        trained: list[nn.Parameter] = []
        if torch.is_grad_enabled():
            self._give_up()
            trained = [parameter for parameter in self._model[0].parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        self._on = True
        try:
            yield
        finally:
            self._on = False
            if trained:
                self._give_up()
            for parameter in trained:
                parameter.requires_grad_(True)

    def _give_up(self) -> None:
        """Of a trunk that FSDP2 shards: parameters are the shards from here on, and what is gathered next takes their requires_grad."""
        for module in self._model[0].modules():
            reshard = getattr(module, "reshard", None)
            if reshard is not None:
                reshard()

    def _addition(self, key: str) -> Callable[[nn.Module, Sequence[Any], Tensor], Tensor | None]:
        def add(module: nn.Module, args: Sequence[Any], out: Tensor) -> Tensor | None:
            if not self._on:
                return None
            low = F.linear(args[0].float(), self.down[key])
            return out + (F.linear(low, self.up[key]) * self._scaling).to(out.dtype)

        return add
