"""Rows to shards: in blocks, in any number of processes, and over again after a crash with the same result."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ._encode import Encoder, Overlong, Tokenizer, encode_block, nothing_left
from ._errors import DataError
from ._shards import MANIFEST, Shards, open_shards, read_json, write_manifest, write_shard


def build_shards(
    rows: Iterable[dict[str, Any]],
    tokenizer: Tokenizer,
    directory: str | Path,
    *,
    kind: str,
    max_length: int,
    overlong: Overlong = "truncate",
    template: str | None = None,
    system: str | None = None,
    rows_per_shard: int = 8192,
    processes: int = 1,
    progress: Callable[[int, int], object] | None = None,
    alive: Callable[[], object] = lambda: None,
) -> Shards:
    """Encodes rows as `encode_rows` does, into shards of `rows_per_shard` rows each, and opens them.

    Shard i holds the i-th block of rows whatever the number of processes, so the files are a function of rows, tokenizer and settings.
    After a crash the same call takes over the shards that are whole and makes the rest. `progress(rows, tokens)` is called after each
    shard, `alive()` after each row that is encoded, or once a second for each of several processes that encodes. Raises DataError: as
    encode_rows; a directory that holds shards of other rows or settings; a process that dies.
    """
    directory = Path(directory)
    settings: dict[str, Any] = {
        "tokenizer": tokenizer.fingerprint,
        "kind": kind,
        "max_length": max_length,
        "overlong": overlong,
        "template": template if template is not None or kind != "messages" else getattr(tokenizer, "chat_template", None),
        "system": system,
        "rows_per_shard": rows_per_shard,
    }
    if rows_per_shard < 1 or processes < 1:
        raise DataError(f"rows_per_shard {rows_per_shard} and processes {processes} must be at least 1")
    encoder = Encoder(tokenizer, kind=kind, max_length=max_length, overlong=overlong, template=template, system=system)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{directory}: cannot be made ({error.strerror}); give a directory that can be written") from None
    finished = (directory / MANIFEST).exists()
    if finished:
        _refuse_other_settings(directory, settings)
    entries: list[dict[str, Any]] = []
    jobs = ((directory, index, block, settings, finished) for index, block in enumerate(_blocks(rows, rows_per_shard)))
    for entry in _run(jobs, encoder, processes, alive):
        entries.append(entry)
        if progress:
            progress(sum(e["rows"] for e in entries), sum(e["tokens"] for e in entries))
    counts = _counts(entries)
    if not counts["kept"]:
        raise DataError(nothing_left(counts["rows"], Counter(counts["dropped"]), max_length))
    if finished and [entry["name"] for entry in open_shards(directory).manifest["shards"]] != [entry["name"] for entry in entries]:
        raise DataError(f"{directory}: holds shards of another number of rows; remove it, or give another directory")
    if not finished:
        kept = [{name: value for name, value in entry.items() if name != "settings"} for entry in entries]
        write_manifest(directory, settings, counts, kept)
    return open_shards(directory, fingerprint=settings["tokenizer"])


def _blocks(rows: Iterable[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    iterator = iter(rows)
    while block := list(islice(iterator, size)):
        yield block


Job = tuple[Path, int, list[dict[str, Any]], dict[str, Any], bool]


def _run(jobs: Iterator[Job], encoder: Encoder, processes: int, alive: Callable[[], object]) -> Iterator[dict[str, Any]]:
    """Entries in the order of the jobs; at most two blocks a process are held at a time."""
    if processes == 1:
        yield from (_make(job, encoder, alive) for job in jobs)
        return
    from ._workers import do_over

    yield from do_over(_make, encoder, jobs, processes, alive)


def _make(job: Job, encoder: Encoder, alive: Callable[[], object]) -> dict[str, Any]:
    """The entry of one shard: of the one on disk, where it was made of these rows with these settings and is whole, else of a new one."""
    directory, index, rows, settings, finished = job
    key = hashlib.sha256(json.dumps([settings, rows], sort_keys=True).encode()).hexdigest()
    description = directory / f"shard-{index:05d}.json"
    if (entry := _whole_entry(description)) and entry.get("key") == key:
        return entry
    if finished:
        shard = description.with_suffix(".bin")
        raise DataError(f"{shard}: is damaged, or made of other rows; remove {directory}, or give another directory")
    block = encode_block(rows, encoder, alive)
    counts = {"rows": block.rows, "kept": block.kept, "dropped": dict(block.dropped), "truncated": block.truncated}
    return write_shard(directory, index, block.examples, {"key": key, "settings": settings, **counts})


def _whole_entry(description: Path) -> dict[str, Any] | None:
    """The entry on disk, if there is one and the bytes of its shard are those that it describes."""
    try:
        entry = read_json(description)
        Shards(description.parent, {}, [entry]).verify()
    except DataError:
        return None
    return entry


def _refuse_other_settings(directory: Path, settings: dict[str, Any]) -> None:
    for name, there in open_shards(directory).manifest["settings"].items():
        if there != settings.get(name):
            shown = f"{name} differs" if name in ("template", "tokenizer") else f"{name} was {there!r} and is now {settings.get(name)!r}"
            raise DataError(f"{directory}: holds shards made with other settings ({shown}); remove it, or give another directory")


def _counts(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "rows": sum(entry["rows"] for entry in entries),
        "kept": sum(entry["kept"] for entry in entries),
        "documents": sum(entry["documents"] for entry in entries),
        "dropped": dict(sum((Counter(entry["dropped"]) for entry in entries), Counter())),
        "truncated": sum(entry["truncated"] for entry in entries),
        "tokens": sum(entry["tokens"] for entry in entries),
        "trained_tokens": sum(entry["trained_tokens"] for entry in entries),
    }
