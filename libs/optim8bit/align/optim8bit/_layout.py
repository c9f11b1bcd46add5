"""Where each parameter's state lies: local rows of the full parameter, block size, place in a bucket's flat tensors.

The block size of a parameter and the choice of 8 bits or fp32 depend on the *full* shape alone, and a block never crosses a
dim-0 row. FSDP2 cuts parameters between rows, so no shard boundary cuts a block, and a state moves between any numbers of ranks
as whole rows.
"""

import math
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from align.optim8bit import _noise
from align.optim8bit.quant import MIN_BLOCK, ZERO_CODE, OptimizerError

DTYPES = (torch.float32, torch.bfloat16)
Groups = tuple[Any, ...]  # process groups


def block_for(shape: tuple[int, ...], block_size: int = 2048, min_8bit_elems: int = 4096) -> int:
    """Block size of a parameter of this full shape, or 0 for fp32 state.

    The largest power of two up to `block_size` that divides the row length (elements under one dim-0 index). Fewer than two
    dimensions, fewer than `min_8bit_elems` elements, or a row that 64 does not divide: fp32.
    """
    numel = math.prod(shape)
    if len(shape) < 2 or numel < min_8bit_elems or numel == 0:
        return 0
    row = numel // shape[0]
    block = min(block_size, row & -row)
    return block if block >= MIN_BLOCK else 0


def _dtensor_module() -> Any:
    """torch.distributed.tensor if anything has imported it (importing it here would cost every user 0.5 s)."""
    return sys.modules.get("torch.distributed.tensor")


def is_dtensor(tensor: torch.Tensor) -> bool:
    module = _dtensor_module()
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> torch.Tensor:
    """This rank's part, sharing memory."""
    part: torch.Tensor = tensor.to_local() if is_dtensor(tensor) else tensor.detach()
    return part


def placement_of(name: str, param: Any) -> tuple[int, int, Groups]:
    """(first row, end row, process groups to sum a norm over) of a parameter's local part.

    Plain tensors and Replicate hold all rows and are summed over no group, so that replicas count once.
    """
    rows = param.shape[0] if param.ndim else 1
    if not is_dtensor(param):
        return 0, rows, ()
    shard_type, replicate_type = _dtensor_module().Shard, _dtensor_module().Replicate
    start, stop, groups = 0, rows, []
    for dim, placement in enumerate(param.placements):
        if type(placement) is replicate_type:
            continue
        if type(placement) is not shard_type or placement.dim != 0:  # subclasses too: a strided shard is no row range
            raise OptimizerError(
                f"parameter {name} is placed {placement}; only Shard(0), as fully_shard makes it, and Replicate are supported"
            )
        ranks, rank = param.device_mesh.size(dim), param.device_mesh.get_local_rank(dim)
        chunk = -(-(stop - start) // ranks)  # torch.chunk's rule
        start, stop = min(stop, start + rank * chunk), min(stop, start + (rank + 1) * chunk)
        if ranks > 1:
            groups.append(param.device_mesh.get_group(dim))
    held = local(param).shape[0] if param.ndim else rows
    if held != stop - start:
        raise OptimizerError(f"parameter {name} holds {held} local rows where Shard(0) of {tuple(param.shape)} gives {stop - start}")
    return start, stop, tuple(groups)


@dataclass
class Member:
    """One parameter: what it is, which rows of it are here, and where its state begins in the bucket's flat tensors."""

    name: str
    param: torch.Tensor
    block: int
    start: int
    stop: int
    groups: Groups
    step: int = 0
    offset: int = 0  # elements
    words: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.words = _noise.name_words(self.name)

    @property
    def full_shape(self) -> tuple[int, ...]:
        return tuple(self.param.shape)

    @property
    def row(self) -> int:
        """Elements under one dim-0 index."""
        return math.prod(self.full_shape[1:])

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *self.full_shape[1:]) if self.full_shape else ()

    @property
    def numel(self) -> int:
        return (self.stop - self.start) * self.row

    @property
    def first(self) -> int:
        """Flat index in the full parameter of the first local element: the counter of its noise."""
        return self.start * self.row


def make_member(name: str, param: torch.Tensor, block_size: int, min_8bit_elems: int) -> Member:
    """Check one parameter and place it. Raises OptimizerError by name for what can't be stepped."""
    if param.dtype not in DTYPES:
        raise OptimizerError(f"parameter {name} is {param.dtype}; float32 and bfloat16 are supported, convert the model first")
    if param.device.type == "meta":
        raise OptimizerError(f"parameter {name} is on the meta device; materialise the model before making its optimizer")
    if not local(param).is_contiguous():
        raise OptimizerError(f"parameter {name} is not contiguous; blocks run along rows, make it contiguous before the optimizer")
    if param.numel() >= 1 << 32:
        raise OptimizerError(f"parameter {name} has {param.numel()} elements; the noise counter has 32 bits, split it below 2**32")
    start, stop, groups = placement_of(name, param)
    return Member(name, param, block_for(tuple(param.shape), block_size, min_8bit_elems), start, stop, groups)


class Bucket:
    """The members of one parameter group that share block size, dtype and device, with their state in flat tensors.

    8-bit: m_codes, v_codes uint8 (n,); m_absmax, v_absmax fp32 (n / block,). fp32: m, v (n,). Each member begins at a multiple of
    `granule` elements.
    """

    def __init__(self, group: int, members: list[Member], backend: ModuleType, granule: int):
        first = members[0]
        self.group, self.members, self.backend, self.granule = group, members, backend, granule
        self.block, self.dtype, self.device = first.block, first.param.dtype, first.param.device
        end = 0
        for member in members:
            member.offset = end
            end += -(-member.numel // granule) * granule
        self.state = self._empty_state(end)
        self.scratch: dict[Any, Any] = {}  # the backend's tables

    def _empty_state(self, n: int) -> dict[str, torch.Tensor]:
        if not self.block:
            return {key: torch.zeros(n, device=self.device) for key in ("m", "v")}
        state = {}
        for key, signed in (("m", True), ("v", False)):
            state[f"{key}_codes"] = torch.full((n,), ZERO_CODE[signed], dtype=torch.uint8, device=self.device)
            state[f"{key}_absmax"] = torch.zeros(n // self.block, device=self.device)
        return state

    def views(self, member: Member) -> dict[str, torch.Tensor]:
        """The member's own state, sharing memory: m and v or codes in the local shape, absmax (local rows, blocks a row)."""
        views = {}
        for key, flat in self.state.items():
            per = self.block if key.endswith("absmax") else 1
            part = flat[member.offset // per : (member.offset + member.numel) // per]
            views[key] = part.view(member.stop - member.start, member.row // per) if per > 1 else part.view(member.local_shape)
        return views
