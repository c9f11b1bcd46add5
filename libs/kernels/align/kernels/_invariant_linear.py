"""A linear layer whose every output number is the same bits whatever it is batched with: one order over K, no split."""

import torch
from torch import Tensor

from align.kernels import _runtime
from align.kernels._runtime import KernelError, wide

# Tiles may differ by the number of rows: an output is added up over K in the same order by the same instruction in all of them.
FEW_ROWS = {"m": 64, "n": 32, "k": 128, "warps": 4, "stages": 4, "group": 1}
SOME_ROWS = {"m": 64, "n": 64, "k": 128, "warps": 4, "stages": 3, "group": 16}
MANY_ROWS = {"m": 128, "n": 128, "k": 64, "warps": 8, "stages": 3, "group": 8}
TILE_ROWS = 64


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias, bit-equal for a row in any batch, at any place in it; for strict mode.

    Args:
        x: (..., K), weight: (N, K), bias: (N,) or None. bf16 or fp16 for the kernel; on the CPU and in other dtypes the reference, 64 rows
            at a time.

    Returns:
        (..., N), added up in fp32 over K from its beginning to its end, rounded once. The gradients are cuBLAS's and depend on the batch.

    Raises:
        KernelError: shapes or dtypes do not fit.
    """
    if weight.ndim != 2 or x.shape[-1] != weight.shape[1] or x.dtype != weight.dtype:
        raise KernelError(
            f"x {x.dtype} {tuple(x.shape)}, weight {weight.dtype} {tuple(weight.shape)}: expected (..., K), (N, K), one dtype"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        raise KernelError(f"bias {bias.dtype} {tuple(bias.shape)}: expected {x.dtype} ({weight.shape[0]},)")
    y: Tensor = torch.ops.align.invariant_linear(x, weight, bias)
    return y


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Tiles of 64 rows, the last one filled up: a row is always multiplied by the same code."""
    flat = x.reshape(-1, x.shape[-1])
    tiles = _runtime.cdiv(flat.shape[0], TILE_ROWS)
    padded = wide(torch.nn.functional.pad(flat, (0, 0, 0, tiles * TILE_ROWS - flat.shape[0])))
    parts = [padded[i * TILE_ROWS : (i + 1) * TILE_ROWS] @ wide(weight).t() for i in range(tiles)]
    y = torch.cat(parts)[: flat.shape[0]] if parts else wide(flat) @ wide(weight).t()
    y = y if bias is None else y + wide(bias)
    return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


@_runtime.op("invariant_linear")
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not _runtime.use_kernel(x) or x.dtype == torch.float32:
        return reference(x, weight, bias)
    from align.kernels import _invariant_kernels

    flat, (outputs, size) = _runtime.rows_of(x), weight.shape
    rows = flat.shape[0]
    out = x.new_empty(*x.shape[:-1], outputs)
    if not out.numel():
        return out
    weight = weight.contiguous()
    name, default = ("_few", FEW_ROWS) if rows <= TILE_ROWS else ("_some", SOME_ROWS) if rows <= 1024 else ("", MANY_ROWS)
    c = _runtime.config(x, "invariant_linear" + name, f"{outputs}x{size}", default)
    with _runtime.on(x):
        _invariant_kernels.linear[(_runtime.cdiv(rows, c["m"]) * _runtime.cdiv(outputs, c["n"]),)](
            flat, weight, out if bias is None else bias, out, rows, outputs,
            K=size, M=c["m"], N=c["n"], BLOCK=c["k"], GROUP=c["group"], BIAS=bias is not None, WIDE=_runtime.interpreted(),
            num_warps=c["warps"], num_stages=c["stages"],
        )  # fmt: skip
    return out


@_runtime.fake("invariant_linear")
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    x, weight = ctx.saved_tensors
    flat = grad.reshape(-1, grad.shape[-1])
    dx = (flat @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
    dweight = flat.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
    return dx, dweight, flat.sum(0) if ctx.needs_input_grad[2] else None


_runtime.differentiable("invariant_linear", _backward, _save)
