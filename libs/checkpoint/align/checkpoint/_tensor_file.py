"""safetensors files written a piece at a time. The safetensors package would build the whole file in memory first.

Format: https://github.com/huggingface/safetensors, section "Format": u64 length of the header, the header as JSON, the tensors' bytes.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from align.checkpoint import _files
from align.checkpoint._errors import CheckpointError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Later:
    """A tensor that is fetched when its turn comes, so that not all are in host memory at once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], Tensor]
    gathered: bool = False  # all ranks must fetch it together

    @classmethod
    def of(cls, tensor: Tensor) -> Later:
        """A plain tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.detach)

    @property
    def bytes(self) -> int:
        """Of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def order_of(tensors: Mapping[str, Later]) -> list[str]:
    """The names as they lie in a file: the widest first, as the safetensors package does, so that each lies on a multiple of its size."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def write_tensors(path: Path, tensors: Mapping[str, Later], metadata: Mapping[str, str]) -> _files.Written:
    """Writes a safetensors file; on the host at most one tensor is copied at a time.

    Raises:
        CheckpointError: a dtype that safetensors files do not have.
        OSError: the disk says no.
    """
    names = order_of(tensors)
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        check_dtype(name, tensors[name])
        start, end = end, end + tensors[name].bytes
        header[name] = {"dtype": _NAMES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file = _files.NewFile(path)
    try:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            _write_bytes(file, tensors[name].fetch())
        return file.close()
    finally:
        file.abandon()


def check_dtype(name: str, tensor: Later) -> None:
    """Raises CheckpointError for a dtype that safetensors files do not have."""
    if tensor.dtype not in _NAMES:
        raise CheckpointError(f"{name} is {tensor.dtype}, which a safetensors file can't hold; keep {', '.join(_NAMES.values())}")


def bytes_of(tensors: Mapping[str, Later]) -> int:
    """Bytes of data, without headers."""
    return sum(tensor.bytes for tensor in tensors.values())


def _write_bytes(file: _files.NewFile, tensor: Tensor) -> None:
    flat = tensor.to("cpu").contiguous()
    size = flat.numel() * flat.element_size()
    if size:
        # The tensor's own memory; Tensor.numpy() would want numpy and has no bf16.
        file.write(memoryview((ctypes.c_char * size).from_address(flat.data_ptr())))
