"""Stepper: the cached forward for one token a row, stripped for speed. Sampling spends its time here."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from align.model._attention import Context, attend
from align.model._cache import KVCache
from align.model._decoder import Block, Decoder, RMSNorm

# Weights that read the same input are joined into one matrix up to this many elements: below it a step waits for the calls of operators,
# above it for the weights themselves.
_JOIN_BELOW = 1 << 20
_SLACK = 64  # steps between two moves of the whole cache, at least
_TABLE_BELOW = 8  # times as many tokens in the vocabulary as rows: below it the first block's products are made once, for all tokens
_VECTOR = 8  # attention reads this many keys more rather than a number of keys that is no multiple of it

_Linear = tuple[Tensor, Tensor | None]  # transposed weight (in, out), bias


class _Read(NamedTuple):
    """A norm, and the matrices that read what it gives."""

    weight: Tensor | None  # None: it is in the matrices
    eps: Tensor  # 0-d, in the dtype to compute in: elementwise operations take it faster than a number
    parts: list[_Linear]


class _Layer(NamedTuple):
    """One block, looked up once."""

    qkv: _Read
    q_norm: _Read | None
    k_norm: _Read | None
    out: _Linear
    gate_up: _Read
    down: _Linear
    window: int | None


class _Cut(NamedTuple):
    """A matrix whose last columns are queries, keys and values. Where the rotation works on pairs, queries and keys are complex."""

    whole: Tensor  # (n, … + (H + 2 Hkv) * Dh)
    queries: Tensor  # (n, Hkv, H / Hkv, Dh)
    keys: Tensor  # (n, Hkv, Dh)
    values: Tensor  # (n, Hkv * Dh)


class _Cells(NamedTuple):
    """The cache of one layer, of the first n rows."""

    keys: Tensor  # (n, S, Hkv, Dh), where they are written; complex for pairs
    values: Tensor  # (n, S, Hkv * Dh)
    keys_read: Tensor  # (n, Hkv * Dh, S)


class _Views(NamedTuple):
    """Buffers of a step with n rows, cut as the operations want them: in a small model, cutting would take as long as computing."""

    projected: _Cut
    first: _Cut | None  # from the table: hidden states (n, D), then what the first block makes of them
    padded: Tensor  # (n, H, Hkv * Dh): each query in the place of its key head, 0 elsewhere
    own: Tensor  # (n, Hkv, H / Hkv, Dh) of it: where it is not padding; complex for pairs
    mixed: Tensor  # (n, H, Hkv * Dh): attention's result, of which each head wants its own part,
    mixed_own: Tensor  # (n, Hkv, H / Hkv, Dh)
    heads: Tensor  # (n, H * Dh): these parts together
    heads_apart: Tensor  # (n, Hkv, H / Hkv, Dh)
    gate_up: Tensor  # (n, 2 F)
    gate: Tensor
    up: Tensor
    closed: Tensor  # (n, 1, S)
    cells: list[_Cells]


class Stepper:
    """Computes what `Decoder.forward` with a cache and T = 1 does, in a fraction of the time where the model is small.

    The rows end at the same slot of its cache, whatever their lengths: a step writes one slot of all rows, a window is a range of slots,
    and what lies before a row's first position is closed once, when the row enters. The key heads of a row are handled by one product,
    each query padded by zeros to all of them, so that a row is one matrix.

    Small weights are copied once into joined matrices, so a Stepper belongs to the weights as they were when it was made: after a training
    step, make a new one. For `torch.inference_mode`.
    """

    def __init__(self, model: Decoder, rows: int, max_length: int) -> None:
        """rows: as many at most. max_length: of a row, in positions."""
        config, weight = model.config, model.model.embed_tokens.weight
        device, dtype, blocks = weight.device, weight.dtype, model.blocks
        self._room, self._slot = max_length + _SLACK + _VECTOR, 0  # the slot that is written next
        self._heads, self._kv_heads, self._head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._size, self._embedding = config.hidden_size, weight
        queries, keys = self._heads * self._head_dim, self._kv_heads * self._head_dim
        widest = config.hidden_size * max(queries + 2 * keys, 2 * config.intermediate_size)
        # A rotation of neighbours is one complex product. Weights that are copied can be copied in that order.
        self._paired = widest <= _JOIN_BELOW and dtype in (torch.float32, torch.float64)
        self._layers = [_layer(block, self._paired) for block in blocks]
        fold = self._paired and model.output_weight.numel() <= _JOIN_BELOW
        self._head = _read(model.model.norm, [(model.output_weight, None)], fold)
        self._table = None
        if self._paired and config.vocab_size <= _TABLE_BELOW * rows:
            projected = weight.new_empty(config.vocab_size, queries + 2 * keys)
            self._table = torch.cat((weight, _heads_of(weight, self._layers[0], self._cut(projected))), 1)
        sizes = {
            "projected": queries + 2 * keys,
            "first": self._size + queries + 2 * keys,
            "padded": self._heads * keys,
            "mixed": self._heads * keys,
            "heads": queries,
            "gate_up": 2 * config.intermediate_size,
        }
        self._buffers = {name: torch.zeros(rows, size, device=device, dtype=dtype) for name, size in sizes.items()}
        shape = (len(blocks), rows, self._room, self._kv_heads, self._head_dim)
        # Not zeros: memory for slots that are never reached costs nothing.
        self._keys, self._values = (torch.empty(shape, device=device, dtype=dtype) for _ in range(2))
        self._starts = [0] * rows  # the slot of each row's first position
        self._closed = torch.zeros(rows, 1, self._room, device=device, dtype=dtype)  # -inf before it
        self._views: dict[int, _Views] = {}
        cos, sin = (table[:, None] for table in model.rope_tables(max_length))  # (S, 1, Dh / 2) each, fp32
        if self._paired:
            self._angles = [torch.complex(cos.to(dtype), sin.to(dtype))]
        else:
            self._angles = [torch.cat((cos, cos), -1).to(dtype), sin.to(dtype)]

    def read(self, ids: Tensor, lengths: Sequence[int]) -> tuple[KVCache, Tensor]:
        """Of prompts (P, T) int64, padded on the right after their `lengths`: the cache that `Decoder.forward` would leave, for `enter`,
        and the logits (P, V) after each. Of the last block only keys and values are made for more than a prompt's last token.
        """
        (count, length), device = ids.shape, ids.device
        ends = torch.tensor(lengths, device=device)
        last, at = torch.arange(count, device=device) * length + ends - 1, torch.arange(length, device=device)
        angles = [table[:length].repeat(count, 1, 1) for table in self._angles]
        turns, context = (angles, [angle.unsqueeze(1) for angle in angles]), Context("sdpa_causal")
        shape = (len(self._layers), count, length, self._kv_heads, self._head_dim)
        cache = KVCache(self._keys.new_empty(shape), self._values.new_empty(shape), length)
        whole = None if self._table is None else self._table.index_select(0, ids.flatten())
        hidden = self._embedding.index_select(0, ids.flatten()) if whole is None else whole[:, : self._size]
        for number, layer in enumerate(self._layers):
            if whole is None:
                whole = hidden.new_empty(len(hidden), (self._heads + 2 * self._kv_heads) * self._head_dim)
                _heads_of(hidden, layer, self._cut(whole))
            cut, whole = self._cut(whole), None
            queries = hidden.new_empty(count, length, self._heads, self._head_dim)
            keys = hidden.new_empty(count, length, self._kv_heads, self._head_dim)
            _turn(cut.queries, turns[1], self._turnable(queries.view(-1, *cut.queries.shape[1:3], self._head_dim)))
            _turn(cut.keys, turns[0], self._turnable(keys.flatten(0, 1)))
            cache.k[number] = keys.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self._paired else keys
            cache.v[number] = cut.values.view(shape[1:])
            if number < len(self._layers) - 1:
                heads = attend(queries, keys, cache.v[number], context, number, layer.window).flatten(0, 1)
            else:
                hidden, behind = hidden.index_select(0, last), ends[:, None] - 1 - at
                seen = (behind >= 0) & (behind < (layer.window or length))
                heads = F.scaled_dot_product_attention(
                    queries.flatten(0, 1).index_select(0, last)[:, :, None], keys.transpose(1, 2), cache.v[number].transpose(1, 2),
                    attn_mask=seen[:, None, None], enable_gqa=self._heads != self._kv_heads,
                ).flatten(1)  # fmt: skip
            hidden = _add_projected(hidden, heads, layer.out)
            gate_up = hidden.new_empty(len(hidden), sum(weight.shape[1] for weight, _ in layer.gate_up.parts))
            _project(_normed(hidden, layer.gate_up), layer.gate_up.parts, gate_up)
            gate, up = gate_up.chunk(2, -1)
            hidden = _add_projected(hidden, F.silu(gate).mul_(up), layer.down)
        return cache, torch.mm(_normed(hidden, self._head), self._head.parts[0][0])

    def enter(self, first: int, cache: KVCache, sources: Tensor, lengths: Sequence[int]) -> None:
        """Rows `first` and on begin with what the rows `sources` (N,) int64 of a cache hold at their first `lengths` positions.

        The rows before `first` are those that go on; the others are given up.
        """
        longest, last = max(lengths), first + len(lengths)
        reach = self._slot - min(self._starts[:first], default=self._slot)
        if self._slot < longest + _VECTOR:
            self._shift(max(longest, reach) + _VECTOR, reach)
        device = self._keys.device
        self._clear(slice(first, last), self._slot - max(longest, reach), self._slot - longest)
        places = torch.arange(longest, device=device) - (longest - torch.tensor(lengths, device=device))[:, None]
        places = (places.clamp_(min=0) + (sources * cache.max_length)[:, None]).flatten()  # what stands before a start is closed
        for ours, given in ((self._keys, cache.k), (self._values, cache.v)):
            new = given.flatten(1, 2).index_select(1, places).unflatten(1, (-1, longest))  # (layers, N, longest, Hkv, Dh)
            if ours is self._keys and self._paired:
                new = _neighbours(new)
            ours[:, first:last, self._slot - longest : self._slot] = new
        self._starts[first:last] = [self._slot - length for length in lengths]
        self._close(first, last)

    def move(self, row: int, to: int) -> None:
        """Row `to` becomes what row `row` is."""
        start = self._starts[to] = self._starts[row]
        for cache in (self._keys, self._values):
            cache[:, to, start : self._slot] = cache[:, row, start : self._slot]
        self._closed[to] = self._closed[row]

    def __call__(self, tokens: Tensor, positions: Tensor, bound: int) -> Tensor:
        """Logits (n, V) after the tokens (n,) int64 of rows 0 .. n - 1, which have the `positions` (n,) int64 that follow in these rows.

        bound: above every position whose result matters; keys from there on are not looked at. An n that was used before is a little
        faster.
        """
        if self._slot == self._room:
            self._shift(bound - 1 + _VECTOR, bound - 1)
        views, slot = self._views_of(tokens.shape[0]), self._slot
        self._slot += 1
        count = min(-(-bound // _VECTOR) * _VECTOR, slot + 1)
        angles = [table.index_select(0, positions) for table in self._angles]
        turns = angles, [angle.unsqueeze(1) for angle in angles]  # of keys, of queries
        if self._table is None or views.first is None:
            hidden, cut = self._embedding.index_select(0, tokens), None
        else:
            torch.index_select(self._table, 0, tokens, out=views.first.whole)
            hidden, cut = views.first.whole[:, : self._size], views.first
        for layer, cells in zip(self._layers, views.cells, strict=True):
            if cut is None:
                cut = views.projected
                _heads_of(hidden, layer, cut)
            self._attend(cut, views, cells, turns, slot, count if layer.window is None else min(count, layer.window))
            hidden, cut = _add_projected(hidden, views.heads, layer.out), None
            _project(_normed(hidden, layer.gate_up), layer.gate_up.parts, views.gate_up)
            hidden = _add_projected(hidden, F.silu(views.gate).mul_(views.up), layer.down)
        return torch.mm(_normed(hidden, self._head), self._head.parts[0][0])

    def _attend(self, cut: _Cut, views: _Views, cells: _Cells, turns: tuple[list[Tensor], list[Tensor]], slot: int, count: int) -> None:
        """From queries, keys and values to `views.heads`; writes the cache and reads its last `count` slots."""
        _turn(cut.queries, turns[1], views.own)
        _turn(cut.keys, turns[0], cells.keys.select(1, slot))
        cells.values.select(1, slot).copy_(cut.values)
        from_slot = slot + 1 - count
        closed, keys = views.closed.narrow(2, from_slot, count), cells.keys_read.narrow(2, from_slot, count)
        scores = torch.baddbmm(closed, views.padded, keys, alpha=self._head_dim**-0.5)  # (n, H, count)
        torch.bmm(torch.softmax(scores, -1), cells.values.narrow(1, from_slot, count), out=views.mixed)
        views.heads_apart.copy_(views.mixed_own)

    def _shift(self, to: int, reach: int) -> None:
        """Moves all rows, of which the last `reach` slots matter, so that `to` is written next."""
        if reach:
            for cache in (*self._keys, *self._values):
                cache[:, to - reach : to] = cache[:, self._slot - reach : self._slot].clone()
            self._clear(slice(None), to - reach, to - reach)
        self._starts = [max(start + to - self._slot, 0) for start in self._starts]
        self._slot = to
        self._close(0, len(self._starts))

    def _clear(self, rows: slice, start: int, end: int) -> None:
        """What is closed is read, and must be finite: slots from a few before `start` to `end`."""
        for cache in (self._keys, self._values):
            cache[:, rows, start - _VECTOR : end] = 0

    def _close(self, first: int, last: int) -> None:
        starts = torch.tensor(self._starts[first:last], device=self._closed.device)
        before = torch.arange(self._room, device=self._closed.device) < starts[:, None]
        self._closed[first:last, 0] = self._closed.new_zeros(()).masked_fill(before, float("-inf"))

    def _views_of(self, n: int) -> _Views:
        if n not in self._views:
            heads, kv_heads, dim = self._heads, self._kv_heads, self._head_dim
            projected, first, padded, mixed, merged, gate_up = (self._buffers[name][:n] for name in self._buffers)
            apart = (n, kv_heads, -1, kv_heads, dim)
            gate, up = gate_up.chunk(2, -1)
            keys, values = self._keys[:, :n], self._values[:, :n].flatten(3)
            self._views[n] = _Views(
                projected=self._cut(projected),
                first=None if self._table is None else self._cut(first),
                padded=padded.view(n, heads, -1),
                own=self._turnable(padded.view(apart).diagonal(0, 1, 3).permute(0, 3, 1, 2)),
                mixed=mixed.view(n, heads, -1),
                mixed_own=mixed.view(apart).diagonal(0, 1, 3).permute(0, 3, 1, 2),
                heads=merged,
                heads_apart=merged.view(n, kv_heads, -1, dim),
                gate_up=gate_up,
                gate=gate,
                up=up,
                closed=self._closed[:n],
                cells=[
                    _Cells(self._turnable(keys[layer]), values[layer], keys[layer].flatten(2).transpose(1, 2))
                    for layer in range(len(self._layers))
                ],
            )
        return self._views[n]

    def _cut(self, whole: Tensor) -> _Cut:
        kv_heads, dim = self._kv_heads, self._head_dim
        queries, keys, values = whole[:, -(self._heads + 2 * kv_heads) * dim :].split_with_sizes(
            (self._heads * dim, kv_heads * dim, kv_heads * dim), 1
        )
        apart = queries.unflatten(1, (kv_heads, -1, dim)), keys.unflatten(1, (kv_heads, dim))
        return _Cut(whole, self._turnable(apart[0]), self._turnable(apart[1]), values)

    def _turnable(self, x: Tensor) -> Tensor:
        return torch.view_as_complex(x.unflatten(-1, (-1, 2))) if self._paired else x


def _turn(x: Tensor, angles: list[Tensor], out: Tensor) -> None:
    """Gives queries or keys their positions: by complex numbers, or by cosine (…, Dh) and sine (…, Dh / 2)."""
    if len(angles) == 1:
        torch.mul(x, angles[0], out=out)
        return
    cos, sin = angles
    (low, high), (out_low, out_high) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(x, cos, out=out)
    out_low.addcmul_(high, sin, value=-1)
    out_high.addcmul_(low, sin)


def _neighbours(x: Tensor) -> Tensor:
    """(…, Dh): the pairs (i, i + Dh / 2) side by side."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def _heads_of(hidden: Tensor, layer: _Layer, cut: _Cut) -> Tensor:
    """Fills `cut`, which has nothing before the queries, with what a block makes of hidden states (n, D)."""
    _project(_normed(hidden, layer.qkv), layer.qkv.parts, cut.whole)
    for heads, norm in ((cut.queries, layer.q_norm), (cut.keys, layer.k_norm)):
        if norm is not None:
            real = torch.view_as_real(heads).flatten(-2) if heads.is_complex() else heads
            real.copy_(_normed(real, norm))
    return cut.whole


def _layer(block: Block, paired: bool) -> _Layer:
    attention, mlp = block.self_attn, block.mlp
    qkv = [(linear.weight, linear.bias) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
    norms = attention.q_norm, attention.k_norm
    if paired:
        dim = attention.head_dim
        for at in (0, 1):
            weight, bias = qkv[at]
            weight = _neighbours(weight.t().unflatten(1, (-1, dim))).flatten(1).t()
            qkv[at] = weight, None if bias is None else _neighbours(bias.unflatten(0, (-1, dim))).flatten()
    q_norm, k_norm = (None if norm is None else _read(norm, [], False) for norm in norms)
    if paired:
        q_norm, k_norm = (norm and norm._replace(weight=_neighbours(norm.weight)) for norm in (q_norm, k_norm))
    return _Layer(
        qkv=_read(block.input_layernorm, qkv, paired),
        q_norm=q_norm,
        k_norm=k_norm,
        out=(attention.o_proj.weight.t(), attention.o_proj.bias),
        gate_up=_read(block.post_attention_layernorm, [(linear.weight, linear.bias) for linear in (mlp.gate_proj, mlp.up_proj)], paired),
        down=(mlp.down_proj.weight.t(), mlp.down_proj.bias),
        window=attention.window,
    )


def _read(norm: RMSNorm, linears: list[tuple[Tensor, Tensor | None]], fold: bool) -> _Read:
    """linears: weight (out, in) and bias of each. fold: the norm's weight goes into them."""
    eps = torch.tensor(norm.eps, dtype=torch.promote_types(norm.weight.dtype, torch.float32), device=norm.weight.device)
    if fold:
        linears = [(weight * norm.weight, bias) for weight, bias in linears]
    if len(linears) > 1 and sum(weight.numel() for weight, _ in linears) <= _JOIN_BELOW:
        biases = [bias for _, bias in linears if bias is not None]
        linears = [(torch.cat([weight for weight, _ in linears]), torch.cat(biases) if biases else None)]
    return _Read(None if fold else norm.weight, eps, [(weight.t(), bias) for weight, bias in linears])


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


def _normed(x: Tensor, norm: _Read) -> Tensor:
    """What RMSNorm computes, but for a weight that is in the matrices, in fewer operations."""
    wide = x if x.dtype == norm.eps.dtype else x.to(norm.eps.dtype)
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(norm.eps, length, length, value=1 / x.shape[-1]).rsqrt_()
    scaled = wide * scale
    return scaled if norm.weight is None else scaled.mul_(norm.weight).to(x.dtype)
