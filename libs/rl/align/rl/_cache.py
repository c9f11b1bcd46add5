"""Log-probabilities of a reference model, kept in a file that belongs to exactly one set of weights, rows and forward."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from align.rl._errors import RlError
from align.rollout_protocol import RolloutProtocolError
from align.rollout_protocol import weights_sha256 as directory_sha256

FORMAT = 1
_MAGIC = b"align reference cache\n"


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
    """`align.rollout_protocol.weights_sha256`: of names, dtypes, shapes and bytes of all tensors of a model directory.

    Raises:
        RlError: no *.safetensors there, or a file that is none.
    """
    try:
        return directory_sha256(directory)
    except RolloutProtocolError as error:
        raise RlError(str(error)) from None


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
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RlError(f"{path} is no reference cache, or only the beginning of one; make it anew with //stages:reference") from None
    if not content.startswith(_MAGIC) or number != FORMAT:
        raise RlError(f"{path} has format {number!r}, this version reads {FORMAT}; make it anew with //stages:reference")
    return key, payload, digest


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}…"
