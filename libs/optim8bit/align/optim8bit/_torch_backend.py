"""The reference step in plain torch operations, on any device.

Every operation is one IEEE fp32 operation, none contracted (no `alpha=`, no addcmul), in the order of `_kernels.py`: the two agree
bit for bit there where Triton uses IEEE operations too. Parameters are stepped in runs of up to `RUN` elements that lie one
after another in the bucket's state, so that a model of many small tensors costs few operations and a large one little memory.
"""

from dataclasses import dataclass

import torch

from align.optim8bit import _noise, quant
from align.optim8bit._layout import Bucket, Member, local

RUN = 1 << 22


@dataclass(frozen=True)
class Hyper:
    """The scalars of one step of one parameter group; each is rounded to fp32 where it is used."""

    beta1: float
    beta2: float
    eps: float
    decay: float  # 1 - lr * weight_decay
    step_size: float  # lr / (1 - beta1**t)
    root_bias2: float  # (1 - beta2**t) ** -0.5
    grad_scale: float
    stochastic: bool
    words: tuple[int, int]  # of (seed, t)
    ieee: bool  # for the Triton backend

    @property
    def one_minus_beta1(self) -> float:
        return 1.0 - self.beta1

    @property
    def one_minus_beta2(self) -> float:
        return 1.0 - self.beta2


@dataclass(frozen=True)
class Piece:
    """Elements [begin, end) of one member's flat local part."""

    index: int
    begin: int
    end: int


@dataclass(frozen=True)
class Run:
    pieces: tuple[Piece, ...]
    offset: int  # in the bucket's state
    count: int


def granule(block: int) -> int:
    return block or 1


def plan(members: list[Member], block: int) -> list[Run]:
    """Cut members into runs that are contiguous in the state; only whole blocks are cut off a large member."""
    runs: list[Run] = []
    pieces: list[Piece] = []
    offset = count = 0

    def close() -> None:
        nonlocal pieces, count
        if pieces:
            runs.append(Run(tuple(pieces), offset, count))
        pieces, count = [], 0

    for index, member in enumerate(members):
        begin = 0
        while begin < member.numel:
            if count >= RUN or (pieces and offset + count != member.offset + begin):
                close()
            if not pieces:
                offset = member.offset + begin
            end = min(member.numel, begin + RUN - count)
            if end < member.numel and block:
                end = max(begin + block, end - (end - begin) % block)
            pieces.append(Piece(index, begin, end))
            count += end - begin
            begin = end
    close()
    return runs


def _gather(flats: list[torch.Tensor], run: Run) -> torch.Tensor:
    """The run's elements in fp32, always a new tensor."""
    parts = [flats[p.index][p.begin : p.end] for p in run.pieces]
    if len(parts) == 1:
        return parts[0].to(torch.float32, copy=True)
    return torch.cat(parts).float()


def _noise_bits(members: list[Member], run: Run, words: tuple[int, int], device: torch.device) -> torch.Tensor:
    """(count,) int32 noise of the run's elements; keys are per parameter, counters run over the full parameter."""
    pairs, keys, lengths, spans = [], [], [], []
    for piece in run.pieces:
        member = members[piece.index]
        first = (member.first + piece.begin) // 2
        last = (member.first + piece.end - 1) // 2
        lengths.append(last - first + 1)
        spans.append(((member.first + piece.begin) % 2, piece.end - piece.begin))
        pairs.append(torch.arange(first, last + 1, dtype=torch.int32, device=device))  # below 2**31
        keys.append([_noise.as_int32(a ^ b) for a, b in zip(member.words, words, strict=True)])
    if len(pairs) == 1:
        bits = _noise.noise(_noise.pair_words(pairs[0], *keys[0]))
        skip, count = spans[0]
        return bits[skip : skip + count]
    columns = torch.tensor(keys, dtype=torch.int32).to(device).T
    key0, key1 = (torch.cat([key.expand(n) for key, n in zip(torch.split(column, 1), lengths, strict=True)]) for column in columns)
    bits = _noise.noise(_noise.pair_words(torch.cat(pairs), key0, key1))
    if all(span == (0, 2 * length) for span, length in zip(spans, lengths, strict=True)):
        return bits
    parts = torch.split(bits, [2 * length for length in lengths])
    return torch.cat([part[skip : skip + count] for part, (skip, count) in zip(parts, spans, strict=True)])


def _decoded(bucket: Bucket, key: str, signed: bool, run: Run) -> torch.Tensor:
    state, block = bucket.state, bucket.block
    if not block:
        return state[key][run.offset : run.offset + run.count]
    codes = state[f"{key}_codes"][run.offset : run.offset + run.count]
    absmax = state[f"{key}_absmax"][run.offset // block : (run.offset + run.count) // block]
    values = quant.codebook(signed, codes.device).values.index_select(0, codes.int())
    values.view(-1, block).mul_(absmax[:, None])
    return values


def _store(bucket: Bucket, key: str, signed: bool, run: Run, value: torch.Tensor) -> None:
    block = bucket.block
    if not block:
        return  # updated in place
    blocks = value.view(-1, block)
    absmax, reciprocal = quant.scales((blocks.abs() if signed else blocks).amax(1))
    codes = quant.encode(blocks * reciprocal[:, None], quant.codebook(signed, value.device))
    bucket.state[f"{key}_codes"][run.offset : run.offset + run.count] = codes.view(-1)
    bucket.state[f"{key}_absmax"][run.offset // block : (run.offset + run.count) // block] = absmax


def _sqrt(v: torch.Tensor) -> torch.Tensor:
    """Correctly rounded. On the CPU torch takes MKL's fp32 function, which is not; rounding the float64 root is."""
    return v.double().sqrt_().float() if v.device.type == "cpu" else v.sqrt()


@dataclass(frozen=True)
class Prepared:
    """Members of one bucket and their local gradients, for `square_sum` and then `update`."""

    members: list[Member]
    grads: list[torch.Tensor]


def prepare(bucket: Bucket, members: list[Member], grads: list[torch.Tensor]) -> Prepared:
    return Prepared(members, grads)


def update(bucket: Bucket, prepared: Prepared, hyper: Hyper) -> None:
    """One AdamW step of the prepared members, which have the same step count."""
    members, grads = prepared.members, prepared.grads
    names = ("plan", tuple(m.offset for m in members))
    if names not in bucket.scratch:
        bucket.scratch = {names: plan(members, bucket.block)}
    params = [local(m.param).view(-1) for m in members]
    flat_grads = [g.reshape(-1) for g in grads]
    for run in bucket.scratch[names]:
        g, p = _gather(flat_grads, run), _gather(params, run)
        if hyper.grad_scale != 1.0:
            g.mul_(hyper.grad_scale)
        m, v = _decoded(bucket, "m", True, run), _decoded(bucket, "v", False, run)
        m.mul_(hyper.beta1).add_(g * hyper.one_minus_beta1)
        v.mul_(hyper.beta2).add_((g * hyper.one_minus_beta2).mul_(g))
        denominator = _sqrt(v).mul_(hyper.root_bias2).add_(hyper.eps)
        p.mul_(hyper.decay).sub_((m / denominator).mul_(hyper.step_size))
        _store(bucket, "m", True, run, m)
        _store(bucket, "v", False, run, v)
        if bucket.dtype == torch.bfloat16:
            p = _noise.stochastic_bf16(p, _noise_bits(members, run, hyper.words, p.device)) if hyper.stochastic else p.bfloat16()
        targets = [params[piece.index][piece.begin : piece.end] for piece in run.pieces]
        torch._foreach_copy_(targets, list(torch.split(p, [t.numel() for t in targets])))


def square_sum(bucket: Bucket, prepared: Prepared) -> torch.Tensor:
    """Sum of squares of the local gradients, 0-d float64."""
    grads = [g for g in prepared.grads if g.numel()]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=bucket.device)
    return torch.stack(torch._foreach_norm(grads, 2, torch.float64)).square_().sum()
