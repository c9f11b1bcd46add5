"""Blocks on a GPU: align.kernels' operations, one pass over memory where torch makes several; one product for weights that are neighbours.

The same function as the plain blocks' to rounding (norm, rotation and activation are rounded once, the tables of the rotation not at all).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from align import kernels
from align.model._attention import Context, attend
from align.model._errors import ModelError

if TYPE_CHECKING:
    from align.model._decoder import Block, Decoder


class Fused(NamedTuple):
    """What a fused block takes besides the residual stream and the tables of the rotation."""

    branch: Tensor | None  # (B, T, D), what the block before adds to the residual; None: it was added, or there is no block before
    rows: Tensor | None  # (B, T) int64, each token's row of the tables; None: they have a row a token
    qkv: Tensor | None  # the joint weight of queries, keys and values where theirs are neighbours in memory
    gate_up: Tensor | None


def wanted(self: Decoder, hidden: Tensor) -> bool:
    """Whether a forward without a cache takes this way; `invariant`, which is this way with other products, always does."""
    return self.fused and hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16, torch.float32)


class _JointLinear(torch.autograd.Function):
    """x · jointᵀ, where `joint` is the memory of several weights, whose gradients are made side by side as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, joint: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, joint)
        ctx.rows = [weight.shape[0] for weight in weights]
        return F.linear(x, joint)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, joint = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        dx = (flat @ joint).view(x.shape) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return dx, None, *(None for _ in ctx.rows)
        return dx, None, *(flat.t() @ x.flatten(0, -2)).split_with_sizes(ctx.rows)


def block(self: Block, residual: Tensor, cos: Tensor, sin: Tensor, context: Context, fused: Fused) -> tuple[Tensor, Tensor]:
    """(the residual stream without this block's MLP, what its MLP adds to it), both (B, T, D)."""
    norm = self.input_layernorm
    if fused.branch is None:
        normed = kernels.rms_norm(residual, norm.weight, norm.eps)
    else:
        normed, residual = kernels.add_rms_norm(fused.branch, residual, norm.weight, norm.eps)
    linear = _invariant if context.impl == "invariant" else _call
    q, k, v = _queries_keys_values(self.self_attn, normed, cos, sin, fused, linear)
    mixed = linear(self.self_attn.o_proj, attend(q, k, v, context, self.self_attn.layer, self.self_attn.window))
    norm, mlp = self.post_attention_layernorm, self.mlp
    normed, residual = kernels.add_rms_norm(mixed, residual, norm.weight, norm.eps)
    if fused.gate_up is None:
        inner = kernels.swiglu(linear(mlp.gate_proj, normed), linear(mlp.up_proj, normed))
    else:
        inner = kernels.swiglu_packed(_joint(normed, fused.gate_up, mlp.gate_proj, mlp.up_proj))
    return residual, linear(mlp.down_proj, inner)


def _call(linear: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = linear(x)
    return out


def _invariant(linear: nn.Module, x: Tensor) -> Tensor:
    """The layer's product in an order that does not depend on the batch."""
    if not isinstance(linear, nn.Linear):
        raise ModelError(f"forward_impl 'invariant' has no product for a {type(linear).__name__}; merge the adapter into the weights")
    return kernels.invariant_linear(x, linear.weight, linear.bias)


def _joint(x: Tensor, joint: Tensor, *linears: nn.Module) -> Tensor:
    out: Tensor = _JointLinear.apply(x, joint, *(linear.weight for linear in linears))  # type: ignore[no-untyped-call]
    return out


def _queries_keys_values(
    self: Any, x: Tensor, cos: Tensor, sin: Tensor, fused: Fused, linear: Callable[[nn.Module, Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, H, Dh) and twice (B, T, Hkv, Dh), rotated; `self` is the block's Attention."""
    dim = self.head_dim
    if fused.qkv is not None:
        qkv = _joint(x, fused.qkv, self.q_proj, self.k_proj, self.v_proj)
        heads, kv_heads = (linear.weight.shape[0] // dim for linear in (self.q_proj, self.k_proj))
        if self.q_norm is None:
            return kernels.rope_qkv(qkv, cos, sin, fused.rows, heads=heads, kv_heads=kv_heads)
        q, k, v = qkv.view(*qkv.shape[:-1], -1, dim).split_with_sizes((heads, kv_heads, kv_heads), -2)
    else:
        q, k, v = (linear(part, x).unflatten(-1, (-1, dim)) for part in (self.q_proj, self.k_proj, self.v_proj))
    if self.q_norm is not None and linear is _invariant:
        q, k = (kernels.rms_norm(heads, norm.weight, norm.eps) for heads, norm in ((q, self.q_norm), (k, self.k_norm)))
    elif self.q_norm is not None:
        q, k = self.q_norm(q), self.k_norm(k)
    return *kernels.rope(q, k, cos, sin, fused.rows), v


def hidden_states(self: Decoder, embedded: Tensor, positions: Tensor | None, context: Context) -> Tensor:
    """What follows the embedding: all blocks and the last norm; (B, T, D) like `embedded`.

    A block hands on the residual stream and what is still to be added to it, so that the sum is made in the norm that reads it. Where the
    backward computes a block again its input is kept, and one tensor is less than two: the sum is made before it.
    """
    cos, sin, rows = _tables(self, embedded, positions)
    residual, branch = embedded, None
    for number, layer in enumerate(self.model.layers):
        weights = (None if context.impl == "invariant" else neighbours(linears) for linears in projections(layer))
        if self._recomputes(number):
            joined = residual if branch is None else residual + branch
            more = Fused(None, rows, *weights)
            # Nothing in a block is random, so no generator's state need be kept.
            residual, branch = checkpoint(layer, joined, cos, sin, context, more, use_reentrant=False, preserve_rng_state=False)
        else:
            residual, branch = layer(residual, cos, sin, context, Fused(branch, rows, *weights))
    norm = self.model.norm
    if branch is None:
        return kernels.rms_norm(residual, norm.weight, norm.eps)
    return kernels.add_rms_norm(branch, residual, norm.weight, norm.eps)[0]


def _tables(self: Decoder, hidden: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cosine and sine, fp32: of 0 .. T - 1 with each token's row, or where positions are given of each token, (B * T, Dh / 2)."""
    batch, length = hidden.shape[:2]
    rows = None
    if positions is None:
        positions = torch.arange(length, device=hidden.device)
        rows = positions.repeat(batch).view(batch, length)
    else:
        positions = positions.expand(batch, length).flatten()
    angle = positions.to(torch.float32)[:, None] * self._frequencies.to(hidden.device)
    return angle.cos() * self._rope_factor, angle.sin() * self._rope_factor, rows


def projections(layer: Any) -> tuple[list[Any], list[Any]]:
    """The linear layers of a block that read the same input."""
    attention, mlp = layer.self_attn, layer.mlp
    return [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]


def neighbours(linears: Sequence[Any]) -> Tensor | None:
    """One tensor whose rows are those of the layers' weights, if these lie one after another in one storage; else, or with biases, None."""
    return _together([linear.weight for linear in linears]) if all(map(_plain, linears)) else None


def _together(tensors: Sequence[Tensor]) -> Tensor | None:
    """One tensor with the rows of these, if they lie so."""
    first, end = tensors[0], tensors[0].storage_offset()
    memory = first.untyped_storage().data_ptr()
    for tensor in tensors:
        if tensor.untyped_storage().data_ptr() != memory or tensor.storage_offset() != end or not tensor.is_contiguous():
            return None
        end += tensor.numel()
    rows = sum(tensor.shape[0] for tensor in tensors)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _plain(linear: Any) -> bool:
    """Whether it is a linear layer without bias, whole on this device: no adapter, no shard."""
    return isinstance(linear, nn.Linear) and linear.bias is None and not hasattr(linear.weight, "to_local")


@torch.no_grad()
def side_by_side(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor (the sum of n_i, ...) with the rows of the parameters (n_i, ...): their own memory. Where they do not lie one after
    another they are moved there; they stay parameters with the same values.

    What a parameter's `.data` was before is no longer its memory then, so call this before anything holds on to that. A later `.to`
    undoes it.
    """
    found = _together(parameters)
    if found is not None:
        return found
    with torch.inference_mode(False):
        joint, start = torch.cat([parameter.detach() for parameter in parameters]), 0
    for parameter in parameters:
        parameter.data = joint[start : start + parameter.shape[0]]
        start += parameter.shape[0]
    return joint


def lay_side_by_side(model: Decoder) -> None:
    """`side_by_side` for the weights that read the same input, a block at a time; those with biases, adapters or shards stay."""
    for layer in model.blocks:
        for linears in projections(layer):
            if all(map(_plain, linears)):
                side_by_side([linear.weight for linear in linears])
