"""A run leaves a history that can be read, and says last that it is done."""

import json
import tempfile
from pathlib import Path

from align.tracking import RunDir, read_history

run = RunDir.create(Path(tempfile.mkdtemp(), "run"), config_toml="seed = 0\n", env={})
for step in (1, 2, 3):
    run.log(step, loss=1.0 / step)
run.finish("done", stage="mine", steps=3)
assert [line["step"] for line in read_history(run.path / "history.jsonl")] == [1, 2, 3]
assert json.loads((run.path / "stage_result.json").read_text())["status"] == "done"
