"""Attention by name: every implementation computes the same function, and its name is recorded wherever log-probs are stored."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from align.model._cache import KVCache
from align.model._errors import ModelError

# sdpa_causal: each row of the batch is one document, padded on the right.
# cpu_per_document: packed rows; each document is attended to alone. Any device, meant for the CPU.
# sdpa_cached: keys and values from a KVCache.
_PADDING_LIMIT = 2.5  # padded tokens for each real one, up to which packed documents are attended to in one call, else one by one
_ALIKE = 1.25  # sequences of `paths` are attended to together if none is longer than the shortest by more than this factor
# varlen: packed rows on a GPU in bf16 or fp16, torch.nn.attention.varlen; nothing waits for the device.
# invariant: for strict sampling; packed or not, a token's result is the same bits whatever else is in the batch (half precision, a GPU).
FORWARD_IMPLS = ("sdpa_causal", "cpu_per_document", "sdpa_cached", "varlen", "invariant")


def pick_forward_impl(*, packed: bool = False, cached: bool = False, like: Tensor | None = None) -> str:
    """The name that `forward_impl=None` stands for; `like` is a weight of the model (None: on the CPU)."""
    if cached or not packed:
        return "sdpa_cached" if cached else "sdpa_causal"
    fast = like is not None and like.is_cuda and like.dtype in (torch.bfloat16, torch.float16)
    return "varlen" if fast else "cpu_per_document"


@dataclass
class Context:
    """What all layers of one forward share."""

    impl: str
    cache: KVCache | None = None
    positions: Tensor | None = None  # (B or 1, T), for a cache
    fresh: bool = False  # the cache is empty and every row starts at 0
    slots: Tensor | None = None  # (B * T,) rows of the flattened cache to write; None: the first T of every row
    bound: int = 0  # keys 0 .. bound - 1 of the cache are looked at
    masks: dict[Any, Tensor] = field(default_factory=dict)  # window -> mask, built once
    groups: list[tuple[int, int]] = field(default_factory=list)  # cpu_per_document: how many are attended to in one call, and the longest
    members: Tensor | None = None  # (all groups' padded rows,) the token of each place
    places: Tensor | None = None  # (B * T,) a place of each token
    ends: Tensor | None = None  # varlen, invariant: (S + 1,) int32 on the device
    longest: int = 0  # packed: no document is longer
    kernel: Callable[..., Any] | None = None  # varlen: torch's
    says_gqa: bool = False  # varlen: whether it wants to be told of fewer key heads


def attend(q: Tensor, k: Tensor, v: Tensor, context: Context, layer: int, window: int | None) -> Tensor:
    """Causal attention of q (B, T, H, Dh) over k, v (B, T, Hkv, Dh), within a sliding window where given; returns (B, T, H * Dh).

    With a cache, k and v are written to it first and a query at position p sees positions 0 .. p of its row.
    """
    if context.cache is not None:
        return _cached(q, k, v, context, context.cache, layer, window)
    if context.impl == "varlen":
        return _varlen(q, k, v, context, window)
    if context.impl == "invariant":
        return _invariant(q, k, v, context, window)
    if context.impl == "cpu_per_document":
        return _per_document(q, k, v, context, window)
    return _causal(q, k, v, window, context)


def _causal(q: Tensor, k: Tensor, v: Tensor, window: int | None, context: Context) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped, length = q.shape[1] != k.shape[1], q.shape[2]
    if window is None or length <= window:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    else:
        key = (window, length)
        if key not in context.masks:
            at = torch.arange(length, device=q.device)
            context.masks[key] = (at <= at[:, None]) & (at > at[:, None] - window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=context.masks[key], enable_gqa=grouped)
    return out.transpose(1, 2).flatten(2)


def _varlen(q: Tensor, k: Tensor, v: Tensor, context: Context, window: int | None) -> Tensor:
    """torch 2.11 says "causal" by the window and takes fewer key heads as they are; 2.13 wants enable_gqa=True for them."""
    assert context.kernel is not None
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if context.says_gqa:
        options["enable_gqa"] = q.shape[2] != k.shape[2]
    flat = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
    out: Tensor = context.kernel(*flat, context.ends, context.ends, context.longest, context.longest, **options)
    return out.view(q.shape[0], q.shape[1], -1)


def _invariant(q: Tensor, k: Tensor, v: Tensor, context: Context, window: int | None) -> Tensor:
    from align.kernels import invariant_attention

    assert context.ends is not None
    out = invariant_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), context.ends, context.longest, window=window)
    return out.view(q.shape[0], q.shape[1], -1)


def _varlen_context(ends: Tensor, longest: int) -> Context:
    """All that a compiled block would stumble over is looked up here."""
    from torch.nn.attention.varlen import varlen_attn

    says_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return Context("varlen", ends=ends.int(), longest=longest, kernel=varlen_attn, says_gqa=says_gqa)


def _per_document(q: Tensor, k: Tensor, v: Tensor, context: Context, window: int | None) -> Tensor:
    """The documents of a group in one call, each in a row of its own, padded: for short ones several times as fast as a call apiece."""
    (batch, length, heads, dim), kv_heads = q.shape, k.shape[2]
    assert context.members is not None and context.places is not None
    rows = torch.cat((q, k, v), 2).view(batch * length, -1).index_select(0, context.members)
    outs = []
    for part, (count, longest) in zip(rows.split([a * b for a, b in context.groups]), context.groups, strict=True):
        of_part = part.view(count, longest, -1, dim).split_with_sizes((heads, kv_heads, kv_heads), 2)
        outs.append(_causal(*of_part, window, context).flatten(0, 1))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out.index_select(0, context.places).view(batch, length, -1)


def _grouped(
    groups: list[list[int]], lengths: list[int], tokens_of: Callable[[Tensor, int], Tensor], total: int, device: torch.device
) -> Context:
    """Documents for `_per_document`, those of a group in one call.

    tokens_of: given documents (n,) int64 and a length, their first tokens (n, length) among the `total` tokens of the batch, -1 after the
    end of a document.
    """
    longest = [max(lengths[document] for document in group) for group in groups]
    members = [tokens_of(torch.tensor(group, device=device), most).flatten() for group, most in zip(groups, longest, strict=True)]
    joined = torch.cat(members)
    slots = (joined >= 0).nonzero()[:, 0]
    # A token of several documents is taken from the first of its places: always the same one.
    places = torch.full((total,), len(joined), device=device).scatter_reduce_(0, joined[slots], slots, "amin")
    shapes = [(len(group), most) for group, most in zip(groups, longest, strict=True)]
    return Context("cpu_per_document", groups=shapes, members=joined.clamp_(min=0), places=places, longest=max(lengths))


def _alike(lengths: list[int]) -> list[list[int]]:
    """Sequences of like length together, from the shortest up."""
    groups: list[list[int]] = []
    for at in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not groups or lengths[at] > _ALIKE * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(at)
    return groups


def _packed_context(spans: tuple[tuple[int, int], ...], device: torch.device) -> Context:
    starts, ends = torch.tensor(spans, device=device).unbind(1)

    def tokens_of(documents: Tensor, length: int) -> Tensor:
        tokens = starts[documents, None] + torch.arange(length, device=device)
        return tokens.where(tokens < ends[documents, None], -1)

    lengths, total, documents = [b - a for a, b in spans], spans[-1][1], list(range(len(spans)))
    together = len(spans) * max(lengths) <= _PADDING_LIMIT * total
    return _grouped([documents] if together else [[at] for at in documents], lengths, tokens_of, total, device)


def _paths_context(paths: Tensor, total: int, position_ids: Tensor | None) -> Context:
    if position_ids is None:
        raise ModelError("paths were given without position_ids; give each token's place in its sequence")
    lengths = (paths >= 0).sum(1)
    if (
        int(lengths.min()) < 1
        or int(paths.max()) >= total
        or not torch.equal(paths.unique()[-total:], torch.arange(total, device=paths.device))
    ):
        raise ModelError(f"paths must lead through each of the {total} tokens, and none may be empty")
    each = lengths.tolist()
    return _grouped(_alike(each), each, lambda documents, length: paths[documents, :length], total, paths.device)


def _cached(q: Tensor, k: Tensor, v: Tensor, context: Context, cache: KVCache, layer: int, window: int | None) -> Tensor:
    keys, values = cache.k[layer], cache.v[layer]  # (B, S, Hkv, Dh)
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    if context.slots is None:
        keys[:, :length], values[:, :length] = k, v
    else:
        keys.view(-1, kv_heads * dim).index_copy_(0, context.slots, k.reshape(-1, kv_heads * dim))
        values.view(-1, kv_heads * dim).index_copy_(0, context.slots, v.reshape(-1, kv_heads * dim))
    if context.positions is None or context.fresh:
        return _causal(q, k, v, window, context)
    if window not in context.masks:
        context.masks[window] = _cache_mask(context.positions, context.bound, window, heads // kv_heads, q)
    keys, values = keys[:, : context.bound].transpose(1, 2), values[:, : context.bound].transpose(1, 2)
    # The query heads of one group become extra queries of their key head: no key is repeated.
    q = q.view(batch, length, kv_heads, -1, dim).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, dim)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=context.masks[window])
    return out.reshape(batch, heads, length, dim).transpose(1, 2).reshape(batch, length, heads * dim)


def _cache_mask(positions: Tensor, bound: int, window: int | None, group: int, q: Tensor) -> Tensor:
    """0 where a query may look, -inf elsewhere: (B or 1, 1, group * T, bound), in q's dtype."""
    at, positions = torch.arange(bound, device=q.device), positions[:, :, None]
    seen = at <= positions
    if window is not None:
        seen &= at > positions - window
    mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, float("-inf"))
    return mask[:, None].repeat(1, 1, group, 1)


def context_for(
    impl: str | None,
    shape: torch.Size,
    *,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    cache: KVCache | None,
    max_seqlen: int | None,
    like: Tensor,
    paths: Tensor | None = None,
) -> tuple[Context, Tensor | None]:
    """Checks what a forward was given and returns its context and the positions, (B or 1, T) or None for 0 .. T - 1.

    Raises:
        ModelError: an unknown name, one that does not fit, boundaries that do not cover the batch, positions outside the cache.
    """
    batch, length = shape
    if paths is not None:
        if cache is not None or cu_seqlens is not None or impl not in (None, "cpu_per_document"):
            raise ModelError("paths are of the forward cpu_per_document, without cu_seqlens and cache")
        return _paths_context(paths, batch * length, position_ids), position_ids
    packed = cu_seqlens is not None
    wanted = pick_forward_impl(packed=packed, cached=cache is not None, like=like)
    if impl not in (None, *FORWARD_IMPLS):
        raise ModelError(f"forward_impl {impl!r} is unknown; known are {', '.join(FORWARD_IMPLS)}")
    if impl == "cpu_per_document" and packed and cache is None:
        wanted = impl  # it runs everywhere
    if impl == "invariant" and cache is None:
        return _invariant_context(shape, position_ids, cu_seqlens, max_seqlen, like)
    if impl not in (None, wanted):
        raise ModelError(f"forward_impl {impl!r} does not fit this call, which wants {wanted!r}; leave it out")
    if cache is not None:
        if cu_seqlens is not None:
            raise ModelError("cu_seqlens and cache were both given; packed rows have no cache")
        return _cache_context(cache, batch, length, position_ids)
    if cu_seqlens is not None and wanted == "varlen" and position_ids is not None:
        return _varlen_context(cu_seqlens, max_seqlen or batch * length), position_ids
    if cu_seqlens is not None:
        spans = _spans(cu_seqlens, batch * length)
        if position_ids is None:
            starts = torch.cat([torch.arange(b - a, device=cu_seqlens.device) for a, b in spans])
            position_ids = starts.view(batch, length)
        if wanted == "varlen":
            return _varlen_context(cu_seqlens, max(b - a for a, b in spans)), position_ids
        return _packed_context(spans, like.device), position_ids
    if position_ids is not None and position_ids.device.type == "cpu" and bool((position_ids[:, 1:] == 0).any()):
        raise ModelError("position_ids begin again within a row, which is one sequence without cu_seqlens; give cu_seqlens")
    return Context(wanted), position_ids


def _invariant_context(
    shape: torch.Size, position_ids: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None, like: Tensor
) -> tuple[Context, Tensor | None]:
    """Each document alone, or each row."""
    batch, length = shape
    if cu_seqlens is None:
        ends = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=like.device)
        return Context("invariant", ends=ends, longest=length), position_ids
    if position_ids is not None and max_seqlen is not None:
        return Context("invariant", ends=cu_seqlens.int(), longest=max_seqlen), position_ids
    spans = _spans(cu_seqlens, batch * length)
    if position_ids is None:
        position_ids = torch.cat([torch.arange(b - a, device=cu_seqlens.device) for a, b in spans]).view(batch, length)
    return Context("invariant", ends=cu_seqlens.int(), longest=max(b - a for a, b in spans)), position_ids


def _spans(cu_seqlens: Tensor, total: int) -> tuple[tuple[int, int], ...]:
    ends = cu_seqlens.tolist()
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != total or any(b < a for a, b in pairwise(ends)):
        raise ModelError(f"cu_seqlens must rise from 0 to B * T = {total}; got {ends[:8]}{' …' if len(ends) > 8 else ''}")
    return tuple((a, b) for a, b in pairwise(ends) if b > a)  # the padding of a fixed-length cu_seqlens is empty documents


def _cache_context(cache: KVCache, batch: int, length: int, position_ids: Tensor | None) -> tuple[Context, Tensor]:
    device, (_, rows, room) = cache.k.device, cache.k.shape[:3]
    if batch != rows:
        raise ModelError(f"input_ids has {batch} rows, the cache {rows}")
    if position_ids is None:
        if cache.length is None:
            raise ModelError("the length of this cache is not known after a forward with position_ids on a GPU; give position_ids")
        bound, fresh = cache.length + length, cache.length == 0
        positions = torch.arange(cache.length, bound, device=device)[None]
        after = bound
    else:
        positions, fresh = position_ids.expand(batch, length), False
        if device.type == "cpu":
            bound = after = int(positions.max()) + 1
            if int(positions.min()) < 0:
                raise ModelError(f"position_ids holds {int(positions.min())}; positions start at 0")
            after = max(bound, cache.length or 0)
        else:
            bound, after = room, None  # reading the positions would wait for the GPU
    if bound > room:
        raise ModelError(f"position {bound - 1} is outside a cache of max_length {room}; make it longer with new_cache")
    slots = None
    if not fresh:
        slots = (positions + torch.arange(batch, device=device)[:, None] * room).flatten()
    cache.length = after
    return Context("sdpa_cached", cache=cache, positions=positions, fresh=fresh, slots=slots, bound=bound), positions
