"""A model directory as one GGUF file (version 3), for llama.cpp and what is built on it: weights as F16 or Q8_0, tokenizer included.

Source: docs/gguf.md of the ggml project; Q8_0 as ggml quantises it: 32 weights a block, scale = largest magnitude / 127 in fp16.
"""

import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor

from align.model._config import ModelConfig
from align.model._decoder import Decoder
from align.model._directory import _json, _names, _opened, _weight_files, load_config
from align.model._errors import ModelError
from align.model._gguf_convert import _NAMES, _ROPE_FACTORS
from align.model._gguf_tokenizer import tokenizer_metadata
from align.model._rope import inverse_frequencies

_ALIGNMENT = 32
_F32, _F16, _Q8_0 = 0, 1, 8
_FILE_TYPES = {"f16": 1, "q8_0": 7}  # general.file_type
_GGUF_NAMES = {hf: gguf for gguf, hf in _NAMES.items()}
_BYTES = {_F32: lambda count: 4 * count, _F16: lambda count: 2 * count, _Q8_0: lambda count: count // 32 * 34}


def export_gguf(directory: str | Path, path: str | Path, *, weights: Literal["f16", "q8_0"] = "f16") -> None:
    """Writes the model of an HF directory, tokenizer.json included, as a GGUF file; `convert_gguf` reads it back.

    Matrices become F16, or Q8_0 where the rows are multiples of 32; vectors stay F32. Memory holds one tensor at a time. The file appears
    whole or not at all.

    Raises:
        ModelError: a model or a tokenizer that GGUF readers would take for another (a sliding window, unknown rope scaling, an unknown
        pre-tokenizer), a weight beyond fp16's range, or what `load_config` raises.
    """
    directory, path = Path(directory), Path(path)
    if weights not in _FILE_TYPES:
        raise ModelError(f"weights {weights!r} is no choice; f16 or q8_0 is")
    config = load_config(directory)
    kind = {"qwen2": "qwen2", "qwen3": "qwen3"}.get(config.model_type, "llama")
    metadata = {"general.architecture": kind, "general.name": directory.absolute().name, "general.file_type": _FILE_TYPES[weights],
                "general.quantization_version": 2, "general.alignment": _ALIGNMENT, **_architecture(config, kind, directory),
                **tokenizer_metadata(directory, config, _json)}  # fmt: skip
    with torch.device("meta"):
        shapes = {name: tuple(parameter.shape) for name, parameter in Decoder(config).named_parameters()}
    entries = [(name, _gguf_name(name), shape, _type(shape, weights)) for name, shape in shapes.items()]
    factors = _rope_factors(config)
    if factors is not None:
        entries.insert(0, ("", _ROPE_FACTORS, tuple(factors.shape), _F32))
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            _header(file, metadata, [entry[1:] for entry in entries])
            with _Stored(directory) as stored:
                for name, _, shape, stored_as in entries:
                    tensor = factors if not name else stored.tensor(name, shape)
                    assert tensor is not None
                    if kind == "llama" and re.search(r"\.[qk]_proj\.", name):
                        tensor = _interleaved(tensor, config.head_dim)
                    file.write(_bytes(tensor, stored_as, f"{directory}: {name}"))
                    file.write(bytes(-file.tell() % _ALIGNMENT))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)


class _Stored:
    """The tensors of a directory, one at a time."""

    def __init__(self, directory: Path) -> None:
        self._files = _weight_files(directory)
        self._place = {name: file for file in self._files for name in _names(file)}

    def __enter__(self) -> "_Stored":
        return self

    def __exit__(self, *exc: object) -> None:
        self._place.clear()

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._place:
            raise ModelError(f"{self._files[0].parent} lacks {name}")
        with _opened(self._place[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self._place[name]}: {name} has shape {tuple(tensor.shape)}, but config.json says {shape}")
        return tensor.float()


def _architecture(config: ModelConfig, kind: str, place: Path) -> dict[str, Any]:
    windowed = config.sliding_window is not None and (config.use_sliding_window or config.model_type == "mistral")
    if windowed and config.sliding_window is not None and config.sliding_window < config.max_position_embeddings:
        raise ModelError(f"{place}: a sliding window of {config.sliding_window}; readers of {kind} files would attend to everything")
    if config.mlp_bias or (config.attention_bias and kind == "qwen3"):
        raise ModelError(f"{place}: biases that {kind} files have no place for")
    values = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size, "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_theta), "rope.dimension_count": config.head_dim, "vocab_size": config.vocab_size,
    }  # fmt: skip
    scaling = config.rope_scaling
    if scaling and scaling["rope_type"] in ("linear", "yarn"):
        known = {"rope_type", "factor", "original_max_position_embeddings"}
        if unknown := sorted(set(scaling) - known):
            raise ModelError(f"{place}: rope scaling with {unknown[0]}, which GGUF files have no place for")
        values |= {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": float(scaling["factor"])}
        if original := scaling.get("original_max_position_embeddings"):
            values["rope.scaling.original_context_length"] = original
    return {f"{kind}.{key}": value for key, value in values.items()}


def _rope_factors(config: ModelConfig) -> Tensor | None:
    """llama3 scaling is stored as what it divides the frequencies by."""
    if not config.rope_scaling or config.rope_scaling["rope_type"] != "llama3":
        return None
    return inverse_frequencies(replace(config, rope_scaling=None))[0] / inverse_frequencies(config)[0]


def _gguf_name(name: str) -> str:
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    stem, _, suffix = name.rpartition(".")
    return f"blk.{layer[1]}.{_GGUF_NAMES[layer[2]]}.{layer[3]}" if layer else f"{_GGUF_NAMES[stem]}.{suffix}"


def _type(shape: tuple[int, ...], weights: str) -> int:
    if len(shape) == 1:
        return _F32
    return _Q8_0 if weights == "q8_0" and shape[-1] % 32 == 0 else _F16


def _interleaved(weights: Tensor, head_dim: int) -> Tensor:
    """Rows of each head from the pairs (i, i + head_dim / 2) of HF to the pairs (0, 1), (2, 3), … of llama GGUF files."""
    return weights.view(-1, 2, head_dim // 2, *weights.shape[1:]).transpose(1, 2).reshape(weights.shape)


def _bytes(tensor: Tensor, kind: int, place: str) -> bytes:
    tensor = tensor.contiguous()
    if not torch.isfinite(tensor).all():
        raise ModelError(f"{place} holds a value that is not finite")
    if kind == _F32:
        return tensor.numpy().tobytes()
    if kind == _F16:
        if float(tensor.abs().max()) > 65504.0:
            raise ModelError(f"{place} holds a weight of magnitude {float(tensor.abs().max()):.4g}; fp16 ends at 65504")
        return tensor.half().numpy().tobytes()
    blocks = tensor.view(-1, 32)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    scaled = blocks * inverse
    codes = (scaled + torch.copysign(torch.full_like(scaled, 0.5), scaled)).trunc().to(torch.int8)  # halves away from zero, as roundf
    return torch.cat((scale.half().view(torch.uint8), codes.view(torch.uint8)), 1).numpy().tobytes()


def _header(file: BinaryIO, metadata: Mapping[str, Any], entries: list[tuple[str, tuple[int, ...], int]]) -> None:
    file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(entries), len(metadata)))
    for key, value in metadata.items():
        file.write(_text(key) + b"".join(_value(value)))
    offset = 0
    for name, shape, kind in entries:
        file.write(_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset))
        offset += -(-_BYTES[kind](math.prod(shape)) // _ALIGNMENT) * _ALIGNMENT
    file.write(bytes(-file.tell() % _ALIGNMENT))


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(value: Any, *, inner: bool = False) -> Iterator[bytes]:
    """The type's number, then the value; of an array's items the value alone."""
    kind = {bool: 7, int: 5 if isinstance(value, int) and value < 0 else 4, float: 6, str: 8, list: 9}[type(value)]
    if not inner:
        yield struct.pack("<I", kind)
    if kind == 9:
        item = value[0] if value else ""
        yield struct.pack("<IQ", {str: 8, float: 6, int: 5}[type(item)], len(value))
        if type(item) is str:
            yield from (_text(text) for text in value)
        else:
            yield struct.pack(f"<{len(value)}{'f' if type(item) is float else 'i'}", *value)
    else:
        yield _text(value) if kind == 8 else struct.pack({7: "<?", 5: "<i", 4: "<I", 6: "<f"}[kind], value)
