"""50 steps of training against transformers on the same rows: every loss, every norm, the weights at the end. Frozen answers in data/."""

import json
from pathlib import Path

from train_parity_cases import compare


def test_fifty_steps_are_those_of_transformers(tmp_path):
    compare(tmp_path, json.loads((Path(__file__).parent / "data" / "parity.json").read_text()))
