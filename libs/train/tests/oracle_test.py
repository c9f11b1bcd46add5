"""Asks transformers itself for the 50 steps; parity_test.py compares with its frozen answers."""

import json
import subprocess
from pathlib import Path

import pytest
import requires
from train_parity_cases import CASES, compare, write

pytestmark = pytest.mark.oracle
DATA = Path(__file__).parent / "data"


def test_transformers_still_answers_so(tmp_path):
    write(tmp_path / "models")
    subprocess.run([requires.oracle(), "-I", str(DATA / "parity_oracle.txt"), tmp_path / "models", tmp_path / "out.json"], check=True)
    answers, frozen = json.loads((tmp_path / "out.json").read_text()), json.loads((DATA / "parity.json").read_text())
    for case in CASES:
        assert answers[case]["losses"] == pytest.approx(frozen[case]["losses"], abs=1e-5)
    compare(tmp_path, answers)
