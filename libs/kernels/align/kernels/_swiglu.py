"""SwiGLU (Shazeer 2020): silu(gate) · up."""

import torch
from torch import Tensor

from align.kernels import _runtime
from align.kernels._runtime import KernelError, wide

SWIGLU = {"block": 1024, "warps": 4}


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up in fp32, rounded once. gate, up: (..., F), one dtype; returns (..., F), contiguous. Differentiable in both."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise KernelError(f"gate is {gate.dtype} {tuple(gate.shape)}, up {up.dtype} {tuple(up.shape)}: they must be alike")
    y: Tensor = torch.ops.align.swiglu(gate, up)
    return y


def swiglu_packed(gate_up: Tensor) -> Tensor:
    """`swiglu` of the two halves of one joint projection (..., 2 F): gate, then up. The backward writes one gradient (..., 2 F)."""
    if gate_up.shape[-1] % 2:
        raise KernelError(f"gate_up {tuple(gate_up.shape)}: the last dimension must be even, gate and up side by side")
    y: Tensor = torch.ops.align.swiglu_packed(gate_up)
    return y


def reference(gate: Tensor, up: Tensor) -> Tensor:
    return (torch.nn.functional.silu(wide(gate)) * wide(up)).to(gate.dtype).contiguous()


def reference_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dy, g, u = wide(grad), wide(gate), wide(up)
    sigmoid = g.sigmoid()
    silu = g * sigmoid
    return (dy * u * (sigmoid + silu * (1 - sigmoid))).to(gate.dtype).contiguous(), (dy * silu).to(up.dtype).contiguous()


def _rows(x: Tensor) -> Tensor:
    """(..., F) as (N, F) whose rows may lie apart."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.flatten(0, -2) if x.ndim > 1 else x[None]


def _config(x: Tensor, name: str) -> tuple[int, int, int]:
    c = _runtime.config(x, name, x.shape[-1], SWIGLU)
    block = min(c["block"], _runtime.power_of_two(x.shape[-1]))
    return _runtime.cdiv(x.shape[-1], block), block, c["warps"]


def _launch(gate: Tensor, up: Tensor) -> Tensor:
    from align.kernels import _row_kernels

    out, g, u = gate.new_empty(gate.shape), _rows(gate), _rows(up)
    blocks, block, warps = _config(gate, "swiglu")
    if out.numel():
        with _runtime.on(gate):
            _row_kernels.swiglu[(blocks * g.shape[0],)](
                g, u, out, g.stride(0), u.stride(0), SIZE=g.shape[1], BLOCK=block, num_warps=warps, **_runtime.early()
            )  # fmt: skip
    return out


def _launch_backward(grad: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    from align.kernels import _row_kernels

    g, u, dg, du = _rows(gate), _rows(up), _rows(dgate), _rows(dup)
    blocks, block, warps = _config(gate, "swiglu_backward")
    if grad.numel():
        with _runtime.on(gate):
            _row_kernels.swiglu_backward[(blocks * g.shape[0],)](
                _runtime.rows_of(grad), g, u, dg, du, g.stride(0), u.stride(0), dg.stride(0), du.stride(0),
                SIZE=g.shape[1], BLOCK=block, num_warps=warps, **_runtime.early(),
            )  # fmt: skip


@_runtime.op("swiglu")
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return (_launch if _runtime.use_kernel(gate) else reference)(gate, up)


@_runtime.op("swiglu_backward")
def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    if not _runtime.use_kernel(gate):
        return reference_backward(grad, gate, up)
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    _launch_backward(grad, gate, up, dgate, dup)
    return dgate, dup


@_runtime.op("swiglu_packed")
def _swiglu_packed(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return (_launch if _runtime.use_kernel(gate_up) else reference)(gate, up)


@_runtime.op("swiglu_packed_backward")
def _swiglu_packed_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    if not _runtime.use_kernel(gate_up):
        return torch.cat(reference_backward(grad, gate, up), -1)
    out = gate_up.new_empty(gate_up.shape)
    _launch_backward(grad, gate, up, *out.chunk(2, -1))
    return out


def _half(gate_up: Tensor) -> tuple[int, ...]:
    return (*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@_runtime.fake("swiglu")
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@_runtime.fake("swiglu_backward")
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


@_runtime.fake("swiglu_packed")
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(_half(gate_up))


@_runtime.fake("swiglu_packed_backward")
def _(grad: Tensor, gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    return torch.ops.align.swiglu_backward(grad, *ctx.saved_tensors)


def _backward_packed(ctx, grad):  # type: ignore[no-untyped-def]
    return torch.ops.align.swiglu_packed_backward(grad, *ctx.saved_tensors)


_runtime.differentiable("swiglu", _backward, _save)
_runtime.differentiable("swiglu_packed", _backward_packed, _save)
