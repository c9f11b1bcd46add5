"""An optimizer's state_dict as named tensors and JSON, and back.

torch numbers parameters by their place in the groups. Here they carry their names, their full shape and the rows that this file holds, so
that a file can be read by a run that shards them otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from align.checkpoint._errors import CheckpointError
from align.checkpoint._ranks import Ranks, rows_of, sharded


def names_of(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """The name of each parameter, in the order of the state_dict's numbers: the optimizer's own names, else the model's.

    Raises:
        CheckpointError: a parameter has no name, or two have the same.
    """
    of_model = {id(parameter): name for name, parameter in model.named_parameters()}
    names = []
    for index, group in enumerate(optimizer.param_groups):
        own = group.get("param_names") or [None] * len(group["params"])
        for given, parameter in zip(own, group["params"], strict=True):
            name = given or of_model.get(id(parameter))
            if name is None:
                raise CheckpointError(
                    f"a parameter of shape {tuple(parameter.shape)} in optimizer group {index} belongs to no module of the model; "
                    "give the optimizer named parameters"
                )
            names.append(name)
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"two parameters of the optimizer are named {double}; names must differ")
    return names


def pack(optimizer: Optimizer, model: nn.Module, rank: int = 0) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(this rank's tensors by name, the rest as JSON). What is on every rank is in rank 0's alone.

    Raises:
        CheckpointError: the state holds something that is neither a tensor nor JSON.
    """
    names = names_of(optimizer, model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state_dict = optimizer.state_dict()
    name_of = _by_key(names, state_dict)
    own = {name: parameter for name, parameter in zip(names, parameters, strict=True) if rank == 0 or sharded(parameter)}
    tensors: dict[str, Tensor] = {}
    document = {
        "parameters": {name: {"shape": list(parameter.shape), "rows": list(rows_of(parameter))} for name, parameter in own.items()},
        "state": {
            name_of[key]: _flatten(value, name_of[key], tensors) for key, value in state_dict["state"].items() if name_of[key] in own
        },
        "groups": [
            {key: [name_of[item] for item in value] if key == "params" else _flatten(value, f"groups.{index}.{key}", tensors)
             for key, value in group.items()}
            for index, group in enumerate(state_dict["param_groups"])
        ],
        "other": {
            key: _flatten(value, f"other.{key}", tensors) for key, value in state_dict.items() if key not in ("state", "param_groups")
        },
    }  # fmt: skip
    return tensors, document


def joined(ranks: Ranks, tensors: Mapping[str, Tensor], document: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every rank's `pack` as one, on rank 0's host; the others get theirs back. Parameters pass one at a time."""
    documents = ranks.gather(document)
    first: dict[str, Any] = documents[0]
    whole: dict[str, Tensor] = {key: value for key, value in tensors.items() if key.startswith(("groups.", "other."))}
    for name, place in first["parameters"].items():
        parts = ranks.gather({key: value.detach().cpu() for key, value in tensors.items() if _belongs(key, name, first)})
        if ranks.rank:
            continue
        for key, value in parts[0].items():
            held = [(doc["parameters"][name]["rows"], part[key]) for doc, part in zip(documents, parts, strict=True) if key in part]
            by_row = value.ndim > 0 and value.shape[0] == place["rows"][1] - place["rows"][0]
            whole[key] = torch.cat([part for _, part in sorted(held, key=lambda pair: pair[0])]) if by_row else value
        _all_rows(first["state"].get(name), place["shape"][0] if place["shape"] else 1)
        place["rows"] = [0, place["shape"][0] if place["shape"] else 1]
    return (whole, first) if ranks.rank == 0 else (dict(tensors), document)


def _belongs(key: str, name: str, document: Mapping[str, Any]) -> bool:
    """Whether a tensor is of the parameter `name`; a name may be the beginning of another."""
    return key.startswith(f"{name}.") and key in _tensor_names(document["state"].get(name))


def _tensor_names(value: Any) -> set[str]:
    if isinstance(value, list):
        return {name for item in value for name in _tensor_names(item)}
    if not isinstance(value, dict):
        return set()
    ((kind, content),) = value.items()
    if kind == "tensor":
        return {content}
    return {name for item in (content.values() if kind == "dict" else content) for name in _tensor_names(item)}


def _all_rows(entry: Any, rows: int) -> None:
    """An entry that says which rows it holds says all."""
    if isinstance(entry, dict) and "rows" in entry.get("dict", {}):
        entry["dict"]["rows"] = [0, rows]


class Part(NamedTuple):
    """One optimizer file: what it says and its tensors, of which rows can be read."""

    document: Mapping[str, Any]
    reader: Any  # safetensors' safe_open


def unpack(parts: Sequence[Part], optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """The state_dict for `optimizer`: of each parameter the rows that this rank holds, from whichever files have them.

    Raises:
        CheckpointError: the optimizer has other parameters, or other shapes, than the files.
    """
    names = names_of(optimizer, model)
    parameters = dict(zip(names, (parameter for group in optimizer.param_groups for parameter in group["params"]), strict=True))
    saved = {name: place for part in parts for name, place in part.document["parameters"].items()}
    if set(names) != set(saved):
        odd = sorted(set(names) ^ set(saved))
        raise CheckpointError(f"optimizer.state: {odd[0]} is only in the {'checkpoint' if odd[0] in saved else 'run'} ({len(odd)} such)")
    for name, parameter in parameters.items():
        if saved[name]["shape"] != list(parameter.shape):
            raise CheckpointError(f"optimizer.state: {name} is {saved[name]['shape']} in the checkpoint and {list(parameter.shape)} here")
    now, first = optimizer.state_dict(), parts[0]
    key_of = {name: key for key, name in _by_key(names, now).items()}
    layout = [[key_of[name] for name in group["params"]] for group in first.document["groups"]]
    wanted = [group["params"] for group in now["param_groups"]]
    if layout != wanted:
        raise CheckpointError("optimizer.state: the parameters are grouped otherwise in the checkpoint; build the optimizer the same way")
    state = {name: _rows(parts, name, rows_of(parameter)) for name, parameter in parameters.items()}
    fetch = first.reader.get_tensor
    return {
        "state": {key_of[name]: value for name, value in state.items() if value is not None},
        "param_groups": [
            {key: layout[index] if key == "params" else _restore(value, fetch) for key, value in group.items()}
            for index, group in enumerate(first.document["groups"])
        ],
        **{key: _restore(value, fetch) for key, value in first.document["other"].items()},
    }


def _rows(parts: Sequence[Part], name: str, wanted: tuple[int, int]) -> Any:
    """The entry of a parameter with its rows wanted[0] .. wanted[1] - 1; None where there is none."""
    holding = sorted(
        (part.document["parameters"][name]["rows"], number) for number, part in enumerate(parts) if name in part.document["state"]
    )
    if not holding:
        return None
    start, stop = wanted
    (low, high), number = next((h for h in holding if h[0][1] > h[0][0]), holding[0])

    def fetch(key: str) -> Tensor:
        piece = parts[number].reader.get_slice(key)
        shape = piece.get_shape()
        if not shape or shape[0] != high - low:  # the same on every rank: a step count
            whole: Tensor = parts[number].reader.get_tensor(key)
            return whole
        found, end = [], start
        for (first, last), which in holding:
            if first <= end < min(last, stop):
                found.append(parts[which].reader.get_slice(key)[end - first : min(last, stop) - first])
                end = min(last, stop)
        if end != stop:
            raise CheckpointError(f"optimizer.state: rows {end} to {stop} of {name} are in none of the {len(parts)} optimizer files")
        return torch.cat(found) if found else parts[number].reader.get_slice(key)[0:0]

    entry = _restore(parts[number].document["state"][name], fetch)
    if isinstance(entry, dict) and "rows" in entry:
        entry["rows"] = [start, stop]
    return entry


def _by_key(names: list[str], state_dict: Mapping[str, Any]) -> dict[Any, str]:
    """The name of each parameter by what the state_dict calls it: a number, as torch's optimizers do, or a name (AdamW8bit)."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    return dict(zip(keys, names, strict=True))


def _flatten(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """JSON in which {"tensor": name} stands for a tensor, {"tuple": [...]} for a tuple and {"dict": {...}} for a dict."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise CheckpointError(f"optimizer.state: {path} has keys that are not strings, which JSON can't hold")
        return {"dict": {key: _flatten(item, f"{path}.{key}", tensors) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        items = [_flatten(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"optimizer.state: {path} is a {type(value).__name__}, which JSON can't hold; keep numbers, strings and tensors")


def _restore(value: Any, fetch: Callable[[str], Tensor]) -> Any:
    if isinstance(value, list):
        return [_restore(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return fetch(content)
    if kind == "tuple":
        return tuple(_restore(item, fetch) for item in content)
    return {key: _restore(item, fetch) for key, item in content.items()}
