"""Every file operation of a save, each behind one hook, so that a test can crash or fail the disk at any of them."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PIECE = 16 * 2**20  # bytes written and hashed at a time
SYNCED = 2**30  # bytes after which what is written goes to the disk, so that the sync at the end of a large file is not minutes long

# Called with (operation, path) before each operation. Tests put a function here that kills the process or raises OSError.
before: Callable[[str, Path], None] | None = None


def _about_to(operation: str, path: Path) -> None:
    if before is not None:
        before(operation, path)


@dataclass(frozen=True)
class Written:
    """One durable file."""

    bytes: int
    sha256: str


class NewFile:
    """A file that must not exist yet. It is hashed while it is written, and on the disk when `close` returns."""

    def __init__(self, path: Path) -> None:
        _about_to("create", path)
        self._path = path
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 (closed by close or abandon)
        self._hash = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Writes all of it; a full disk raises OSError."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE):
            piece = view[start : start + PIECE]
            self._hash.update(piece)
            if (self._bytes + len(piece)) // SYNCED > self._bytes // SYNCED:
                os.fdatasync(self._file.fileno())
            self._bytes += len(piece)
            while len(piece) > 0:
                _about_to("write", self._path)
                piece = piece[self._file.write(piece) :]

    def close(self) -> Written:
        """Flushes to the disk."""
        try:
            _about_to("sync", self._path)
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
        return Written(self._bytes, self._hash.hexdigest())

    def abandon(self) -> None:
        """Closes without a promise, after an error."""
        self._file.close()


def write(path: Path, data: bytes) -> Written:
    """A whole small file."""
    file = NewFile(path)
    try:
        file.write(data)
        return file.close()
    finally:
        file.abandon()


def make_directory(path: Path) -> None:
    """One new directory; its parents too."""
    _about_to("mkdir", path)
    path.mkdir(parents=True)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    _about_to("syncdir", path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Atomic, within one directory."""
    _about_to("rename", old)
    os.rename(old, new)


def remove_directory(path: Path, *, first: str) -> None:
    """Removes a flat directory, the file `first` before all others: without it nobody takes the rest for whole."""
    names = sorted(os.listdir(path), key=lambda name: (name != first, name))
    for name in names:
        _about_to("unlink", path / name)
        if (path / name).is_dir() and not (path / name).is_symlink():
            shutil.rmtree(path / name)
        else:
            os.unlink(path / name)
    _about_to("rmdir", path)
    os.rmdir(path)


def free_bytes(path: Path) -> int:
    """What an ordinary user may still write below `path`, which need not exist yet."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
