"""SmolLM2-135M-Instruct, converted from GGUF: transformers' answers on the converted directory, frozen."""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
import requires
import torch
from safetensors.torch import load_file

from align.model import Decoder, convert_gguf, load, save

pytestmark = pytest.mark.weights
DATA = Path(__file__).parent / "data"
SCRIPT = Path(__file__).absolute().parents[3] / "third_party" / "oracle" / "model_oracle.py"
# Of tokenizer.json with sorted keys and no spaces: the vocabulary, merges and splits of the published SmolLM2 tokenizer.
TOKENIZER = "ce3109a954ed4f765bd24871b633dc96de55f89b170f923fb0bcc0350c7984d9"


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    (gguf,) = requires.weights("smollm2-135m-instruct").rglob("*.gguf")
    out = tmp_path_factory.mktemp("smollm2")
    convert_gguf(gguf, out)
    return out


@pytest.fixture(scope="module")
def model(directory) -> Decoder:
    return load(directory).requires_grad_(False)


def test_logits_and_greedy_tokens_equal_transformers(model):
    expected = load_file(DATA / "smollm2.safetensors")
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    logits = model.lm_head(model(expected["input_ids"]))[0, :, ::97]
    assert (logits - expected["logits"]).abs().max() <= 1e-4
    ids, cache, tokens = expected["input_ids"], model.new_cache(1, 128), []
    for _ in range(32):
        ids = model.lm_head(model(ids, cache=cache)[:, -1:]).argmax(-1)
        tokens.append(int(ids))
    assert tokens == expected["greedy"].tolist()


def test_tokenizer_is_the_published_one(directory):
    raw = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    assert (len(raw["model"]["vocab"]), len(raw["model"]["merges"]), len(raw["added_tokens"])) == (49152, 48900, 17)
    canonical = json.dumps(raw, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert hashlib.sha256(canonical).hexdigest() == TOKENIZER


@pytest.mark.oracle
def test_transformers_loads_what_we_save(directory, model, tmp_path):
    save(model, tmp_path / "saved", max_shard_bytes=200_000_000)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "saved" / name).write_bytes((directory / name).read_bytes())
    subprocess.run([requires.oracle(), "-I", str(SCRIPT), "real", str(tmp_path / "saved"), str(tmp_path / "out")], check=True)
    answers, frozen = load_file(tmp_path / "out.safetensors"), load_file(DATA / "smollm2.safetensors")
    assert torch.equal(answers["input_ids"], frozen["input_ids"]) and torch.equal(answers["greedy"], frozen["greedy"])
    assert (answers["logits"] - frozen["logits"]).abs().max() <= 1e-4
