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
SMALLEST_FAST_SCALE = 1e-6  # below it the fast kernel's units could leave fp32's range


@dataclass
class Tuning:
    """How `adam8` is launched. Elements a program: at least a block; more elements a thread amortise the tables' addresses."""

    chunk: int = 2048
    warps: int = 2
    shared_maps: bool = False
    maxnreg: int | None = None


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


def scalars(hyper: Hyper, ieee: bool) -> dict[str, float]:
    """The kernels' scalars. The fast 8-bit kernel keeps m and v in units of (1 - beta) * scale: see `adam8`."""
    scale = hyper.grad_scale
    common = {"grad_scale": scale, "eps": hyper.eps, "decay": hyper.decay}
    if ieee:
        return common | {
            "m_keep": hyper.beta1,
            "m_new": hyper.one_minus_beta1,
            "v_keep": hyper.beta2,
            "v_new": hyper.one_minus_beta2,
            "m_unit": 1.0,
            "v_unit": 1.0,
            "root": hyper.root_bias2,
            "rate": hyper.step_size,
        }
    m_unit, v_unit = hyper.one_minus_beta1 * scale, hyper.one_minus_beta2 * scale * scale
    return common | {
        "m_keep": hyper.beta1 / m_unit,
        "m_new": 1.0,
        "v_keep": hyper.beta2 / v_unit,
        "v_new": 1.0,
        "m_unit": m_unit,
        "v_unit": v_unit,
        "root": hyper.root_bias2 * v_unit**0.5,
        "rate": hyper.step_size * m_unit,
    }


@functools.cache
def code_table(signed: bool, device: torch.device) -> tuple[torch.Tensor, int]:
    """(table from the entry of +0 on, shift) for `_kernels._code`: an entry for every pattern of a float's bits above `shift`.

    A value's bits, for the signed map made monotone (`bits ^ (bits >> 31 & 0x7FFFFFFF)`), are compared with the one threshold that the
    entry's interval can hold. Entry = low 24 bits of the threshold << 8 | code at the interval's lower edge. There is an entry for
    every bit pattern, NaN included, so no clamp is needed and nothing is read out of bounds.
    """
    book = quant.codebook(signed, "cpu")
    bits = book.bounds.view(torch.int32).long()
    # The code is the number of thresholds below the value. A negative value is at most -bound from -bits - 1 on; there is no -1.
    thresholds = torch.cat([(-bits[:127] - 2).flip(0), bits]) if signed else bits
    count = 1 << (31 - book.shift)
    intervals = torch.arange(-count if signed else 0, count)
    lower = intervals << book.shift
    upper = lower + (1 << book.shift) - 1
    first = torch.searchsorted(thresholds, lower)  # thresholds below the edge: its code
    threshold = thresholds[first.clamp_max(len(thresholds) - 1)]
    inside = (threshold >= lower) & (threshold < upper) & (first < len(thresholds))
    entry = (torch.where(inside, threshold, upper) & 0xFFFFFF) << 8 | first
    entry = torch.where(entry >= 1 << 31, entry - (1 << 32), entry).to(torch.int32).to(device)
    return entry[count:] if signed else entry, book.shift


def update(bucket: Bucket, prepared: Prepared, hyper: Hyper) -> None:
    """One AdamW step of the prepared members, which have the same step count."""
    launch, grads = prepared.launch, prepared.grads
    if not launch.chunk_member.numel():
        return
    ieee = hyper.ieee or _interpreted() or hyper.grad_scale < SMALLEST_FAST_SCALE
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
            _update8(bucket, launch, grid, scalars(hyper, ieee) | keys | options)
        else:
            some = {k: v for k, v in scalars(hyper, True).items() if not k.endswith("unit")}
            _kernels.adam32[grid](launch.chunk_member, launch.records, bucket.state["m"], bucket.state["v"], **some, **keys, **options)


def _update8(bucket: Bucket, launch: Launch, grid: tuple[int], arguments: dict[str, Any]) -> None:
    state, device = bucket.state, bucket.device
    m_map, v_map = (quant.codebook(signed, device).values for signed in (True, False))
    (m_table, m_shift), (v_table, v_shift) = (code_table(signed, device) for signed in (True, False))
    if TUNING.maxnreg is not None:
        arguments["maxnreg"] = TUNING.maxnreg
    _kernels.adam8[grid](
        launch.chunk_member,
        launch.records,
        state["m_codes"],
        state["v_codes"],
        state["m_absmax"],
        state["v_absmax"],
        m_map,
        v_map,
        m_table,
        v_table,
        M_SHIFT=m_shift,
        V_SHIFT=v_shift,
        BLOCK=bucket.block,
        EVEN=launch.even,
        ALIGN=16 if launch.aligned else 2,
        SHARED_MAPS=TUNING.shared_maps,
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
