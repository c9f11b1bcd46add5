"""A parquet file becomes JSON Lines."""

import json
import tempfile
from pathlib import Path

import pyarrow
import pyarrow.parquet

from align.ingest import to_jsonl

folder = Path(tempfile.mkdtemp())
pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1+1=", "2+2="], "completion": ["2", "4"]}), folder / "rows.parquet")
to_jsonl(folder / "rows.parquet", folder / "rows.jsonl")
rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
assert rows == [{"prompt": "1+1=", "completion": "2"}, {"prompt": "2+2=", "completion": "4"}]
