"""Asks transformers itself about the tiny checkpoints; model_test.py compares with its frozen answers."""

import json
import subprocess
from pathlib import Path

import pytest
import requires
import torch
from model_cases import CASES, input_ids, write
from safetensors.torch import load_file

from align.model import ModelConfig, load

pytestmark = pytest.mark.oracle
DATA = Path(__file__).parent / "data"
SCRIPT = Path(__file__).absolute().parents[3] / "third_party" / "oracle" / "model_oracle.py"


def ask(*words: object) -> None:
    subprocess.run([requires.oracle(), "-I", str(SCRIPT), *map(str, words)], check=True)


def test_transformers_loads_what_we_save_and_still_answers_as_frozen(tmp_path):
    write(tmp_path / "cases")
    ask("cases", tmp_path / "cases", tmp_path / "out")
    answers, frozen = load_file(tmp_path / "out.safetensors"), load_file(DATA / "transformers.safetensors")
    configs = json.loads((tmp_path / "out.json").read_text())
    for name in CASES:
        model = load(tmp_path / "cases" / name)
        with torch.no_grad():
            assert (model.lm_head(model(input_ids(name))) - answers[f"{name}.logits"]).abs().max() <= 1e-5, name
        assert (frozen[f"{name}.logits"] - answers[f"{name}.logits"]).abs().max() <= 1e-5, name
        assert torch.equal(frozen[f"{name}.greedy"], answers[f"{name}.greedy"]), name
        assert ModelConfig.from_hf(configs[name]).rope_scaling == model.config.rope_scaling, name


def test_transformers_reads_the_gguf_file_as_frozen(tmp_path):
    write(tmp_path / "cases")
    ask("gguf", tmp_path / "cases", tmp_path / "llama.gguf")
    assert (tmp_path / "llama.gguf").read_bytes() == (DATA / "llama.gguf").read_bytes()
    answers, frozen = load_file(tmp_path / "llama.safetensors"), load_file(DATA / "llama.safetensors")
    assert (answers["logits"] - frozen["logits"]).abs().max() <= 1e-5 and torch.equal(answers["greedy"], frozen["greedy"])
