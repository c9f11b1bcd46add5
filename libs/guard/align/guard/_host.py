"""read_host: what this machine has left, from /proc, cgroups and the disk under the run directory."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

_GIB = 2**30


@dataclass(frozen=True)
class Host:
    """A machine's state. None where the system does not tell."""

    available_host_gb: float  # MemAvailable, or what the container may still take when that is less, GiB
    total_host_gb: float
    free_disk_gb: float  # on the disk of the folder, for this user
    load: float | None  # one-minute average
    cores: int
    disk_queue: int | None  # requests in flight on the disk of the folder


def read_host(
    folder: str | Path, *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup"), sys_block: Path = Path("/sys/dev/block")
) -> Host:
    """Reads the machine's state; `folder` need not exist yet, its nearest existing parent's disk counts.

    What this machine does not tell is None. Raises OSError where that disk cannot be asked for its free space.
    """
    memory = _memory(proc / "meminfo")
    available, total = memory["MemAvailable"], memory["MemTotal"]
    limit, used = _integer(cgroup / "memory.max"), _integer(cgroup / "memory.current")
    if limit is not None:
        total = min(total, limit)
        available = min(available, max(limit - (used or 0) + _inactive_files(cgroup / "memory.stat"), 0))
    place = Path(folder).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        load: float | None = float((proc / "loadavg").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        load = None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Host(available / _GIB, total / _GIB, shutil.disk_usage(place).free / _GIB, load, cores, _queue(place, sys_block))


def _memory(path: Path) -> dict[str, int]:
    """Bytes by name. Where there is no /proc, sysconf's figures."""
    try:
        lines = path.read_text().splitlines()
        found = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
        return {"MemTotal": found["MemTotal"], "MemAvailable": found["MemAvailable"]}
    except (OSError, ValueError, KeyError):
        page = os.sysconf("SC_PAGE_SIZE")
        return {"MemTotal": os.sysconf("SC_PHYS_PAGES") * page, "MemAvailable": os.sysconf("SC_AVPHYS_PAGES") * page}


def _integer(path: Path) -> int | None:
    """The number in a file; None when there is none ("max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _inactive_files(path: Path) -> int:
    """Page cache of a container that the kernel gives back before it refuses memory."""
    try:
        for line in path.read_text().splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0


def _queue(place: Path, sys_block: Path) -> int | None:
    device = os.stat(place).st_dev
    try:
        reads, writes = (sys_block / f"{os.major(device)}:{os.minor(device)}" / "inflight").read_text().split()
        return int(reads) + int(writes)
    except (OSError, ValueError):
        return None  # overlay, network or memory file system
