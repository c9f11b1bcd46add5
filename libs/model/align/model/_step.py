"""Stepper: the cached forward for one token a row, stripped for speed. What sampling spends its time in."""

import torch
import torch.nn.functional as F
from torch import Tensor

from align.model._cache import KVCache
from align.model._decoder import Attention, Decoder, RMSNorm

# Weights up to this many elements that read the same input are joined into one matrix: below it a step waits for operator calls, above it for the weights.
_JOIN_BELOW = 1 << 20


class Stepper:
    """Computes what `Decoder.forward` with a cache and T = 1 does, in a third of the time where the model is small.

    Small weights are copied once into joined matrices, so a Stepper belongs to the weights as they were when it was made: make a new one after a training step.
    Meant for `torch.inference_mode`; the key heads of a row are handled by one product, with each query padded by zeros to all of them, so that a row is one matrix.
    """

    def __init__(self, model: Decoder, cache: KVCache) -> None:
        """cache: from `model.new_cache`; its first n rows are stepped, n at most its batch."""
        config, device, dtype = model.config, cache.k.device, cache.k.dtype
        self._model, self._cache = model, cache
        self._head_dim, self._heads, self._kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        self._layers = [
            (
                layer,
                _joined(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                _joined(layer.mlp.gate_proj, layer.mlp.up_proj),
                cache.k[index].flatten(2),  # (B, S, Hkv * Dh)
                cache.v[index].flatten(2),
            )
            for index, layer in enumerate(model.model.layers)
        ]
        # (1, H, Hkv, 1): the scale where a query head reads a key head, 0 elsewhere.
        group = self._heads // self._kv_heads
        reads = torch.eye(self._kv_heads, device=device, dtype=dtype).repeat_interleave(group, 0)
        self._reads = (reads * self._head_dim**-0.5).view(1, self._heads, self._kv_heads, 1)
        self._at = torch.arange(cache.max_length, device=device)
        self._first_slot = torch.arange(cache.k.shape[1], device=device) * cache.max_length
        self._open, self._closed = torch.zeros((), device=device, dtype=dtype), torch.full((), float("-inf"), device=device, dtype=dtype)
        self._cos, self._sin = (table[0] for table in model._angles(self._at[None], cache.max_length, model.model.embed_tokens.weight))  # (S, 1, Dh) each

    def __call__(self, tokens: Tensor, positions: Tensor, bound: int) -> Tensor:
        """Hidden states after the last norm, (n, D), of the tokens (n,) int64 that rows 0 .. n - 1 of the cache have at `positions` (n,) int64.

        bound: above every position; keys from there on are not looked at. Writes keys and values to the cache.
        """
        n = tokens.shape[0]
        hidden = self._model.model.embed_tokens(tokens)
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        slots = self._first_slot[:n] + positions
        masks: dict[int | None, Tensor] = {}
        for layer, qkv, gate_up, keys, values in self._layers:
            attention = layer.self_attn
            if attention.window not in masks:
                masks[attention.window] = self._mask(positions, bound, attention.window)
            projected = _project(_norm(hidden, layer.input_layernorm), qkv).view(n, -1, self._head_dim)  # heads: q, then k, then v
            mixed = self._attend(attention, projected, cos, sin, slots, masks[attention.window], keys, values, bound)
            hidden = _add_projected(hidden, mixed, attention.o_proj)
            gate, up = _project(_norm(hidden, layer.post_attention_layernorm), gate_up).chunk(2, -1)
            hidden = _add_projected(hidden, F.silu(gate).mul_(up), layer.mlp.down_proj)
        return _norm(hidden, self._model.model.norm)

    def _attend(
        self, attention: Attention, projected: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, mask: Tensor, keys: Tensor, values: Tensor, bound: int
    ) -> Tensor:  # (n, H * Dh)
        n, heads, kv_heads, dim = projected.shape[0], self._heads, self._kv_heads, self._head_dim
        qk, v = projected[:, : heads + kv_heads], projected[:, heads + kv_heads :]
        if attention.q_norm is not None:
            qk = torch.cat((_norm(qk[:, :heads], attention.q_norm), _norm(qk[:, heads:], attention.k_norm)), 1)
        qk = torch.addcmul(qk * cos, qk.roll(dim // 2, -1), sin)
        keys.view(-1, kv_heads * dim).index_copy_(0, slots, qk[:, heads:].reshape(n, -1))
        values.view(-1, kv_heads * dim).index_copy_(0, slots, v.reshape(n, -1))
        queries = (qk[:, :heads, None] * self._reads).view(n, heads, kv_heads * dim)
        scores = torch.bmm(queries, keys[:n, :bound].transpose(1, 2)).add_(mask)  # (n, H, bound)
        mixed = torch.bmm(torch.softmax(scores, -1), values[:n, :bound])  # (n, H, Hkv * Dh), of which each head wants its own part
        return mixed.view(n, kv_heads, -1, kv_heads, dim).diagonal(0, 1, 3).permute(0, 3, 1, 2).reshape(n, heads * dim)

    def _mask(self, positions: Tensor, bound: int, window: int | None) -> Tensor:
        """0 where a row may look, -inf elsewhere: (n, 1, bound)."""
        at, last = self._at[:bound], positions[:, None]
        seen = at <= last
        if window is not None:
            seen &= at > last - window
        return torch.where(seen, self._open, self._closed).unsqueeze(1)


def _joined(*linears: torch.nn.Linear) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of each, or of all in one."""
    parts = [(linear.weight, linear.bias) for linear in linears]
    if sum(weight.numel() for weight, _ in parts) > _JOIN_BELOW:
        return parts
    biases = [bias for _, bias in parts if bias is not None]
    return [(torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None)]


def _project(x: Tensor, parts: list[tuple[Tensor, Tensor | None]]) -> Tensor:
    outs = [F.linear(x, weight, bias) for weight, bias in parts]
    return outs[0] if len(outs) == 1 else torch.cat(outs, -1)


def _add_projected(hidden: Tensor, x: Tensor, linear: torch.nn.Linear) -> Tensor:
    out = torch.addmm(hidden, x, linear.weight.t())
    return out if linear.bias is None else out.add_(linear.bias)


def _norm(x: Tensor, norm: RMSNorm) -> Tensor:
    """`norm(x)`, in fewer operations."""
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = length.square_().div_(x.shape[-1]).add_(norm.eps).rsqrt_()
    return (wide * scale).mul_(norm.weight).to(x.dtype)
