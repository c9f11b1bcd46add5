"""Tiny checkpoints, one a family and option, with weights that are a function of name and index alone.

`python3 libs/model/tests/model_cases.py DIR` writes them as model directories, for third_party/oracle/model_oracle.py to answer.
"""

import json
import sys
import zlib
from pathlib import Path

import torch
from torch import Tensor

from align.model import Decoder, ModelConfig, init, save

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": None,
    "dtype": "float32",
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, dict] = {
    "llama": {"model_type": "llama"},
    "llama_biased_tied": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama3": {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": _LLAMA3, "num_key_value_heads": 1},
    "llama_linear": {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "num_key_value_heads": 4},
    "mistral": {"model_type": "mistral", "head_dim": 24, "rope_theta": 1000000.0},
    "mistral_window": {"model_type": "mistral", "sliding_window": 8},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "rope_theta": 1000000.0},
    "qwen2_window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen2_yarn": {
        "model_type": "qwen2",
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "rope_theta": 1000000.0},
    "qwen3_biased_tied": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
}
PROMPT, NEW_TOKENS = 8, 32  # greedy continuation of the first row's first tokens


def config(name: str) -> ModelConfig:
    return ModelConfig(**{**_COMMON, **CASES[name]})


def counted(name: str, count: int) -> Tensor:
    """(count,) fp32, uniform in [-1, 1): splitmix64 of crc32(name) and the index; no library's generator is part of a frozen value."""
    state = (torch.arange(count, dtype=torch.int64) + (zlib.crc32(name.encode()) << 24)) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * factor
    state = state ^ ((state >> 31) & ((1 << 33) - 1))
    return ((state >> 40) & 0xFFFFFF).float() / (1 << 23) - 1


def build(name: str) -> Decoder:
    """The tiny model of a case: weights of standard deviation 1 / sqrt(columns), norms about 1, biases about 0."""
    model = init(config(name), seed=0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = counted(f"{name}/{parameter_name}", parameter.numel()).view(parameter.shape)
            if parameter.dim() == 2:
                parameter.copy_(noise * (3 / parameter.shape[1]) ** 0.5)
            else:
                parameter.copy_(noise * 0.2 + (0.0 if parameter_name.endswith(".bias") else 1.0))
    return model


def input_ids(name: str) -> Tensor:
    """(2, 40) int64."""
    return ((counted(f"{name}/input_ids", 80).view(2, 40) + 1) * 48).long()


def write(directory: Path) -> None:
    """Writes every case; the first in shards."""
    for number, name in enumerate(CASES):
        save(build(name), directory / name, max_shard_bytes=50_000 if number == 0 else 10**9)
        ids = {"input_ids": input_ids(name).tolist(), "prompt": PROMPT, "new_tokens": NEW_TOKENS}
        (directory / name / "input_ids.json").write_text(json.dumps(ids), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
