"""Token shards on disk: our own format, memory-mapped, every byte under a digest.

A directory holds `shard-00000.bin`, ... , beside each a `.json` that describes it, and `manifest.json`, written last. A shard is,
little-endian and each section at a multiple of 64 bytes:

    header  64 bytes: b"alignshd", uint32 format, uint32 bytes per id (2 or 4), uint64 documents, uint64 tokens, zeros
    ids     tokens × (uint16 or uint32)
    mask    ceil(tokens / 8) bytes, bit i of the stream is token i, lowest bit first
    lengths documents × uint32
    trained documents × uint32, targets of each document

Its description holds the size, the sha256 of the file and of each chunk of 4 MiB. A chunk is hashed when it is first read.
"""

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np

from ._encode import Example
from ._errors import DataError

FORMAT = 1
CHUNK = 4 << 20
MAGIC = b"alignshd"
HEADER = struct.Struct("<8sIIQQ")
MANIFEST = "manifest.json"


class Shards:
    """The documents of a directory of shards, in order; a `Loader` takes it in place of an `Encoded`.

    Opening reads the manifest and the files' sizes only, and raises DataError where one is missing or of another size. Reading a document
    checks the chunks it lies in, once; `verify` checks all.
    """

    def __init__(self, directory: Path, manifest: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]):
        self.directory, self.manifest = directory, manifest
        self._files = [_ShardFile(directory, entry) for entry in entries]
        self.documents = sum(entry["documents"] for entry in entries)
        self.tokens = sum(entry["tokens"] for entry in entries)
        self.trained_tokens = sum(entry["trained_tokens"] for entry in entries)
        self.digest = hashlib.sha256("".join(entry["sha256"] for entry in entries).encode()).hexdigest()
        self._firsts = np.cumsum([0, *(entry["documents"] for entry in entries)])
        self.examples: Sequence[Example] = _Examples(self)

    @cached_property
    def lengths(self) -> np.ndarray:
        """(N,) int64, tokens of each document."""
        return np.concatenate([file.lengths for file in self._files]).astype(np.int64)

    @cached_property
    def trained(self) -> np.ndarray:
        """(N,) int64, targets of each document."""
        return np.concatenate([file.trained for file in self._files]).astype(np.int64)

    def example(self, index: int) -> Example:
        """Document `index`, copied out of the map; raises DataError, naming file and bytes, when they are not those that were written."""
        which = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return self._files[which].example(index - int(self._firsts[which]))

    def verify(self) -> None:
        """Hashes every file; raises DataError with the name of the first that is not what was written."""
        for file in self._files:
            file.verify()


def open_shards(directory: str | Path, *, fingerprint: str | None = None, partial: bool = False) -> Shards:
    """Opens a directory that `build_shards` finished; with `partial`, the shards that are whole so far while others are still written.

    fingerprint: of the tokenizer in use; shards of another are refused. Raises DataError: no manifest, a manifest that was changed, a
    newer format, a file that is missing or of another size.
    """
    directory = Path(directory)
    if partial and not (directory / MANIFEST).is_file():
        entries = [read_json(path) for path in sorted(directory.glob("shard-*.json"))]
        manifest: dict[str, Any] = {"settings": dict(entries[0]["settings"]) if entries else {}}
    else:
        manifest = _read_manifest(directory)
        entries = manifest["shards"]
    if not entries:
        raise DataError(f"{directory}: holds no whole shard; build the shards first")
    given = manifest["settings"].get("tokenizer")
    if fingerprint is not None and given != fingerprint:
        raise DataError(f"{directory}: made with another tokenizer (fingerprint {given}, not {fingerprint}); build the shards again")
    return Shards(directory, manifest, entries)


def write_shard(directory: Path, index: int, examples: Sequence[Example], notes: Mapping[str, Any]) -> dict[str, Any]:
    """Writes one shard and then its description, each at once or not at all; returns the description, `notes` in it.

    Any number of processes may write different shards of one directory.
    """
    content = _content(examples)
    name = f"shard-{index:05d}.bin"
    write_whole(directory / name, content)
    entry = {
        "name": name,
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "chunks": [hashlib.sha256(content[at : at + CHUNK]).hexdigest() for at in range(0, len(content), CHUNK)],
        "documents": len(examples),
        "tokens": sum(len(example.ids) for example in examples),
        "trained_tokens": int(sum(example.mask[1:].sum() for example in examples)),
        **notes,
    }
    write_whole(directory / f"shard-{index:05d}.json", to_json(entry))
    return entry


def write_manifest(directory: Path, settings: Mapping[str, Any], counts: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> None:
    """The last file: with it the directory is whole."""
    content = {"format": FORMAT, "settings": settings, "counts": counts, "shards": list(entries)}
    write_whole(directory / MANIFEST, to_json(content | {"sha256": _seal(content)}))


def write_whole(path: Path, content: bytes) -> None:
    """Puts a file in place so that a reader, or a run after a crash, sees all of it or none."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"{path}: cannot be written ({error.strerror}); free space, or give another directory") from None


def to_json(value: object) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); build the shards again") from None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise DataError(f"{path}: is damaged; build the shards again")
    return value


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    if not path.is_file():
        raise DataError(f"{directory}: has no {MANIFEST}; it is no directory of shards, or they are not finished yet")
    manifest = read_json(path)
    if manifest.get("format") != FORMAT:
        raise DataError(f"{path}: format {manifest.get('format')!r}, this version reads {FORMAT}; use the one that wrote it")
    if _seal({key: value for key, value in manifest.items() if key != "sha256"}) != manifest.get("sha256"):
        raise DataError(f"{path}: is damaged (its sha256 is not {manifest.get('sha256')!r}); build the shards again")
    return manifest


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(to_json(content)).hexdigest()


def _content(examples: Sequence[Example]) -> bytes:
    ids = np.concatenate([example.ids for example in examples]) if examples else np.zeros(0, np.int32)
    masks = np.concatenate([example.mask for example in examples]) if examples else np.zeros(0, np.bool_)
    width = 2 if ids.max(initial=0) < 1 << 16 else 4
    sections = [
        HEADER.pack(MAGIC, FORMAT, width, len(examples), len(ids)),
        ids.astype(f"<u{width}").tobytes(),
        np.packbits(masks, bitorder="little").tobytes(),
        np.array([len(example.ids) for example in examples], "<u4").tobytes(),
        np.array([example.mask[1:].sum() for example in examples], "<u4").tobytes(),
    ]
    return b"".join(section + bytes(-len(section) % 64) for section in sections)


class _ShardFile:
    def __init__(self, directory: Path, entry: Mapping[str, Any]):
        self.path, self.entry = directory / entry["name"], entry
        try:
            size = self.path.stat().st_size
        except OSError:
            raise DataError(f"{self.path}: is missing; build the shards again") from None
        if size != entry["size"]:
            raise DataError(f"{self.path}: has {size} bytes, not {entry['size']}; build the shards again")
        self._checked = bytearray(len(entry["chunks"]))

    @cached_property
    def _map(self) -> memoryview:
        with open(self.path, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    @cached_property
    def _sections(self) -> tuple[int, dict[str, int]]:
        """Bytes per id, and where each section begins."""
        magic, version, width, documents, tokens = HEADER.unpack(self._read(0, HEADER.size))
        if (magic, version, documents, tokens) != (MAGIC, FORMAT, self.entry["documents"], self.entry["tokens"]):
            raise DataError(f"{self.path}: its header does not fit its description; build the shards again")
        starts, at = {}, 64
        for name, size in (("ids", tokens * width), ("mask", -(-tokens // 8)), ("lengths", documents * 4), ("trained", documents * 4)):
            starts[name] = at
            at += size + -size % 64
        return width, starts

    @cached_property
    def lengths(self) -> np.ndarray:
        return self._counts("lengths")

    @cached_property
    def trained(self) -> np.ndarray:
        return self._counts("trained")

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.lengths, dtype=np.int64)

    def example(self, index: int) -> Example:
        stop = int(self._ends[index])
        start = stop - int(self.lengths[index])
        width, sections = self._sections
        ids = np.frombuffer(self._read(sections["ids"] + start * width, sections["ids"] + stop * width), f"<u{width}")
        packed = self._read(sections["mask"] + start // 8, sections["mask"] + -(-stop // 8))
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        return Example(ids.astype(np.int32), bits[start % 8 : start % 8 + stop - start].astype(np.bool_))

    def verify(self) -> None:
        self._read(0, self.entry["size"])

    def _counts(self, name: str) -> np.ndarray:
        start = self._sections[1][name]
        return np.frombuffer(self._read(start, start + 4 * self.entry["documents"]), "<u4")

    def _read(self, start: int, stop: int) -> memoryview:
        """Bytes start..stop of the map, their chunks hashed if they were not yet."""
        for chunk in range(start // CHUNK, -(-stop // CHUNK)):
            if not self._checked[chunk]:
                found = hashlib.sha256(self._map[chunk * CHUNK : (chunk + 1) * CHUNK]).hexdigest()
                if found != self.entry["chunks"][chunk]:
                    raise DataError(
                        f"{self.path}: the bytes from {chunk * CHUNK} on are not those that were written (sha256); the file is damaged: "
                        f"build the shards again"
                    )
                self._checked[chunk] = 1
        return self._map[start:stop]


class _Examples(Sequence[Example]):
    def __init__(self, shards: Shards):
        self._shards = shards

    def __len__(self) -> int:
        return int(self._shards.documents)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        if isinstance(index, slice):
            return [self._shards.example(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._shards.example(index % len(self))

    def __iter__(self) -> Iterator[Example]:
        return (self._shards.example(index) for index in range(len(self)))
