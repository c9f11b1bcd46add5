"""environment: where a run ran, so that it can be understood later."""

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "triton", "numpy", "safetensors")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED", "WORLD_SIZE")


def environment(extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Versions, git state, interpreter, processor, memory, start time; `extra` (threads, GPU names) is put beside them.

    Imports none of the packages whose versions it tells. No user name, host name or secret is in it.
    """
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": _memory_gb(),
        "packages": _versions(),
        "git": _git(Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY") or Path.cwd())),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        **(extra or {}),
    }


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gb() -> float | None:
    """Total memory in GiB."""
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (ValueError, OSError):
        return None


def _git(folder: Path) -> dict[str, Any] | None:
    """Commit and whether the tree differs from it; None outside a repository or without git."""

    def ask(*words: str) -> str:
        command = ["git", "-C", str(folder), "--no-optional-locks", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None
