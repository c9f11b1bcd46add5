"""Attention of one new query a row over a key-value cache, split over the keys so that few rows still fill the GPU (flash decoding)."""

import torch
from torch import Tensor

from align.kernels import _rope_cache, _runtime
from align.kernels._rope_cache import check_projection
from align.kernels._runtime import KernelError, wide

# `keys`: of a tile. `chunk`: keys of a program; 0 cuts each row's keys into equal parts until about `programs` programs run.
DECODE = {"keys": 64, "warps": 4, "stages": 3, "programs": 264, "chunk": 0}
MAX_SPLITS = 64


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    page_table: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    counters: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """softmax(q · kᵀ · scale) · v over keys 0 .. lengths - 1 of each row (the last `window` of them); softmax in fp32.

    Nothing is read on the host: it can be captured in a CUDA graph.

    Args:
        q: (B, H, Dh), the new token of each row, its own key already in the cache.
        k_cache, v_cache: (P, page, Hkv, Dh); strides are free but for the last dimension. H is a multiple of Hkv.
        lengths: (B,), int32 or int64, keys of each row; a row of length 0 gives zeros.
        page_table: (B, M), int32: position j of row b lies in page_table[b, j // page] at j % page. None: row b has page b alone.
        scale: None is Dh ** -0.5.
        window: None looks at all keys.
        counters: int32 zeros, at least B · Hkv of them, kept by the caller for all calls on one stream, and zeros again after each: with
            them one kernel does what takes two without. The bits are the same.
        early: begin on a GPU while the kernel launched just before this one still runs. Only where that one writes neither lengths nor
            page_table, as in a captured decoding step: they are read before it has ended. The bits are the same.

    Returns:
        (B, H, Dh), in q's dtype. Not differentiable.

    Raises:
        KernelError: the shapes do not belong together.
    """
    _check(q, k_cache, v_cache, lengths, page_table)
    _check_options(window, counters, q.shape[0] * k_cache.shape[2])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = torch.ops.align.decode_attention(q, k_cache, v_cache, lengths, page_table, scale, window or 0, counters, early)
    return out


def rope_decode_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    *,
    heads: int,
    bias: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    counters: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """`rope_to_cache` of a new token a row and `decode_attention` over what is then in the cache, by one kernel.

    In place on k_cache and v_cache. The new token's part is not rounded to the cache's dtype before it is weighed, so the bits may differ
    from those of the two; what goes to the cache may by one rounding.

    Args:
        qkv: (B, (H + 2 Hkv) · Dh), contiguous: queries, keys, values; or (parts, B, …) of `split_linear`, to be added. bias: (…,), added.
        cos, sin: (S, Dh / 2). lengths: (B,), keys of each row with the new one, 1 to S (not checked: that would wait for the GPU).
        heads: H. early: begin on a GPU while the kernel launched just before this one still runs, which must write nothing but qkv.
        The others: those of `decode_attention`; no two rows may have one place, but for places nobody reads.

    Returns:
        (B, H, Dh), in the cache's dtype. Not differentiable.

    Raises:
        KernelError: the shapes or strides do not belong together.
    """
    check_projection(qkv, k_cache, v_cache, page_table, None, len(lengths), heads, bias)
    dim = k_cache.shape[3]
    if cos.shape != sin.shape or cos.ndim != 2 or cos.shape[1] * 2 != dim:
        raise KernelError(f"tables {tuple(cos.shape)} and {tuple(sin.shape)}: expected twice (positions, {dim // 2})")
    _check_options(window, counters, len(lengths) * k_cache.shape[2])
    scale = dim**-0.5 if scale is None else scale
    out: Tensor = torch.ops.align.rope_decode_attention(
        qkv, cos, sin, lengths, k_cache, v_cache, page_table, heads, bias, scale, window or 0, counters, early
    )
    return out


def _check_options(window: int | None, counters: Tensor | None, most: int) -> None:
    if window is not None and window < 1:
        raise KernelError(f"window {window} must be at least 1, or None for all keys")
    if counters is not None and (counters.dtype != torch.int32 or counters.numel() < most):
        raise KernelError(f"counters {counters.dtype} {tuple(counters.shape)}: expected int32, at least {most}")


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, page_table: Tensor | None) -> None:
    if (
        q.ndim != 3
        or k_cache.ndim != 4
        or k_cache.shape != v_cache.shape
        or q.shape[2] != k_cache.shape[3]
        or q.shape[1] % k_cache.shape[2]
    ):
        raise KernelError(
            f"q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}: expected (B, H, Dh) and twice "
            "(pages, page, Hkv, Dh), H a multiple of Hkv"
        )
    if lengths.shape != q.shape[:1]:
        raise KernelError(f"lengths {tuple(lengths.shape)}: expected one a row, ({q.shape[0]},)")
    if page_table is None and k_cache.shape[0] < q.shape[0]:
        raise KernelError(f"{q.shape[0]} rows, a cache of {k_cache.shape[0]}: give page_table, or a row of the cache each")
    if page_table is not None and (page_table.ndim != 2 or page_table.shape[0] != q.shape[0]):
        raise KernelError(f"page_table {tuple(page_table.shape)}: expected ({q.shape[0]}, pages of a row)")


def gather_pages(cache: Tensor, page_table: Tensor | None, rows: int) -> Tensor:
    """(B, S, Hkv, Dh): the rows' pages one after another."""
    return cache[:rows] if page_table is None else cache[page_table.long()].flatten(1, 2)


def reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, page_table: Tensor | None, scale: float, window: int
) -> Tensor:  # fmt: skip
    keys, values = (wide(gather_pages(cache, page_table, q.shape[0])) for cache in (k_cache, v_cache))
    heads, kv_heads = q.shape[1], keys.shape[2]
    at, ends = torch.arange(keys.shape[1], device=q.device), lengths[:, None]
    seen = at < ends if not window else (at < ends) & (at >= ends - window)  # (B, S)
    grouped = wide(q).reshape(len(q), kv_heads, heads // kv_heads, q.shape[2])
    scores = torch.einsum("bkgd,bskd->bkgs", grouped, keys) * scale
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    shares = torch.where(seen[:, None, None], scores.softmax(-1), 0)
    values = torch.where(seen[:, :, None, None], values, 0)
    return torch.einsum("bkgs,bskd->bkgd", shares, values).flatten(1, 2).to(q.dtype)


def splits_for(rows: int, kv_heads: int, room: int, keys: int, programs: int) -> int:
    """A power of two: the keys of a row are cut until about `programs` programs run, never finer than a tile."""
    splits = 1
    while rows * kv_heads * splits < programs and splits < MAX_SPLITS and splits * keys < room:
        splits *= 2
    return splits


@_runtime.op("decode_attention", mutates=("counters",))
def _decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, page_table: Tensor | None, scale: float, window: int,
    counters: Tensor | None, early: bool,
) -> Tensor:  # fmt: skip
    if not _runtime.use_kernel(q):
        return reference(q, k_cache, v_cache, lengths, page_table, scale, window)
    if k_cache.stride(3) != 1 or k_cache.stride() != v_cache.stride():
        raise KernelError(f"caches with strides {k_cache.stride()} and {v_cache.stride()}: they must be alike and end in 1")
    return _launch(q.contiguous(), q.shape[1], k_cache, v_cache, lengths, page_table, scale, window, counters, early)


def _launch(
    q: Tensor, heads: int, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, page_table: Tensor | None, scale: float, window: int,
    counters: Tensor | None, early: bool, turn: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> Tensor:  # fmt: skip
    """turn: (cos, sin, bias) where q is a whole projection."""
    from align.kernels import _decode_kernels

    rows, (page, kv_heads, dim) = len(lengths), k_cache.shape[1:]
    out = k_cache.new_empty(rows, heads, dim)
    if not out.numel():
        return out
    room, group = page * (1 if page_table is None else page_table.shape[1]), heads // kv_heads
    name = "decode_attention" if turn is None else "rope_decode_attention"
    c = _runtime.config(q, name, f"{dim}/{group}/{min(2048, _runtime.power_of_two(rows * kv_heads))}", DECODE)
    chunk = _runtime.cdiv(max(c["chunk"], _runtime.cdiv(room, MAX_SPLITS)), c["keys"]) * c["keys"] if c["chunk"] else 0
    splits = _runtime.cdiv(room, chunk) if chunk else splits_for(rows, kv_heads, room, c["keys"], c["programs"])
    count = rows * heads * splits
    parts = out if splits == 1 else torch.empty(count, dim, dtype=torch.float32, device=q.device)
    peaks = out if splits == 1 else torch.empty(2, count, dtype=torch.float32, device=q.device)
    table = lengths if page_table is None else page_table.contiguous()
    cos, sin, bias = (q, q, None) if turn is None else turn
    shape = {
        "D": dim, "DIM": max(16, _runtime.power_of_two(dim)), "KEYS": c["keys"], "SPLITS": splits, "PADDED": _runtime.power_of_two(splits),
        "CHUNK": chunk, "HEADS": heads,
    }  # fmt: skip
    with _runtime.on(q):
        _decode_kernels.split[(kv_heads, rows, splits)](
            q, k_cache, v_cache, lengths, table, out, parts, peaks, lengths if counters is None else counters,
            q if bias is None else bias, cos.contiguous(), sin.contiguous(),
            k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), table.stride(0), scale * 1.4426950408889634, window, count, rows,
            GROUP=group, GROUP_PADDED=max(16, _runtime.power_of_two(group)), PAGE=page, PAGED=page_table is not None,
            FUSED=counters is not None, WIDE=_runtime.interpreted(), num_warps=c["warps"], num_stages=c["stages"],
            EARLY=early, TURN=turn is not None, PARTS=len(q) if turn is not None and q.ndim == 3 else 0, BIAS=bias is not None,
            **_runtime.early(), **shape,
        )  # fmt: skip
        if splits > 1 and counters is None:
            _decode_kernels.combine[(rows * heads,)](lengths, parts, peaks, out, window, count, num_warps=1, **shape)
    return out


@_runtime.op("rope_decode_attention", mutates=("k_cache", "v_cache", "counters"))
def _rope_decode(
    qkv: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, heads: int,
    bias: Tensor | None, scale: float, window: int, counters: Tensor | None, early: bool,
) -> Tensor:  # fmt: skip
    if not _runtime.use_kernel(k_cache):
        positions = lengths.long() - 1
        q = _rope_cache.reference(qkv, cos, sin, positions, k_cache, v_cache, page_table, None, heads, bias)
        return reference(q, k_cache, v_cache, lengths, page_table, scale, window)
    return _launch(qkv, heads, k_cache, v_cache, lengths, page_table, scale, window, counters, early, (cos, sin, bias))


@_runtime.fake("rope_decode_attention")
def _(
    qkv: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, heads: int,
    bias: Tensor | None, scale: float, window: int, counters: Tensor | None, early: bool,
) -> Tensor:  # fmt: skip
    return k_cache.new_empty(len(lengths), heads, k_cache.shape[3])


@_runtime.fake("decode_attention")
def _(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, page_table: Tensor | None, scale: float, window: int,
    counters: Tensor | None, early: bool,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape)
