"""Model directories: what is written is read back bit for bit, in every spelling of config.json, and what is wrong is named."""

import doctest
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from model_cases import CASES, build, config, input_ids
from safetensors.torch import load_file, save_file

from align.model import ModelConfig, ModelError, load, load_config, save

# config.json as transformers 5.24.0 wrote it for the same models (data/PROVENANCE.md).
WRITTEN_BY_5 = json.loads((Path(__file__).parent / "data" / "transformers.json").read_text(encoding="utf-8"))
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def directory(tmp_path) -> Path:
    save(build("qwen2"), tmp_path / "model")
    return tmp_path / "model"


def edit(directory: Path, **changes) -> None:
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({k: v for k, v in {**raw, **changes}.items() if v != "absent"}))


def change(directory: Path, **tensors) -> None:
    """Replaces, adds or (None) removes tensors of the one file."""
    changed = {**load_file(directory / "model.safetensors"), **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, directory / "model.safetensors")


def refused(directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(directory)
    message = str(caught.value)
    assert "\n" not in message and caught.value.exit_code == 2
    return message


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("limit", [10**9, 40_000])
def test_save_and_load_are_exact(tmp_path, name, limit):
    model = build(name)
    save(model, tmp_path, max_shard_bytes=limit)
    again = load(tmp_path)
    assert list(again.state_dict()) == list(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    assert torch.equal(model(input_ids(name)), again(input_ids(name)))
    assert all(parameter.requires_grad for parameter in again.parameters())
    assert ModelConfig.from_hf(model.config.to_hf()).to_hf() == model.config.to_hf()


def test_shards_have_an_index_and_tied_weights_stand_once(tmp_path):
    model = build("qwen2")
    save(model, tmp_path, max_shard_bytes=60_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)] and len(files) > 2
    assert index["metadata"]["total_size"] == sum(4 * parameter.numel() for parameter in model.parameters())
    assert "lm_head.weight" not in index["weight_map"]
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / file)
    assert all(path.stat().st_size < 60_000 + 4096 for path in tmp_path.glob("*.safetensors"))
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1  # safetensors alone would let nobody but the owner read the weights
    save(model, tmp_path)  # one file now: no shard and no index stays behind
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_dtype(directory):
    assert load(directory).output_weight.dtype == torch.float32
    half = load(directory, dtype=torch.bfloat16)
    assert all(parameter.dtype == torch.bfloat16 for parameter in half.parameters())
    save(half, directory)
    assert load(directory).output_weight.dtype == torch.bfloat16  # as config.json says
    edit(directory, dtype=None, torch_dtype=None)
    assert load(directory).output_weight.dtype == torch.bfloat16  # as stored
    edit(directory, torch_dtype="float32")
    assert load(directory).output_weight.dtype == torch.float32


def test_a_loaded_model_does_not_lean_on_the_file(directory):
    model = load(directory)
    before = model.output_weight.clone()
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(-4096, 2)
        file.write(b"\xff" * 4096)
    assert torch.equal(model.output_weight, before)


def test_a_state_dict_stands_in_for_the_weights(tmp_path):
    model = build("llama")
    halved = {name: tensor / 2 for name, tensor in model.state_dict().items()}
    save(model, tmp_path, state_dict=halved)
    assert torch.equal(load(tmp_path).output_weight, model.output_weight / 2)
    with pytest.raises(ModelError, match=r"state_dict lacks lm_head\.weight of a llama model with 3 layers"):
        save(model, tmp_path, state_dict={name: tensor for name, tensor in halved.items() if name != "lm_head.weight"})
    with pytest.raises(ModelError, match=r"torch\.float16 and the embedding torch\.float32; a directory has one dtype"):
        save(model, tmp_path, state_dict={**halved, "lm_head.weight": halved["lm_head.weight"].half()})
    assert torch.equal(load(tmp_path).output_weight, model.output_weight / 2)  # refused before anything was written


@pytest.mark.parametrize("name", CASES)
def test_config_of_transformers_5(name):
    read, ours = ModelConfig.from_hf(WRITTEN_BY_5[name]), config(name)
    assert [read.window(layer) for layer in range(3)] == [ours.window(layer) for layer in range(3)]
    for field in (
        "rope_theta",
        "rope_scaling",
        "tie_word_embeddings",
        "head_dim",
        "num_key_value_heads",
        "qkv_bias",
        "output_bias",
        "mlp_has_bias",
        "qk_norm",
        "rms_norm_eps",
        "max_position_embeddings",
        "max_length",
        "dtype",
        "bos_token_id",
        "eos_token_id",
    ):
        assert getattr(read, field) == getattr(ours, field), field


def test_config_of_transformers_4():
    scaling = {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": scaling,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "transformers_version": "4.45.0.dev0",
        "use_cache": True,
        "pretraining_tp": 1,
    }
    read = ModelConfig.from_hf(raw)
    assert (read.rope_theta, read.rope_scaling["rope_type"], read.dtype) == (500000.0, "llama3", "bfloat16")
    assert read.eos_token_id == (128001, 128008, 128009)
    written = read.to_hf()
    assert {name: written[name] for name in raw} == raw  # every key survives, known or not
    assert written["dtype"] == "bfloat16" and written["rope_parameters"] == {**raw["rope_scaling"], "rope_theta": 500000.0}
    assert ModelConfig.from_hf(written) == ModelConfig.from_hf({**written, "rope_scaling": None, "rope_theta": 500000.0})


def test_what_a_config_leaves_out_is_what_transformers_assumes():
    raw: dict = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64)
    raw |= {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 32}
    llama = ModelConfig.from_hf(raw)
    assert (llama.num_key_value_heads, llama.max_position_embeddings) == (32, 2048)
    assert (llama.rope_theta, llama.tie_word_embeddings) == (10000.0, False)
    mistral = ModelConfig.from_hf({**raw, "model_type": "mistral"})
    assert (mistral.num_key_value_heads, mistral.sliding_window, mistral.head_dim) == (8, 4096, 2)
    assert ModelConfig.from_hf({**raw, "model_type": "mistral", "sliding_window": None}).sliding_window is None
    assert ModelConfig.from_hf({**raw, "model_type": "qwen3"}).head_dim == 128


def test_unknown_keys_survive(directory):
    edit(directory, quite_new={"a": [1, None]}, attention_dropout=0.0)
    save(load(directory), directory)
    raw = json.loads((directory / "config.json").read_text())
    assert raw["quite_new"] == {"a": [1, None]} and raw["attention_dropout"] == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_neox"}, "model_type 'gpt_neox' is not supported; supported are llama, mistral, qwen2, qwen3"),
        ({"model_type": "absent"}, "model_type None is not supported"),
        ({"hidden_size": "absent", "vocab_size": None}, "config.json lacks vocab_size, hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim is 15; rotary positions want an even number"),
        ({"head_dim": None, "hidden_size": 65}, "hidden_size 65 is not a multiple of num_attention_heads 4; give head_dim"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5; it must be a positive integer"),
        ({"intermediate_size": True}, "intermediate_size is True"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be a positive integer"),
        ({"rms_norm_eps": None, "rope_theta": "1e4", "rope_parameters": None}, "rope_theta is '1e4'; it must be a positive number"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers 3"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types holds 'chunked_attention'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}, "rope_type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}, "rope_parameters": None}, "rope_scaling of type linear has factor None"),
        ({"rope_scaling": 2, "rope_parameters": None}, "rope_scaling is 2; it must be an object or null"),
        ({"rope_theta": 5.0}, "rope_theta has different values in config.json: [5.0, 1000000.0]; remove one"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"type": "linear", "factor": 4.0}}, "differ in"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"dtype": "int8"}, "dtype 'int8' in config.json is not supported"),
        ({"model_type": ["mistral"]}, "model_type ['mistral'] is not supported"),
        ({"num_hidden_layers": 10**30}, f"num_hidden_layers is {10**30}; it must be at most 4096"),
        ({"vocab_size": 2**63}, f"vocab_size is {2**63}; it must be at most 1.67772e+07"),
        ({"num_attention_heads": 2**20, "num_key_value_heads": 2**20, "head_dim": 2**20}, "heads 1048576 of head_dim 1048576"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps is inf; it must be at most 1e+30"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan; it must be a positive number"),
        ({"rope_theta": [5.0]}, "rope_theta has different values in config.json: [[5.0], 1000000.0]; remove one"),
        ({"rope_theta": {}, "rope_parameters": None}, "rope_theta is {}; it must be a positive number"),
        ({"layer_types": True}, "layer_types is True; it must be a list or null"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; it must be true or false"),
        ({"max_window_layers": "3"}, "max_window_layers is '3'; it must be an integer"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id is (1, '2'); it must be an integer"),
        ({"rope_scaling": {"type": "linear", "factor": math.nan}, "rope_parameters": None}, "has factor nan; it must be a positive number"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": "1"}, "rope_parameters": None}, "has beta_fast '1'; it must be a"),
    ],
)
def test_a_config_that_cannot_be_used(directory, changes, message):
    edit(directory, **changes)
    assert message in (found := refused(directory)) and found.startswith(f"{directory / 'config.json'}: ")


def test_missing_files_say_what_is_expected(directory):
    expected = "a model directory holds config.json and model.safetensors, or model.safetensors.index.json with its shards"
    assert refused(directory / "none") == f"{directory / 'none'} is not a directory; {expected}"
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert refused(directory) == (
        f"{directory} has no model.safetensors and no model.safetensors.index.json; {expected}; pytorch_model.bin is not read: convert it "
        "(GGUF: align.model.convert_gguf)"
    )
    (directory / "config.json").unlink()
    assert refused(directory) == f"{directory / 'config.json'} is missing; {expected}"
    (directory / "config.json").write_text("{")
    assert "config.json is not JSON: " in refused(directory)
    (directory / "config.json").write_text("[" * 100_000)
    assert "config.json is not JSON: " in refused(directory)
    (directory / "config.json").write_text("[]")
    assert "config.json holds no JSON object" in refused(directory)


def test_missing_and_unexpected_tensors(directory):
    up, bias = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.o_proj.bias"
    change(directory, **{bias: torch.zeros(64)})
    assert f"has {bias}, which a qwen2 model of its config.json does not have" in refused(directory)
    change(directory, **{bias: None, up: None, EMBEDDING: None})
    assert f"lacks {EMBEDDING}, {up} of a qwen2 model with 3 layers" in refused(directory)
    edit(directory, num_hidden_layers=4)
    assert "and 9 more of a qwen2 model with 4 layers" in refused(directory)


def test_shapes(directory):
    edit(directory, intermediate_size=128)
    assert "model.layers.0.mlp.down_proj.weight has shape (64, 96), but config.json says (64, 128)" in refused(directory)


def test_tied_heads(directory):
    embedding = load_file(directory / "model.safetensors")[EMBEDDING]
    change(directory, **{"lm_head.weight": embedding.clone()})
    assert load(directory).output_weight.shape == (96, 64)  # a copy of the embedding does no harm
    change(directory, **{"lm_head.weight": embedding + 1})
    assert "lm_head.weight is not the embedding, but tie_word_embeddings is true; set it to false in config.json" in refused(directory)
    edit(directory, tie_word_embeddings=False)
    assert torch.equal(load(directory).output_weight, embedding + 1)
    change(directory, **{"lm_head.weight": None})
    assert "lacks lm_head.weight of a qwen2 model with 3 layers; is tie_word_embeddings true?" in refused(directory)


def test_old_rotary_buffers_are_passed_over(directory):
    change(directory, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load(directory)


def test_integer_weights_are_refused(directory):
    change(directory, **{"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    assert "model.norm.weight is stored as torch.int8" in refused(directory)


def test_truncated_files(directory):
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert refused(directory).startswith(f"{path} is truncated or no safetensors file (")


def test_shards_that_do_not_fit_the_index(directory):
    model = load(directory)
    save(model, directory, max_shard_bytes=60_000)
    index = directory / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    shard = directory / raw["weight_map"]["model.norm.weight"]
    shutil.move(shard, directory / "away")
    assert refused(directory) == f"{shard} is missing; model.safetensors.index.json names it"
    shutil.move(directory / "away", shard)
    first = sorted(set(raw["weight_map"].values()))[0]
    raw["weight_map"]["model.norm.weight"] = first
    index.write_text(json.dumps(raw))
    assert refused(directory) == f"{directory / first} lacks model.norm.weight, which model.safetensors.index.json places there"
    index.write_text("{}")
    assert refused(directory) == f"{index}: weight_map is missing or empty"


def test_load_config_alone(directory):
    assert load_config(directory).num_hidden_layers == 3


def test_readme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert doctest.testfile(str(Path(__file__).parents[1] / "README.md"), module_relative=False).failed == 0
