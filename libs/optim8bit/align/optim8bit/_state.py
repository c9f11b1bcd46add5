"""The optimizer's state as plain data: JSON-able settings and one flat entry of tensors a parameter, by rows of the full shape."""

from collections.abc import Iterable
from typing import Any

import torch

from align.optim8bit._layout import Bucket, Member
from align.optim8bit.quant import OptimizerError, map_digest

FORMAT = 1
KIND = "adamw8bit"


def entry(bucket: Bucket, member: Member) -> dict[str, Any]:
    """What is saved of one parameter: this rank's rows, tensors sharing memory with the optimizer."""
    return {
        "step": member.step,
        "full_shape": list(member.full_shape),
        "rows": [member.start, member.stop],
        "block": member.block,
        "dtype": str(bucket.dtype).removeprefix("torch."),
        **bucket.views(member),
    }


def _tensors(saved: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in saved.items() if isinstance(value, torch.Tensor)}


def check_header(state: dict[str, Any]) -> None:
    if state.get("kind") != KIND or state.get("format") != FORMAT:
        what = f"{state.get('kind')!r} format {state.get('format')!r}"
        raise OptimizerError(f"optimizer state is {what}, not {KIND!r} format {FORMAT}; it belongs to another optimizer or version")
    digest = state["settings"]["map"]
    if digest != map_digest():
        raise OptimizerError(f"optimizer state has the 8-bit map {digest}, this version has {map_digest()}; its codes mean other values")


def check_entry(name: str, saved: dict[str, Any], bucket: Bucket, member: Member) -> None:
    """Refuse, by name, an entry that isn't bit for bit what this member can hold."""
    if list(saved["full_shape"]) != list(member.full_shape):
        raise OptimizerError(f"state of {name} is for shape {list(saved['full_shape'])}, the parameter has {list(member.full_shape)}")
    if saved["block"] != member.block:
        raise OptimizerError(
            f"state of {name} has block size {saved['block']}, this optimizer gives it {member.block} (0 is fp32); "
            "set block_size and min_8bit_elems as they were"
        )
    dtype = str(bucket.dtype).removeprefix("torch.")
    if saved["dtype"] != dtype:
        theirs = saved["dtype"]
        raise OptimizerError(f"state of {name} belongs to a {theirs} parameter, this one is {dtype}; load the model in {theirs}")
    start, stop = saved["rows"]
    if start > member.start or stop < member.stop:
        needed = f"{member.start}:{member.stop}"
        raise OptimizerError(
            f"state of {name} holds rows {start}:{stop}, rank needs {needed}; use merge_state_dicts on all ranks' states first"
        )
    views, tensors = bucket.views(member), _tensors(saved)
    if sorted(views) != sorted(tensors):
        raise OptimizerError(f"state of {name} has tensors {sorted(tensors)}, {sorted(views)} are needed")
    for key, view in views.items():
        if tensors[key].dtype != view.dtype:
            raise OptimizerError(f"state of {name}: {key} is {tensors[key].dtype}, {view.dtype} is needed")
        shape = (stop - start, *view.shape[1:]) if view.ndim else ()
        if tensors[key].shape != shape:
            raise OptimizerError(f"state of {name}: {key} has shape {tuple(tensors[key].shape)}, {shape} is needed")


def copy_entry(saved: dict[str, Any], bucket: Bucket, member: Member) -> None:
    start = saved["rows"][0]
    for key, view in bucket.views(member).items():
        source = saved[key][member.start - start : member.stop - start] if view.ndim else saved[key]
        view.copy_(source)
    member.step = int(saved["step"])


def _merge_entry(name: str, shards: list[dict[str, Any]]) -> dict[str, Any]:
    first = shards[0]
    for shard in shards[1:]:
        for key in ("step", "full_shape", "block", "dtype"):
            if shard[key] != first[key]:
                values = f"{first[key]} and {shard[key]}"
                raise OptimizerError(f"state of {name}: ranks disagree on {key}, {values}; they are not of one checkpoint")
    rows = first["full_shape"][0] if first["full_shape"] else 1
    parts: list[tuple[dict[str, Any], int, int]] = []  # shard, first and end of the rows taken from it
    end = 0
    for shard in sorted(shards, key=lambda s: (s["rows"][0], -s["rows"][1])):
        start, stop = shard["rows"]
        if start > end:
            break
        if stop > end:  # else a replica
            parts.append((shard, end - start, stop - start))
            end = stop
    if end != rows:
        raise OptimizerError(f"state of {name}: rows {end}:{rows} are in none of the {len(shards)} states; pass the state of every rank")
    merged = {**first, "rows": [0, rows]}
    for key, tensor in _tensors(first).items():
        if tensor.ndim and parts:
            merged[key] = torch.cat([shard[key][a:b] for shard, a, b in parts])
    return merged


def merge_state_dicts(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Join the `state_dict()` of every rank into one that any number of ranks can load. Exact: rows are copied.

    Replicas count once. Raises OptimizerError when rows are missing or the states are not of one step.
    """
    states = list(states)
    if not states:
        raise OptimizerError("no states to merge; pass the state of every rank")
    for state in states:
        check_header(state)
        if state["settings"] != states[0]["settings"]:
            values = f"{states[0]['settings']} and {state['settings']}"
            raise OptimizerError(f"ranks disagree on settings, {values}; they are not of one checkpoint")
    names = {name: None for state in states for name in state["state"]}
    entries = {name: _merge_entry(name, [s["state"][name] for s in states if name in s["state"]]) for name in names}
    return {**states[0], "state": entries}
