"""Parquet to rows. The only file in the repository that imports pyarrow."""

import difflib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from align.data import DataError, Row

BATCH = 512  # rows that are held at a time, beside one row group as it is stored


class IngestError(DataError):
    """A parquet file, or what was asked of it, is wrong; or pyarrow is not installed."""


def parquet_rows(source: str | Path | BinaryIO, *, columns: Sequence[str] | None = None, name: str | None = None) -> Iterator[Row]:
    """Yields the rows of a parquet file (a path, or an open file such as `align.data.Hub.open` gives), in order, as JSON has them.

    Every codec and encoding that pyarrow reads. Structs become objects, lists lists, maps with string keys objects, dictionaries their
    values, nulls None; times, dates and decimals become strings as Arrow writes them. `columns` takes some of the columns, in the
    file's order. A row's `place` is "file:row", counted from 1; `name` stands for the file there and in messages.

    Raises IngestError: no pyarrow (naming the extra), no parquet file, damage (with the row before it), no such column, a column that has
    no form in JSON (bytes, durations), NaN and infinity, bytes that are not UTF-8; each with column, row and the way out.
    """
    pa, pq = _arrow()
    where = name or str(source)
    try:
        file = pq.ParquetFile(source)
    except FileNotFoundError:
        raise IngestError(f"{where}: no such file; give the path of a .parquet file") from None
    except (pa.ArrowException, OSError) as error:
        raise IngestError(f"{where}: is no whole parquet file ({_short(error)}); get it again") from None
    with file:
        chosen = _chosen(file.schema_arrow, columns, where)
        casts = [_cast(pa, field.type, field.name, where) for field in chosen]
        finite = [(field.name, floats) for field in chosen if (floats := _floats(pa, field.type))]
        count = 0
        batches = file.iter_batches(batch_size=BATCH, columns=[field.name for field in chosen], use_threads=False)
        while (batch := _next(pa, batches, where, count)) is not None:
            made = [column.cast(cast) if cast is not None else column for column, cast in zip(batch.columns, casts, strict=True)]
            try:
                plain = pa.RecordBatch.from_arrays(made, names=[field.name for field in chosen]).to_pylist(maps_as_pydicts="strict")
            except UnicodeDecodeError as error:
                raise IngestError(f"{where}: a string in rows {count + 1} to {count + len(batch)} is not UTF-8 ({error.reason})") from None
            except KeyError as error:
                raise IngestError(f"{where}: a map in rows {count + 1} to {count + len(batch)} has a key twice ({error})") from None
            for values in plain:
                count += 1
                for column, check in finite:
                    if not check(values[column]):
                        raise IngestError(
                            f"{where}:{count}: column {column!r} holds NaN or an infinity, which JSON has not; leave it out (columns)"
                        )
                row = Row(values)
                row.place = f"{where}:{count}"
                yield row


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError:
        raise IngestError(
            "reading parquet needs pyarrow, which is not installed; install the extra: pip install 'align-ingest[parquet]', or let Bazel "
            "bring it: ./bazelw run //libs/ingest:to_jsonl -- FILE.parquet FILE.jsonl"
        ) from None
    return pyarrow, pyarrow.parquet


def _next(pa: Any, batches: Iterator[Any], where: str, count: int) -> Any:
    try:
        return next(batches, None)
    except DataError:
        raise  # of a remote file
    except (pa.ArrowException, OSError) as error:
        raise IngestError(f"{where}: is damaged after row {count} ({_short(error)}); get it again") from None


def _chosen(schema: Any, columns: Sequence[str] | None, where: str) -> list[Any]:
    fields = list(schema)
    names = [field.name for field in fields]
    for name in names if columns is None else columns:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            raise IngestError(f"{where}: has no column {name!r}{meant}; it has {', '.join(names)}")
        if names.count(name) > 1:
            raise IngestError(f"{where}: has two columns {name!r}; which is meant cannot be said")
    chosen = [field for field in fields if columns is None or field.name in columns]
    if not chosen:
        raise IngestError(f"{where}: no columns are left; it has {', '.join(names) or 'none'}")
    return chosen


def _cast(pa: Any, kind: Any, column: str, where: str) -> Any:
    """The type to cast a column to before it becomes Python's, None where it needs none. Raises IngestError for what JSON cannot hold."""
    target = _plain(pa, kind, column, where)
    return None if target.equals(kind) else target


def _plain(pa: Any, kind: Any, column: str, where: str) -> Any:
    types = pa.types
    if (types.is_temporal(kind) and not types.is_duration(kind) and not types.is_interval(kind)) or types.is_decimal(kind):
        return pa.string()
    if types.is_dictionary(kind):
        return _plain(pa, kind.value_type, column, where)
    if types.is_map(kind):
        if not types.is_string(kind.key_type) and not types.is_large_string(kind.key_type):
            raise IngestError(f"{where}: column {column!r} has a map with keys of {kind.key_type}, not strings; leave it out (columns)")
        return pa.map_(kind.key_type, kind.item_field.with_type(_plain(pa, kind.item_type, column, where)))
    if types.is_struct(kind):
        return pa.struct([field.with_type(_plain(pa, field.type, column, where)) for field in kind])
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = kind.value_field.with_type(_plain(pa, kind.value_type, column, where))
        if types.is_large_list(kind):
            return pa.large_list(inner)
        return pa.list_(inner, kind.list_size if types.is_fixed_size_list(kind) else -1)
    simple = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean, types.is_null)
    if not any(is_one(kind) for is_one in simple):
        raise IngestError(f"{where}: column {column!r} is of type {kind}, which has no form in JSON; leave it out (columns)")
    return kind


def _floats(pa: Any, kind: Any) -> Callable[[Any], bool] | None:
    """A check that all floats inside a value are finite; None for a type without floats."""
    types = pa.types
    if types.is_floating(kind):
        return lambda value: value is None or math.isfinite(value)
    if types.is_struct(kind):
        inner = {field.name: check for field in kind if (check := _floats(pa, field.type))}
        return (lambda value: value is None or all(check(value[name]) for name, check in inner.items())) if inner else None
    if types.is_map(kind) or types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        of = _floats(pa, kind.item_type if types.is_map(kind) else kind.value_type)
        return (lambda value: value is None or all(map(of, value.values() if isinstance(value, dict) else value))) if of else None
    return _floats(pa, kind.value_type) if types.is_dictionary(kind) else None


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 160 else text[:157] + "..."
