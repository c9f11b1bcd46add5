"""Rows to a JSON Lines file, and the command that does it."""

import argparse
import gzip
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from align.config import ConfigError, caller_path
from align.data import DataError, Hub, HubPath

from ._parquet import IngestError, parquet_rows


@dataclass(frozen=True)
class Ingested:
    """`digest` is the sha256 of the lines, as `align.data.read_rows` gives it for the file that was written."""

    rows: int
    digest: str


def to_jsonl(source: str | Path, target: str | Path | BinaryIO | None, *, columns: Sequence[str] | None = None) -> Ingested:
    """Writes the rows of a parquet file as JSON Lines (UTF-8, a line a row, the columns in the file's order), in bounded memory.

    source: a path, or "hub:owner/name[@revision]/file.parquet", of which only the row groups' ranges are read. target: a path, gzipped when
    it ends with .gz, and in place whole or not at all; an open file; None only counts. Raises IngestError, align.data.HubError.
    """
    if isinstance(source, str) and source.startswith("hub:"):
        where = HubPath.parse(source)
        remote = Hub().open(where.repo, where.path, where.revision)  # no buffer: pyarrow reads the footer and then whole column chunks
        rows = parquet_rows(cast(BinaryIO, remote), columns=columns, name=source)
    else:
        rows = parquet_rows(source, columns=columns)
    digest, count = hashlib.sha256(), 0
    with _opened(target) as file:
        for row in rows:
            line = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
            digest.update(line)
            if file is not None:
                file.write(line)
            count += 1
    return Ingested(count, digest.hexdigest())


@contextmanager
def _opened(target: str | Path | BinaryIO | None) -> Iterator[IO[bytes] | None]:
    if target is None or not isinstance(target, (str, Path)):
        yield target
        return
    path = Path(target)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as zipped:
                    yield cast(IO[bytes], zipped)
            else:
                yield raw
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise IngestError(f"{path}: cannot be written ({error.strerror or error}); choose another file") from None
    finally:
        partial.unlink(missing_ok=True)


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="to_jsonl",
        description="Parquet to JSON Lines, once. Prints the rows and the sha256 of the lines.",
        epilog="Example: ./bazelw run //libs/ingest:to_jsonl -- data.parquet data.jsonl.gz --columns question,answer",
    )
    parser.add_argument("source", help="a .parquet file, or hub:owner/name[@revision]/file.parquet")
    parser.add_argument("target", nargs="?", help="a .jsonl or .jsonl.gz file; - is the standard output; none: only count")
    parser.add_argument("--columns", help="some of the columns, with commas")
    given = parser.parse_args(argv)
    try:
        columns = given.columns.split(",") if given.columns else None
        source: Any = given.source if given.source.startswith("hub:") else caller_path(given.source)
        target: Any = sys.stdout.buffer if given.target == "-" else caller_path(given.target) if given.target else None
        done = to_jsonl(source, target, columns=columns)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except (DataError, ConfigError) as error:
        print(f"to_jsonl: {error}", file=sys.stderr)
        return 2
    print(f"{done.rows} rows, sha256 {done.digest}, of {given.source}", file=sys.stderr if given.target == "-" else sys.stdout)
    return 0
