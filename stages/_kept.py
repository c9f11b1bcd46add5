"""The folder that build_data writes: which files it is of, the rows that were kept, the tests; whole or not there at every moment."""

import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _sources import BUNDLED, File, local_digest, sha256_of

from align.config import ConfigError
from align.data import DataError, Row, RowSet, bundled

SOURCES, ROWS = "sources.json", "rows.json"
OF_NO_MATTER = ("run_dir", "shards.processes")  # what is built does not depend on them
SIDES = ("train", "held_out")


@dataclass
class Kept:
    """What became of the rows. `sides` holds rows and sha256 of rows/<side>.jsonl, `files` what was read of each file."""

    kind: str = ""
    read: int = 0
    sides: dict[str, dict[str, Any]] = field(default_factory=dict)
    removed: Counter[str] = field(default_factory=Counter)  # by reason: copy, contaminated
    touched: dict[str, dict[str, int]] = field(default_factory=dict)  # by test: rows removed, questions found, questions too short
    unread: Counter[str] = field(default_factory=Counter)  # what a published form's reader left out, by its reason
    files: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(side["rows"] for side in self.sides.values())

    def summary(self) -> str:
        gone = [f"{count:,} {why}" for why, count in sorted((self.removed + self.unread).items())]
        sides = ", ".join(f"{side['rows']:,} {name}" for name, side in self.sides.items())
        return f"{self.read:,} read, {self.rows:,} kept ({sides}; kind {self.kind}), removed {', '.join(gone) or 'none'}"

    def plain(self) -> dict[str, Any]:
        return {**vars(self), "removed": dict(self.removed), "unread": dict(self.unread)}


class Folder:
    """A build's folder, locked. `again` says that an earlier process began it."""

    def __init__(self, path: Path, files: list[File], *, again: bool):
        self.path, self.files, self.again = path, files, again

    def kept(self, now: set[str], alive: Callable[[], object]) -> Kept | None:
        """The rows, where an earlier process finished them; `now` names the files on disk that would be read today.

        Raises DataError when the rows, or the files that they are of, have changed since.
        """
        try:
            found = json.loads((self.path / ROWS).read_bytes())
            kept = Kept(**{**found, "removed": Counter(found["removed"]), "unread": Counter(found["unread"])})
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, RecursionError):
            raise DataError(f"{self.path / ROWS}: is damaged; remove {self.path} and build again") from None
        for side, known in kept.sides.items():
            path = rows_path(self.path, side)
            if not path.is_file() or sha256_of(path, alive) != known["sha256"]:
                raise DataError(f"{path}: is missing or was changed since it was written; remove {self.path} and build again")
        then = {file.name for file in self.files if file.form != "bundled" and not file.name.startswith("hub:")}
        if then != now:
            which = ", ".join(sorted(then ^ now)[:3])
            raise DataError(f"{self.path}: was built of other files than data.sources names now ({which}); name a new run_dir")
        for file, known in zip(self.files, kept.files, strict=True):
            was = known.get("local")
            if was and os.stat(file.name).st_mtime_ns != was["mtime_ns"] and local_digest(file, alive)["sha256"] != was["sha256"]:
                raise DataError(f"{file.name}: was changed since {self.path} was built of it; name a new run_dir, or restore it")
        return kept

    def keep(self, rows: Iterable[tuple[str, Row, dict[str, Any]]], alive: Callable[[], object]) -> Kept:
        """Writes rows/train.jsonl, rows/held_out.jsonl and rows/removed.jsonl, and then, as their seal, rows.json."""
        kept = Kept()
        found: dict[str, list[int]] = {}
        (self.path / "rows").mkdir(exist_ok=True)
        with ExitStack() as stack:
            sides = {side: stack.enter_context(_LinesFile(rows_path(self.path, side))) for side in (*SIDES, "removed")}
            for side, row, note in rows:
                if side == "end":
                    _end(kept, note, alive)
                    continue
                kept.read += 1
                if side == "removed":
                    kept.removed[note["why"]] += 1
                    sides[side].write(note)
                    if "test" in note:
                        found.setdefault(note["test"], []).append(note["item"])
                else:
                    kept.kind = note["kind"]
                    sides[side].write(row)
            for test, items in found.items():
                kept.touched.setdefault(test, {}).update(rows_removed=len(items), questions_found=len(set(items)))
            kept.sides = {side: {"rows": file.rows, "sha256": file.digest} for side, file in sides.items() if side in SIDES and file.rows}
            if not kept.rows:
                why = ", ".join(f"{name} {count}" for name, count in sorted((kept.removed + kept.unread).items()))
                raise DataError(
                    f"no rows are left of {kept.read} ({why or 'none given'}); rows that hold the questions of tests.sets are removed "
                    "unless tests.words=0"
                )
            for side, file in sides.items():
                if file.rows or side == "removed":
                    file.seal()
        write_whole(self.path / ROWS, _json(kept.plain()))
        return kept


@contextmanager
def open_folder(path: Path, settings: dict[str, Any], list_them: Callable[[], list[File]]) -> Iterator[Folder]:
    """Makes the folder, or takes up one that was begun with the same settings and files; no other process can meanwhile.

    Raises ConfigError: the folder is of another build (the settings that differ are named), of something else, or in use.
    """
    sources = path / SOURCES
    try:
        if not sources.exists() and path.is_dir() and any(name.name not in (".lock", f".{SOURCES}.partial") for name in path.iterdir()):
            raise ConfigError(f"run_dir {path}: holds other things already; name a new directory")
        again = sources.exists()
        files = list_them() if not again else []  # before anything is made: a source that is not there leaves nothing behind
        path.mkdir(parents=True, exist_ok=True)
        (path / ".lock").touch()
    except OSError as error:
        raise ConfigError(f"run_dir {path}: cannot be made or written ({error.strerror}); name another") from None
    with open(path / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"run_dir {path}: another build_data is at work there; wait for it, or name another") from None
        again = sources.exists()
        plain = _without(json.loads(json.dumps(settings, default=str)))
        try:
            known = json.loads(sources.read_bytes()) if again else None
            then = [File(**file) for file in known["files"]] if known is not None else []
        except (ValueError, TypeError, KeyError, RecursionError):
            raise DataError(f"{sources}: is damaged; remove {path} and build again") from None
        if known is not None and (known["settings"] == plain or (path / ROWS).exists()):
            _refuse_others(path, known["settings"], plain)
            files = then
        else:  # new, or nothing that is whole was made with the other settings
            files = files or list_them()
            write_whole(sources, _json({"settings": plain, "files": [file.plain() for file in files]}))
        yield Folder(path, files, again=again)


def rows_path(path: Path, side: str) -> Path:
    return path / "rows" / f"{side}.jsonl"


def write_tests(path: Path, tests: dict[str, RowSet]) -> None:
    """tests/<name>.jsonl with {prompt, answer, ...}, and PROVENANCE.md with their digests and, of bundled sets, source and licence."""
    path.mkdir(exist_ok=True)
    lines, texts = ["# Tests", "", "| file | rows | sha256 | made of | its sha256 |", "|---|---|---|---|---|"], []
    for name, found in tests.items():
        rows = [{key: value for key, value in row.items() if key != "completion"} for row in found.rows]
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        write_whole(path / f"{name}.jsonl", content)
        lines.append(f"| `{name}.jsonl` | {len(rows)} | {hashlib.sha256(content).hexdigest()} | {found.path} | {found.digest} |")
        if name in BUNDLED and str(found.path) == name:
            text = (bundled(name).parent / "PROVENANCE.md").read_text(encoding="utf-8")
            texts += [text] if text not in texts else []
    write_whole(path / "PROVENANCE.md", "\n\n".join(["\n".join(lines), *texts]).encode())


def write_whole(path: Path, content: bytes) -> None:
    """Puts a file in place so that a reader, or a run after a crash, sees all of it or none."""
    partial = path.with_name(f".{path.name}.partial")
    with _told(path):
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """The disk's refusal as a user's error, which names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}); free space, or name another run_dir") from None


class _LinesFile:
    """A JSON Lines file that is in place once it is sealed."""

    def __init__(self, path: Path):
        self._path, self._partial = path, path.with_name(f".{path.name}.partial")
        self._file = open(self._partial, "wb", 1 << 20)  # noqa: SIM115 - closed by __exit__
        self._hash, self.rows = hashlib.sha256(), 0

    def __enter__(self) -> "_LinesFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._partial.unlink(missing_ok=True)
        with suppress(OSError):  # what is still in the buffer of a full disk; the first refusal was told
            self._file.close()

    def write(self, row: dict[str, Any]) -> None:
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        with _told(self._path):
            self._file.write(line)
        self._hash.update(line)
        self.rows += 1

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def seal(self) -> None:
        with _told(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._partial, self._path)


def _end(kept: Kept, note: dict[str, Any], alive: Callable[[], object]) -> None:
    if "unchecked" in note:
        for test, count in note["unchecked"].items():
            kept.touched[test] = {"rows_removed": 0, "questions_found": 0, "questions_too_short": count}
        return
    kept.unread.update(note["dropped"])
    kept.files.append({**note["file"].plain(), "rows": note["rows"], "local": local_digest(note["file"], alive)})


def _refuse_others(path: Path, was: dict[str, Any], now: dict[str, Any]) -> None:
    differing = [name for name in dict.fromkeys([*_flat(was), *_flat(now)]) if _flat(was).get(name) != _flat(now).get(name)]
    if differing:
        shown = "; ".join(f"{name} was {_flat(was).get(name)!r} and is {_flat(now).get(name)!r}" for name in differing[:3])
        raise ConfigError(f"run_dir {path}: was built with other settings ({shown}); name a new directory")


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _without(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in _flat(settings).items() if name not in OF_NO_MATTER}


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, default=str) + "\n").encode()
