"""50 steps of training against transformers on the same rows: every loss, every norm, the weights at the end. Frozen answers in data/."""

import json
from pathlib import Path

from train_parity_cases import compare, compare_adapter

DATA = Path(__file__).parent / "data"


def test_fifty_steps_are_those_of_transformers(tmp_path):
    compare(tmp_path, json.loads((DATA / "parity.json").read_text()))


def test_an_exported_adapter_means_in_peft_what_it_means_here():
    compare_adapter(json.loads((DATA / "peft.json").read_text()))
