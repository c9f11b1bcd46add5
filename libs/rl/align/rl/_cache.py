"""Log-probabilities of a reference model, kept in a file that belongs to exactly one set of weights, rows and forward."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from align.rl._errors import RlError

FORMAT = 1
_MAGIC = b"align reference cache\n"
_CHUNK = 1 << 23


@dataclass(frozen=True, kw_only=True)
class CacheKey:
    """What reference log-probabilities depend on. Two keys agree in every field, or the cache is refused."""

    arm: str  # the run's own name for its rows
    weights: str  # `weights_sha256`
    tokenizer: str  # fingerprint
    rows: str  # digest of all token ids and masks, in order
    pairs: int
    max_length: int
    forward_impl: str
    dtype: str


@dataclass(frozen=True)
class ReferenceCache:
    """Summed log-probabilities of the answers of each pair, in the order of the rows."""

    key: CacheKey
    chosen: list[float]
    rejected: list[float]


def weights_sha256(directory: str | os.PathLike[str]) -> str:
    """sha256 over names, dtypes, shapes and bytes of all tensors of a model directory, in the order of their names: the same however the
    weights are cut into files. A chunk is in memory at a time.

    Raises:
        RlError: no *.safetensors there, or a file that is none.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    files = [path for path in files if not path.name.startswith(("optimizer", "trainer", "adapter", "value"))]
    if not files:
        raise RlError(f"{directory} has no *.safetensors, so no weights to take the digest of")
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
                    raise RlError(f"{path} ends before {name} does; fetch the file again")
                digest.update(chunk)
                left -= len(chunk)
    return digest.hexdigest()


def _tensors(path: Path) -> Iterator[tuple[str, dict[str, Any], int]]:
    """(name, entry, where the data begin) of a safetensors file: 8 bytes of length, a JSON header, the data."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= min(100 << 20, path.stat().st_size):
            raise RlError(f"{path} is no safetensors file: its header would have {size} bytes")
        try:
            header: dict[str, Any] = json.loads(file.read(size))
        except ValueError as error:
            raise RlError(f"{path} is no safetensors file: {error}") from None
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, entry, 8 + size


def write_cache(path: str | os.PathLike[str], cache: ReferenceCache) -> None:
    """Writes the file whole or not at all. Raises RlError: not as many numbers as the key says, or the disk."""
    path = Path(path)
    for side in (cache.chosen, cache.rejected):
        if len(side) != cache.key.pairs:
            raise RlError(f"{len(side)} log-probabilities for {cache.key.pairs} pairs; nothing was written")
    payload = array("d", [*cache.chosen, *cache.rejected]).tobytes()
    header = {"format": FORMAT, **asdict(cache.key), "payload_sha256": hashlib.sha256(payload).hexdigest()}
    partial = path.with_name(f".{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(_MAGIC + json.dumps(header).encode() + b"\n" + payload)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise RlError(f"{path}: can't be written ({error.strerror}); choose another cache path") from None
    finally:
        partial.unlink(missing_ok=True)


def read_header(path: str | os.PathLike[str]) -> CacheKey:
    """The key that a cache was made for. Raises RlError: no such file, or not one of these."""
    return _read(Path(path))[0]


def read_cache(path: str | os.PathLike[str], key: CacheKey) -> ReferenceCache:
    """The cache, if it was made for exactly this key.

    Raises:
        RlError: another key (every field that differs is named with both values), a file that is not whole.
    """
    path = Path(path)
    found, payload, digest = _read(path)
    own, wanted = asdict(found), asdict(key)
    changed = [f"{name} is {_short(own[name])} there and {_short(wanted[name])} here" for name in wanted if own[name] != wanted[name]]
    if changed:
        raise RlError(f"{path} is a reference of something else: {', '.join(changed)}; make it anew with //stages:reference")
    if len(payload) != 16 * found.pairs or hashlib.sha256(payload).hexdigest() != digest:
        raise RlError(f"{path} is not whole ({len(payload)} of {16 * found.pairs} bytes, or changed); make it anew with //stages:reference")
    numbers = array("d", payload).tolist()
    return ReferenceCache(found, numbers[: found.pairs], numbers[found.pairs :])


def _read(path: Path) -> tuple[CacheKey, bytes, str]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RlError(f"{path}: can't be read ({error.strerror}); make it with //stages:reference") from None
    line, _, payload = content.removeprefix(_MAGIC).partition(b"\n")
    try:
        header: Mapping[str, Any] = json.loads(line)
        number, digest = header["format"], header["payload_sha256"]
        key = CacheKey(**{field.name: header[field.name] for field in fields(CacheKey)})
    except (ValueError, KeyError, TypeError):
        raise RlError(f"{path} is no reference cache, or only the beginning of one; make it anew with //stages:reference") from None
    if not content.startswith(_MAGIC) or number != FORMAT:
        raise RlError(f"{path} has format {number!r}, this version reads {FORMAT}; make it anew with //stages:reference")
    return key, payload, digest


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}…"
