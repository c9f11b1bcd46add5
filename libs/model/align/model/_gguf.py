"""GGUF files (version 2 and 3, little-endian): metadata, and tensors dequantised to fp32.

Source: docs/gguf.md of the ggml project; block layouts as in ggml-common.h: 32 weights a block, scale (and minimum) in fp16, two 4-bit
codes a byte, the first half of the block in the low nibbles.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from align.model._errors import ModelError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


def _half(blocks: Tensor, column: int) -> Tensor:
    return blocks[:, column : column + 2].contiguous().view(torch.float16).float()  # (N, 1)


def _nibbles(codes: Tensor) -> Tensor:
    return torch.cat((codes & 15, codes >> 4), 1).float()  # (N, 16) -> (N, 32)


# ggml type -> name, weights in a block, bytes in a block, blocks (N, bytes) uint8 -> (N, weights) fp32
_TYPES: dict[int, tuple[str, int, int, Callable[[Tensor], Tensor]]] = {
    0: ("F32", 1, 4, lambda b: b.view(torch.float32)),
    1: ("F16", 1, 2, lambda b: b.view(torch.float16).float()),
    2: ("Q4_0", 32, 18, lambda b: _half(b, 0) * (_nibbles(b[:, 2:]) - 8)),
    3: ("Q4_1", 32, 20, lambda b: _half(b, 0) * _nibbles(b[:, 4:]) + _half(b, 2)),
    8: ("Q8_0", 32, 34, lambda b: _half(b, 0) * b[:, 2:].contiguous().view(torch.int8).float()),
}
# Names of other types, for the message that refuses them.
_OTHER_TYPES = {6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 30: "BF16"}


@dataclass(frozen=True)
class _Entry:
    shape: tuple[int, ...]  # rows first, as in torch
    kind: int
    offset: int


class GgufFile:
    """An open GGUF file. `metadata` maps keys to Python values, `shapes` tensor names to shapes.

    Raises:
        ModelError: not a GGUF file, another version, truncated, a tensor of an unsupported type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from error
        self._size = path.stat().st_size
        try:
            self._read_header()
        except ModelError:
            self._file.close()
            raise

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def tensor(self, name: str) -> Tensor:
        """The weights of one tensor, fp32."""
        entry = self._entries[name]
        _, per_block, block_bytes, decode = _TYPES[entry.kind]
        count = math.prod(entry.shape)
        self._file.seek(self._data + entry.offset)
        data = self._read(count // per_block * block_bytes)
        return decode(torch.frombuffer(data, dtype=torch.uint8).view(-1, block_bytes)).reshape(entry.shape)

    def _read_header(self) -> None:
        if self._read(4) != b"GGUF":
            raise ModelError(f"{self.path} is no GGUF file")
        version = self._scalar("<I")
        if version not in (2, 3):
            raise ModelError(f"{self.path} is GGUF version {version}; versions 2 and 3, little-endian, are read")
        tensors, pairs = self._scalar("<Q"), self._scalar("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<I"))
        self._entries: dict[str, _Entry] = {}
        for _ in range(tensors):
            name = self._string()
            shape = tuple(self._scalar("<Q") for _ in range(self._scalar("<I")))[::-1]
            self._entries[name] = _Entry(shape, self._scalar("<I"), self._scalar("<Q"))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self.path} is damaged: general.alignment is {alignment!r}")
        self._data = -(-self._file.tell() // alignment) * alignment
        for name, entry in self._entries.items():
            self._check(name, entry)
        self.shapes = {name: entry.shape for name, entry in self._entries.items()}

    def _check(self, name: str, entry: _Entry) -> None:
        if entry.kind not in _TYPES:
            kind = _OTHER_TYPES.get(entry.kind, f"type {entry.kind}")
            known = ", ".join(item[0] for item in _TYPES.values())
            raise ModelError(f"{self.path}: {name} is stored as {kind}; supported are {known}")
        _, per_block, block_bytes, _ = _TYPES[entry.kind]
        if not entry.shape or entry.shape[-1] % per_block:
            raise ModelError(f"{self.path}: {name} of shape {entry.shape} is not made of blocks of {per_block}")
        if self._data + entry.offset + math.prod(entry.shape) // per_block * block_bytes > self._size:
            raise ModelError(f"{self.path} is truncated: {name} ends behind the end of the file at byte {self._size}")

    def _read(self, count: int) -> bytearray:
        if count > self._size:
            raise ModelError(f"{self.path} is damaged: it announces {count} bytes in a file of {self._size}")
        data = bytearray(count)
        if self._file.readinto(data) != count:
            raise ModelError(f"{self.path} is truncated at byte {self._size}")
        return data

    def _scalar(self, form: str) -> Any:
        return struct.unpack(form, self._read(struct.calcsize(form)))[0]

    def _string(self) -> str:
        return self._read(self._scalar("<Q")).decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._scalar("<I"), self._scalar("<Q")
            if inner in _SCALARS:
                form = _SCALARS[inner]
                return list(struct.unpack(f"<{count}{form[1]}", self._read(count * struct.calcsize(form))))
            if count > self._size or inner != _STRING:
                raise ModelError(f"{self.path} is damaged: it announces {count} values of type {inner} in a file of {self._size} bytes")
            return [self._value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelError(f"{self.path} is damaged: metadata of type {kind}")
        return self._scalar(_SCALARS[kind])
