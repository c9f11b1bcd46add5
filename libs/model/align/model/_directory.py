"""Model directories in HF layout: config.json, safetensors in one file or in shards with an index."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from align.model._config import ModelConfig
from align.model._decoder import Decoder
from align.model._errors import ModelError

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
EXPECTED = f"a model directory holds {CONFIG} and {SINGLE}, or {INDEX} with its shards"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # a buffer that old Llama checkpoints carry
_NAMED = 5  # so many tensor names in a message


def load(directory: str | Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> Decoder:
    """Reads a model directory.

    Args:
        dtype: of the parameters; None: what config.json says, else that of the stored embedding.
        device: where the parameters go; they are read one tensor at a time, straight to it.

    Raises:
        ModelError: something is missing, truncated, unexpected, of another shape, or not supported; the message names it.
    """
    directory = Path(directory)
    config = load_config(directory)
    files = _weight_files(directory)
    model = Decoder(config)
    wanted = dict(model.named_parameters())
    found = {name: path for path in files for name in _names(path)}
    tied_copy = found.pop("lm_head.weight", None) if config.tie_word_embeddings else None
    _check_names(directory, set(wanted), {name for name in found if not _IGNORED.fullmatch(name)}, config)
    tensors: dict[str, Tensor] = {}
    dtype = dtype or (getattr(torch, config.dtype) if config.dtype else None)
    for path in files:
        with _opened(path) as file:
            for name in sorted(set(file.keys()) & set(wanted)):
                _check_shape(path, name, file.get_slice(name).get_shape(), wanted[name].shape)
                tensor = file.get_tensor(name)
                if not tensor.is_floating_point() or tensor.element_size() < 2:
                    raise ModelError(f"{path}: {name} is stored as {tensor.dtype}; supported are float64, float32, bfloat16, float16")
                tensors[name] = tensor
                if dtype is not None:
                    tensors[name] = tensor.to(device=device, dtype=dtype, copy=True)  # a copy: the file may change below a mapping
    if dtype is None:
        dtype = tensors["model.embed_tokens.weight"].dtype
        tensors = {name: tensor.to(device=device, dtype=dtype, copy=True) for name, tensor in tensors.items()}
    if tied_copy is not None:
        _check_tied(tied_copy, tensors["model.embed_tokens.weight"])
    model.load_state_dict(tensors, assign=True)
    return model.requires_grad_(True)


def load_config(directory: str | Path) -> ModelConfig:
    """Reads the config.json of a model directory; raises ModelError, naming the file."""
    directory = Path(directory)
    if not directory.is_dir():
        raise ModelError(f"{directory} is not a directory; {EXPECTED}")
    path = directory / CONFIG
    if not path.is_file():
        raise ModelError(f"{path} is missing; {EXPECTED}")
    raw = _json(path)
    try:
        return ModelConfig.from_hf(raw)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def save(
    model: Decoder, directory: str | Path, *, state_dict: Mapping[str, Tensor] | None = None, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Writes config.json and the weights, as transformers and vLLM read them; earlier weights of the directory are replaced.

    Args:
        state_dict: the full tensors where `model` holds shards of them; None: the model's own.
        max_shard_bytes: weights above it are split over files with an index, in the model's order; a tensor is never split.

    Raises:
        ModelError: a tensor that is missing, unexpected, of another shape, or a shard of one (gather it first).
        OSError: the directory cannot be written.
    """
    directory = Path(directory)
    tensors = {name: tensor.detach() for name, tensor in (model.state_dict() if state_dict is None else state_dict).items()}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    _check_names("state_dict", set(shapes), set(tensors), model.config)
    dtype = tensors["model.embed_tokens.weight"].dtype
    for name, tensor in tensors.items():
        if hasattr(tensor, "full_tensor"):
            raise ModelError(f"{name} is a shard of a tensor; gather it and give state_dict")
        _check_shape("state_dict", name, tensor.shape, shapes[name])
        if tensor.dtype != dtype:
            raise ModelError(f"{name} is {tensor.dtype} and the embedding {dtype}; a directory has one dtype")
    write_model(model.config, directory, shapes, tensors.__getitem__, dtype, max_shard_bytes)


def write_model(
    config: ModelConfig,
    directory: Path,
    shapes: Mapping[str, torch.Size],
    tensor: Callable[[str], Tensor],
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    """Writes config.json and the tensors named in `shapes`, in this order, each made by `tensor` when its shard is written."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        if _OURS.fullmatch(path.name):
            path.unlink()
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    shards = list(_shards(sizes, max_shard_bytes))
    index: dict[str, Any] = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": {}}
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (directory / file).touch()
        mode = (directory / file).stat().st_mode  # as the user's umask has it; save_file makes files that only their owner can read
        save_file({name: tensor(name).contiguous() for name in names}, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(mode)
        index["weight_map"].update(dict.fromkeys(names, file))
    if len(shards) > 1:
        write_json(directory / INDEX, index)
    write_json(directory / CONFIG, config.with_dtype(str(dtype).removeprefix("torch.")).to_hf())


def _shards(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, nbytes in sizes.items():
        if names and size + nbytes > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    yield names


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if not index.is_file():
        others = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
        hint = f"; {others[0]} is not read: convert it (GGUF: align.model.convert_gguf)" if others else ""
        raise ModelError(f"{directory} has no {SINGLE} and no {INDEX}; {EXPECTED}{hint}")
    weight_map = _json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map is missing or empty")
    files = [directory / name for name in sorted(set(weight_map.values()))]
    for path in files:
        if not path.is_file():
            raise ModelError(f"{path} is missing; {INDEX} names it")
    for path in files:
        absent = sorted(name for name, file in weight_map.items() if directory / file == path and name not in _names(path))
        if absent:
            raise ModelError(f"{path} lacks {_some(absent)}, which {INDEX} places there")
    return files


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except SafetensorError as error:
        raise ModelError(f"{path} is truncated or no safetensors file ({error}); fetch or save it again") from error


def _names(path: Path) -> set[str]:
    with _opened(path) as file:
        return set(file.keys())


def _check_names(place: Path | str, wanted: set[str], found: set[str], config: ModelConfig) -> None:
    missing, unexpected = sorted(wanted - found), sorted(found - wanted)
    if missing:
        hint = "; is tie_word_embeddings true?" if missing == ["lm_head.weight"] else ""
        raise ModelError(f"{place} lacks {_some(missing)} of a {config.model_type} model with {config.num_hidden_layers} layers{hint}")
    if unexpected:
        raise ModelError(f"{place} has {_some(unexpected)}, which a {config.model_type} model of its config.json does not have")


def _check_shape(place: Path | str, name: str, found: Any, wanted: Any) -> None:
    if tuple(found) != tuple(wanted):
        raise ModelError(f"{place}: {name} has shape {tuple(found)}, but config.json says {tuple(wanted)}")


def _check_tied(path: Path, embedding: Tensor) -> None:
    with _opened(path) as file:
        head = file.get_tensor("lm_head.weight").to(device=embedding.device, dtype=embedding.dtype)
    if head.shape != embedding.shape or not torch.equal(head, embedding):
        raise ModelError(f"{path}: lm_head.weight is not the embedding, but tie_word_embeddings is true; set it to false in config.json")


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
