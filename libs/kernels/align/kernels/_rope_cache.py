"""From a joint projection to attention's inputs on a paged cache, in one pass: queries turned, keys turned and filed, values filed."""

import torch
from torch import Tensor

from align.kernels import _rope, _runtime
from align.kernels._rope import _check, _cut
from align.kernels._runtime import KernelError, wide

ROPE_CACHE = {"heads": 8, "warps": 4}


def rope_to_cache(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    rows: Tensor | None = None,
    *,
    heads: int,
    bias: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Cuts qkv, rotates q and k by the tables' row of each token's position, and writes k and v to the token's place in the cache.

    In place on k_cache and v_cache; two tokens of one call must not have one place, but for places nobody reads. For decoding: it can be
    captured in a CUDA graph. The bits of q and k are those of `rope_qkv`.

    Args:
        qkv: (N, (H + 2 Hkv) · Dh), contiguous: queries, keys, values; or (parts, N, …) of `split_linear`, to be added. bias: (…,), added.
        cos, sin: (S, Dh / 2), fp32 by preference. positions: (N,), int64, below S (not checked: that would wait for the GPU).
        k_cache, v_cache: (P, page, Hkv, Dh), strides free but for the last dimension, alike.
        page_table: (B, M), int32: position p of row b lies in page_table[b, p // page] at p % page.
        rows: (N,), int64: the table's row of each token; None: token n is row n.
        heads: H. early: as for `decode_attention`; only where the kernel launched just before writes nothing but qkv.

    Returns:
        q rotated, (N, H, Dh).

    Raises:
        KernelError: the shapes or strides do not belong together.
    """
    q, k = check_projection(qkv, k_cache, v_cache, page_table, rows, len(positions), heads, bias)
    _check(q, k, cos, sin, positions)
    if rows is not None and rows.shape != positions.shape:
        raise KernelError(f"rows {tuple(rows.shape)}: expected one a token, {tuple(positions.shape)}")
    turned: Tensor = torch.ops.align.rope_to_cache(qkv, cos, sin, positions, k_cache, v_cache, page_table, rows, heads, bias, early)
    return turned


def check_projection(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, rows: Tensor | None, tokens: int, heads: int, bias: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Raises KernelError unless the shapes and strides belong together; views of q and k in it (of its first part)."""
    if k_cache.ndim != 4 or k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise KernelError(
            f"caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)} with strides {k_cache.stride()} and {v_cache.stride()}: expected "
            "twice (pages, page, Hkv, Dh), alike, the last stride 1"
        )
    kv_heads, dim = k_cache.shape[2:]
    if qkv.ndim not in (2, 3) or qkv.shape[-1] != (heads + 2 * kv_heads) * dim or not qkv.is_contiguous():
        raise KernelError(
            f"qkv {tuple(qkv.shape)}: expected contiguous (N, {(heads + 2 * kv_heads) * dim}) for {heads} + 2 * {kv_heads} heads"
        )
    if heads % kv_heads or qkv.shape[-2] != tokens:
        raise KernelError(f"{heads} query heads for {kv_heads} of keys, {qkv.shape[-2]} rows of qkv for {tokens} tokens")
    if page_table.ndim != 2 or (rows is None and page_table.shape[0] < tokens):
        raise KernelError(f"page_table {tuple(page_table.shape)} for {tokens} tokens: a row each, or `rows`, one a token")
    if bias is not None and bias.shape != qkv.shape[-1:]:
        raise KernelError(f"bias {tuple(bias.shape)}: expected ({qkv.shape[-1]},)")
    q, k, _ = _cut(qkv if qkv.ndim == 2 else qkv[0], heads, kv_heads, dim)
    return q, k


def reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, rows: Tensor | None,
    heads: int, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    page, kv_heads, dim = k_cache.shape[1:]
    qkv = qkv.sum(0) if qkv.ndim == 3 else qkv
    qkv = (qkv if bias is None else wide(qkv) + wide(bias)).to(k_cache.dtype)
    q, k, v = _cut(qkv, heads, kv_heads, dim)
    at = torch.arange(len(qkv), device=qkv.device) if rows is None else rows
    pages = page_table[at, positions // page].long()
    k_cache[pages, positions % page] = _rope.reference(k, cos, sin, positions, False)
    v_cache[pages, positions % page] = v
    return _rope.reference(q, cos, sin, positions, False)


@_runtime.op("rope_to_cache", mutates=("k_cache", "v_cache"))
def _rope_to_cache(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, rows: Tensor | None,
    heads: int, bias: Tensor | None, early: bool,
) -> Tensor:  # fmt: skip
    if not _runtime.use_kernel(qkv):
        return reference(qkv, cos, sin, positions, k_cache, v_cache, page_table, rows, heads, bias)
    from align.kernels import _decode_kernels

    tokens, (page, kv_heads, dim) = len(positions), k_cache.shape[1:]
    turned = k_cache.new_empty(tokens, heads, dim)
    if not tokens:
        return turned
    c = _runtime.config(qkv, "rope_to_cache", f"{heads}/{kv_heads}/{dim}", ROPE_CACHE)
    with _runtime.on(qkv):
        _decode_kernels.rope_to_cache[(tokens, _runtime.cdiv(heads + 2 * kv_heads, c["heads"]))](
            qkv, qkv if bias is None else bias, cos.contiguous(), sin.contiguous(), positions, k_cache, v_cache, page_table,
            positions if rows is None else rows, turned, tokens, page_table.stride(0), *k_cache.stride()[:3],
            HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, PAIRS=_runtime.power_of_two(dim // 2), PAGE=page, BLOCK=c["heads"],
            HAS_ROWS=rows is not None, PARTS=len(qkv) if qkv.ndim == 3 else 0, BIAS=bias is not None, num_warps=c["warps"],
            EARLY=early, **_runtime.early(),
        )  # fmt: skip
    return turned


@_runtime.fake("rope_to_cache")
def _(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, rows: Tensor | None,
    heads: int, bias: Tensor | None, early: bool,
) -> Tensor:  # fmt: skip
    return k_cache.new_empty(len(positions), heads, k_cache.shape[3])
