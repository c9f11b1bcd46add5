"""The products of a decoding step with what stands around them: a norm, a gate, the residual sum.

A step of few rows waits for weights, and between two products for small kernels that leave the memory idle, so there should be few of
those. For one row the norm is inside the product (`normed_vector`, `residual_vector`). For 2 to 64 rows a product is cut along its inputs
too, so that all cores have work and the rows are read less often; its parts are added up where they are used anyway: in `sum_rms_norm`
and in `rope_to_cache`.
"""

import torch
from torch import Tensor

from align.kernels import _runtime
from align.kernels._runtime import KernelError, wide

TILE = {"n": 64, "k": 64, "splits": 4, "warps": 4, "stages": 4, "lines": 0}
GATED = {"n": 64, "k": 64, "warps": 4, "stages": 6, "lines": 0}
VECTOR = {"rows": 2, "block": 1024, "warps": 4, "stages": 1, "lines": 0}
MAX_ROWS = 64


def split_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ as parts to be added: (parts, B, N) fp32, as many as the tuning table says.

    Args:
        x: (B, K), B from 2 to 64. weight: (N, K), contiguous; half precision for the kernel.

    Raises:
        KernelError: shapes or dtypes do not fit.
    """
    _check(x, weight)
    parts: Tensor = torch.ops.align.split_linear(x, weight)
    return parts


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """silu(x · gateᵀ) · (x · upᵀ), (B, F), in fp32 and rounded once, of x (B, K) and the joint weight (2 F, K): gate, then up."""
    _check(x, weight)
    if len(weight) % 2:
        raise KernelError(f"weight {tuple(weight.shape)}: expected an even number of rows, gate and up")
    y: Tensor = torch.ops.align.gated_linear(x, weight)
    return y


def sum_rms_norm(
    parts: Tensor, h: Tensor, norm: Tensor, eps: float, bias: Tensor | None = None, *, early: bool = False
) -> tuple[Tensor, Tensor]:
    """h + the sum of all parts + bias, rounded to h's dtype, and its norm: (normed, summed), like `add_rms_norm`.

    Args:
        parts: (parts, B, D) of `split_linear`. h: (B, D). norm, bias: (D,).
        early: as for `decode_attention`; only where the kernel launched just before writes nothing but parts.
    """
    if parts.ndim != 3 or parts.shape[1:] != h.shape or norm.shape != h.shape[1:] or (bias is not None and bias.shape != norm.shape):
        raise KernelError(f"parts {tuple(parts.shape)}, h {tuple(h.shape)}, norm {tuple(norm.shape)}: expected (parts, B, D), (B, D), (D,)")
    y, summed = torch.ops.align.sum_rms_norm(parts, h, norm, eps, bias, early)
    return y, summed


def normed_vector(h: Tensor, norm: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None, *, gated: bool = False) -> Tensor:
    """rms_norm(h) · weightᵀ + bias of one row h (1, K), norm (K,); gated: silu of the first half of that times the second, no bias."""
    _check(h, weight)
    if len(h) != 1 or norm.shape != h.shape[1:] or (gated and (bias is not None or len(weight) % 2)):
        raise KernelError(f"h {tuple(h.shape)}, norm {tuple(norm.shape)}, weight {tuple(weight.shape)}: one row; gated takes no bias")
    y: Tensor = torch.ops.align.normed_vector(h, norm, weight, eps, bias, gated)
    return y


def residual_vector(x: Tensor, weight: Tensor, h: Tensor, bias: Tensor | None = None) -> Tensor:
    """h + x · weightᵀ + bias, rounded once, of one row: x (1, K), h (1, N)."""
    _check(x, weight)
    if len(x) != 1 or h.shape != (1, len(weight)):
        raise KernelError(f"x {tuple(x.shape)}, h {tuple(h.shape)}: expected one row, and (1, {len(weight)})")
    y: Tensor = torch.ops.align.residual_vector(x, weight, h, bias)
    return y


def _check(x: Tensor, weight: Tensor) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype or not weight.is_contiguous():
        raise KernelError(
            f"x {x.dtype} {tuple(x.shape)}, weight {weight.dtype} {tuple(weight.shape)}: expected (B, K) and contiguous (N, K) of one dtype"
        )


def _gate(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, 1)
    return torch.nn.functional.silu(gate) * up


def _wide_parts(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _tiles(x: Tensor, weight: Tensor, out: Tensor, outputs: int, c: _runtime.Config, splits: int, gated: bool) -> None:
    from align.kernels import _step_kernels

    rows, size = x.shape
    m, block = min(MAX_ROWS, max(16, _runtime.power_of_two(rows))), _block(x, c)
    grid = (_runtime.cdiv(rows, m) * _runtime.cdiv(outputs, c["n"]), splits)
    with _runtime.on(x):
        _step_kernels.step_linear[grid](
            x.contiguous(), weight, out, rows, outputs,
            K=size, M=m, N=c["n"], BLOCK=block, SHARE=_share(size, splits, block), GATED=gated, WIDE=_runtime.interpreted(),
            LINES=c["lines"], num_warps=c["warps"], num_stages=c["stages"], **_runtime.early(),
        )  # fmt: skip


def _block(x: Tensor, c: _runtime.Config) -> int:
    """Inputs of a tile: the table is for half precision, and wider numbers take the same shared memory."""
    return c["k"] * 2 // x.element_size()


def _share(size: int, splits: int, block: int) -> int:
    """Inputs of a part: whole blocks."""
    return _runtime.cdiv(_runtime.cdiv(size, splits), block) * block


@_runtime.op("split_linear")
def _split(x: Tensor, weight: Tensor) -> Tensor:
    if not _runtime.use_kernel(x):
        return (wide(x) @ wide(weight).t())[None]
    (rows, size), outputs = x.shape, len(weight)
    c = _runtime.config(x, "split_linear", f"{outputs}x{size}", TILE)
    splits = _runtime.cdiv(size, _share(size, c["splits"], _block(x, c)))
    parts = x.new_empty(splits, rows, outputs, dtype=torch.float32)
    if parts.numel():
        _tiles(x, weight, parts, outputs, c, splits, False)
    return parts


@_runtime.op("gated_linear")
def _gated(x: Tensor, weight: Tensor) -> Tensor:
    if not _runtime.use_kernel(x):
        return _gate(wide(x) @ wide(weight).t()).to(x.dtype)
    (rows, size), outputs = x.shape, len(weight) // 2
    c = _runtime.config(x, "gated_linear", f"{outputs}x{size}", GATED)
    out = x.new_empty(rows, outputs)
    if out.numel():
        _tiles(x, weight, out, outputs, c, 1, True)
    return out


@_runtime.op("sum_rms_norm")
def _sum_rms_norm(
    parts: Tensor, h: Tensor, norm: Tensor, eps: float, bias: Tensor | None, early: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not _runtime.use_kernel(h):
        total = wide(h) + parts.sum(0) if bias is None else wide(h) + parts.sum(0) + wide(bias)
        summed = total.to(h.dtype)
        return (wide(summed) * torch.rsqrt(wide(summed).square().mean(1, keepdim=True) + eps) * wide(norm)).to(h.dtype), summed
    from align.kernels import _step_kernels

    y, summed, (count, rows, size) = torch.empty_like(h), torch.empty_like(h), parts.shape
    if y.numel():
        c = _runtime.config(h, "sum_rms_norm", size, {"warps": 4})
        with _runtime.on(h):
            _step_kernels.sum_rms_norm[(rows,)](
                parts.contiguous(), norm if bias is None else bias, h.contiguous(), norm, y, summed, rows, eps,
                D=size, BLOCK=_runtime.power_of_two(size), PARTS=count, BIAS=bias is not None, EARLY=early, num_warps=c["warps"],
                **_runtime.early(),
            )  # fmt: skip
    return y, summed


def _vector(
    x: Tensor, weight: Tensor, outputs: int, *, bias: Tensor | None, norm: Tensor | None = None, eps: float = 0.0, gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    from align.kernels import _step_kernels

    size, x, out = x.shape[1], x.contiguous(), x.new_empty(1, outputs)
    c = _runtime.config(x, "step_vector" + ("_gated" if gated else ""), f"{outputs}x{size}", VECTOR)
    with _runtime.on(x):
        _step_kernels.step_vector[(_runtime.cdiv(outputs, c["rows"]),)](
            x, weight, out if bias is None else bias, out if residual is None else residual.contiguous(), out if norm is None else norm,
            out, outputs, eps,
            K=size, ROWS=c["rows"], BLOCK=min(c["block"], _runtime.power_of_two(size)), STAGES=c["stages"], SCALE=norm is not None,
            GATED=gated, ADD=residual is not None, BIAS=bias is not None, LINES=c["lines"], num_warps=c["warps"], **_runtime.early(),
        )  # fmt: skip
    return out


@_runtime.op("normed_vector")
def _normed_vector(h: Tensor, norm: Tensor, weight: Tensor, eps: float, bias: Tensor | None, gated: bool) -> Tensor:
    if _runtime.use_kernel(h):
        return _vector(h, weight, len(weight) // (2 if gated else 1), bias=bias, norm=norm, eps=eps, gated=gated)
    y = ((wide(h) * wide(norm)) @ wide(weight).t()) * torch.rsqrt(wide(h).square().mean(1, keepdim=True) + eps)
    y = y if bias is None else y + wide(bias)
    return (_gate(y) if gated else y).to(h.dtype)


@_runtime.op("residual_vector")
def _residual_vector(x: Tensor, weight: Tensor, h: Tensor, bias: Tensor | None) -> Tensor:
    if _runtime.use_kernel(x):
        return _vector(x, weight, len(weight), bias=bias, residual=h)
    y = wide(x) @ wide(weight).t() + wide(h)
    return (y if bias is None else y + wide(bias)).to(x.dtype)


@_runtime.fake("split_linear")
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), len(x), len(weight), dtype=_wide_parts(x))


@_runtime.fake("gated_linear")
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(len(x), len(weight) // 2)


@_runtime.fake("sum_rms_norm")
def _(parts: Tensor, h: Tensor, norm: Tensor, eps: float, bias: Tensor | None, early: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(h), torch.empty_like(h)


@_runtime.fake("normed_vector")
def _(h: Tensor, norm: Tensor, weight: Tensor, eps: float, bias: Tensor | None, gated: bool) -> Tensor:
    return h.new_empty(1, len(weight) // (2 if gated else 1))


@_runtime.fake("residual_vector")
def _(x: Tensor, weight: Tensor, h: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(1, len(weight))
