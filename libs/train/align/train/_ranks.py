"""The processes of one run: who is who, and the little that they say to each other on the host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from align.train._errors import TrainError

# An evaluation on rank 0 may take hours while the others wait for it; a rank that is gone is the watchdog's business.
PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class Ranks:
    """This process among all. `Ranks()` is a run of one process, for which every method is the identity.

    What passes between ranks here goes over gloo on the host, so none of it waits for a GPU.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    _group: Any = field(default=None, repr=False, compare=False)
    _saver_group: Any = field(default=None, repr=False, compare=False)

    @property
    def main(self) -> bool:
        """Whether this process writes the run's files."""
        return self.rank == 0

    @property
    def saver(self) -> Ranks:
        """The same ranks over a group of their own, for a thread that saves while the run goes on."""
        return Ranks(self.rank, self.world, self.local_rank, self._saver_group, None)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of the ranks, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._group)
        return values

    def agree(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return self.gather(value if self.main else None)[0]

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """The sum over the ranks of each number, in float64 and in the order of the ranks: the same bits everywhere."""
        if self.world == 1:
            return [float(number) for number in numbers]
        own = torch.tensor(numbers, dtype=torch.float64)
        parts = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(parts, own, group=self._group)
        totals: list[float] = torch.stack(parts).sum(0).tolist()
        return totals


def join(device: str) -> Ranks:
    """Takes this process's place in the run that a launcher (`launch`, torchrun) started; without one it is a run of one process.

    Args:
        device: "cuda" (NCCL; this process gets the GPU of its local rank) or "cpu" (gloo).

    Raises:
        TrainError: more processes than GPUs, or a launcher that did not say all that is needed.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Ranks()
    try:
        rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    except KeyError as error:
        raise TrainError(f"WORLD_SIZE is {world} but {error.args[0]} is not set; start with launch.nproc={world} or torchrun") from None
    if device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise TrainError(f"launch.nproc asks for GPU {local_rank} and this machine has {torch.cuda.device_count()}; lower launch.nproc")
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        if device == "cuda":
            dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
        else:
            dist.init_process_group("gloo")
    group, saver = (dist.new_group(backend="gloo", timeout=PATIENCE) for _ in range(2))
    return Ranks(rank, world, local_rank, group, saver)


def leave(ranks: Ranks) -> None:
    """Ends the processes' connection in order; nothing may be sent after it."""
    if ranks.world > 1:
        ranks.gather(None)
        dist.destroy_process_group()
