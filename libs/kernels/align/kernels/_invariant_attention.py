"""Causal attention with fixed tiles: a query's result is the same bits in a whole sequence, in a part of it, and alone against a cache."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from align.kernels import _runtime
from align.kernels._runtime import KernelError, wide

# The tile of keys decides the bits: it begins at multiples of `keys` from position 0. The tile of queries does not.
ATTENTION = {"queries": 64, "keys": 64, "warps": 4, "stages": 2}


def invariant_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Causal self-attention of packed documents, each alone; softmax in fp32.

    Args:
        q: (T, H, Dh), k and v: (T, Hkv, Dh), one dtype; H a multiple of Hkv.
        cu_seqlens: (S + 1,), int32: document s is tokens cu_seqlens[s] .. cu_seqlens[s + 1] - 1; empty ones may pad it.
        max_seqlen: at least the longest document.
        scale: None is Dh ** -0.5. window: keys that a query sees, itself included; None is all.

    Returns:
        (T, H, Dh), bit-equal to `invariant_decode` of the same tokens. The gradient is torch's flash attention's.

    Raises:
        KernelError: shapes or dtypes do not fit.
    """
    _check(q, k, v, window)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = torch.ops.align.invariant_attention(q, k, v, cu_seqlens, max_seqlen, scale, window or 0)
    return out


def invariant_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    page_table: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """`decode_attention` in the tiles and the order of `invariant_attention`: no split, so slower for few rows.

    The shapes, dtypes and errors are those of `decode_attention`.
    """
    from align.kernels import _decode_attention

    _decode_attention._check(q, k_cache, v_cache, lengths, page_table)
    if q.dtype != k_cache.dtype:
        raise KernelError(f"q is {q.dtype}, the cache {k_cache.dtype}; they must be alike")
    if window is not None and window < 1:
        raise KernelError(f"window {window} must be at least 1, or None for all keys")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = torch.ops.align.invariant_decode(q, k_cache, v_cache, lengths, page_table, scale, window or 0)
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> None:
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1] or q.dtype != k.dtype:
        raise KernelError(
            f"q {q.dtype} {tuple(q.shape)}, k {k.dtype} {tuple(k.shape)}, v {tuple(v.shape)}: expected (T, H, Dh) and twice (T, Hkv, Dh), "
            "H a multiple of Hkv, one dtype"
        )
    if window is not None and window < 1:
        raise KernelError(f"window {window} must be at least 1, or None for all keys")


def _documents(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
    """(where, queries, keys, values, shares (H, t, t)) of each document, keys and values repeated for every query head, in fp32 or fp64."""
    group = q.shape[1] // k.shape[1]
    for a, b in pairwise(cu_seqlens.tolist()):
        queries = wide(q[a:b])
        keys, values = (wide(x[a:b]).repeat_interleave(group, 1) for x in (k, v))
        at = torch.arange(b - a, device=q.device)
        seen = at <= at[:, None]
        seen = seen & (at > at[:, None] - window) if window else seen
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        yield slice(a, b), queries, keys, values, scores.masked_fill_(~seen, float("-inf")).softmax(-1)


def reference(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int) -> Tensor:
    out = q.new_zeros(q.shape)
    for where, _, _, values, shares in _documents(q, k, v, cu_seqlens, scale, window):
        out[where] = torch.einsum("hqk,khd->qhd", shares, values).to(q.dtype)
    return out


def reference_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    for where, queries, keys, values, shares in _documents(q, k, v, cu_seqlens, scale, window):
        dout, grouped = wide(grad[where]), (len(queries), k.shape[1], q.shape[1] // k.shape[1], q.shape[2])
        dshares = torch.einsum("qhd,khd->hqk", dout, values)
        dscores = shares * (dshares - (dshares * shares).sum(-1, keepdim=True)) * scale
        dq[where] = torch.einsum("hqk,khd->qhd", dscores, keys).to(q.dtype)
        dk[where] = torch.einsum("hqk,qhd->khd", dscores, queries).reshape(grouped).sum(2).to(k.dtype)
        dv[where] = torch.einsum("hqk,qhd->khd", shares, dout).reshape(grouped).sum(2).to(v.dtype)
    return dq, dk, dv


def _launch(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, lengths: Tensor, table: Tensor | None, sequences: int, queries: int, page: int,
    scale: float, window: int, strides: tuple[int, ...],
) -> Tensor:  # fmt: skip
    """`queries`: at most so many a sequence; `page` 0: keys are packed as the queries are, else each sequence has pages."""
    from align.kernels import _invariant_kernels

    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    (_, heads, dim), kv_heads = q.shape, k.shape[-2]
    group, padded = heads // kv_heads, max(16, _runtime.power_of_two(q.shape[2]))
    if not out.numel() or not sequences:
        return out
    c = _runtime.config(q, "invariant_attention", dim, ATTENTION)
    with _runtime.on(q):
        _invariant_kernels.attention[(_runtime.cdiv(queries * group, c["queries"]), kv_heads, sequences)](
            q, k, v, out, q_starts, lengths, lengths if table is None else table, *strides, 0 if table is None else table.stride(0),
            scale * 1.4426950408889634, window,
            HEADS=heads, GROUP=group, D=dim, DIM=padded, QUERIES=c["queries"], KEYS=c["keys"], PAGE=page,
            DECODE=page > 0, PAGED=table is not None, WIDE=_runtime.interpreted(), num_warps=c["warps"], num_stages=c["stages"],
        )  # fmt: skip
    return out


@_runtime.op("invariant_attention")
def _attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int
) -> Tensor:  # fmt: skip
    if not _runtime.use_kernel(q):
        return reference(q, k, v, cu_seqlens, scale, window)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    strides = (0, k.stride(0), k.stride(1))
    return _launch(q, k, v, cu_seqlens, cu_seqlens, None, cu_seqlens.numel() - 1, max_seqlen, 0, scale, window, strides)


@_runtime.op("invariant_decode")
def _decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, page_table: Tensor | None, scale: float, window: int
) -> Tensor:  # fmt: skip
    if not _runtime.use_kernel(q):
        from align.kernels import _decode_attention

        return _decode_attention.reference(q, k_cache, v_cache, lengths, page_table, scale, window)
    if k_cache.stride(3) != 1 or k_cache.stride() != v_cache.stride():
        raise KernelError(f"caches with strides {k_cache.stride()} and {v_cache.stride()}: they must be alike and end in 1")
    table = None if page_table is None else page_table.contiguous()
    return _launch(
        q.contiguous(), k_cache, v_cache, lengths, lengths, table, q.shape[0], 1, k_cache.shape[1], scale, window, k_cache.stride()[:3]
    )  # fmt: skip


@_runtime.op("invariant_attention_backward")
def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """By torch's flash attention on CUDA, run again for its logsumexp; by the formulas elsewhere."""
    if not (q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)):
        return reference_backward(grad, q, k, v, cu_seqlens, scale, window)
    shared = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, True)
    options = {"scale": scale, "window_size_left": window - 1 if window else None, "window_size_right": 0 if window else None}
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(q, k, v, *shared, False, **options)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(grad.contiguous(), q, k, v, out, lse, *shared, state, unused, **options)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_runtime.fake("invariant_attention")
def _(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape)


@_runtime.fake("invariant_decode")
def _(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, page_table: Tensor | None, scale: float, window: int
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape)


@_runtime.fake("invariant_attention_backward")
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:4])
    ctx.rest = inputs[4:]


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    return *torch.ops.align.invariant_attention_backward(grad, *ctx.saved_tensors, *ctx.rest), None, None, None, None


_runtime.differentiable("invariant_attention", _backward, _save)
