"""The event file, read back by the framing and the messages' definitions."""

import math
import struct

import pytest

from align.tracking import RunDir, RunDirError, write_tensorboard
from align.tracking._tensorboard import crc32c


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # RFC 3720, B.4: 32 bytes of zeroes, of ones, ascending, descending
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_crc32c_of_the_standard(data, crc):
    assert crc32c(data) == crc


def fields(data):
    """(number, value) of a protobuf message: varints as integers, the rest as bytes."""
    place, found = 0, []

    def varint():
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < len(data):
        key = varint()
        size = {0: None, 1: 8, 2: -1, 5: 4}[key & 7]
        if size is None:
            found.append((key >> 3, varint()))
            continue
        size = varint() if size < 0 else size
        found.append((key >> 3, data[place : place + size]))
        place += size
    return found


def read(path):
    data, place = path.read_bytes(), 0
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        for start, size in ((place, 8), (place + 12, length)):
            crc = crc32c(data[start : start + size])
            assert struct.unpack_from("<I", data, start + size)[0] == (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
        yield fields(data[place + 12 : place + 12 + length])
        place += 16 + length


def test_every_number_of_a_run_is_in_the_file(tmp_path):
    run = RunDir.create(tmp_path / "r", config_toml="", env={})
    for step in (1, 2, 300):
        run.log(step, loss=1.0 / step, lr=math.nan, tokens=10**40, event="a note")
    run.eval(300, accuracy=0.5)
    path = write_tensorboard(tmp_path / "r")
    assert path == write_tensorboard(tmp_path / "r")  # anew, not longer
    first, *events = read(path)
    assert dict(first)[3] == b"brain.Event:2"
    seen = []
    for event in events:
        step = dict(event)[2]
        for number, value in fields(dict(event)[5]):
            scalar = dict(fields(value))
            assert number == 1
            seen.append((step, scalar[1].decode(), struct.unpack("<f", scalar[2])[0]))
    assert [item for item in seen if item[1] == "loss"] == [(1, "loss", 1.0), (2, "loss", 0.5), (300, "loss", pytest.approx(1 / 300))]
    assert [name for step, name, _ in seen if step == 1] == ["loss", "lr", "tokens"] and math.isnan(seen[1][2]) and math.isinf(seen[2][2])
    assert seen[-1] == (300, "eval/accuracy", 0.5)


def test_without_a_run_it_says_so(tmp_path):
    with pytest.raises(RunDirError, match=r"no history\.jsonl"):
        write_tensorboard(tmp_path)
