"""Where build_data's rows come from: bundled sets, files, files on a hub; JSON Lines, text and parquet."""

import fnmatch
import glob
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from align.config import ConfigError, caller_path, workspace_root
from align.data import (
    DataError,
    Hub,
    HubPath,
    Row,
    bundled,
    bundled_rows,
    check_rows,
    gsm8k_rows,
    lean_rows,
    math500_rows,
    parse_lines,
    preference_rows,
    prm800k_rows,
    read_objects,
    solution_pairs,
    text_rows,
)

T = TypeVar("T")
BUNDLED = ("gsm8k_train", "gsm8k_test", "gsm8k_solutions", "math500")
Published = Literal["rows", "gsm8k", "math500", "prm800k", "preferences", "solutions", "lean"]
# A published form's reader: objects to rows, and what it left out.
READERS: dict[str, Callable[[Iterable[Row]], tuple[list[dict[str, Any]], Counter[str]]]] = {
    "gsm8k": lambda objects: (gsm8k_rows(objects), Counter()),
    "math500": lambda objects: (math500_rows(objects), Counter()),
    "prm800k": prm800k_rows,
    "preferences": preference_rows,
    "solutions": solution_pairs,
    "lean": lambda objects: (lean_rows(objects), Counter()),
}
UNREAD = (".csv", ".tsv", ".arrow", ".json", ".zst", ".xz", ".bz2", ".zip", ".tar", ".pdf", ".html")


@dataclass(frozen=True)
class File:
    """One file of rows. `name` is what messages call it: a bundled name, a path, or hub:owner/name@commit/path."""

    name: str
    form: Literal["bundled", "jsonl", "text", "parquet"]
    size: int

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Reading:
    """How files become rows: the fields of build_data's section `data` that matter here."""

    format: str
    kind: str
    rename: dict[str, str]
    columns: list[str] | None
    text: Literal["file", "line", "paragraph"]
    stream: bool


def list_files(sources: list[str], hub: Callable[[], Hub]) -> list[File]:
    """The files that the sources name now, a hub's pinned to a commit. Raises ConfigError or DataError for a source that names none."""
    files: list[File] = []
    for source in sources:
        if source in BUNDLED:
            files.append(File(source, "bundled", bundled(source).stat().st_size))
        elif source.startswith("hub:"):
            files += _on_hub(HubPath.parse(source), hub())
        else:
            files += _on_disk(source)
    for name, count in Counter(file.name for file in files).items():
        if count > 1:
            raise ConfigError(f"data.sources names {name} {count} times; name it once")
    if not files:
        raise ConfigError("data.sources is empty; name a bundled set, a file, or hub:owner/name/path")
    return files


def files_on_disk(sources: list[str]) -> set[str]:
    """The names of all files but a hub's, as they are now."""
    return {file.name for source in sources if source not in BUNDLED and not source.startswith("hub:") for file in _on_disk(source)}


def _on_disk(source: str) -> list[File]:
    path = caller_path(source)
    if any(sign in source for sign in "*?[") and not path.exists():
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
    else:
        found = [path]
    if not found:
        raise ConfigError(f"data.sources {source}: no file matches; wildcards are *, ?, [...] and **")
    files = []
    for one in found:
        if not one.is_file():
            what = "a directory; name its files, as in " + str(one / "*.jsonl") if one.is_dir() else "not a file that is there"
            raise ConfigError(f"data.sources {source}: {one} is {what} (the bundled sets are {', '.join(BUNDLED)})")
        with open(one, "rb") as opened:
            begins = opened.read(4)
        files.append(File(str(one), "parquet" if begins == b"PAR1" else _form(one.name), one.stat().st_size))
    return files


def _on_hub(where: HubPath, hub: Hub) -> list[File]:
    commit = hub.commit(where.repo, where.revision)
    listed = hub.files(where.repo, commit)
    chosen = [file for file in listed if file.path == where.path] or [file for file in listed if fnmatch.fnmatchcase(file.path, where.path)]
    if not chosen:
        some = ", ".join(file.path for file in listed[:8])
        raise DataError(f"hub:{where.repo}/{where.path}: no file matches; at {where.revision} there are {len(listed)}: {some}")
    return [File(f"hub:{where.repo}@{commit}/{file.path}", _form(file.path), file.size) for file in sorted(chosen, key=lambda f: f.path)]


def _form(name: str) -> Literal["jsonl", "text", "parquet"]:
    stem = name.lower().removesuffix(".gz")
    if stem.endswith(UNREAD):
        raise ConfigError(f"{name}: is not read; JSON Lines (.jsonl), text (.txt, .md), both also .gz, and .parquet are: convert it")
    return "parquet" if stem.endswith(".parquet") else "text" if stem.endswith((".txt", ".md")) else "jsonl"


def sha256_of(path: str | Path, alive: Callable[[], object]) -> str:
    """Of a file's bytes, with a sign of life for each of its megabytes."""
    found = hashlib.sha256()
    with open(path, "rb") as opened:
        while chunk := opened.read(1 << 20):
            found.update(chunk)
            alive()
    return found.hexdigest()


def local_digest(file: File, alive: Callable[[], object]) -> dict[str, Any]:
    """What tells whether a file on disk is still the same: its time, and the sha256 of its bytes. Empty for others, which do not change."""
    if file.form == "bundled" or file.name.startswith("hub:"):
        return {}
    return {"mtime_ns": os.stat(file.name).st_mtime_ns, "sha256": sha256_of(file.name, alive)}


def read_file(
    file: File, reading: Reading, hub: Callable[[], Hub], *, limit: int | None = None, alive: Callable[[], object] = lambda: None
) -> tuple[Iterator[tuple[Row, str]], Counter[str]]:
    """(row, kind) of each row of a file, at most `limit` objects of it read; and the counts of what its reader leaves out."""
    if file.form == "bundled":
        found = bundled_rows(file.name)
        return ((_placed(row, file.name), found.kind) for row in islice(found.rows, limit)), Counter()
    objects = living(islice(_objects(file, reading, hub), limit), alive)  # also where a reader takes all before it gives a row
    if reading.format != "rows":
        rows, dropped = READERS[reading.format](_renamed(objects, reading.rename))
        return check_rows(map(_placed, rows), kind=reading.kind), dropped
    return check_rows(_renamed(objects, reading.rename), kind=reading.kind), Counter()


def living(each: Iterable[T], alive: Callable[[], object]) -> Iterator[T]:
    """The same, with a sign of life for each."""
    for one in each:
        alive()
        yield one


def _placed(row: dict[str, Any], name: str = "") -> Row:
    placed = row if isinstance(row, Row) else Row(row)
    placed.place = getattr(row, "place", name)
    return placed


def _objects(file: File, reading: Reading, hub: Callable[[], Hub]) -> Iterator[Row]:
    path = file.name
    if path.startswith("hub:"):
        where = HubPath.parse(path)
        if reading.stream and file.form == "jsonl":
            return parse_lines(hub().stream_lines(where.repo, where.path, where.revision), path)
        if not reading.stream or file.form == "text":  # parquet is then read by range
            path = str(hub().download(where.repo, where.path, where.revision))
    if file.form == "parquet":
        return parse_lines(_parquet_lines(path, reading.columns), file.name)
    return text_rows(path, by=reading.text) if file.form == "text" else read_objects(path)


def _renamed(objects: Iterable[Row], names: dict[str, str]) -> Iterator[Row]:
    for row in objects:
        for theirs, ours in names.items():
            if theirs not in row:
                raise DataError(f"{row.place}: has no field {theirs!r} (data.rename); it has {', '.join(map(repr, row))}")
            if ours in row and ours not in names:
                raise DataError(f"{row.place}: has a field {ours!r} already; data.rename {theirs}={ours} would lose it: rename it too")
        if names:
            renamed = Row({names.get(name, name): value for name, value in row.items()})
            renamed.place, row = row.place, renamed
        yield row


def _parquet_lines(path: str, columns: list[str] | None) -> Iterator[bytes]:
    """Lines of JSON that //libs/ingest:to_jsonl, a process of its own, makes of a parquet file: pyarrow stays out of the stages."""
    words = [path, "-", *(["--columns", ",".join(columns)] if columns else [])]
    environment, folder = dict(os.environ), None
    if importlib.util.find_spec("align.ingest") is not None:
        command = [sys.executable, "-m", "align.ingest"]
    elif (wrapper := workspace_root() / "bazelw").is_file():
        command, folder = [str(wrapper), "run", "--noshow_progress", "//libs/ingest:to_jsonl", "--"], workspace_root()
        for name in ("PYTHONPATH", "RUNFILES_DIR", "RUNFILES_MANIFEST_FILE"):  # of this stage's own launcher
            environment.pop(name, None)
    else:
        raise DataError(f"{path}: parquet is read by align.ingest, which is not here: pip install 'align-ingest[parquet]'")
    with tempfile.TemporaryFile() as told:
        process = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=told, cwd=folder, env=environment)
        assert process.stdout is not None
        try:
            yield from (line for line in process.stdout if line.endswith(b"\n"))
            code = process.wait()
        finally:
            process.stdout.close()
            process.kill()
            process.wait()
        if code:
            told.seek(0)
            last = told.read().decode("utf-8", "replace").strip().rpartition("\n")[2].removeprefix("to_jsonl: ")
            raise DataError(last or f"{path}: its reader ended with {code} and said nothing")
