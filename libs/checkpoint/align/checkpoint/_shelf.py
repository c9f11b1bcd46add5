"""A directory of checkpoints: which are whole, in which order they were written, which may go.

`step-000060` is a checkpoint. A save writes `.step-000060.partial` and renames it. What is to be removed is first renamed to
`.step-000060.old`. Names that begin with a dot are nobody's but the saver's, with one exception: when a crash came between the two renames
that replace a checkpoint by a new one of the same step, the `.old` one is whole and may be all there is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from align.checkpoint import _files
from align.checkpoint._errors import CheckpointError, CheckpointWarning

MANIFEST = "manifest.json"
HASHERS = 8  # files whose digest is computed at a time; one thread does about 1.4 GB/s
_NAME = re.compile(r"(?:step-(\d+)|\.step-(\d+)\.(old|partial))")


@dataclass(frozen=True)
class Entry:
    """One directory that has a manifest."""

    path: Path
    step: int
    order: int  # rises with each save, also after a resume from an older step
    metric: float | None
    files: dict[str, dict[str, Any]]

    @property
    def age(self) -> tuple[int, bool, int]:
        """Sorts from the first written to the last."""
        return self.order, not self.path.name.startswith("."), self.step


def name_of(step: int) -> str:
    """The directory's name; it sorts by step up to a million steps."""
    return f"step-{step:06d}"


def partial_name(step: int) -> str:
    """What a save writes to."""
    return f".{name_of(step)}.partial"


def old_name(step: int) -> str:
    """What is about to be removed."""
    return f".{name_of(step)}.old"


def manifest(step: int, order: int, metric: float | None, files: dict[str, _files.Written]) -> bytes:
    """The manifest's text."""
    listed = {name: {"bytes": file.bytes, "sha256": file.sha256} for name, file in sorted(files.items())}
    return (json.dumps({"step": step, "order": order, "metric": metric, "files": listed}, indent=1) + "\n").encode()


def read_entry(path: Path) -> Entry:
    """Reads a manifest; the files are not looked at.

    Raises:
        CheckpointError: no manifest, or one that is torn.
    """
    try:
        data = json.loads((path / MANIFEST).read_bytes())
        entry = Entry(path, data["step"], data["order"], data["metric"], dict(data["files"]))
        numbers = (entry.step, entry.order, 0 if entry.metric is None else entry.metric, *(file["bytes"] for file in entry.files.values()))
        if not all(isinstance(number, int | float) for number in numbers) or not all(file["sha256"] for file in entry.files.values()):
            raise ValueError("values of other kinds")
        return entry
    except FileNotFoundError:
        raise CheckpointError(f"{path} has no {MANIFEST}, so it is not a whole checkpoint; use another one") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path / MANIFEST} can't be read ({error!r}), so the checkpoint is not whole; use another one") from None


def check(entry: Entry, without: str | None = None) -> None:
    """Compares every file with the manifest, size and sha256; those whose names begin with `without` are not looked at.

    One absence is left to the loader, which refuses it by name: optimizer files. A crash can't make it, since the manifest is written last;
    somebody removed them, and to fall back to an older checkpoint would hide that.

    Raises:
        CheckpointError: names the first file that differs.
    """
    files = {name: wanted for name, wanted in entry.files.items() if without is None or not name.startswith(without)}
    with ThreadPoolExecutor(min(len(files) or 1, HASHERS)) as pool:
        reasons = list(pool.map(lambda item: _difference(entry.path / item[0], item[1]), files.items()))
    for reason in reasons:
        if reason:
            raise CheckpointError(f"{entry.path} is not whole: {reason}; use another checkpoint")


def _difference(path: Path, wanted: dict[str, Any]) -> str | None:
    try:
        size = path.stat().st_size
        if size != wanted["bytes"]:
            return f"{path.name} has {size} bytes, its manifest says {wanted['bytes']}"
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None if path.name.startswith("optimizer") else f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} can't be read ({error.strerror})"
    return None if digest == wanted["sha256"] else f"{path.name} has another sha256 than its manifest says"


def entries(directory: Path) -> tuple[list[Entry], list[tuple[int, str]]]:
    """The checkpoints that have a manifest, the first written first, and (step, why) of each `step-` directory that has none."""
    found, broken = [], []
    for path, step, kind in _ours(directory):
        if kind == "partial":
            continue
        try:
            found.append(read_entry(path))
        except CheckpointError as error:
            if kind != "old":
                broken.append((step, str(error)))
    return sorted(found, key=lambda entry: entry.age), broken


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The whole checkpoint that was written last, or None where there is no checkpoint at all.

    Every file of the answer was compared with its sha256. Those that are not whole are passed over, each with a CheckpointWarning.

    Raises:
        CheckpointError: there are checkpoints, and none is whole.
    """
    found, unread = entries(Path(directory))
    broken = [reason for _, reason in unread]
    entry = _newest_whole(found, broken)
    if entry is not None:
        for reason in broken:
            warnings.warn(f"{_cause(reason)}; falling back to {entry.path.name}", CheckpointWarning, stacklevel=2)
        return entry.path
    if broken:
        raise CheckpointError(
            f"{directory} holds {len(broken)} checkpoint(s) and none is whole ({_cause(broken[-1])}); move them away to start at step 0"
        )
    return None


def newest(directory: str | os.PathLike[str], *, setting: str) -> Path | None:
    """The checkpoint that was written last, for who takes its model and does not train on; None where there is no checkpoint at all.

    Unlike `latest` it falls back to no other: what is asked of an older model would be taken for the newest one's answer. Every file was
    compared with its sha256, the optimizer's aside, which a model does without.

    Args:
        setting: what the user names a checkpoint with, such as "model.path", for the message.

    Raises:
        CheckpointError: it is not whole. The message names the file, what is wrong with it, and the newest older one that is whole.
    """
    found, unread = entries(Path(directory))
    # Without a manifest nothing says when a directory was written; the step does, where it is beyond all that say so.
    last = max((entry.step for entry in found), default=-1)
    reasons = [reason for step, reason in sorted(unread, reverse=True) if step > last]
    entry = _newest_whole(found, reasons, without="optimizer")
    if reasons:
        way = f"the newest whole one is older: {setting}={entry.path}" if entry is not None else "no older one is whole; name another model"
        raise CheckpointError(f"{_cause(reasons[0])}; {way}")
    return entry.path if entry is not None else None


def _newest_whole(found: list[Entry], broken: list[str], without: str | None = None) -> Entry | None:
    """Of entries in their order; for each that is passed over the reason is added to `broken`."""
    for entry in reversed(found):
        try:
            check(entry, without)
        except CheckpointError as error:
            broken.append(str(error))
            continue
        return entry
    return None


def _cause(reason: str) -> str:
    """A complaint about one checkpoint, without its way out."""
    return reason.split("; use another")[0]


def sweep(directory: Path, kinds: tuple[str, ...]) -> None:
    """Removes what crashed saves left behind."""
    for path, _, kind in list(_ours(directory)):
        if kind in kinds:
            _files.remove_directory(path, first=MANIFEST)


def prune(directory: Path, newest: Path, keep: int) -> None:
    """Removes all but the `keep` checkpoints written last and, where metrics were given, the one with the highest.

    A checkpoint that a run was resumed from counts like any other. What has no manifest is not ours to judge and stays.
    """
    found = [entry for entry in entries(directory)[0] if not entry.path.name.startswith(".")]
    kept = {entry.path for entry in found[-keep:]} | {newest}
    scored = [entry for entry in found if entry.metric is not None]
    if scored:
        kept.add(max(scored, key=lambda entry: (entry.metric, entry.age)).path)
    for entry in found:
        if entry.path not in kept:
            old = directory / old_name(entry.step)
            _files.rename(entry.path, old)
            _files.remove_directory(old, first=MANIFEST)


def _ours(directory: Path) -> Iterator[tuple[Path, int, str | None]]:
    """(path, step, "old", "partial" or None) of every directory with one of our names."""
    if not directory.is_dir():
        return
    for path in sorted(directory.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            yield path, int(match[1] or match[2]), match[3]
