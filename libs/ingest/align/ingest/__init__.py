"""Parquet to JSON Lines, once: the one library that may use pyarrow, and it does so when a file is opened and not before."""

from ._jsonl import Ingested, main, to_jsonl
from ._parquet import IngestError, parquet_rows

__all__ = ["IngestError", "Ingested", "main", "parquet_rows", "to_jsonl"]
