"""JSON lines that survive a kill: one write a line, a failed write taken back, a torn last line dropped."""

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, SupportsFloat

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # JSON has no such numbers; written as these strings

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RunDirError(OSError):
    """A run directory that cannot be made, written or read. The message is one line: the file, the reason, the way out."""

    exit_code = 2


def failed(path: Path, error: OSError, what: str = "cannot be written") -> RunDirError:
    """The RunDirError for an operating system's error, with the way out."""
    way = "free space on that disk or choose another run_dir" if error.errno in _FULL else "choose another run_dir"
    return RunDirError(f"{path}: {what}: {error.strerror or error}; {way}")


class Lines:
    """An append-only file of JSON objects."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise failed(path, error) from None

    def append(self, record: dict[str, Any], *, sync: bool = False) -> None:
        """Writes one object as one line with one system call. Raises RunDirError; the file then ends with the line before."""
        line = encode(record)
        try:
            size = os.fstat(self._fd).st_size
            try:
                written = 0
                while written < len(line):
                    written += os.write(self._fd, line[written:])
                if sync:
                    os.fsync(self._fd)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, size)
                raise
        except OSError as error:
            raise failed(self.path, error) from None

    def touch(self) -> None:
        """Sets the file's time to now."""
        try:
            os.utime(self._fd)
        except OSError as error:
            raise failed(self.path, error) from None

    def close(self) -> None:
        """Closes the file, once."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def encode(record: dict[str, Any]) -> bytes:
    """One line. Readable text where it is Unicode, escapes where it is not (lone surrogates)."""
    record = {key: _plain(value) for key, value in record.items()}
    try:
        return (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(record, allow_nan=False) + "\n").encode()


def _plain(value: Any) -> Any:
    """What JSON can hold: a one-element tensor or array becomes its number, a number that is not finite its name."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    if not isinstance(value, float):
        if hasattr(value, "item"):
            return _plain(value.item())
        if not isinstance(value, SupportsFloat):
            raise TypeError(f"a log line cannot hold {value!r} of type {type(value).__name__}")
        value = float(value)
    if math.isfinite(value):
        return float(value)
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def read_lines(path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Each whole object with its line number and the byte offset just after it; a torn last line is left out.

    Raises RunDirError with the line for a broken line that is not the last.
    """
    torn: str | None = None
    try:
        with open(path, "rb") as file:
            offset = 0
            for number, line in enumerate(file, 1):
                if torn:
                    raise RunDirError(torn)
                offset += len(line)
                try:
                    record = json.loads(line)
                    if not isinstance(record, dict):
                        raise ValueError
                except (ValueError, RecursionError):
                    torn = f"{path}:{number}: not a JSON object; remove the line"
                    continue
                yield number, offset, record
    except RunDirError:
        raise
    except OSError as error:
        raise failed(path, error, "cannot be read") from None


def read_batches(path: Path) -> Iterator[list[dict[str, Any]]]:
    """The objects of `read_lines` in lists of a few thousand, for files of millions of lines; what is wrong is told as there."""
    done = 0  # lines
    try:
        with open(path, "rb") as file:
            while lines := file.readlines(1 << 20):
                batch: Any = None
                if all(line[:1] == b"{" and line[-2:] == b"}\n" for line in lines):
                    try:
                        batch = json.loads(b"[" + b",".join(lines) + b"]")  # one call of the parser for all
                    except (ValueError, RecursionError):
                        batch = None
                if batch is None or len(batch) != len(lines):
                    break
                done += len(lines)
                yield batch
            else:
                return
    except OSError as error:
        raise failed(path, error, "cannot be read") from None
    yield from ([record] for number, _, record in read_lines(path) if number > done)


def read_history(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a history.jsonl (eval.jsonl, samples.jsonl) as logged, NaN and infinities included.

    A torn last line, which a kill or a full disk can leave, is left out. Raises RunDirError for a file that cannot be read and
    for any other broken line, by number.
    """
    return [restore(record) for _, _, record in read_lines(Path(path))]


def restore(record: dict[str, Any]) -> dict[str, Any]:
    """The record with "nan", "inf" and "-inf" as numbers again; `step` and `event` as they are."""
    for key, value in record.items():
        if isinstance(value, str) and value in _NOT_FINITE:
            record[key] = _NOT_FINITE[value]
    return record


def cut_after(path: Path, step: int) -> None:
    """Drops every line from the first one with a later step on, and a torn last line; in place, so that a kill loses nothing else."""
    if not path.exists():
        return
    end = 0
    for _, offset, record in read_lines(path):
        if isinstance(record.get("step"), int) and record["step"] > step:
            break
        end = offset
    try:
        os.truncate(path, end)
        with open(path, "rb+") as file:
            if end and file.seek(end - 1) >= 0 and file.read(1) != b"\n":
                file.write(b"\n")  # whole, but for its newline
    except OSError as error:
        raise failed(path, error) from None


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file so that a reader sees the old one or the new one, whatever happens. Raises RunDirError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise failed(path, error) from None
