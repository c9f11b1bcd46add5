"""Stepper: the cached forward for one token a row, stripped for speed. Sampling spends its time here."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from align.model._cache import KVCache
from align.model._decoder import Block, Decoder, RMSNorm

# Weights that read the same input are joined into one matrix up to this many elements: below it a step waits for the calls of operators,
# above it for the weights themselves.
_JOIN_BELOW = 1 << 20

_Linear = tuple[Tensor, Tensor | None]  # transposed weight (in, out), bias


class _Norm(NamedTuple):
    weight: Tensor
    eps: Tensor  # 0-d, in the dtype to compute in: elementwise operations take it faster than a number


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
    keys: Tensor  # (B * S, Hkv * Dh), as `values`
    values: Tensor


class _Views(NamedTuple):
    """Buffers of a step with n rows, cut as the operations want them: in a small model, cutting would take as long as computing."""

    projected: Tensor  # (n, (H + 2 Hkv) * Dh): queries, keys, values
    queries: Tensor  # (n, H, Dh) of it
    keys: Tensor  # (n, Hkv, Dh) of it
    unturned: tuple[Tensor, Tensor, Tensor]  # queries and keys, (n, H + Hkv, Dh), and its halves
    values: Tensor  # (n, Hkv * Dh) of it
    turned: tuple[Tensor, Tensor, Tensor]  # queries and keys with their positions, and their halves
    turned_queries: Tensor  # (n, H / Hkv, Dh, Hkv) of it
    turned_keys: Tensor  # (n, Hkv * Dh) of it
    padded: Tensor  # (n, H, Hkv * Dh): each query in the place of its key head, 0 elsewhere
    own: Tensor  # (n, H / Hkv, Dh, Hkv) of it: where it is not padding
    mixed: Tensor  # (n, H, Hkv * Dh): attention's result, of which each head wants its own part,
    mixed_own: Tensor  # (n, Hkv, H / Hkv, Dh)
    heads: Tensor  # (n, H * Dh): these parts together
    heads_apart: Tensor  # (n, Hkv, H / Hkv, Dh)
    gate_up: Tensor  # (n, 2 F)
    gate: Tensor
    up: Tensor
    first_slot: Tensor  # (n,)


class Stepper:
    """Computes what `Decoder.forward` with a cache and T = 1 does, in a fraction of the time where the model is small.

    Small weights are copied once into joined matrices, so a Stepper belongs to the weights as they were when it was made: after a training
    step, make a new one. For `torch.inference_mode`. The key heads of a row are handled by one product, each query padded by zeros to all
    of them, so that a row is one matrix.
    """

    def __init__(self, model: Decoder, cache: KVCache) -> None:
        """cache: from `model.new_cache`; a call steps its first n rows."""
        config, device, dtype = model.config, cache.k.device, cache.k.dtype
        self._batch, self._room = cache.k.shape[1:3]
        self._embedding = model.model.embed_tokens.weight
        self._heads, self._kv_heads, self._head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._layers = [_layer(block, cache, index) for index, block in enumerate(model.model.layers)]
        self._last_norm = _norm_of(model.model.norm)
        wide = self._kv_heads * self._head_dim
        sizes = {
            "projected": self._heads * self._head_dim + 2 * wide,
            "turned": self._heads * self._head_dim + wide,
            "padded": self._heads * wide,
            "mixed": self._heads * wide,
            "heads": self._heads * self._head_dim,
            "gate_up": 2 * config.intermediate_size,
        }
        self._buffers = {name: torch.zeros(self._batch, size, device=device, dtype=dtype) for name, size in sizes.items()}
        self._views: dict[int, _Views] = {}
        self._cached: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        self._first_slot = torch.arange(self._batch, device=device) * self._room
        cos, sin = model._angles(torch.arange(self._room, device=device)[None], self._room, self._embedding)  # (1, S, 1, Dh) each
        self._cos, self._sin = cos[0], sin[0, ..., self._head_dim // 2 :].contiguous()
        self._masks = {layer.window: _mask_table(self._room, layer.window, self._embedding) for layer in self._layers}

    def __call__(self, tokens: Tensor, positions: Tensor, bound: int) -> Tensor:
        """Hidden states after the last norm, (n, D), of the tokens (n,) int64 that rows 0 .. n - 1 have at `positions` (n,) int64.

        bound: above every position whose result matters; keys from there on are not looked at. Writes keys and values to the cache.
        An n and a bound that were used before are a little faster.
        """
        n, bound = tokens.shape[0], min(-(-bound // 8) * 8, self._room)  # whole vectors: a little more to read, less to compute
        views, cached = self._views_of(n), self._cached_of(n, bound)
        hidden = self._embedding.index_select(0, tokens)
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        slots, from_end = views.first_slot + positions, self._room - 1 - positions
        masks = {window: table[:, :bound].index_select(0, from_end).unsqueeze(1) for window, table in self._masks.items()}  # (n, 1, bound)
        for layer, (keys, values) in zip(self._layers, cached, strict=True):
            _project(_normed(hidden, layer.before_attention), layer.qkv, views.projected)
            self._attend(layer, views, cos, sin, slots, masks[layer.window], keys, values)
            hidden = _add_projected(hidden, views.heads, layer.out)
            _project(_normed(hidden, layer.before_mlp), layer.gate_up, views.gate_up)
            hidden = _add_projected(hidden, F.silu(views.gate).mul_(views.up), layer.down)
        return _normed(hidden, self._last_norm)

    def _attend(
        self, layer: _Layer, views: _Views, cos: Tensor, sin: Tensor, slots: Tensor, mask: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """From `views.projected` to `views.heads`."""
        if layer.q_norm is not None and layer.k_norm is not None:
            views.queries.copy_(_normed(views.queries, layer.q_norm))
            views.keys.copy_(_normed(views.keys, layer.k_norm))
        (whole, low, high), (turned, turned_low, turned_high) = views.unturned, views.turned
        torch.mul(whole, cos, out=turned)
        turned_low.addcmul_(high, sin, value=-1)
        turned_high.addcmul_(low, sin)
        layer.keys.index_copy_(0, slots, views.turned_keys)
        layer.values.index_copy_(0, slots, views.values)
        views.own.copy_(views.turned_queries)
        scores = torch.baddbmm(mask, views.padded, keys, alpha=self._head_dim**-0.5)  # (n, H, bound)
        torch.bmm(torch.softmax(scores, -1), values, out=views.mixed)
        views.heads_apart.copy_(views.mixed_own)

    def _views_of(self, n: int) -> _Views:
        if n not in self._views:
            heads, kv_heads, dim = self._heads, self._kv_heads, self._head_dim
            projected, turned, padded, mixed, merged, gate_up = (self._buffers[name][:n] for name in self._buffers)
            turning = (heads + kv_heads) * dim
            whole, turned_whole = projected[:, :turning].view(n, -1, dim), turned.view(n, -1, dim)
            apart = (n, kv_heads, -1, kv_heads, dim)
            gate, up = gate_up.chunk(2, -1)
            self._views[n] = _Views(
                projected=projected,
                queries=whole[:, :heads],
                keys=whole[:, heads:],
                unturned=(whole, *whole.chunk(2, -1)),
                values=projected[:, turning:],
                turned=(turned_whole, *turned_whole.chunk(2, -1)),
                turned_queries=turned_whole[:, :heads].unflatten(1, (kv_heads, -1)).permute(0, 2, 3, 1),
                turned_keys=turned[:, heads * dim :],
                padded=padded.view(n, heads, -1),
                own=padded.view(apart).diagonal(0, 1, 3),
                mixed=mixed.view(n, heads, -1),
                mixed_own=mixed.view(apart).diagonal(0, 1, 3).permute(0, 3, 1, 2),
                heads=merged,
                heads_apart=merged.view(n, kv_heads, -1, dim),
                gate_up=gate_up,
                gate=gate,
                up=up,
                first_slot=self._first_slot[:n],
            )
        return self._views[n]

    def _cached_of(self, n: int, bound: int) -> list[tuple[Tensor, Tensor]]:
        """Of each layer the keys (n, Hkv * Dh, bound) and values (n, bound, Hkv * Dh)."""
        if (n, bound) not in self._cached:
            rows = (self._batch, self._room, -1)
            self._cached[n, bound] = [
                (layer.keys.view(rows)[:n, :bound].transpose(1, 2), layer.values.view(rows)[:n, :bound]) for layer in self._layers
            ]
        return self._cached[n, bound]


def _layer(block: Block, cache: KVCache, index: int) -> _Layer:
    attention, mlp = block.self_attn, block.mlp
    return _Layer(
        before_attention=_norm_of(block.input_layernorm),
        qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm=None if attention.q_norm is None else _norm_of(attention.q_norm),
        k_norm=None if attention.k_norm is None else _norm_of(attention.k_norm),
        out=(attention.o_proj.weight.t(), attention.o_proj.bias),
        before_mlp=_norm_of(block.post_attention_layernorm),
        gate_up=_joined(mlp.gate_proj, mlp.up_proj),
        down=(mlp.down_proj.weight.t(), mlp.down_proj.bias),
        window=attention.window,
        keys=cache.k[index].flatten(2).flatten(0, 1),
        values=cache.v[index].flatten(2).flatten(0, 1),
    )


def _mask_table(room: int, window: int | None, like: Tensor) -> Tensor:
    """(S, S), a view of 2 S numbers: row S - 1 - p holds 0 where a query at position p may look, -inf elsewhere."""
    closed = like.new_full((2 * room,), float("-inf"))
    closed[max(0, room - (window or room)) : room] = 0
    return closed.unfold(0, room, 1)


def _norm_of(norm: RMSNorm) -> _Norm:
    dtype = torch.promote_types(norm.weight.dtype, torch.float32)
    return _Norm(norm.weight, torch.tensor(norm.eps, dtype=dtype, device=norm.weight.device))


def _joined(*linears: nn.Linear) -> list[_Linear]:
    """Weight and bias of each, or of all in one."""
    if sum(linear.weight.numel() for linear in linears) > _JOIN_BELOW:
        return [(linear.weight.t(), linear.bias) for linear in linears]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return [(torch.cat([linear.weight for linear in linears]).t(), torch.cat(biases) if biases else None)]


def _project(x: Tensor, parts: list[_Linear], out: Tensor) -> None:
    """x (n, in) times the weights, side by side into out."""
    start = 0
    for weight, bias in parts:
        end = start + weight.shape[1]
        into = out if len(parts) == 1 else out[:, start:end]
        if bias is None:
            torch.mm(x, weight, out=into)
        else:
            torch.addmm(bias, x, weight, out=into)
        start = end


def _add_projected(hidden: Tensor, x: Tensor, linear: _Linear) -> Tensor:
    weight, bias = linear
    out = torch.addmm(hidden, x, weight)
    return out if bias is None else out.add_(bias)


def _normed(x: Tensor, norm: _Norm) -> Tensor:
    """What RMSNorm computes, in fewer operations."""
    wide = x.to(norm.eps.dtype)
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(norm.eps, length, length, value=1 / x.shape[-1]).rsqrt_()
    return (wide * scale).mul_(norm.weight).to(x.dtype)
