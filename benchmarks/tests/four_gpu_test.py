"""The whole command on two gloo ranks with a tiny model: every part gives its rows, and nothing differs where nothing may."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(__file__).parents[1] / "four_gpu.py"


@pytest.mark.slow
def test_every_part_on_two_ranks(tmp_path):
    table, log = tmp_path / "table.md", tmp_path / "table.json"
    command = [sys.executable, str(COMMAND), "--ranks", "2", "--model", "tiny", "--device", "cpu", "--steps", "4", "--out", str(table)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=False)
    told = json.loads(log.read_text(encoding="utf-8"))
    assert done.returncode == 0 and told["failed"] == {}
    rows = {what: (value, beside) for what, value, beside in told["rows"]}
    same = [value for what, (value, _) in rows.items() if "differ" in what]
    assert len(same) == 5 and all(re.match(r"0( of \d+)?$", value) for value in same), rows  # three resumes, loaded on two ranks and on one
    assert rows["dpo: optimizer files"][0] == rows["grpo: optimizer files"][0] == "2 of 2 ranks"
    grpo = rows["grpo: losses of 3 steps, s of the last"][0]
    assert "–" not in grpo, "a step without a gradient"
    assert len(told["log"]["sft"]["each"]) == 2 and told["log"]["sft"]["files"].keys() >= {"optimizer-00001-of-00002.safetensors"}
    assert "optimizer-00001-of-00002.safetensors" not in told["log"]["gather"]["files"]
    shown = table.read_text(encoding="utf-8")
    assert "2 gloo ranks on the CPU" in shown and "| save stall, s |" in shown and "the seed for 7.25B on 4 ranks 3.38" in shown
