"""The output projection joined with cross-entropy, or with log-probabilities: the logits exist a chunk of rows at a time, never whole.

The products are cuBLAS's (or the CPU's); the kernels make of a chunk of logits the losses and, in its place, their gradient. The way of
Liger kernel (Hsu et al. 2024, arXiv:2410.10989, section 3.2). Nothing waits for the GPU: rows outside the mask are computed as zeros.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from align.kernels import _runtime
from align.kernels._runtime import KernelError, wide

CHUNK_BYTES = 128 << 20  # of the logits of one chunk
LEAST_ROWS = 1024  # below it the products with hidden leave part of a GPU idle
ROWS = {"block": 4096, "warps": 8}
SLOPE = {"block": 4096, "warps": 8}


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
    fp32_weight_grad: bool = False,
) -> Tensor:
    """The sum over the mask of the cross-entropy of softmax(hidden · weightᵀ) with the targets, without the logits in memory.

    The gradients are made in the forward, while a chunk's logits are at hand; the backward scales them in place; a second is refused.

    Args:
        hidden: (..., D), weight: (V, D), one dtype.
        targets: (...), int64; anything outside 0..V-1 may stand where the mask is False.
        mask: (...), bool; None takes every row. Whatever is in hidden where it is False, NaN too, reaches neither loss nor gradient.
        label_smoothing: share of the target spread over the vocabulary evenly, in [0, 1) (Szegedy et al. 2016).
        z_loss: adds z_loss · logsumexp² of each row (Chowdhery et al. 2022, section 5); 0 is off.
        chunk: rows at a time; None takes the power of two that keeps a chunk's logits at 128 MiB, at least 1,024 rows.
        fp32_weight_grad: add up the weight's gradient over chunks in fp32, not in weight's dtype: costs memory and time; see README.

    Returns:
        0-d fp32 (fp64 for fp64): the sum, to be divided by the number of trained tokens.

    Raises:
        KernelError: shapes, dtypes or numbers that do not fit.
    """
    _check(hidden, weight, targets, mask, chunk)
    if not 0 <= label_smoothing < 1 or z_loss < 0:
        raise KernelError(f"label_smoothing {label_smoothing} must be in [0, 1), z_loss {z_loss} at least 0")
    rows, ids, kept = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), None if mask is None else mask.reshape(-1)
    grads = torch.is_grad_enabled()
    loss: Tensor = torch.ops.align.linear_cross_entropy(
        rows, weight, ids, kept, label_smoothing, z_loss, chunk or 0, grads and hidden.requires_grad, grads and weight.requires_grad,
        fp32_weight_grad,
    )[0]  # fmt: skip
    return loss


def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor | None = None, *, chunk: int | None = None, invariant: bool = False
) -> Tensor:
    """log softmax(hidden · weightᵀ)[target] of every row, 0 where the mask is False; the backward computes each chunk's logits again.

    Args and errors: as `linear_cross_entropy`; invariant: the logits by `invariant_linear`, so that a row's result is the same bits in any
    batch, and those of `logprob` of such logits: strict mode. The gradient's logits are cuBLAS's in any case.

    Returns:
        (...), fp32 (fp64 for fp64).
    """
    _check(hidden, weight, targets, mask, chunk)
    rows, ids, kept = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), None if mask is None else mask.reshape(-1)
    logprobs: Tensor = torch.ops.align.linear_logprob(rows, weight, ids, kept, chunk or 0, invariant)[0]
    return logprobs.view(targets.shape)


def logprob(logits: Tensor, targets: Tensor) -> Tensor:
    """log softmax(logits)[target] of each row, in fp32, in the arithmetic of `linear_logprob`: for the sampler's side of strict mode.

    Args:
        logits: (N, V). targets: (N,), int64.

    Returns:
        (N,), fp32 (fp64 for fp64); not differentiable.
    """
    if logits.ndim != 2 or targets.shape != logits.shape[:1] or targets.dtype != torch.int64:
        raise KernelError(f"logits {tuple(logits.shape)}, targets {targets.dtype} {tuple(targets.shape)}: expected (N, V), int64 (N,)")
    logprobs: Tensor = torch.ops.align.logprob(logits, targets)
    return logprobs


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor | None, chunk: int | None) -> None:
    if hidden.shape[:-1] != targets.shape or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1] or hidden.dtype != weight.dtype:
        raise KernelError(
            f"hidden {hidden.dtype} {tuple(hidden.shape)}, weight {weight.dtype} {tuple(weight.shape)}, targets {tuple(targets.shape)}: "
            "expected (..., D), (V, D) of one dtype, and (...)"
        )
    if targets.dtype != torch.int64:
        raise KernelError(f"targets are {targets.dtype}; expected torch.int64 token ids")
    if mask is not None and (mask.shape != targets.shape or mask.dtype != torch.bool):
        raise KernelError(f"the mask is {mask.dtype} {tuple(mask.shape)}, expected torch.bool {tuple(targets.shape)} like the targets")
    if chunk is not None and chunk < 1:
        raise KernelError(f"chunk is {chunk}; it is a number of rows, at least 1 (None chooses)")


def chunk_rows(vocabulary: int, element_size: int, chunk: int) -> int:
    """Rows of a chunk. A power of two: then the tiles of hidden's gradient fill the GPU's cores in whole rounds.

    2,048 rows of 4,096 columns are 256 tiles of 128 × 256 for 132 cores, 97 % of two rounds; 2,816 would be 89 % of three.
    """
    if chunk:
        return chunk
    most: int = CHUNK_BYTES // (vocabulary * element_size)
    return max(LEAST_ROWS, 1 << max(0, most.bit_length() - 1))


def _chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor | None, chunk: int, invariant: bool = False
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor | None]]:
    """(where, its rows of hidden with zeros outside the mask, logits, targets, mask) of each chunk; the logits may be overwritten."""
    step = chunk_rows(weight.shape[0], hidden.element_size(), chunk)
    for start in range(0, hidden.shape[0], step):
        where = slice(start, min(start + step, hidden.shape[0]))
        part, kept = hidden[where], None if mask is None else mask[where]
        if kept is not None:
            part = torch.where(kept[:, None], part, 0)  # 0 times NaN would be NaN in the weight's gradient
        # The logits have no name here: a generator's variables would keep them alive beside the next chunk's.
        yield where, part, torch.ops.align.invariant_linear(part, weight, None) if invariant else part @ weight.t(), targets[where], kept


class _WeightGradient:
    """Adds up slopeᵀ · hidden over chunks, in the weight's dtype or in fp32."""

    def __init__(self, weight: Tensor, fp32: bool):
        self.total: Tensor | None = None
        self.weight, self.fp32 = weight, fp32 and weight.dtype in (torch.bfloat16, torch.float16)

    def add(self, slope: Tensor, part: Tensor) -> None:
        if not self.fp32:
            if self.total is None:
                self.total = slope.t() @ part
            else:
                self.total.addmm_(slope.t(), part)
            return
        if self.total is None:
            self.total = torch.zeros(self.weight.shape, dtype=torch.float32, device=self.weight.device)
        if slope.is_cuda:
            torch.ops.aten.addmm.dtype_out(self.total, slope.t(), part, torch.float32, out=self.total)
        else:
            self.total.addmm_(slope.float().t(), part.float())

    def result(self) -> Tensor:
        return torch.zeros_like(self.weight) if self.total is None else self.total.to(self.weight.dtype)


def reference_rows(
    logits: Tensor, targets: Tensor, mask: Tensor | None, smoothing: float, z_loss: float, grads: bool
) -> Tensor:  # fmt: skip
    """Losses (n,) of a chunk of logits, which become their gradient where `grads`."""
    x = wide(logits)
    kept = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask
    ids = torch.where(kept, targets, 0)[:, None]
    lse = x.logsumexp(1, keepdim=True)
    loss = lse - (1 - smoothing) * x.gather(1, ids) - smoothing * x.mean(1, keepdim=True) + z_loss * lse.square()
    if grads:
        slope = (x - lse).exp_() * (1 + 2 * z_loss * lse) - smoothing / x.shape[1]
        slope.scatter_add_(1, ids, slope.new_full(ids.shape, smoothing - 1.0))
        logits.copy_(torch.where(kept[:, None], slope, 0))
    return torch.where(kept, loss.squeeze(1), 0)


def _launch_rows(
    logits: Tensor, targets: Tensor, mask: Tensor | None, smoothing: float, z_loss: float, grads: bool, lse: Tensor | None = None
) -> Tensor:
    """As `reference_rows`; with `lse`, log-probabilities in place of losses, and each row's logsumexp into it."""
    from align.kernels import _vocabulary_kernels

    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    c = _runtime.config(logits, "cross_entropy_rows", _runtime.power_of_two(vocabulary), ROWS)
    block = min(c["block"], _runtime.power_of_two(vocabulary))
    with _runtime.on(logits):
        _vocabulary_kernels.cross_entropy_rows[(rows,)](
            logits, targets, targets if mask is None else mask.view(torch.uint8), losses, losses if lse is None else lse,
            logits.stride(0), vocabulary, smoothing, z_loss,
            BLOCK=block, HAS_MASK=mask is not None, SMOOTH=smoothing > 0, Z=z_loss > 0, GRADS=grads,
            LOGPROB=lse is not None, num_warps=max(1, min(c["warps"], block // 128)),
        )  # fmt: skip
    return losses


def _launch_slope(logits: Tensor, targets: Tensor, mask: Tensor | None, lse: Tensor, upstream: Tensor) -> None:
    """Logits become upstream · (onehot - softmax)."""
    from align.kernels import _vocabulary_kernels

    rows, vocabulary = logits.shape
    c = _runtime.config(logits, "logprob_slope", _runtime.power_of_two(vocabulary), SLOPE)
    block = min(c["block"], _runtime.power_of_two(vocabulary))
    with _runtime.on(logits):
        _vocabulary_kernels.logprob_slope[(rows * _runtime.cdiv(vocabulary, block),)](
            logits, targets, targets if mask is None else mask.view(torch.uint8), lse, upstream, logits.stride(0), vocabulary,
            BLOCK=block, HAS_MASK=mask is not None, num_warps=max(1, min(c["warps"], block // 128)),
        )  # fmt: skip


@_runtime.op("linear_cross_entropy")
def _cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor | None, smoothing: float, z_loss: float, chunk: int,
    want_hidden: bool, want_weight: bool, fp32_weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, gradient of hidden, of weight); a gradient that is not wanted is empty."""
    rows = _launch_rows if _runtime.use_kernel(hidden) else reference_rows
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    losses = torch.empty(hidden.shape[0], dtype=dtype, device=hidden.device)
    dhidden = hidden.new_empty(hidden.shape if want_hidden else (0,))
    dweight = _WeightGradient(weight, fp32_weight_grad)
    for where, part, logits, ids, kept in _chunks(hidden, weight, targets, mask, chunk):
        losses[where] = rows(logits, ids, kept, smoothing, z_loss, want_hidden or want_weight)
        if want_hidden:
            torch.mm(logits, weight, out=dhidden[where])
        if want_weight:
            dweight.add(logits, part)
        del logits
    return losses.sum(), dhidden, dweight.result() if want_weight else weight.new_empty(0)


@_runtime.op("linear_logprob")
def _linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor | None, chunk: int, invariant: bool
) -> tuple[Tensor, Tensor]:
    """(log-probabilities, logsumexp of each row)."""
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logprobs, lse = (torch.empty(hidden.shape[0], dtype=dtype, device=hidden.device) for _ in range(2))
    for where, _, logits, ids, kept in _chunks(hidden, weight, targets, mask, chunk, invariant):
        if _runtime.use_kernel(hidden):
            logprobs[where] = _launch_rows(logits, ids, kept, 0.0, 0.0, False, lse[where])
        else:
            logprobs[where] = -reference_rows(logits, ids, kept, 0.0, 0.0, False)
            lse[where] = wide(logits).logsumexp(1)
    return logprobs, lse


@_runtime.op("logprob")
def _logprob(logits: Tensor, targets: Tensor) -> Tensor:
    if not _runtime.use_kernel(logits):
        return -reference_rows(logits, targets, None, 0.0, 0.0, False)
    logits = logits.contiguous()
    return _launch_rows(logits, targets, None, 0.0, 0.0, False, torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device))


@_runtime.op("linear_logprob_backward")
def _logprob_backward(
    upstream: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor | None, lse: Tensor, chunk: int,
    want_hidden: bool, want_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dhidden = hidden.new_empty(hidden.shape if want_hidden else (0,))
    dweight = _WeightGradient(weight, False)
    upstream = upstream.contiguous()
    for where, part, logits, ids, kept in _chunks(hidden, weight, targets, mask, chunk):
        if _runtime.use_kernel(hidden):
            _launch_slope(logits, ids, kept, lse[where], upstream[where])
        else:
            kept = torch.ones_like(ids, dtype=torch.bool) if kept is None else kept
            slope = -(wide(logits) - lse[where, None]).exp_()
            slope.scatter_add_(1, torch.where(kept, ids, 0)[:, None], slope.new_ones(ids.shape)[:, None])
            logits.copy_(torch.where(kept[:, None], slope * upstream[where, None], 0))
        if want_hidden:
            torch.mm(logits, weight, out=dhidden[where])
        if want_weight:
            dweight.add(logits, part)
        del logits
    return dhidden, dweight.result() if want_weight else weight.new_empty(0)


@_runtime.op("scale_", mutates=("x",))
def _scale_(x: Tensor, factor: Tensor) -> None:
    """x *= factor (0-d), the product in fp32; nothing is read or written where the factor is 1."""
    if not _runtime.use_kernel(x) or not x.is_contiguous():
        x.copy_(wide(x) * factor)
    elif x.numel():
        from align.kernels import _row_kernels

        with _runtime.on(x):
            _row_kernels.scale[(_runtime.cdiv(x.numel(), 4096),)](x, factor, x.numel(), BLOCK=4096, num_warps=8)


@_runtime.fake("linear_cross_entropy")
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor | None, smoothing: float, z_loss: float, chunk: int,
    want_hidden: bool, want_weight: bool, fp32_weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return hidden.new_empty((), dtype=dtype), *_grads_like(hidden, weight, want_hidden, want_weight)


@_runtime.fake("logprob")
def _(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.new_empty(targets.shape, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)


@_runtime.fake("linear_logprob")
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor | None, chunk: int, invariant: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return hidden.new_empty(targets.shape, dtype=dtype), hidden.new_empty(targets.shape, dtype=dtype)


@_runtime.fake("linear_logprob_backward")
def _(
    upstream: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor | None, lse: Tensor, chunk: int,
    want_hidden: bool, want_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _grads_like(hidden, weight, want_hidden, want_weight)


def _grads_like(hidden: Tensor, weight: Tensor, want_hidden: bool, want_weight: bool) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape if want_hidden else (0,)), weight.new_empty(weight.shape if want_weight else (0,))


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.want, ctx.spent = inputs[7:9], False
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, upstream, *_):  # type: ignore[no-untyped-def]
    if upstream is None:
        return (None,) * 10
    if ctx.spent:
        raise RuntimeError("linear_cross_entropy gave its gradients away in the first backward; call it again for a second one")
    ctx.spent = True
    grads = ctx.saved_tensors
    for grad, wanted in zip(grads, ctx.want, strict=True):
        if wanted:
            torch.ops.align.scale_(grad, upstream)
    dhidden, dweight = (grad if wanted else None for grad, wanted in zip(grads, ctx.want, strict=True))
    return dhidden, dweight, *(None,) * 8


def _save_logprob(ctx, inputs, output):  # type: ignore[no-untyped-def]
    hidden, weight, targets, mask, ctx.chunk, _ = inputs
    ctx.save_for_backward(hidden, weight, targets, mask, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward_logprob(ctx, upstream, _):  # type: ignore[no-untyped-def]
    if upstream is None:
        return (None,) * 6
    dhidden, dweight = torch.ops.align.linear_logprob_backward(upstream, *ctx.saved_tensors, ctx.chunk, *ctx.needs_input_grad[:2])
    return dhidden if ctx.needs_input_grad[0] else None, dweight if ctx.needs_input_grad[1] else None, *(None,) * 4


_runtime.differentiable("linear_cross_entropy", _backward, _save)
_runtime.differentiable("linear_logprob", _backward_logprob, _save_logprob)
