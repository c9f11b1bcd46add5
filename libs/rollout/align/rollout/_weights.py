"""The weights of a decoding step, those that read one input side by side in memory, so that one product serves them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from align.model import Decoder, side_by_side
from align.rollout._sampling import RolloutError


class Layer(NamedTuple):
    """One block. Weights (out, in), biases (out,) or None."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    window: int | None


def layers_of(model: Decoder) -> list[Layer]:
    """The model's blocks. Its query, key and value weights, and its gate and up weights, become neighbours in memory: still its parameters,
    with the same values, and a training step on them is seen here.

    Raises:
        RolloutError: a layer that is not a plain linear one, whose weight alone would be half the truth.
    """
    return [_layer(block, number) for number, block in enumerate(model.blocks)]


def _layer(block: Any, number: int) -> Layer:
    attention, mlp = block.self_attn, block.mlp
    for name, module in (*attention.named_children(), *mlp.named_children()):
        if name.endswith("_proj") and not isinstance(module, nn.Linear):
            raise RolloutError(f"layer {number} has a {type(module).__name__} as {name}; merge the adapter into the weights to sample")
    qkv, qkv_bias = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up, gate_up_bias = _joined(mlp.gate_proj, mlp.up_proj)
    return Layer(
        attention_norm=block.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=qkv_bias,
        q_norm=None if attention.q_norm is None else attention.q_norm.weight,
        k_norm=None if attention.k_norm is None else attention.k_norm.weight,
        out=attention.o_proj.weight,
        out_bias=attention.o_proj.bias,
        mlp_norm=block.post_attention_layernorm.weight,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=mlp.down_proj.weight,
        down_bias=mlp.down_proj.bias,
        window=attention.window,
    )


def _joined(*linears: Any) -> tuple[Tensor, Tensor | None]:
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return side_by_side([linear.weight for linear in linears]), side_by_side(biases) if biases else None


def addresses(model: Decoder) -> tuple[int, ...]:
    """Where the parameters lie: a captured graph knows them by that."""
    return tuple(parameter.data_ptr() for parameter in model.parameters())
