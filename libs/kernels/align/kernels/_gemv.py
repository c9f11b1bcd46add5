"""A weight times few rows: what a decoding step of a small batch waits for is reading the weight."""

import torch
from torch import Tensor

from align.kernels import _runtime
from align.kernels._runtime import KernelError, wide

ONE = {"rows": 4, "block": 1024, "warps": 4, "stages": 1}
FEW = {"rows": 32, "block": 256, "warps": 4, "stages": 4}
MAX_BATCH = 16


def gemv(x: Tensor, weight: Tensor, addend: Tensor | None = None) -> Tensor:
    """x · weightᵀ (+ addend) for 1 to 16 rows, added up in fp32, rounded once.

    Args:
        x: (B, K), B from 1 to 16. weight: (N, K), contiguous. addend: (B, N), for example the residual; None adds nothing. One dtype.

    Returns:
        (B, N). Not differentiable. The order of the sum depends on B: see `invariant_linear` where that matters.

    Raises:
        KernelError: shapes or dtypes do not fit.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype or not weight.is_contiguous():
        raise KernelError(
            f"x {x.dtype} {tuple(x.shape)}, weight {weight.dtype} {tuple(weight.shape)}: expected (B, K) and contiguous (N, K) of one dtype"
        )
    if not 1 <= x.shape[0] <= MAX_BATCH:
        raise KernelError(f"{x.shape[0]} rows; from 1 to {MAX_BATCH} (torch.nn.functional.linear is the way for more)")
    if addend is not None and (addend.shape != (x.shape[0], weight.shape[0]) or addend.dtype != x.dtype):
        raise KernelError(f"addend {addend.dtype} {tuple(addend.shape)}: expected {x.dtype} {(x.shape[0], weight.shape[0])}")
    y: Tensor = torch.ops.align.gemv(x, weight, addend)
    return y


def reference(x: Tensor, weight: Tensor, addend: Tensor | None) -> Tensor:
    y = wide(x) @ wide(weight).t()
    return (y if addend is None else y + wide(addend)).to(x.dtype)


@_runtime.op("gemv")
def _gemv(x: Tensor, weight: Tensor, addend: Tensor | None) -> Tensor:
    if not _runtime.use_kernel(x):
        return reference(x, weight, addend)
    from align.kernels import _decode_kernels

    (batch, size), outputs, x = x.shape, weight.shape[0], x.contiguous()
    out = x.new_empty(batch, outputs)
    extra = out if addend is None else addend.contiguous()
    if not out.numel():
        return out
    shape = f"{outputs}x{size}"
    with _runtime.on(x):
        if batch == 1:
            c = _runtime.config(x, "gemv_one", shape, ONE)
            _decode_kernels.gemv_one[(_runtime.cdiv(outputs, c["rows"]),)](
                x, weight, extra, out, outputs,
                K=size, ROWS=c["rows"], BLOCK=min(c["block"], _runtime.power_of_two(size)), ADD=addend is not None, STAGES=c["stages"],
                num_warps=c["warps"],
            )  # fmt: skip
        else:
            c = _runtime.config(x, "gemv_few", shape, FEW)
            _decode_kernels.gemv_few[(_runtime.cdiv(outputs, c["rows"]),)](
                x, weight, extra, out, batch, outputs,
                K=size, BATCH=MAX_BATCH, ROWS=c["rows"], BLOCK=c["block"], ADD=addend is not None, WIDE=_runtime.interpreted(),
                num_warps=c["warps"], num_stages=c["stages"],
            )  # fmt: skip
    return out


@_runtime.fake("gemv")
def _(x: Tensor, weight: Tensor, addend: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])
