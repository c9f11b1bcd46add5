"""The Triton kernel of `_advance`. Importing this module imports triton."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def advance(state, drawn, logprob, raw, ids, logprobs, raws, stops, rows, field, width):
    """One row a program; the fields of `state` lie `field` apart, in the order of `_advance`."""
    i = tl.program_id(0)
    row = tl.load(rows + i)
    own = state + row
    if tl.load(own + 6 * field) == 0:
        step = tl.load(own + 3 * field)
        token = tl.load(drawn + i)
        tl.store(ids + row * width + step, token)
        tl.store(logprobs + row * width + step, tl.load(logprob + i))
        tl.store(raws + row * width + step, tl.load(raw + i))
        tl.store(own, token)
        tl.store(own + field, tl.load(own + field) + 1)
        tl.store(own + 2 * field, tl.load(own + 2 * field) + 1)
        tl.store(own + 3 * field, step + 1)
        full = (step + 1 >= tl.load(own + 4 * field)).to(tl.int64) * 2
        tl.store(own + 6 * field, tl.where(tl.load(stops + token) != 0, 1, full))
