"""GGUF import: a small file with every supported type against transformers' own reading of it, and files that are wrong."""

import contextlib
import json
import math
import shutil
import struct
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import NEW_TOKENS, PROMPT, input_ids
from safetensors.torch import load_file, save_file

from align.model import ModelError, convert_gguf, export_gguf, init, load, load_config, save
from align.model._gguf import GgufFile
from align.model._gguf_convert import _decimal
from align.model._gguf_export import _bytes
from align.model._gguf_tokenizer import tokenizer_files

FILE = Path(__file__).parent / "data" / "llama.gguf"
EXPECTED = load_file(FILE.with_suffix(".safetensors"))


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("converted")
    convert_gguf(FILE, directory)
    return directory


def test_logits_and_greedy_tokens_equal_transformers(converted):
    model, ids = load(converted), input_ids("llama")
    with torch.no_grad():
        assert (model.lm_head(model(ids)) - EXPECTED["logits"]).abs().max() <= 1e-5
        ids = ids[:1, :PROMPT]
        for _ in range(NEW_TOKENS):
            ids = torch.cat((ids, model.lm_head(model(ids)[:, -1:]).argmax(-1)), 1)
    assert ids[0, PROMPT:].tolist() == EXPECTED["greedy"].tolist()


@pytest.mark.parametrize(
    "name",
    ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_down"],  # Q4_0, Q8_0, F16, F32, Q4_1
)
def test_dequantised_weights_equal_those_of_the_gguf_package(name):
    name = f"blk.0.{name}.weight"
    with GgufFile(FILE) as file:
        weights = file.tensor(name).double()
    assert float(weights.sum()) == pytest.approx(float(EXPECTED[f"weight.{name}"]), rel=1e-12)
    assert float(weights.square().sum()) == pytest.approx(float(EXPECTED[f"weight.{name}.squares"]), rel=1e-12)


def test_blocks_by_hand():
    # ggml-common.h: half d, (half m,) 16 bytes: byte i holds weight i in its low and weight i + 16 in its high nibble.
    codes = bytes((15 - i) << 4 | i for i in range(16))
    want = torch.tensor([float(i) for i in range(16)] + [15.0 - i for i in range(16)])
    block = struct.pack("<e", 0.5) + codes
    assert torch.equal(_one_block(2, block), 0.5 * (want - 8))
    assert torch.equal(_one_block(3, struct.pack("<ee", 0.5, -3.0) + codes), 0.5 * want - 3)
    assert torch.equal(_one_block(8, struct.pack("<e", 0.25) + struct.pack("<32b", *range(-16, 16))), 0.25 * torch.arange(-16.0, 16.0))


def test_the_directory_in_bfloat16_and_in_shards(tmp_path):
    convert_gguf(FILE, tmp_path, dtype=torch.bfloat16, max_shard_bytes=30_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert load(tmp_path).output_weight.dtype == torch.bfloat16


def test_config_and_tokenizer_files(converted):
    config = json.loads((converted / "config.json").read_text())
    assert (config["model_type"], config["tie_word_embeddings"]) == ("llama", False)
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-05, 10000.0)
    tokenizer = json.loads((converted / "tokenizer.json").read_text())
    assert tokenizer["model"]["vocab"]["Ġ"] == 94 and tokenizer["model"]["merges"] == ["i n"]
    assert [item["content"] for item in tokenizer["added_tokens"]] == ["<s>", "</s>"]
    assert [part["type"] for part in tokenizer["pre_tokenizer"]["pretokenizers"]] == ["Digits", "ByteLevel"]
    tokenizer_config = json.loads((converted / "tokenizer_config.json").read_text())
    assert (tokenizer_config["bos_token"], tokenizer_config["eos_token"], tokenizer_config["add_bos_token"]) == ("<s>", "</s>", False)


def test_sentencepiece_merges_come_from_the_scores():
    pieces = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "b", "ab", "▁ab", "abb", "ba"]
    scores = [0.0, 0.0, 0.0, 0.0, -9.0, -10.0, -11.0, 0.0, -1.0, -3.0, -2.0]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.token_type": [2, 3, 3, 6] + [1] * 7,
        "tokenizer.ggml.eos_token_id": 2,
    }
    tokenizer, config = tokenizer_files(metadata, "file")
    assert tokenizer["model"]["merges"] == ["a b", "▁ ab", "b a", "ab b"]  # by score: ab 0, ▁ab -1, ba -2, abb -3
    assert tokenizer["model"]["byte_fallback"] and tokenizer["model"]["unk_token"] == "<unk>" and config["add_bos_token"]
    assert tokenizer["post_processor"]["single"][0] == {"SpecialToken": {"id": "<s>", "type_id": 0}}
    assert tokenizer["normalizer"]["normalizers"][0] == {"type": "Prepend", "prepend": "▁"}
    bare, _ = tokenizer_files({**metadata, "tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}, "file")
    assert len(bare["normalizer"]["normalizers"]) == 1 and bare["post_processor"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.tokens": None}, "file has no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "tokenizer gpt2/deepseek-llm is not supported; supported are gpt2/smollm, gpt2/gpt-2"),
        ({"tokenizer.ggml.model": "llama"}, "file has 0 tokenizer.ggml.scores for 2 tokens"),
    ],
)
def test_tokenizers_that_cannot_be_rebuilt(changes, message):
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": ["a", "b"], **changes}
    with pytest.raises(ModelError) as caught:
        tokenizer_files(metadata, "file")
    assert message in str(caught.value)


def test_numbers_are_the_decimals_that_were_meant():
    meant = [1e-5, 1e-6, 500000.0, 10000.0, 8.0, 0.1]
    assert [_decimal(struct.unpack("<f", struct.pack("<f", number))[0]) for number in meant] == meant


def test_llama3_scaling_is_known_by_its_divisors(tmp_path):
    # Llama 3.1, 8B: rope_freqs.weight of its GGUF files, by the formula of its release code; head_dim 128, theta 500000.
    divisors = []
    for i in range(64):
        wavelength = 2 * torch.pi * 500000.0 ** (i / 64)
        smooth = (8192 / wavelength - 1) / 3
        divisors.append(1.0 if wavelength < 2048 else 8.0 if wavelength > 8192 else 1 / ((1 - smooth) / 8 + smooth))
    meta = {"attention.key_length": 128, "rope.dimension_count": 128, "rope.freq_base": 500000.0}
    convert_gguf(_file(tmp_path, meta, {"rope_freqs.weight": torch.tensor(divisors)}), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    with pytest.raises(ModelError, match=r"rope_freqs\.weight belongs to no known rope scaling"):
        convert_gguf(_file(tmp_path, meta, {"rope_freqs.weight": torch.tensor(divisors) * 1.1}), tmp_path / "out")


@pytest.mark.parametrize(
    ("meta", "tensors", "message"),
    [
        ({"expert_count": 8}, {}, "is a mixture of experts; dense models are read"),
        ({"rope.dimension_count": 8}, {}, "rotary dimensions and value heads must be as wide as the key heads, 16"),
        ({"block_count": None}, {}, "lacks llama.block_count"),
        ({"attention.head_count": 0}, {}, "llama.attention.head_count is 0; dense models have one positive integer there"),
        ({"rope.scaling.type": "longrope"}, {}, "rope_type 'longrope' is not supported"),
        ({"block_count": 2}, {}, "lacks model.layers.1.input_layernorm.weight, against its own metadata for a llama model"),
        ({}, {"blk.0.attn_sinks.weight": torch.zeros(4)}, "has blk.0.attn_sinks.weight, against its own metadata"),
        ({"feed_forward_length": 64}, {}, "blk.0.ffn_gate.weight has shape (32, 32); its metadata says (64, 32)"),
    ],
)
def test_files_that_contradict_themselves(tmp_path, meta, tensors, message):
    with pytest.raises(ModelError) as caught:
        convert_gguf(_file(tmp_path, meta, tensors), tmp_path / "out")
    assert message in str(caught.value) and not (tmp_path / "out").exists()


def test_what_is_no_gguf_file(tmp_path):
    path = tmp_path / "x.gguf"
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        convert_gguf(path, tmp_path / "out")
    for content, message in (
        (b"PK\3\4" * 9, "is no GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "is GGUF version 1; versions 2 and 3, little-endian, are read"),
        (_one_tensor(14, bytes(210)), "x is stored as Q6_K; supported are F32, F16, Q4_0, Q4_1, Q8_0"),
        (_one_tensor(99, bytes(210)), "x is stored as type 99"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=message):
            convert_gguf(path, tmp_path / "out")


@given(st.integers(0, FILE.stat().st_size - 1))
@settings(max_examples=60)
def test_every_truncation_is_noticed(size):
    path = Path(_SCRATCH.name, "cut.gguf")
    path.write_bytes(FILE.read_bytes()[:size])
    with pytest.raises(ModelError):
        GgufFile(path)


@given(st.integers(0, 2600), st.integers(0, 255))
@settings(max_examples=200)
def test_a_damaged_header_raises_nothing_else(place, value):
    data = bytearray(FILE.read_bytes())
    data[place] = value
    path = Path(_SCRATCH.name, "damaged.gguf")
    path.write_bytes(data)
    with contextlib.suppress(ModelError):
        GgufFile(path).__exit__()


_SCRATCH = tempfile.TemporaryDirectory()  # hypothesis takes no fixtures


def _one_tensor(kind: int, block: bytes) -> bytes:
    """A file with the one tensor `x` of 32 weights."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + _string("x") + struct.pack("<IQIQ", 1, 32, kind, 0)
    return head + bytes(-len(head) % 32) + block


def _one_block(kind: int, block: bytes) -> torch.Tensor:
    path = Path(_SCRATCH.name, "block.gguf")
    path.write_bytes(_one_tensor(kind, block))
    with GgufFile(path) as file:
        return file.tensor("x")


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _file(directory: Path, meta: dict, tensors: dict[str, torch.Tensor]) -> Path:
    """A llama file of one layer in F32 with this metadata changed and these tensors added."""
    dim = meta.get("attention.key_length", 16)
    values = {
        "block_count": 1,
        "embedding_length": 32,
        "feed_forward_length": 32,
        "attention.head_count": 2,
        "context_length": 64,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **meta,
    }
    pairs = {f"llama.{key}": value for key, value in values.items() if value is not None} | {"general.architecture": "llama"}
    shapes = {"token_embd": (4, 32), "output_norm": (32,)} | {
        f"blk.0.{name}": shape
        for name, shape in {
            "attn_norm": (32,),
            "ffn_norm": (32,),
            "attn_q": (2 * dim, 32),
            "attn_k": (2 * dim, 32),
            "attn_v": (2 * dim, 32),
            "attn_output": (32, 2 * dim),
            "ffn_gate": (32, 32),
            "ffn_up": (32, 32),
            "ffn_down": (32, 32),
        }.items()
    }
    weights = {f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()} | tensors
    head = b"GGUF" + struct.pack("<IQQ", 3, len(weights), len(pairs) + 3)
    for key, value in pairs.items():
        kind = 8 if isinstance(value, str) else 6 if isinstance(value, float) else 4
        head += _string(key) + struct.pack("<I", kind) + (_string(value) if kind == 8 else struct.pack("<f" if kind == 6 else "<I", value))
    head += _string("tokenizer.ggml.model") + struct.pack("<I", 8) + _string("gpt2")
    head += _string("tokenizer.ggml.pre") + struct.pack("<I", 8) + _string("smollm")
    head += _string("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 4) + b"".join(map(_string, "abcd"))
    body = b""
    for name, tensor in weights.items():
        head += _string(name) + struct.pack("<I", tensor.dim()) + b"".join(struct.pack("<Q", n) for n in reversed(tensor.shape))
        head += struct.pack("<IQ", 0, len(body))
        body += struct.pack(f"<{tensor.numel()}f", *tensor.flatten().tolist())
        body += bytes(-len(body) % 32)
    path = directory / "made.gguf"
    path.write_bytes(head + bytes(-len(head) % 32) + body)
    return path


# Export


def changed(converted, tmp_path, file="config.json", **values) -> Path:
    directory = tmp_path / "changed"
    shutil.copytree(converted, directory)
    path = directory / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return directory


@pytest.mark.parametrize(("weights", "limit"), [("f16", 2**-11), ("q8_0", 1 / 254 + 2**-11)])
def test_an_export_is_read_back_with_the_same_tokenizer_and_config(converted, tmp_path, weights, limit):
    export_gguf(converted, tmp_path / "m.gguf", weights=weights)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "back")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        assert json.loads((tmp_path / "back" / name).read_text()) == json.loads((converted / name).read_text()), name
    for (name, one), (_, two) in zip(load(converted).named_parameters(), load(tmp_path / "back").named_parameters(), strict=True):
        if one.ndim == 1:
            assert torch.equal(one, two), name
        elif weights == "q8_0" and one.shape[-1] % 32 == 0:
            assert ((one - two).abs().view(-1, 32) <= limit * one.abs().view(-1, 32).amax(1, keepdim=True)).all(), name
        else:
            assert ((one - two).abs() <= 2**-11 * one.abs() + 2**-25).all(), name
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_q8_0_blocks_are_what_ggml_makes():
    """Scale = largest magnitude / 127, halves away from zero; against the definition in float64."""
    noise = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([noise, torch.zeros(1, 32), torch.arange(-16.0, 16.0)[None] * 2])
    data = torch.frombuffer(bytearray(_bytes(rows, 8, "x")), dtype=torch.uint8).view(-1, 34)
    scales, codes = data[:, :2].contiguous().view(torch.float16).float()[:, 0], data[:, 2:].contiguous().view(torch.int8)
    for row, scale, code in zip(rows, scales, codes, strict=True):
        exact = row.abs().max() / 127
        assert scale == exact.half().float()
        wanted = [int(math.copysign(math.floor(abs(x / exact.item()) + 0.5), x)) if exact else 0 for x in row.tolist()]
        assert sum(a != b for a, b in zip(code.tolist(), wanted, strict=True)) <= 1  # a quotient of exactly one half in fp32


@pytest.mark.parametrize(
    ("file", "values", "wanted"),
    [
        ("config.json", {"model_type": "mistral", "sliding_window": 8}, "sliding window of 8"),
        ("config.json", {"vocab_size": 90}, "vocabulary of 90"),
        ("tokenizer.json", {"model": {"type": "WordPiece"}}, "WordPiece"),
        ("tokenizer.json", {"pre_tokenizer": {"type": "Whitespace"}}, "no .*name|none that GGUF"),
        ("tokenizer.json", {"normalizer": {"type": "NFKC"}}, "none that GGUF"),
    ],
)
def test_what_a_gguf_reader_would_take_for_another_is_refused(converted, tmp_path, file, values, wanted):
    with pytest.raises(ModelError, match=wanted):
        export_gguf(changed(converted, tmp_path, file, **values), tmp_path / "m.gguf")
    assert not list(tmp_path.glob("*.gguf")) and not list(tmp_path.glob(".*"))


def test_weights_beyond_fp16_and_missing_folders_are_named(converted, tmp_path):
    directory = tmp_path / "large"
    shutil.copytree(converted, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 3] = 1e6
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"up_proj\.weight holds a weight of magnitude 1e\+06; fp16 ends at 65504"):
        export_gguf(directory, tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="cannot be written"):
        export_gguf(converted, tmp_path / "nothing" / "m.gguf")
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        export_gguf(directory, tmp_path / "m.gguf")


def test_llama3_scaling_and_sentencepiece_scores_come_back(converted, tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    directory = changed(converted, tmp_path, rope_scaling=scaling, rope_parameters=None)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abc", "ab", "▁a", "▁ab", "abc"]
    merges = ["a b", "▁ a", "▁ ab", "▁a b", "ab c"]
    special = [{"id": i, "content": pieces[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
               for i in range(3)]  # fmt: skip
    sentencepiece = {
        "added_tokens": special, "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": None, "post_processor": None,
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
        "vocab": {piece: i for i, piece in enumerate(pieces)}, "merges": merges},
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(sentencepiece))
    vocabulary = json.loads((directory / "config.json").read_text())["vocab_size"]
    if vocabulary < len(pieces):  # a model of another vocabulary, from scratch
        config = load_config(directory)
        save(init(replace(config, vocab_size=len(pieces) + 5), 0), directory)
    export_gguf(directory, tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "back")
    model = json.loads((tmp_path / "back/tokenizer.json").read_text())["model"]
    assert model["merges"] == merges and model["vocab"] == sentencepiece["model"]["vocab"] and model["byte_fallback"]
    assert load_config(tmp_path / "back").rope_scaling["factor"] == 8.0
    sentencepiece["model"]["merges"] = merges[::-1]
    (directory / "tokenizer.json").write_text(json.dumps(sentencepiece))
    with pytest.raises(ModelError, match="in no order that scores can give"):
        export_gguf(directory, tmp_path / "n.gguf")
