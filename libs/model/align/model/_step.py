"""Stepper: the cached forward for one token a row, stripped for speed. Sampling spends its time here."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from align.model._cache import KVCache
from align.model._decoder import Block, Decoder, RMSNorm
from torch import Tensor, nn

# Weights that read the same input are joined into one matrix up to this many elements: below it a step waits for the calls of operators,
# above it for the weights themselves.
_JOIN_BELOW = 1 << 20

_Linear = tuple[Tensor, Tensor | None]  # weight, bias


class _Norm(NamedTuple):
    weight: Tensor
    eps: Tensor  # 0-d: elementwise operations take it faster than a number


class _Layer(NamedTuple):
    """One block, looked up once."""

    before_attention: _Norm
    qkv: list[_Linear]
    q_norm: _Norm | None
    k_norm: _Norm | None
    out: _Linear
    before_mlp: _Norm
    gate_up: list[_Linear]
    down: _Linear
    window: int | None
    keys: Tensor  # (B, S, Hkv * Dh)
    values: Tensor


class Stepper:
    """Computes what `Decoder.forward` with a cache and T = 1 does, in a fraction of the time where the model is small.

    Small weights are copied once into joined matrices, so a Stepper belongs to the weights as they were when it was made: after a training
    step, make a new one. For `torch.inference_mode`. The key heads of a row are handled by one product, each query padded by zeros to all
    of them, so that a row is one matrix.
    """

    def __init__(self, model: Decoder, cache: KVCache) -> None:
        """cache: from `model.new_cache`; a call steps its first n rows."""
        config, device, dtype = model.config, cache.k.device, cache.k.dtype
        batch, room = cache.k.shape[1:3]
        self._embedding = model.model.embed_tokens.weight
        self._heads, self._kv_heads, self._head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._layers = [_layer(block, cache, index) for index, block in enumerate(model.model.layers)]
        self._last_norm = _norm_of(model.model.norm)
        self._queries = torch.zeros(batch, self._heads, self._kv_heads * self._head_dim, device=device, dtype=dtype)
        group = self._heads // self._kv_heads
        # (B, group, Dh, Hkv): where a padded query is not padding.
        self._own = self._queries.view(batch, self._kv_heads, group, self._kv_heads, self._head_dim).diagonal(0, 1, 3)
        self._at = torch.arange(room, device=device)
        self._first_slot = torch.arange(batch, device=device) * room
        self._masks = {window: _mask_table(room, window, self._queries) for window in {layer.window for layer in self._layers}}
        cos, sin = model._angles(self._at[None], room, self._embedding)  # (1, S, 1, Dh) each; the first half of sin is negated
        self._cos, self._sin = cos[0], sin[0]

    def __call__(self, tokens: Tensor, positions: Tensor, bound: int) -> Tensor:
        """Hidden states after the last norm, (n, D), of the tokens (n,) int64 that rows 0 .. n - 1 have at `positions` (n,) int64.

        bound: above every position; keys from there on are not looked at. Writes keys and values to the cache.
        """
        bound = min(-(-bound // 8) * 8, self._at.shape[0])  # whole vectors: a little more to read, less to compute
        hidden = self._embedding.index_select(0, tokens)
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        slots = self._first_slot[: tokens.shape[0]] + positions
        from_end = self._at.shape[0] - 1 - positions
        masks = {window: table[:, :bound].index_select(0, from_end).unsqueeze(1) for window, table in self._masks.items()}  # (n, 1, bound)
        for layer in self._layers:
            projected = _project(_normed(hidden, layer.before_attention), layer.qkv)
            mixed = self._attend(layer, projected, cos, sin, slots, masks[layer.window], bound)
            hidden = _add_projected(hidden, mixed, layer.out)
            gate, up = _project(_normed(hidden, layer.before_mlp), layer.gate_up).chunk(2, -1)
            hidden = _add_projected(hidden, F.silu(gate).mul_(up), layer.down)
        return _normed(hidden, self._last_norm)

    def _attend(self, layer: _Layer, projected: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, mask: Tensor, bound: int) -> Tensor:
        n, heads, kv_heads, dim = projected.shape[0], self._heads, self._kv_heads, self._head_dim
        turning, half = heads + kv_heads, dim // 2
        qk = projected[:, : turning * dim].view(n, turning, dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = torch.cat((_normed(qk[:, :heads], layer.q_norm), _normed(qk[:, heads:], layer.k_norm)), 1)
        turned = qk * cos
        turned[..., :half].addcmul_(qk[..., half:], sin[..., :half])
        turned[..., half:].addcmul_(qk[..., :half], sin[..., half:])
        layer.keys.view(-1, kv_heads * dim).index_copy_(0, slots, turned.view(n, -1)[:, heads * dim :])
        layer.values.view(-1, kv_heads * dim).index_copy_(0, slots, projected[:, turning * dim :])
        self._own[:n].copy_(turned[:, :heads].view(n, kv_heads, -1, dim).permute(0, 2, 3, 1))
        scores = torch.baddbmm(mask, self._queries[:n], layer.keys[:n, :bound].transpose(1, 2), alpha=dim**-0.5)  # (n, H, bound)
        mixed = torch.bmm(torch.softmax(scores, -1), layer.values[:n, :bound])  # (n, H, Hkv * Dh), of which a head wants its own part
        return mixed.view(n, kv_heads, -1, kv_heads, dim).diagonal(0, 1, 3).permute(0, 3, 1, 2).reshape(n, heads * dim)


def _layer(block: Block, cache: KVCache, index: int) -> _Layer:
    attention, mlp = block.self_attn, block.mlp
    return _Layer(
        before_attention=_norm_of(block.input_layernorm),
        qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm=None if attention.q_norm is None else _norm_of(attention.q_norm),
        k_norm=None if attention.k_norm is None else _norm_of(attention.k_norm),
        out=(attention.o_proj.weight, attention.o_proj.bias),
        before_mlp=_norm_of(block.post_attention_layernorm),
        gate_up=_joined(mlp.gate_proj, mlp.up_proj),
        down=(mlp.down_proj.weight, mlp.down_proj.bias),
        window=attention.window,
        keys=cache.k[index].flatten(2),
        values=cache.v[index].flatten(2),
    )


def _mask_table(room: int, window: int | None, like: Tensor) -> Tensor:
    """(S, S), a view of 2 S numbers: row S - 1 - p holds 0 where a query at position p may look, -inf elsewhere."""
    closed = like.new_full((2 * room,), float("-inf"))
    closed[max(0, room - (window or room)) : room] = 0
    return closed.unfold(0, room, 1)


def _norm_of(norm: RMSNorm) -> _Norm:
    return _Norm(norm.weight, torch.tensor(norm.eps, device=norm.weight.device))


def _joined(*linears: nn.Linear) -> list[_Linear]:
    """Weight and bias of each, or of all in one."""
    parts: list[_Linear] = [(linear.weight, linear.bias) for linear in linears]
    if sum(weight.numel() for weight, _ in parts) > _JOIN_BELOW:
        return parts
    biases = [bias for _, bias in parts if bias is not None]
    return [(torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None)]


def _project(x: Tensor, parts: list[_Linear]) -> Tensor:
    if len(parts) == 1:
        return F.linear(x, *parts[0])
    return torch.cat([F.linear(x, weight, bias) for weight, bias in parts], -1)


def _add_projected(hidden: Tensor, x: Tensor, linear: _Linear) -> Tensor:
    weight, bias = linear
    out = torch.addmm(hidden, x, weight.t())
    return out if bias is None else out.add_(bias)


def _normed(x: Tensor, norm: _Norm) -> Tensor:
    """What RMSNorm computes, in fewer operations."""
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(norm.eps, length, length, value=1 / x.shape[-1]).rsqrt_()
    return (wide * scale).mul_(norm.weight).to(x.dtype)
