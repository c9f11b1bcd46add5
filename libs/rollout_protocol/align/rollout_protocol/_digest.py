"""What both ends compute of a model directory in the same way, so that they know that they mean the same one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from align.rollout_protocol._errors import RolloutProtocolError

_CHUNK = 1 << 23
_OTHERS = ("optimizer", "trainer", "adapter", "value")  # files of a checkpoint that are no weights of the model
_TOKENIZER_FILES = ("tokenizer.json", "tekken.json", "tokenizer.model", "vocab.json")


def weights_sha256(directory: str | os.PathLike[str]) -> str:
    """sha256 over names, dtypes, shapes and bytes of all tensors of a model directory, in the order of their names: the same however the
    weights are cut into files. A chunk is in memory at a time.

    Raises:
        RolloutProtocolError: no *.safetensors there, or a file that is none.
    """
    files = [path for path in sorted(Path(directory).glob("*.safetensors")) if not path.name.startswith(_OTHERS)]
    if not files:
        raise RolloutProtocolError(f"{directory} has no *.safetensors, so no weights to take the digest of")
    places = sorted((name, path, entry, start) for path in files for name, entry, start in _tensors(path))
    digest = hashlib.sha256()
    for name, path, entry, start in places:
        digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode() + b"\n")
        begin, end = entry["data_offsets"]
        with path.open("rb") as file:
            file.seek(start + begin)
            left = end - begin
            while left:
                chunk = file.read(min(left, _CHUNK))
                if not chunk:
                    raise RolloutProtocolError(f"{path} ends before {name} does; fetch the file again")
                digest.update(chunk)
                left -= len(chunk)
    return digest.hexdigest()


def tokenizer_sha256(directory: str | os.PathLike[str]) -> str:
    """sha256 of the file that holds a model directory's vocabulary; "" where there is none.

    The protocol carries it as the tokenizer's fingerprint: both ends can make it without a tokenizer. Raises OSError where that file
    cannot be read.
    """
    for name in _TOKENIZER_FILES:
        path = Path(directory) / name
        if path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()
    return ""


def _tensors(path: Path) -> Iterator[tuple[str, dict[str, Any], int]]:
    """(name, entry, where the data begin) of a safetensors file: 8 bytes of length, a JSON header, the data."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= min(100 << 20, path.stat().st_size):
            raise RolloutProtocolError(f"{path} is no safetensors file: its header would have {size} bytes")
        try:
            header = json.loads(file.read(size))
        except (ValueError, RecursionError) as error:
            raise RolloutProtocolError(f"{path} is no safetensors file: {error}") from None
    if type(header) is not dict:
        raise RolloutProtocolError(f"{path} is no safetensors file: its header is a JSON {type(header).__name__}, no object")
    for name, entry in header.items():
        if name != "__metadata__":
            if not _is_entry(entry):
                raise RolloutProtocolError(f"{path} is no safetensors file: its header says of {name[:100]!r} {str(entry)[:100]}")
            yield name, entry, 8 + size


def _is_entry(entry: Any) -> bool:
    match entry:
        case {"dtype": str(), "shape": list(), "data_offsets": [int(begin), int(end)]}:
            return 0 <= begin <= end
    return False
