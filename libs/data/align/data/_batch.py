"""Micro-batches as arrays: padded (one document a row) or packed (rows of one length)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ._encode import Example


@dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch of B rows and T positions.

    targets[b, t] is the token after input_ids[b, t] in the same document, and loss_mask[b, t] says whether it is trained. At a document's
    last token and at padding the mask is False and the target 0, a real id: mask the loss with `where`. position_ids start at 0 in
    each document.

    cu_seqlens is None for padded batches. For packed ones it bounds the documents over the flattened B*T positions, padding included as
    documents of its own, and is filled up with B*T (documents of length 0) to one length for the whole run; max_seqlen, a power of
    two, bounds them all. So shapes never change during a run.
    """

    input_ids: np.ndarray  # (B, T) int64
    targets: np.ndarray  # (B, T) int64
    loss_mask: np.ndarray  # (B, T) bool
    position_ids: np.ndarray  # (B, T) int64
    cu_seqlens: np.ndarray | None  # (S+1,) int32
    max_seqlen: int | None


def padded_batch(examples: Sequence[Example], *, pad_id: int = 0) -> Batch:
    """Right-padded to the longest; padding comes after every real token, so causal attention never sees it."""
    width = max(len(example.ids) for example in examples)
    batch = _empty(len(examples), width, pad_id)
    batch.position_ids[:] = np.arange(width)
    for row, example in enumerate(examples):
        _put(batch, row, 0, example)
    return batch


def packed_batch(rows: Sequence[Sequence[Example]], length: int, *, max_seqlen: int, segments: int, pad_id: int = 0) -> Batch:
    """Rows of `length` positions, each the documents of one entry of `rows` and then padding; cu_seqlens gets `segments` + 1 entries."""
    batch = _empty(len(rows), length, pad_id)
    bounds = np.full(segments + 1, len(rows) * length, np.int32)
    count = 0
    for row, examples in enumerate(rows):
        at = 0
        for example in examples:
            _put(batch, row, at, example)
            bounds[count] = row * length + at
            count, at = count + 1, at + len(example.ids)
        # Padding is cut too, or its one long document would pass max_seqlen.
        for start in range(at, length, max_seqlen):
            size = min(max_seqlen, length - start)
            batch.position_ids[row, start : start + size] = np.arange(size)
            bounds[count] = row * length + start
            count += 1
    return Batch(batch.input_ids, batch.targets, batch.loss_mask, batch.position_ids, bounds, max_seqlen)


def _empty(rows: int, width: int, pad_id: int) -> Batch:
    shape = (rows, width)
    ids = np.full(shape, pad_id, np.int64)
    return Batch(ids, np.zeros(shape, np.int64), np.zeros(shape, np.bool_), np.zeros(shape, np.int64), None, None)


def _put(batch: Batch, row: int, at: int, example: Example) -> None:
    size = len(example.ids)
    batch.input_ids[row, at : at + size] = example.ids
    batch.targets[row, at : at + size - 1] = example.ids[1:]
    batch.loss_mask[row, at : at + size - 1] = example.mask[1:]
    batch.position_ids[row, at : at + size] = np.arange(size)
