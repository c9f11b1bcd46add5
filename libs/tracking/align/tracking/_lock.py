"""One writer a run directory: a lock that ends with its process, however that ends."""

import errno
import fcntl
import os
from pathlib import Path

from align.tracking._jsonl import RunDirError, failed

_held: dict[tuple[int, int], int] = {}  # (device, inode) of a directory to the descriptor that holds it for this process


def hold(path: Path) -> None:
    """Takes the directory for this process. Where the file system knows no locks (some network ones), nothing is taken.

    Raises RunDirError: another process has it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise failed(path, error, "cannot be read") from None
    key = _key(descriptor)
    if key in _held:
        os.close(descriptor)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise RunDirError(f"{path}: another process writes its run there; wait until it ends, or choose another run_dir") from None
        return
    _held[key] = descriptor


def release(path: Path) -> None:
    """Gives the directory back; nothing happens where it is not held."""
    try:
        status = os.stat(path)
    except OSError:
        return
    descriptor = _held.pop((status.st_dev, status.st_ino), None)
    if descriptor is not None:
        os.close(descriptor)


def _key(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
