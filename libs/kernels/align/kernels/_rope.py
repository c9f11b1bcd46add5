"""Rotary positions (Su et al. 2021, RoFormer) for queries and keys at once: pairs (i, i + Dh/2), as HF checkpoints have them."""

import torch
from torch import Tensor

from align.kernels import _runtime
from align.kernels._runtime import KernelError, wide

ROPE = {"tokens": 1, "warps": 4}


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rotates every head of q and k by the angles of its token's position; computed in fp32, rounded once.

    Args:
        q: (..., H, Dh), k: (..., Hkv, Dh), leading dimensions alike. Slices of one projection are read where they lie.
        cos, sin: (S, Dh / 2), fp32 by preference.
        position_ids: (...), the tables' row of each token, in 0..S-1 (not checked: that would wait for the GPU), for packed rows as well.
            None takes row t for token t of the flattened leading dimensions, so S must be their number then.

    Returns:
        (q, k) rotated, contiguous. Differentiable in q and k.

    Raises:
        KernelError: the shapes do not belong together.
    """
    _check(q, k, cos, sin, position_ids)
    rotated: tuple[Tensor, Tensor] = torch.ops.align.rope(q, k, cos, sin, position_ids, False)
    return rotated


def rope_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, *, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts one joint projection into q, k, v and rotates q and k, in one pass; the backward writes one gradient, with nothing to join.

    Args:
        qkv: (..., (H + 2 Hkv) · Dh): queries, keys, values. Tables and positions as for `rope`.

    Returns:
        q (..., H, Dh), k and v (..., Hkv, Dh), contiguous.
    """
    if heads < 1 or kv_heads < 1 or qkv.shape[-1] % (heads + 2 * kv_heads):
        raise KernelError(f"qkv {tuple(qkv.shape)} is not (..., (heads + 2 * kv_heads) * Dh) with {heads} heads and {kv_heads} kv_heads")
    dim = qkv.shape[-1] // (heads + 2 * kv_heads)
    q, k, _ = _cut(qkv, heads, kv_heads, dim)
    _check(q, k, cos, sin, position_ids)
    cut: tuple[Tensor, Tensor, Tensor] = torch.ops.align.rope_qkv(qkv, cos, sin, position_ids, heads, kv_heads)
    return cut


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None) -> None:
    half = q.shape[-1] // 2
    if q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1] or q.dtype != k.dtype or q.shape[-1] % 2:
        raise KernelError(f"q is {q.dtype} {tuple(q.shape)}, k {k.dtype} {tuple(k.shape)}: expected (..., H, Dh), (..., Hkv, Dh), Dh even")
    if cos.shape != sin.shape or cos.shape[-1:] != (half,) or cos.ndim != 2 or cos.dtype != sin.dtype:
        raise KernelError(f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)}: expected (S, Dh / 2) = (S, {half}) each, in one dtype")
    if position_ids is None and cos.shape[0] != q.shape[:-2].numel():
        raise KernelError(f"{q.shape[:-2].numel()} tokens and tables of {cos.shape[0]} rows: give position_ids, or a row a token")
    if position_ids is not None and position_ids.shape != q.shape[:-2]:
        raise KernelError(f"position_ids {tuple(position_ids.shape)}: expected {tuple(q.shape[:-2])}, one a token")


def _cut(qkv: Tensor, heads: int, kv_heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.view(*qkv.shape[:-1], heads + 2 * kv_heads, dim).split_with_sizes((heads, kv_heads, kv_heads), -2)
    return q, k, v


def reference(x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, back: bool) -> Tensor:
    """x (..., H, Dh) rotated; `back` turns the other way, which is the gradient."""
    shape = (*x.shape[:-2], 1, x.shape[-1] // 2)
    c, s = (wide(table if position_ids is None else table[position_ids]).view(shape) for table in (cos, sin))
    s = -s if back else s
    low, high = wide(x).chunk(2, -1)
    return torch.cat((low * c - high * s, high * c + low * s), -1).to(x.dtype)


def _tokens(x: Tensor) -> Tensor:
    """(..., H, Dh) as (N, H * Dh) whose rows may lie apart."""
    x = x.flatten(-2) if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] else x.contiguous().flatten(-2)
    return x.flatten(0, -2) if x.ndim > 1 else x[None]


def _launch(sources: tuple[Tensor, ...], to: tuple[Tensor, ...], cos: Tensor, sin: Tensor, position_ids: Tensor | None, back: bool) -> None:
    """q, k and perhaps v, each (..., H, Dh), into tensors of the same shapes that `_tokens` need not copy."""
    from align.kernels import _row_kernels

    q, k = sources[:2]
    heads, kv_heads, dim = q.shape[-2], k.shape[-2], q.shape[-1]
    flat, flat_to = [_tokens(x) for x in sources], [_tokens(x) for x in to]
    tokens = flat[0].shape[0]
    if not tokens:
        return
    copy_v = len(sources) == 3
    (a, b), (a_to, b_to) = flat[:2], flat_to[:2]
    v, v_to = (flat[2], flat_to[2]) if copy_v else (b, b_to)
    positions = cos if position_ids is None else position_ids.reshape(-1).contiguous()
    c = _runtime.config(q, "rope", f"{heads}/{kv_heads}/{dim}", ROPE)
    with _runtime.on(q):
        _row_kernels.rope[(_runtime.cdiv(tokens, c["tokens"]),)](
            a, b, v, a_to, b_to, v_to, a.stride(0), b.stride(0), v.stride(0), a_to.stride(0), b_to.stride(0), v_to.stride(0),
            cos.contiguous(), sin.contiguous(), positions, tokens,
            Q_HEADS=heads, Q_PADDED=_runtime.power_of_two(heads), K_HEADS=kv_heads, K_PADDED=_runtime.power_of_two(kv_heads),
            HALF=dim // 2, PAIRS=_runtime.power_of_two(dim // 2), TOKENS=c["tokens"],
            HAS_POSITIONS=position_ids is not None, COPY_V=copy_v, BACK=back, num_warps=c["warps"],
            **_runtime.early(),
        )  # fmt: skip


@_runtime.op("rope")
def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, back: bool) -> tuple[Tensor, Tensor]:
    if not _runtime.use_kernel(q):
        return reference(q, cos, sin, position_ids, back), reference(k, cos, sin, position_ids, back)
    rotated = q.new_empty(q.shape), k.new_empty(k.shape)
    _launch((q, k), rotated, cos, sin, position_ids, back)
    return rotated


@_runtime.op("rope_qkv")
def _rope_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _cut(qkv, heads, kv_heads, qkv.shape[-1] // (heads + 2 * kv_heads))
    if not _runtime.use_kernel(qkv):
        return (*(reference(x, cos, sin, position_ids, False) for x in (q, k)), v.clone(memory_format=torch.contiguous_format))  # type: ignore[return-value]
    cut = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    _launch((q, k, v), cut, cos, sin, position_ids, False)
    return cut


@_runtime.op("rope_qkv_backward")
def _rope_qkv_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None) -> Tensor:
    heads, kv_heads, dim = dq.shape[-2], dk.shape[-2], dq.shape[-1]
    if not _runtime.use_kernel(dq):
        parts = reference(dq, cos, sin, position_ids, True), reference(dk, cos, sin, position_ids, True), dv
        return torch.cat(parts, -2).flatten(-2)
    dqkv = dq.new_empty((*dq.shape[:-2], (heads + 2 * kv_heads) * dim))
    _launch((dq, dk, dv), _cut(dqkv, heads, kv_heads, dim), cos, sin, position_ids, True)
    return dqkv


@_runtime.fake("rope")
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, back: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@_runtime.fake("rope_qkv")
def _(
    qkv: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dim = qkv.shape[-1] // (heads + 2 * kv_heads)
    q, k, v = (qkv.new_empty((*qkv.shape[:-1], n, dim)) for n in (heads, kv_heads, kv_heads))
    return q, k, v


@_runtime.fake("rope_qkv_backward")
def _(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None) -> Tensor:
    return dq.new_empty((*dq.shape[:-2], (dq.shape[-2] + 2 * dk.shape[-2]) * dq.shape[-1]))


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *_, cos, sin, position_ids, ctx.back = inputs
    ctx.save_for_backward(cos, sin, position_ids)


def _backward(ctx, dq, dk):  # type: ignore[no-untyped-def]
    return *torch.ops.align.rope(dq, dk, *ctx.saved_tensors, not ctx.back), None, None, None, None


def _save_qkv(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, cos, sin, position_ids, *_ = inputs
    ctx.save_for_backward(cos, sin, position_ids)


def _backward_qkv(ctx, dq, dk, dv):  # type: ignore[no-untyped-def]
    return torch.ops.align.rope_qkv_backward(dq, dk, dv, *ctx.saved_tensors), None, None, None, None, None


_runtime.differentiable("rope", _backward, _save)
_runtime.differentiable("rope_qkv", _backward_qkv, _save_qkv)
