"""RMSNorm (Zhang and Sennrich 2019), alone and with the residual sum before it."""

import torch
from torch import Tensor

from align.kernels import _runtime
from align.kernels._runtime import KernelError, wide

# Forward: ROWS rows a program. Backward: `programs` programs, each with every programs-th group of `rows` rows and its part of the weight's
# gradient, so that the sum has one order: no atomics.
FORWARD = {"rows": 1, "warps": 4}
BACKWARD = {"rows": 1, "warps": 4, "programs": 528, "stages": 1}


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension; fp32 inside, rounded once, to x's dtype.

    Args:
        x: (..., D).
        weight: (D,).

    Returns:
        (..., D), contiguous. Differentiable once in x and weight; the weight's gradient is summed in one fixed order.

    Raises:
        KernelError: the shapes do not belong together.
    """
    _check(x, None, weight)
    y: Tensor = torch.ops.align.rms_norm(x, weight, eps)[0]
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """h = x + residual, rounded to their dtype, and `rms_norm(h, weight)`, in one pass over memory.

    Args:
        x, residual: (..., D), one dtype. weight: (D,).

    Returns:
        (normed, h), both (..., D): the branch's input and the next residual.
    """
    _check(x, residual, weight)
    y, h, _ = torch.ops.align.add_rms_norm(x, residual, weight, eps)
    return y, h


def _check(x: Tensor, residual: Tensor | None, weight: Tensor) -> None:
    if weight.ndim != 1 or x.shape[-1:] != weight.shape:
        raise KernelError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)}: expected (..., D) and (D,)")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise KernelError(
            f"residual is {residual.dtype} {tuple(residual.shape)}, x {x.dtype} {tuple(x.shape)}: they must be alike to be added"
        )


def reference_forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, h, 1 / rms of each row (N,))."""
    h = x.contiguous() if residual is None else (wide(x.contiguous()) + wide(residual.contiguous())).to(x.dtype)
    rstd = wide(h).square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide(h) * rstd * wide(weight)).to(x.dtype), h, rstd.flatten()


def reference_backward(dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of h (..., D), of weight (D,)); `dh` is what came to h by itself."""
    h, scale = h.contiguous(), rstd.view(*h.shape[:-1], 1)
    normed, g = wide(h) * scale, wide(dy) * wide(weight)
    dx = (g - normed * (g * normed).mean(-1, keepdim=True)) * scale
    if dh is not None:
        dx += wide(dh)
    return dx.to(h.dtype), (wide(dy) * normed).flatten(0, -2).sum(0).to(weight.dtype)


def _launch_forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    from align.kernels import _row_kernels

    flat, size = _runtime.rows_of(x), x.shape[-1]
    other = flat if residual is None else _runtime.rows_of(residual)
    y = torch.empty_like(flat)
    h = flat if residual is None else torch.empty_like(flat)
    rstd = torch.empty(flat.shape[0], dtype=torch.float32, device=x.device)
    if flat.numel():
        c = _runtime.config(x, "add_rms_norm" if residual is not None else "rms_norm", size, FORWARD)
        with _runtime.on(x):
            _row_kernels.rms_norm[(_runtime.cdiv(flat.shape[0], c["rows"]),)](
                flat, other, weight, y, h, rstd, flat.shape[0], eps,
                D=size, BLOCK=_runtime.power_of_two(size), ROWS=c["rows"], ADD=residual is not None, num_warps=c["warps"],
                **_runtime.early(),
            )  # fmt: skip
    return y.view(x.shape), h.view(x.shape), rstd


def _launch_backward(dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    from align.kernels import _row_kernels

    size, flat = h.shape[-1], _runtime.rows_of(h)
    rows, block = flat.shape[0], _runtime.power_of_two(size)
    c = _runtime.config(h, "rms_norm_backward", size, BACKWARD)
    programs = max(1, min(c["programs"], _runtime.cdiv(rows, c["rows"])))
    dx, dweight = torch.empty_like(flat), torch.empty_like(weight)
    partial = torch.empty(programs, block, dtype=torch.float32, device=h.device)
    grad = _runtime.rows_of(dy)
    with _runtime.on(h):
        _row_kernels.rms_norm_backward[(programs,)](
            grad, grad if dh is None else _runtime.rows_of(dh), flat, weight, rstd, dx, partial, rows,
            D=size, BLOCK=block, ROWS=c["rows"], PROGRAMS=programs, HAS_DH=dh is not None, STAGES=c["stages"], num_warps=c["warps"],
            **_runtime.early(),
        )  # fmt: skip
        columns = min(block, 32)
        _row_kernels.sum_rows[(_runtime.cdiv(size, columns),)](
            partial, dweight, ROWS=programs, D=size, STRIDE=block, BLOCK_ROWS=min(_runtime.power_of_two(programs), 256), COLUMNS=columns,
            num_warps=8, **_runtime.early(),
        )  # fmt: skip
    return dx.view(h.shape), dweight


@_runtime.op("rms_norm")
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, _, rstd = (_launch_forward if _runtime.use_kernel(x) else reference_forward)(x, None, weight, eps)
    return y, rstd


@_runtime.op("add_rms_norm")
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return (_launch_forward if _runtime.use_kernel(x) else reference_forward)(x, residual, weight, eps)


@_runtime.op("rms_norm_backward")
def _rms_norm_backward(dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return (_launch_backward if _runtime.use_kernel(h) else reference_backward)(dy, dh, h, weight, rstd)


def _rstd_like(x: Tensor) -> Tensor:
    return x.new_empty(x.numel() // x.shape[-1], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


@_runtime.fake("rms_norm")
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _rstd_like(x)


@_runtime.fake("add_rms_norm")
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), _rstd_like(x)


@_runtime.fake("rms_norm_backward")
def _(dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return h.new_empty(h.shape), torch.empty_like(weight)


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, _):  # type: ignore[no-untyped-def]
    if dy is None:
        return None, None, None
    x, weight, rstd = ctx.saved_tensors
    return *torch.ops.align.rms_norm_backward(dy, None, x, weight, rstd), None


def _save_add(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(output[1], inputs[2], output[2])
    ctx.set_materialize_grads(False)


def _backward_add(ctx, dy, dh, _):  # type: ignore[no-untyped-def]
    if dy is None:
        return dh, dh, None, None
    h, weight, rstd = ctx.saved_tensors
    dx, dweight = torch.ops.align.rms_norm_backward(dy, dh, h, weight, rstd)
    return dx, dx, dweight, None


_runtime.differentiable("rms_norm", _backward, _save)
_runtime.differentiable("add_rms_norm", _backward_add, _save_add)
