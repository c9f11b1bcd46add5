"""AdamW whose states live on the host: the GPU keeps weights and gradients, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from align.train._errors import TrainError

LANES = 3  # pieces under way at a time: one comes from the device, one is stepped, one goes back
PIECE_BYTES = 8  # of an element in a lane: room for a gradient and a weight of up to 4 bytes each


class _Piece(NamedTuple):
    """A run of elements of one parameter."""

    member: _Member
    start: int
    stop: int


class _Member:
    """One parameter's rows on this rank, with its states on the host."""

    def __init__(self, parameter: Any, group: dict[str, Any]) -> None:
        self.parameter, self.group = parameter, group
        self.rows: Tensor = parameter.detach().to_local() if hasattr(parameter, "to_local") else parameter.detach()
        if not self.rows.is_contiguous():
            raise TrainError("offload_adamw: a parameter is not contiguous; make it contiguous before the optimizer")
        self.master = self.rows.to("cpu", torch.float32, copy=True)
        self.m, self.v = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.step = 0

    def gradient(self) -> Tensor | None:
        """This rank's rows of it, flat."""
        grad: Any = self.parameter.grad
        if grad is None:
            return None
        rows: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
        return rows.detach().reshape(-1)


class _Lane:
    """Pinned room for one piece: gradients come in, weights go out."""

    def __init__(self, elements: int, pinned: bool) -> None:
        self._bytes = torch.empty(elements * PIECE_BYTES, dtype=torch.uint8, pin_memory=pinned)
        self._half = elements * PIECE_BYTES // 2
        self.arrived: Any = None  # CUDA events
        self.left: Any = None

    def gradient(self, elements: int, dtype: torch.dtype) -> Tensor:
        return self._bytes[: elements * dtype.itemsize].view(dtype)

    def weights(self, elements: int, dtype: torch.dtype) -> Tensor:
        return self._bytes[self._half : self._half + elements * dtype.itemsize].view(dtype)


class OffloadAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW with fp32 master weights and fp32 moments in host memory, 12 bytes a parameter; the step runs on the CPU.

    Gradients come to the host and weights go back through pinned memory of at most `pinned_staging_gb`, a piece at a time, while the piece
    before is stepped. Parameters are fp32 or bf16; a sharded parameter is stepped on this rank's rows.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        pinned_staging_gb: float = 1.0,
    ) -> None:
        """Raises TrainError when the staging memory holds no element."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._members = [_Member(parameter, group) for group in self.param_groups for parameter in group["params"]]
        elements = int(pinned_staging_gb * 2**30) // (LANES * PIECE_BYTES)
        if elements < 16:
            raise TrainError(f"optimizer.pinned_staging_gb is {pinned_staging_gb:g}, which holds no gradient; it must be at least 1e-6")
        elements = 1 << (elements.bit_length() - 1)  # torch gives pinned memory in powers of two: more would be above the cap
        self._piece = min(elements, max((member.master.numel() for member in self._members), default=1))
        self._cuda = any(member.rows.is_cuda for member in self._members)
        self._lanes = [_Lane(self._piece, self._cuda) for _ in range(LANES)]
        self._stream = torch.cuda.Stream() if self._cuda else None  # type: ignore[no-untyped-call]

    @property
    def staging_bytes(self) -> int:
        """Pinned memory in use, as torch gives it: each piece rounded up to a power of two."""
        return sum(1 << (lane._bytes.numel() - 1).bit_length() for lane in self._lanes)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step with the gradients in `.grad`; parameters without one are left alone."""
        if closure is not None:
            raise ValueError("OffloadAdamW.step takes no closure; call backward first")
        gradients = {id(member): grad for member in self._members if (grad := member.gradient()) is not None}
        for member in self._members:
            member.step += id(member) in gradients
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        pieces = list(self._pieces(gradients))
        for number in range(len(pieces) + 1):
            if number < len(pieces):
                self._fetch(self._lanes[number % LANES], pieces[number], gradients[id(pieces[number].member)])
            if number:
                self._update(self._lanes[(number - 1) % LANES], pieces[number - 1])
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _pieces(self, gradients: dict[int, Tensor]) -> Iterator[_Piece]:
        for member in self._members:
            size = member.master.numel() if id(member) in gradients else 0
            for start in range(0, size, self._piece):
                yield _Piece(member, start, min(start + self._piece, size))

    def _fetch(self, lane: _Lane, piece: _Piece, gradient: Tensor) -> None:
        """Starts the copy of a gradient to the host."""
        if lane.left is not None:
            lane.left.synchronize()  # its weights are still on their way
        target = lane.gradient(piece.stop - piece.start, gradient.dtype)
        if self._stream is None:
            target.copy_(gradient[piece.start : piece.stop])
            return
        with torch.cuda.stream(self._stream):
            target.copy_(gradient[piece.start : piece.stop], non_blocking=True)
            lane.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            lane.arrived.record()

    def _update(self, lane: _Lane, piece: _Piece) -> None:
        """Steps a piece on the CPU and starts the copy of its weights back. The order of operations is torch.optim.AdamW's."""
        member, size = piece.member, piece.stop - piece.start
        if lane.arrived is not None:
            lane.arrived.synchronize()
        grad = lane.gradient(size, member.parameter.grad.dtype).float()
        (beta1, beta2), lr = member.group["betas"], float(member.group["lr"])
        weights, m, v = (state.view(-1)[piece.start : piece.stop] for state in (member.master, member.m, member.v))
        weights.mul_(1 - lr * member.group["weight_decay"])
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = v.sqrt().div_((1 - beta2**member.step) ** 0.5).add_(member.group["eps"])
        weights.addcdiv_(m, root, value=-lr / (1 - beta1**member.step))
        rows = member.rows.view(-1)[piece.start : piece.stop]
        staged = lane.weights(size, rows.dtype).copy_(weights)
        if self._stream is None:
            rows.copy_(staged)
            return
        with torch.cuda.stream(self._stream):
            rows.copy_(staged, non_blocking=True)
            lane.left = torch.cuda.Event()  # type: ignore[no-untyped-call]
            lane.left.record()

    def state_dict(self) -> dict[str, Any]:
        """By number, as torch's: step, master, m and v of this rank's rows; the tensors share memory with the optimizer."""
        numbers = iter(range(len(self._members)))
        return {
            "state": {n: {"step": x.step, "master": x.master, "m": x.m, "v": x.v} for n, x in enumerate(self._members)},
            "param_groups": [
                {"params": [next(numbers) for _ in group["params"]], **{key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}}
                for group in self.param_groups
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores states and hyperparameters, bit for bit."""
        for number, member in enumerate(self._members):
            saved = state_dict["state"][number]
            member.step = int(saved["step"])
            for key, own in (("master", member.master), ("m", member.m), ("v", member.v)):
                own.copy_(saved[key])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: saved[key] for key in ("lr", "betas", "eps", "weight_decay")})
