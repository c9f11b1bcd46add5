"""The model on a paged cache: prompts packed side by side, or one token a row. The operations are those of `align.kernels`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from align import kernels
from align.model import Decoder
from align.rollout._pages import PAGE
from align.rollout._weights import Layer, layers_of

FEW_ROWS = 64  # up to which products cut along their inputs are faster than cuBLAS's


class Cache(NamedTuple):
    """Keys and values of all layers, (layers, pages, Hkv, page, Dh): a tile of one head is one piece of memory."""

    k: Tensor
    v: Tensor

    @classmethod
    def new(cls, model: Decoder, pages: int) -> Cache:
        config, weight = model.config, model.output_weight
        shape = (config.num_hidden_layers, pages, config.num_key_value_heads, PAGE, config.head_dim)
        return cls(*(torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2)))

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as (pages, page, Hkv, Dh)."""
        return self.k[number].transpose(1, 2), self.v[number].transpose(1, 2)


def page_bytes(model: Decoder) -> int:
    config = model.config
    return 2 * config.num_hidden_layers * PAGE * config.num_key_value_heads * config.head_dim * model.output_weight.element_size()


class Forward:
    """Reads the model's parameters in place. `strict`: only operations whose result for a row does not depend on the rest of the batch."""

    def __init__(self, model: Decoder, cache: Cache, rows: int, room: int, *, strict: bool) -> None:
        """rows: the most of a decoding step. room: the most positions of a row."""
        config = model.config
        self._embedding, self._head, self._norm = model.model.embed_tokens.weight, model.output_weight, model.model.norm.weight
        self._layers, self._eps, self._strict = layers_of(model), config.rms_norm_eps, strict
        self._heads, self._kv_heads, self._dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        device = cache.k.device
        self._cached = [cache.layer(number) for number in range(config.num_hidden_layers)]
        cos, sin = model.rope_tables(room)
        self._cos, self._sin = cos.to(device), sin.to(device)
        self._counters = torch.zeros(rows * self._kv_heads, dtype=torch.int32, device=device)

    def decode(self, tokens: Tensor, positions: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        """Logits (n, V) after `tokens` (n,), which rows 0 .. n - 1 have at `positions` (n,); lengths = positions + 1; table (n, pages)."""

        split = not self._strict and 1 < len(tokens) <= FEW_ROWS

        def attend(number: int, layer: Layer, qkv: Tensor) -> Tensor:
            keys, values = self._cached[number]
            bias = layer.qkv_bias if split else None  # else it is in qkv
            if layer.q_norm is not None and layer.k_norm is not None:
                if split:
                    qkv, bias = (qkv.sum(0) if bias is None else qkv.sum(0) + bias).to(keys.dtype), None
                self._norm_heads(qkv, layer.q_norm, layer.k_norm)
            tables, at = (self._cos, self._sin), (keys, values, table)
            window, counters = layer.window, self._counters
            if not self._strict and len(tokens) > 1:
                return kernels.rope_decode_attention(
                    qkv, *tables, lengths, *at, heads=self._heads, bias=bias, window=window, counters=counters, early=True
                ).flatten(1)
            q = kernels.rope_to_cache(qkv, *tables, positions, *at, heads=self._heads, bias=bias, early=True)
            if self._strict:
                return kernels.invariant_decode(q, keys, values, lengths, table, window=window).flatten(1)
            # One row is cut into parts, each of which would turn the query: the two kernels are faster.
            return kernels.decode_attention(q, keys, values, lengths, table, window=window, counters=counters, early=True).flatten(1)

        if not self._strict and len(tokens) == 1:
            return self._one(tokens, attend)
        return self._few(tokens, attend) if split else self.logits(self._run(tokens, attend))

    def prefill(self, tokens: Tensor, positions: Tensor, rows: Tensor, table: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        """Hidden states (T, D) of packed prompts; their keys and values go to the cache.

        tokens, positions, rows: (T,), the last one the row of `table` (n, pages) that a token belongs to. cu_seqlens: (n + 1,) int32.
        """
        pages, slots = table[rows, positions // PAGE].long(), positions % PAGE

        def attend(number: int, layer: Layer, qkv: Tensor) -> Tensor:
            keys, values = self._cached[number]
            if layer.q_norm is not None and layer.k_norm is not None:
                self._norm_heads(qkv, layer.q_norm, layer.k_norm)
            q, k, v = kernels.rope_qkv(qkv, self._cos, self._sin, positions, heads=self._heads, kv_heads=self._kv_heads)
            keys[pages, slots], values[pages, slots] = k, v
            return kernels.invariant_attention(q, k, v, cu_seqlens, longest, window=layer.window).flatten(1)

        return self._run(tokens, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, V) of hidden states (n, D) after the last norm."""
        return self._linear(hidden, self._head, None)

    def _run(self, tokens: Tensor, attend: Callable[[int, Layer, Tensor], Tensor]) -> Tensor:
        """Hidden states (N, D) after the last norm, for many rows, and for `strict`."""
        hidden = F.embedding(tokens, self._embedding)
        x = kernels.rms_norm(hidden, self._layers[0].attention_norm, self._eps)
        for number, layer in enumerate(self._layers):
            mixed = attend(number, layer, self._linear(x, layer.qkv, layer.qkv_bias))
            x, hidden = self._add(mixed, layer.out, layer.out_bias, hidden, layer.mlp_norm)
            grown = kernels.swiglu_packed(self._linear(x, layer.gate_up, layer.gate_up_bias))
            norm = self._norm if number + 1 == len(self._layers) else self._layers[number + 1].attention_norm
            x, hidden = self._add(grown, layer.down, layer.down_bias, hidden, norm)
        return x

    def _add(self, x: Tensor, weight: Tensor, bias: Tensor | None, hidden: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream with a product added, and its norm first; the product adds to `hidden` in place where it can."""
        if self._strict or bias is not None:
            return kernels.add_rms_norm(self._linear(x, weight, bias), hidden, norm, self._eps)
        hidden.addmm_(x, weight.t())
        return kernels.rms_norm(hidden, norm, self._eps), hidden

    def _one(self, tokens: Tensor, attend: Callable[[int, Layer, Tensor], Tensor]) -> Tensor:
        """Logits of one token in one row: norms, gate and sums inside the products."""
        hidden = F.embedding(tokens, self._embedding)
        for number, layer in enumerate(self._layers):
            qkv = kernels.normed_vector(hidden, layer.attention_norm, layer.qkv, self._eps, layer.qkv_bias)
            hidden = kernels.residual_vector(attend(number, layer, qkv), layer.out, hidden, layer.out_bias)
            grown = kernels.normed_vector(
                hidden, layer.mlp_norm, layer.gate_up, self._eps, layer.gate_up_bias, gated=layer.gate_up_bias is None
            )
            grown = grown if layer.gate_up_bias is None else kernels.swiglu_packed(grown)
            hidden = kernels.residual_vector(grown, layer.down, hidden, layer.down_bias)
        return kernels.normed_vector(hidden, self._norm, self._head, self._eps)

    def _few(self, tokens: Tensor, attend: Callable[[int, Layer, Tensor], Tensor]) -> Tensor:
        """Logits of a token each of few rows: the parts of a product are added up by whoever reads them."""
        hidden = F.embedding(tokens, self._embedding)
        x = kernels.rms_norm(hidden, self._layers[0].attention_norm, self._eps)
        for number, layer in enumerate(self._layers):
            mixed = attend(number, layer, kernels.split_linear(x, layer.qkv))
            parts = kernels.split_linear(mixed, layer.out)
            x, hidden = kernels.sum_rms_norm(parts, hidden, layer.mlp_norm, self._eps, layer.out_bias, early=True)
            if layer.gate_up_bias is None:
                grown = kernels.gated_linear(x, layer.gate_up)
            else:
                grown = kernels.swiglu_packed(F.linear(x, layer.gate_up, layer.gate_up_bias))
            norm = self._norm if number + 1 == len(self._layers) else self._layers[number + 1].attention_norm
            x, hidden = kernels.sum_rms_norm(kernels.split_linear(grown, layer.down), hidden, norm, self._eps, layer.down_bias, early=True)
        return self.logits(x)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._strict:
            return kernels.invariant_linear(x, weight, bias)
        return F.linear(x, weight, bias)

    def _norm_heads(self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        """Norms of each query and key head (Qwen3), in place."""
        ends = self._heads * self._dim, (self._heads + self._kv_heads) * self._dim
        for start, end, weight in ((0, ends[0], q_norm), (ends[0], ends[1], k_norm)):
            part = qkv[:, start:end]
            part.copy_(kernels.rms_norm(part.reshape(len(part), -1, self._dim), weight, self._eps).flatten(1))
