"""A run's numbers as a TensorBoard event file, without TensorBoard.

Sources: tensorflow/core/util/event.proto and summary.proto (Event: wall_time 1, step 2, file_version 3, summary 5; Summary.Value: tag 1,
simple_value 2), TFRecord framing (length, masked CRC-32C of the length, data, masked CRC-32C of the data), CRC-32C as in RFC 3720, B.4.
"""

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from align.tracking._jsonl import RunDirError, read_lines, restore, write_whole

_NOT_DRAWN = {"step", "time"}


def _make_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _make_table()


def crc32c(data: bytes) -> int:
    """The Castagnoli CRC."""
    crc, table = 0xFFFFFFFF, _TABLE
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def write_tensorboard(path: str | Path) -> Path:
    """Writes `tensorboard/events.out.tfevents.align` into a run directory, anew.

    It has every number of history.jsonl, and those of eval.jsonl as eval/…; `tensorboard --logdir RUN` shows it. Returns the file. Raises
    RunDirError when there is no run or the file cannot be written.
    """
    path = Path(path)
    if not (path / "history.jsonl").is_file():
        raise RunDirError(f"{path}: no history.jsonl, so no run; name a run directory")
    records = [_record(_double(1, 0.0) + _bytes(3, b"brain.Event:2"))]
    for name, prefix in (("history.jsonl", ""), ("eval.jsonl", "eval/")):
        if (path / name).is_file():
            records += [_record(event) for event in _events(path / name, prefix)]
    target = path / "tensorboard" / "events.out.tfevents.align"
    try:
        target.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise RunDirError(f"{target.parent}: cannot be made ({error.strerror})") from None
    write_whole(target, b"".join(records))
    return target


def _events(path: Path, prefix: str) -> Iterator[bytes]:
    for _, _, line in read_lines(path):
        record: dict[str, Any] = restore(line)
        values = b"".join(
            _bytes(1, _bytes(1, f"{prefix}{key}".encode()) + _float(2, float(value)))
            for key, value in record.items()
            if key not in _NOT_DRAWN and type(value) in (int, float)
        )
        if values:
            yield _double(1, float(record.get("time", 0.0))) + _number(2, int(record.get("step", 0))) + _bytes(5, values)


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # as protobuf writes a negative int64
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    largest = 3.4028234663852886e38  # a larger one has no float32; TensorBoard draws infinities as such
    if math.isfinite(value) and abs(value) > largest:
        value = math.copysign(math.inf, value)
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value
