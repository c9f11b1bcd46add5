"""The command on two gloo ranks with a tiny model: every part gives its rows, and nothing differs where nothing may.

Steps of GRPO and DPO over ranks are tests of the stages.
"""

import json
import re

import four_gpu
import pytest

pytestmark = pytest.mark.slow


def test_the_parts_on_two_ranks(tmp_path):
    table, log = tmp_path / "table.md", tmp_path / "table.json"
    parts = "one,sft,gather,exact,reshard"
    code = four_gpu.main(["--ranks", "2", "--model", "tiny", "--device", "cpu", "--steps", "4", "--only", parts, "--out", str(table)])
    told = json.loads(log.read_text(encoding="utf-8"))
    assert told["failed"] == {} and code == 0
    rows = {what: value for what, value, _ in told["rows"]}
    same = [value for what, value in rows.items() if "differ" in what]
    assert len(same) == 5 and all(re.match(r"0( of \d+)?$", value) for value in same), rows  # three resumes, loaded on two ranks and on one
    assert len(told["log"]["sft"]["each"]) == 2 and told["log"]["sft"]["files"].keys() >= {"optimizer-00001-of-00002.safetensors"}
    assert "optimizer-00001-of-00002.safetensors" not in told["log"]["gather"]["files"]
    shown = table.read_text(encoding="utf-8")
    assert "2 gloo ranks on the CPU" in shown and "| save stall, s |" in shown and "the seed for 7.25B on 4 ranks 3.38" in shown
