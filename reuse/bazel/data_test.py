"""Lengths are packed into rows, rows read from a file, an order resumed."""

import json
import tempfile
from pathlib import Path

from align.data import Cursor, DataError, pack, read_rows

rows = pack([3, 1, 2, 2], 4)
assert sorted(index for row in rows for index in row) == [0, 1, 2, 3] and len(rows) == 2

file = Path(tempfile.mkdtemp(), "rows.jsonl")
file.write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
assert [row["completion"] for row in read_rows(file).rows] == ["2"]
file.write_text('{"prompt": 1}\n')
try:
    read_rows(file)
except DataError as error:
    assert "rows.jsonl:1" in str(error)
else:
    raise AssertionError("a malformed row was taken")

whole, part = Cursor(10, seed=1, digest="d"), Cursor(10, seed=1, digest="d")
order = whole.take(15)
first = part.take(7)
resumed = Cursor(10, seed=1, digest="d")
resumed.load_state_dict(part.state_dict())
assert first + resumed.take(8) == order
