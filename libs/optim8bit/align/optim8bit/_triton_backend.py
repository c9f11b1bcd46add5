"""The fast step: one launch of `_kernels.adam8` or `adam32` a bucket, with tables that say which chunk belongs to which parameter.

Importing this module imports triton.
"""

import contextlib
import functools
import os
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl  # type: ignore[import-untyped]

from align.optim8bit import _kernels, _noise, quant
from align.optim8bit._layout import Bucket, Member, local
from align.optim8bit._torch_backend import Hyper
from align.optim8bit.quant import OptimizerError

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
CHUNK32 = 1024
NORM_UNROLL = 4


@dataclass
class Tuning:
    """How `adam8` is launched. Elements a program: at least a block; more elements a thread amortise the tables' addresses."""

    chunk: int = 2048
    warps: int = 2


TUNING = Tuning()


def check_device(device: torch.device) -> None:
    if device.type != "cuda" and not _interpreted():
        raise OptimizerError(
            f'backend "triton" needs CUDA parameters, not {device.type}; move the model, use backend "torch", or set TRITON_INTERPRET=1'
        )


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def granule(block: int) -> int:
    """Members start at multiples of the chunk in the state, so that a chunk's state needs no table."""
    return max(TUNING.chunk, block) if block else CHUNK32


@dataclass
class Launch:
    """Tables for one list of members: which member each program works on, and one record of int64 words a member."""

    chunk_member: torch.Tensor  # (chunks,) int16 or int32
    fixed: list[list[int]]  # the words of each record after the two addresses
    even: bool
    addresses: tuple[int, ...] = ()
    records: torch.Tensor | None = None
    aligned: bool = False


def _launch(bucket: Bucket, members: list[Member]) -> Launch:
    """The cached tables; made anew for another list of members."""
    key = tuple(m.offset for m in members)
    if key not in bucket.scratch:
        chunks = [-(-m.numel // bucket.granule) for m in members]
        fixed, first = [], 0
        for member, count in zip(members, chunks, strict=True):
            low, high = member.words
            words = [first, member.offset // bucket.granule - first, member.numel, _signed64(low | high << 32), member.first, 0]
            fixed.append(words)
            first += count
        dtype = torch.int16 if len(members) < 1 << 15 else torch.int32
        owner = torch.arange(len(members), dtype=dtype).repeat_interleave(torch.tensor(chunks))
        even = all(m.numel % bucket.granule == 0 for m in members)
        if len(bucket.scratch) >= 4:  # parameters come and go: keep the tables few
            bucket.scratch.clear()
        bucket.scratch[key] = Launch(owner.to(bucket.device), fixed, even)
    launch: Launch = bucket.scratch[key]
    return launch


def _signed64(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


@dataclass(frozen=True)
class Prepared:
    """Tables with this step's addresses, and the gradients in one dtype, contiguous: they must live until the kernel is queued."""

    launch: Launch
    grads: list[torch.Tensor]


def prepare(bucket: Bucket, members: list[Member], grads: list[torch.Tensor]) -> Prepared:
    """Once a step, before the norm, so that nothing but a launch stands between the host synchronisation and the kernel."""
    dtypes = {g.dtype for g in grads}
    dtype = dtypes.pop() if len(dtypes) == 1 and dtypes <= TYPES.keys() else torch.float32
    grads = [g.to(dtype).contiguous() for g in grads]
    launch = _launch(bucket, members)
    params = [local(m.param) for m in members]
    addresses = tuple(t.data_ptr() for pair in zip(params, grads, strict=True) for t in pair)
    if launch.addresses != addresses:
        rows = [[*addresses[2 * i : 2 * i + 2], *words] for i, words in enumerate(launch.fixed)]
        launch.records = torch.tensor(rows, dtype=torch.int64).to(bucket.device)
        launch.addresses, launch.aligned = addresses, all(a % 16 == 0 for a in addresses)
    return Prepared(launch, grads)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def scalars(hyper: Hyper) -> dict[str, float]:
    return {
        "grad_scale": hyper.grad_scale,
        "m_keep": hyper.beta1,
        "m_new": hyper.one_minus_beta1,
        "v_keep": hyper.beta2,
        "v_new": hyper.one_minus_beta2,
        "root": hyper.root_bias2,
        "eps": hyper.eps,
        "decay": hyper.decay,
        "rate": hyper.step_size,
    }


@functools.cache
def both_maps(device: torch.device) -> torch.Tensor:
    """(512,) fp32: the values of the signed map, then those of the unsigned one."""
    return torch.cat([quant.codebook(signed, device).values for signed in (True, False)])


@functools.cache
def code_table(signed: bool, device: torch.device) -> torch.Tensor:
    """The table of `_kernels._code` from the entry of +0 on: one int32 for each pattern of a float's upper 16 bits.

    A value's bits, for the signed map made monotone (`bits ^ (bits >> 31 & 0x7FFFFFFF)`), lie in an interval of 2**16 patterns that holds
    one threshold at most. Its entry is the number that makes `bits + entry` carry into the code: (code at the lower edge << 16) + 0xFFFF
    - (threshold's low 16 bits) - (lower edge), modulo 2**32; the code is then bits 16 to 23 of the sum. There is an entry for every bit
    pattern, NaN included, so no clamp is needed and nothing is read out of bounds.
    """
    bounds = quant.codebook(signed, "cpu").bounds.view(torch.int32).long()
    # The code is the number of thresholds below the value. A negative value is at most -bound from -bits - 1 on; there is no -1.
    thresholds = torch.cat([(-bounds[:127] - 2).flip(0), bounds]) if signed else bounds
    lower = torch.arange(-(1 << 15) if signed else 0, 1 << 15) << 16
    upper = lower + 0xFFFF
    first = torch.searchsorted(thresholds, lower)  # thresholds below the edge: its code
    threshold = thresholds[first.clamp_max(len(thresholds) - 1)]
    inside = (threshold >= lower) & (threshold < upper) & (first < len(thresholds))
    entry = (first << 16) + 0xFFFF - (torch.where(inside, threshold, upper) & 0xFFFF) - lower
    wrapped = (entry + (1 << 31)) % (1 << 32) - (1 << 31)
    return wrapped.to(torch.int32).to(device)[1 << 15 if signed else 0 :]


def update(bucket: Bucket, prepared: Prepared, hyper: Hyper) -> None:
    """One AdamW step of the prepared members, which have the same step count."""
    launch, grads = prepared.launch, prepared.grads
    if not launch.chunk_member.numel():
        return
    ieee = hyper.ieee or _interpreted()
    keys = {"key0": _noise.as_int32(hyper.words[0]), "key1": _noise.as_int32(hyper.words[1])}
    options = {
        "PARAM": TYPES[bucket.dtype],
        "GRAD": TYPES[grads[0].dtype],
        "STOCHASTIC": hyper.stochastic,
        "IEEE": ieee,
        "CHUNK": bucket.granule,
    }
    if ieee:
        options["enable_fp_fusion"] = False
    grid = (launch.chunk_member.numel(),)
    with _on(bucket.device):
        if bucket.block:
            _update8(bucket, launch, grid, scalars(hyper) | keys | options)
        else:
            states = bucket.state["m"], bucket.state["v"]
            _kernels.adam32[grid](launch.chunk_member, launch.records, *states, **scalars(hyper), **keys, **options)


def _update8(bucket: Bucket, launch: Launch, grid: tuple[int], arguments: dict[str, Any]) -> None:
    state, device = bucket.state, bucket.device
    _kernels.adam8[grid](
        launch.chunk_member,
        launch.records,
        state["m_codes"],
        state["v_codes"],
        state["m_absmax"],
        state["v_absmax"],
        both_maps(device),
        code_table(True, device),
        code_table(False, device),
        BLOCK=bucket.block,
        EVEN=launch.even,
        ALIGN=16 if launch.aligned else 2,
        num_warps=TUNING.warps * max(1, bucket.granule // 2048),
        **arguments,
    )


def square_sum(bucket: Bucket, prepared: Prepared) -> torch.Tensor:
    """Sum of squares of the local gradients, 0-d float64, in two stages without atomics: the same bits every time."""
    launch, grads = prepared.launch, prepared.grads
    chunks = launch.chunk_member.numel()
    if not chunks:
        return torch.zeros((), dtype=torch.float64, device=bucket.device)
    programs = -(-chunks // NORM_UNROLL)
    sums = torch.empty(programs, dtype=torch.float64, device=bucket.device)
    with _on(bucket.device):
        _kernels.square_sums[(programs,)](
            launch.chunk_member,
            launch.records,
            sums,
            chunks,
            CHUNK=bucket.granule,
            UNROLL=NORM_UNROLL,
            GRAD=TYPES[grads[0].dtype],
            EVEN=launch.even,
            ALIGN=16 if launch.aligned else 2,
        )
    return sums.sum()
