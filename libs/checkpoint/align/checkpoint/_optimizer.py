"""An optimizer's state_dict as named tensors and JSON, and back.

torch numbers parameters by their place in the groups. Here they carry their names, their full shape and the rows that this file holds, so
that a file can be read by a run that shards them otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from align.checkpoint._errors import CheckpointError


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


def pack(optimizer: Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by name, the rest as JSON).

    Raises:
        CheckpointError: the state holds something that is neither a tensor nor JSON.
    """
    names = names_of(optimizer, model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state_dict = optimizer.state_dict()
    name_of = _by_key(names, state_dict)
    tensors: dict[str, Tensor] = {}
    document = {
        "parameters": {
            name: {"shape": list(parameter.shape), "rows": [0, parameter.shape[0] if parameter.ndim else 1]}
            for name, parameter in zip(names, parameters, strict=True)
        },
        "state": {name_of[key]: _flatten(value, name_of[key], tensors) for key, value in state_dict["state"].items()},
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


def unpack(document: Mapping[str, Any], tensors: Mapping[str, Tensor], optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """The state_dict for `optimizer`.

    Raises:
        CheckpointError: the optimizer has other parameters, or other shapes, than the file.
    """
    names = names_of(optimizer, model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    saved = document["parameters"]
    if set(names) != set(saved):
        odd = sorted(set(names) ^ set(saved))
        raise CheckpointError(f"optimizer.state: {odd[0]} is only in the {'checkpoint' if odd[0] in saved else 'run'} ({len(odd)} such)")
    for name, parameter in zip(names, parameters, strict=True):
        if saved[name]["shape"] != list(parameter.shape):
            raise CheckpointError(f"optimizer.state: {name} is {saved[name]['shape']} in the checkpoint and {list(parameter.shape)} here")
    now = optimizer.state_dict()
    key_of = {name: key for key, name in _by_key(names, now).items()}
    layout = [[key_of[name] for name in group["params"]] for group in document["groups"]]
    wanted = [group["params"] for group in now["param_groups"]]
    if layout != wanted:
        raise CheckpointError("optimizer.state: the parameters are grouped otherwise in the checkpoint; build the optimizer the same way")
    return {
        "state": {key_of[name]: _restore(value, tensors) for name, value in document["state"].items()},
        "param_groups": [
            {key: layout[index] if key == "params" else _restore(value, tensors) for key, value in group.items()}
            for index, group in enumerate(document["groups"])
        ],
        **{key: _restore(value, tensors) for key, value in document["other"].items()},
    }


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


def _restore(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_restore(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_restore(item, tensors) for item in content)
    return {key: _restore(item, tensors) for key, item in content.items()}
