"""The library's tuning table as a file: one line an op and shape class, so that a diff is read easily."""

import json
from pathlib import Path

from align.kernels import _runtime

TABLE = Path(_runtime.__file__).parent / "tuning.json"
Table = dict[str, dict[str, dict[str, dict[str, int]]]]


def write(table: Table) -> None:
    """Puts {GPU: {op: {shape class: configuration}}} over what the file has."""
    whole: Table = json.loads(TABLE.read_text(encoding="utf-8"))
    for gpu, ops in table.items():
        for op, classes in ops.items():
            whole.setdefault(gpu, {}).setdefault(op, {}).update(classes)
    TABLE.write_text(_compact(whole) + "\n", encoding="utf-8")


def _compact(table: Table) -> str:
    lines = []
    for gpu, ops in sorted(table.items()):
        rows = []
        for op, classes in sorted(ops.items()):
            inner = ",\n".join(f"   {json.dumps(c)}: {json.dumps(v, sort_keys=True)}" for c, v in sorted(classes.items()))
            rows.append(f"  {json.dumps(op)}: {{\n{inner}\n  }}")
        lines.append(f" {json.dumps(gpu)}: {{\n" + ",\n".join(rows) + "\n }")
    return "{\n" + ",\n".join(lines) + "\n}"
