"""One-time conversion of a GGUF file into a model directory in HF layout."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from align.model._config import ModelConfig
from align.model._decoder import Decoder
from align.model._directory import write_json, write_model
from align.model._errors import ModelError
from align.model._gguf import GgufFile
from align.model._gguf_tokenizer import tokenizer_files
from align.model._rope import inverse_frequencies

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"  # what llama3 scaling divides the frequencies by


def convert_gguf(
    gguf_path: str | Path, out_dir: str | Path, *, dtype: torch.dtype = torch.float32, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Writes config.json, safetensors, tokenizer.json and tokenizer_config.json of a llama, qwen2 or qwen3 GGUF file.

    Tensors of type F32, F16, Q8_0, Q4_1 and Q4_0 are dequantised; fp32 loses nothing of them. Everything is checked before the first file
    is written; memory holds one shard at a time.

    Raises:
        ModelError: not such a file; the message names the tensor or the key.
    """
    path, out_dir = Path(gguf_path), Path(out_dir)
    with GgufFile(path) as file:
        names = {_hf_name(name): name for name in file.shapes if name != _ROPE_FACTORS}
        config = _config(file, tied="lm_head.weight" not in names).with_dtype(str(dtype).removeprefix("torch."))
        tokenizer, tokenizer_config = tokenizer_files(file.metadata, str(path))
        shapes = {name: parameter.shape for name, parameter in Decoder(config).named_parameters()}
        missing, unexpected = sorted(set(shapes) - set(names)), sorted(set(names) - set(shapes))
        if missing or unexpected:
            what = f"lacks {missing[0]}" if missing else f"has {names[unexpected[0]]}"
            raise ModelError(f"{path} {what}, against its own metadata for a {config.model_type} model")
        for name, shape in shapes.items():
            if file.shapes[names[name]] != tuple(shape):
                raise ModelError(f"{path}: {names[name]} has shape {file.shapes[names[name]]}; its metadata says {tuple(shape)}")

        def tensor(name: str) -> Tensor:
            weights = file.tensor(names[name])
            if config.model_type == "llama" and re.search(r"\.[qk]_proj\.", name):
                weights = _halves(weights, config.head_dim)
            return weights.to(dtype)

        write_model(config, out_dir, shapes, tensor, dtype, max_shard_bytes)
    write_json(out_dir / "tokenizer.json", tokenizer)
    write_json(out_dir / "tokenizer_config.json", tokenizer_config)


def _halves(weights: Tensor, head_dim: int) -> Tensor:
    """Rows of each head from the interleaved pairs (0, 1), (2, 3), … of llama GGUF files to the pairs (i, i + head_dim / 2) of HF."""
    return weights.view(-1, head_dim // 2, 2, *weights.shape[1:]).transpose(1, 2).reshape(weights.shape)


def _hf_name(name: str) -> str:
    block, _, rest = name.removeprefix("blk.").partition(".") if name.startswith("blk.") else ("", "", name)
    stem, _, suffix = rest.rpartition(".")
    translated = _NAMES.get(stem, stem)
    return f"model.layers.{block}.{translated}.{suffix}" if block else f"{translated}.{suffix}"


def _config(file: GgufFile, *, tied: bool) -> ModelConfig:
    metadata = file.metadata
    kind = metadata.get("general.architecture")
    if kind not in ("llama", "qwen2", "qwen3"):
        raise ModelError(f"{file.path}: architecture {kind!r} is not supported; supported are llama (Mistral, SmolLM2 too), qwen2, qwen3")

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{kind}.{key}", default)
        if found is None:
            raise ModelError(f"{file.path} lacks {kind}.{key}")
        return found

    def integer(key: str, default: int | None = None) -> int:
        found = value(key, default)
        if not isinstance(found, int) or found < 1:
            raise ModelError(f"{file.path}: {kind}.{key} is {found!r}; dense models have one positive integer there")
        return found

    if value("expert_count", 0):
        raise ModelError(f"{file.path} is a mixture of experts; dense models are read")
    heads, size = integer("attention.head_count"), integer("embedding_length")
    head_dim = integer("attention.key_length", size // heads)
    if integer("rope.dimension_count", head_dim) != head_dim or integer("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{file.path}: rotary dimensions and value heads must be as wide as the key heads, {head_dim}")
    token_ids = {
        f"{name}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    values = dict(
        model_type=kind,
        vocab_size=file.shapes.get("token_embd.weight", (0,))[0],
        hidden_size=size,
        intermediate_size=integer("feed_forward_length"),
        num_hidden_layers=integer("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=integer("context_length"),
        rms_norm_eps=_decimal(value("attention.layer_norm_rms_epsilon")),
        rope_theta=_decimal(value("rope.freq_base", 10000.0)),
        rope_scaling=_rope_scaling(metadata, kind),
        attention_bias=kind == "llama" and "blk.0.attn_q.bias" in file.shapes,
        tie_word_embeddings=tied,
        **token_ids,
    )
    try:
        config = ModelConfig(**values)
    except ModelError as error:
        raise ModelError(f"{file.path}: {error}") from error
    return _with_llama3(config, file) if _ROPE_FACTORS in file.shapes else config


def _decimal(value: float) -> float:
    """The shortest decimal with the same fp32 value: 1e-05 where the file has 9.999999747378752e-06."""
    return next(short for digits in range(1, 18) if _fp32(short := float(f"{value:.{digits}g}")) == _fp32(value))


def _fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def _rope_scaling(metadata: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    rope = metadata.get(f"{kind}.rope.scaling.type", "none")
    if rope == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": rope, "factor": _decimal(metadata.get(f"{kind}.rope.scaling.factor", 1.0))}
    original = metadata.get(f"{kind}.rope.scaling.original_context_length")
    return scaling | ({"original_max_position_embeddings": original} if original else {})


def _with_llama3(config: ModelConfig, file: GgufFile) -> ModelConfig:
    """Llama 3.1 and 3.2 store the divisors, not the parameters, of their rope scaling: find the published parameters that give them."""
    stored, plain = file.tensor(_ROPE_FACTORS), inverse_frequencies(config)[0]
    for factor in (8.0, 32.0):
        scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        candidate = config.with_rope_scaling({**scaling, "original_max_position_embeddings": 8192})
        divisors = plain / inverse_frequencies(candidate)[0]
        if stored.shape == divisors.shape and torch.allclose(stored, divisors, rtol=1e-4):
            return candidate
    raise ModelError(f"{file.path}: {_ROPE_FACTORS} belongs to no known rope scaling (llama3 with factor 8 or 32)")
