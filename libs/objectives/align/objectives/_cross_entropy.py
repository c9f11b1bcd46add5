"""Cross-entropy and log-probabilities over a large vocabulary, a chunk of rows at a time.

The logits of N tokens take N × V × 4 bytes: 2 GiB at N = 16,384 and V = 32,768, and as much again for their gradient. Here only one chunk
of rows exists at a time. What is not trained is dropped before the first product, so whatever stands there (padding, NaN, a target of -100)
reaches neither the sum nor a gradient, and costs nothing. On a GPU align.kernels does the same with zeros in the place of dropped rows, so
that nothing waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 2**26  # fp32 logits of one chunk: 256 MiB


def sft_loss(hidden: Tensor, weight: Tensor, targets: Tensor, loss_mask: Tensor, *, chunk: int | None = None) -> Tensor:
    """The summed negative log-likelihood of the trained tokens; divide it by `normalise`.

    `targets` and `loss_mask` (both (B, T) beside `hidden` (B, T, D)) are already shifted: position t of `hidden` predicts `targets[t]`, and
    is trained where `loss_mask[t]`. Dtypes and errors are those of `chunked_cross_entropy`, with the mask required.
    """
    return chunked_cross_entropy(hidden, weight, targets, loss_mask, chunk=chunk)


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor | None = None, *, chunk: int | None = None
) -> Tensor:
    """The sum of -log softmax(hidden · weightᵀ)[target] over the positions of the mask.

    The gradients are made in the forward, chunk by chunk, while the logits are at hand; the backward only scales them. This is the way of
    Liger kernel (arXiv:2410.10989, section 3.2). A second backward is refused.

    Args:
        hidden: (..., D), the decoder's output, any float dtype.
        weight: (V, D), the output embedding, the dtype of `hidden`.
        targets: (...), int64 token ids in 0..V-1 wherever the mask is True.
        mask: (...), bool; None takes every position.
        chunk: rows at a time; None takes as many as keep the logits at 256 MiB.

    Returns:
        0-d tensor, fp32 (fp64 for fp64 input); 0 where nothing is masked in.

    Raises:
        ValueError: the shapes do not belong together, or `chunk` is not positive.
    """
    if hidden.is_cuda:
        from align.kernels import linear_cross_entropy

        _check(hidden, weight, targets, mask)
        return linear_cross_entropy(hidden, weight, targets, mask, chunk=chunk)
    rows, ids, _ = _trained_rows(hidden, weight, targets, mask)
    step = _chunk_rows(weight.shape[0], chunk)
    loss: Tensor = _ChunkedCrossEntropy.apply(rows, weight, ids, step, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return loss


def sequence_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor | None = None, *, chunk: int | None = None, invariant: bool = False
) -> Tensor:
    """The log-probability of every target, 0 where the mask is False.

    The backward computes each chunk's logits again (the gradient of each position is not known in the forward), so the memory stays that
    of one chunk. Sum over the last axis for the log-probability of a sequence.

    Args and errors: as `chunked_cross_entropy`. invariant: on a GPU in an order that does not depend on the batch, for hidden states of the
    forward `invariant`: then a strict sampler's log-probabilities are these, bit for bit.

    Returns:
        (...) of `targets`, fp32 (fp64 for fp64 input).
    """
    if hidden.is_cuda:
        from align.kernels import linear_logprob

        _check(hidden, weight, targets, mask)
        return linear_logprob(hidden, weight, targets, mask, chunk=chunk, invariant=invariant)
    rows, ids, index = _trained_rows(hidden, weight, targets, mask)
    step = _chunk_rows(weight.shape[0], chunk)
    logprobs: Tensor = _ChunkedLogprobs.apply(rows, weight, ids, step)  # type: ignore[no-untyped-call]
    if index is None:
        return logprobs.view(targets.shape)
    return logprobs.new_zeros(targets.numel()).index_copy(0, index, logprobs).view(targets.shape)


def _trained_rows(hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The trained rows (N, D) of hidden, their targets (N,), and where they stood (None: everywhere)."""
    _check(hidden, weight, targets, mask)
    rows, ids = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if mask is None:
        return rows, ids, None
    index = mask.reshape(-1).nonzero().squeeze(1)
    return rows.index_select(0, index), ids.index_select(0, index), index


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor | None) -> None:
    if hidden.shape[:-1] != targets.shape or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}: "
            "expected (..., D), (V, D) and (...)"
        )
    if mask is not None and (mask.shape != targets.shape or mask.dtype != torch.bool):
        raise ValueError(f"the mask is {mask.dtype} {tuple(mask.shape)}, expected torch.bool {tuple(targets.shape)} like the targets")


def _chunk_rows(vocabulary: int, chunk: int | None) -> int:
    if chunk is None:
        return max(256, CHUNK_ELEMENTS // vocabulary)
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it is a number of rows, at least 1 (None chooses)")
    return chunk


def _logits(rows: Tensor, weight: Tensor) -> Tensor:
    """(n, V) in fp32, or fp64: the product in the dtype of the input, everything after it in fp32."""
    logits = rows @ weight.t()
    return logits if logits.dtype == torch.float64 else logits.float()


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ids: Tensor, chunk: int, with_grad: bool) -> Tensor:
        want_rows = with_grad and ctx.needs_input_grad[0]
        want_weight = with_grad and ctx.needs_input_grad[1]
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=wide, device=rows.device)
        rows_grad = torch.empty_like(rows) if want_rows else None
        weight_grad: Tensor | None = None
        for start in range(0, rows.shape[0], chunk):
            part, part_ids = rows[start : start + chunk], ids[start : start + chunk].unsqueeze(1)
            logits = _logits(part, weight)
            peak = logits.amax(1, keepdim=True)
            target = logits.gather(1, part_ids) - peak
            exponentials = logits.sub_(peak).exp_()
            sums = exponentials.sum(1, keepdim=True)
            total += (sums.log() - target).sum()
            if not (want_rows or want_weight):
                continue
            # softmax - onehot, in place of the logits
            slope = exponentials.div_(sums).scatter_add_(1, part_ids, sums.new_full(part_ids.shape, -1.0)).to(rows.dtype)
            if rows_grad is not None:
                torch.mm(slope, weight, out=rows_grad[start : start + chunk])
            if want_weight:
                # Several chunks add up in fp32: in bf16 the later ones would be rounded away.
                product = slope.t() @ part
                weight_grad = product if weight_grad is None else weight_grad.to(wide).add_(product)
        if want_weight and weight_grad is None:
            weight_grad = torch.zeros_like(weight)
        ctx.save_for_backward(rows_grad, None if weight_grad is None else weight_grad.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows_grad, weight_grad = ctx.saved_tensors
        scaled = (None if grad is None else grad * upstream.to(grad.dtype) for grad in (rows_grad, weight_grad))
        return (*scaled, None, None, None)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ids: Tensor, chunk: int) -> Tensor:
        parts = []
        for start in range(0, rows.shape[0], chunk):
            logits = _logits(rows[start : start + chunk], weight)
            target = logits.gather(1, ids[start : start + chunk].unsqueeze(1)).squeeze(1)
            parts.append(target - logits.logsumexp(1))
        ctx.save_for_backward(rows, weight, ids)
        ctx.chunk = chunk
        if not parts:
            return rows.new_zeros(0, dtype=torch.float64 if rows.dtype == torch.float64 else torch.float32)
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, ids = ctx.saved_tensors
        want_rows, want_weight = ctx.needs_input_grad[:2]
        rows_grad = torch.zeros_like(rows) if want_rows else None
        weight_grad = torch.zeros(weight.shape, dtype=upstream.dtype, device=weight.device) if want_weight else None
        for start in range(0, rows.shape[0], ctx.chunk):
            part, part_ids = rows[start : start + ctx.chunk], ids[start : start + ctx.chunk].unsqueeze(1)
            slope = _logits(part, weight).softmax(1).neg_()
            slope.scatter_add_(1, part_ids, slope.new_ones(part_ids.shape))
            slope = slope.mul_(upstream[start : start + ctx.chunk].unsqueeze(1)).to(rows.dtype)
            if rows_grad is not None:
                torch.mm(slope, weight, out=rows_grad[start : start + ctx.chunk])
            if weight_grad is not None:
                weight_grad += slope.t() @ part
        return rows_grad, None if weight_grad is None else weight_grad.to(weight.dtype), None, None
