"""The default SFT run, whole: what the README promises, and the checkpoint that later stages start from."""

import json
from pathlib import Path

import pytest
import torch
from _common import run_stage
from sft import SftConfig, sft

from align.model import load

pytestmark = pytest.mark.slow
STAGES = Path(__file__).absolute().parents[1]


def test_the_default_run_reaches_its_targets(tmp_path, monkeypatch):
    """Some two minutes. Remakes the checked-in checkpoint: the same bytes on the kind of processor that it was made on."""
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    assert run_stage("sft", SftConfig, sft, "", ["run_dir=run"]) == 0
    result = json.loads((tmp_path / "run/stage_result.json").read_text())
    after = result["metrics"]["after"]
    assert after["accuracy_1"] >= 0.95 and after["accuracy_2"] >= 0.95 and after["accuracy_3"] >= 0.80
    assert max(result["metrics"]["before"][f"accuracy_{level}"] for level in (1, 2, 3)) <= 0.05
    made = json.loads((STAGES / "assets/arithmetic_sft/PROVENANCE.json").read_text())
    here = {"cpu_capability": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}
    if {name: made[name] for name in here} == here:
        remade, shipped = load(result["checkpoint"]), load(STAGES / "assets/arithmetic_sft", dtype=torch.float32)
        for (name, new), (_, old) in zip(remade.state_dict().items(), shipped.state_dict().items(), strict=True):
            assert torch.equal(new.bfloat16().float(), old), name
