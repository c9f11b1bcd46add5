"""Reading a checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from align.checkpoint import _shelf
from align.checkpoint._errors import CheckpointError
from align.checkpoint._optimizer import Part, unpack
from align.checkpoint._ranks import local, rows_of
from align.checkpoint._save import FORMAT
from align.checkpoint._tensor_file import DTYPES

# From format n to n + 1, each by a function that changes the document of trainer.json in place. Format 1 is the first.
MIGRATIONS: dict[int, Callable[[dict[str, Any]], None]] = {}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk. The trainer's state is read; weights and optimizer are when asked for."""

    path: Path
    step: int
    metric: float | None
    trainer_state: dict[str, Any]
    tensors: dict[str, Tensor]
    model_config: dict[str, Any]

    def load_model(self, model: nn.Module) -> None:
        """Copies the weights into the model's own parameters, on their device.

        Raises:
            CheckpointError: a name, a shape or a dtype differs.
        """
        own = model.state_dict()
        files = sorted(path for path in self.path.glob("model*.safetensors"))
        seen: set[str] = set()
        with torch.no_grad():
            for file in files:
                with safe_open(file, framework="pt") as reader:
                    for name in reader.keys():  # noqa: SIM118 (a reader is no mapping)
                        _copy(reader.get_slice(name), reader, own.get(name), name, self.path)
                        seen.add(name)
        if missing := sorted(set(own) - seen):
            raise CheckpointError(f"{self.path} has no weight {missing[0]} ({len(missing)} missing); it is of another model")

    @property
    def has_optimizer_state(self) -> bool:
        """False when somebody removed the optimizer's files, or one of several."""
        return bool(self._optimizer_documents())

    @property
    def adapter(self) -> dict[str, Tensor] | None:
        """The tensors of adapter_model.safetensors; None in a checkpoint without an adapter."""
        path = self.path / "adapter_model.safetensors"
        if not path.exists():
            return None
        with safe_open(path, framework="pt") as reader:
            return {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118

    def load_optimizer(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Restores the optimizer's state in the dtypes that it was saved in; of sharded ones this rank's rows, from any files.

        Raises:
            CheckpointError: there is no optimizer state, or it is of other parameters.
        """
        paths = self._optimizer_documents()
        if not paths:
            raise CheckpointError(
                f"{self.path} has no optimizer state (optimizer*.json and .safetensors); "
                "use another checkpoint, or --allow-change optimizer.state to go on with a fresh one"
            )
        with contextlib.ExitStack() as stack:
            parts = [
                Part(_migrated(_read_json(path), path), stack.enter_context(safe_open(path.with_suffix(".safetensors"), framework="pt")))
                for path in paths
            ]
            optimizer.load_state_dict(unpack(parts, optimizer, model))

    def _optimizer_documents(self) -> list[Path]:
        found = [path for path in sorted(self.path.glob("optimizer*.json")) if path.with_suffix(".safetensors").exists()]
        if not found:
            return []
        _, _, ranks = found[0].stem.partition("-of-")
        return found if len(found) == int(ranks or 1) else []


def load(path: str | os.PathLike[str], *, verify: bool = True) -> Checkpoint:
    """Opens a checkpoint.

    Args:
        path: a directory that `save` returned or `latest` found.
        verify: compare every file with its sha256; `latest` has done so for what it returns.

    Raises:
        CheckpointError: it is not whole, or written by a newer version than this one.
    """
    path = Path(path)
    entry = _shelf.read_entry(path)
    if verify:
        _shelf.check(entry)
    document = _migrated(_read_json(path / "trainer.json"), path / "trainer.json")
    with safe_open(path / "trainer.safetensors", framework="pt") as reader:
        tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    return Checkpoint(path, entry.step, entry.metric, document["state"], tensors, _read_json(path / "config.json"))


def _migrated(document: dict[str, Any], path: Path) -> dict[str, Any]:
    number = document.get("format")
    if not isinstance(number, int) or number > FORMAT:
        raise CheckpointError(f"{path} has format {number!r} and this version reads up to {FORMAT}; use the version that wrote it")
    for older in range(number, FORMAT):
        MIGRATIONS[older](document)
    return document


def _copy(saved: Any, reader: Any, own: Tensor | None, name: str, path: Path) -> None:
    """Copies this rank's rows of a weight."""
    if own is None:
        raise CheckpointError(f"{path} holds a weight {name} that the model does not have; it is of another model")
    shape, dtype = tuple(saved.get_shape()), DTYPES[saved.get_dtype()]
    if shape != tuple(own.shape) or dtype != own.dtype:
        raise CheckpointError(
            f"{name} is {dtype} {shape} in {path} and {own.dtype} {tuple(own.shape)} in the model; load them with the same model and dtype"
        )
    start, stop = rows_of(own)
    local(own).copy_(saved[start:stop] if shape else reader.get_tensor(name))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read: {error}; use another checkpoint") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} holds no JSON object; use another checkpoint")
    return document
