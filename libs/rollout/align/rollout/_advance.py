"""The end of a decoding step: each running row notes its token and moves on, or stops. One kernel, nothing read on the host."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

# Rows of the state matrix, one column a row of the batch.
TOKEN = 0  # the last token, not yet in the cache
POSITION = 1  # its position, counted from the start of the prompt
NEXT = 2  # POSITION + 1: the keys that attention looks at, and where the token that is drawn will stand
STEP = 3  # tokens drawn so far
LIMIT = 4  # tokens that may be drawn
KEY = 5  # of the sample's noise
FLAG = 6  # one of the following
RUNNING, STOPPED, FULL, IDLE = 0, 1, 2, 3
FIELDS = 7


def advance(
    state: Tensor, drawn: Tensor, logprob: Tensor, raw: Tensor, ids: Tensor, logprobs: Tensor, raws: Tensor, stops: Tensor, rows: Tensor
) -> None:
    """state: (FIELDS, R) int64. drawn, logprob, raw: (n,), of the rows `rows` (n,) int64. ids, logprobs, raws: (R, W), where a row's k-th
    token and its two log-probabilities go to column k. stops: (V,) bool. A row that does not run stays as it is."""
    if state.is_cuda:
        _kernel()[(rows.shape[0],)](
            state, drawn, logprob, raw, ids, logprobs, raws, stops, rows, state.stride(0), ids.stride(0), num_warps=1
        )  # fmt: skip
        return
    at = rows[state[FLAG, rows] == RUNNING]
    of = (state[FLAG, rows] == RUNNING).nonzero()[:, 0]
    step, tokens = state[STEP, at], drawn[of]
    ids[at, step], logprobs[at, step], raws[at, step] = tokens, logprob[of], raw[of]
    state[TOKEN, at] = tokens
    for field in (POSITION, NEXT, STEP):
        state[field, at] += 1
    full = torch.where(step + 1 >= state[LIMIT, at], FULL, RUNNING)
    state[FLAG, at] = torch.where(stops[tokens], STOPPED, full)


@functools.cache
def _kernel() -> Any:
    from align.rollout import _advance_kernel

    return _advance_kernel.advance
