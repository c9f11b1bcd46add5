"""What of a run is saved besides weights and optimizer, and how it comes back."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from align.checkpoint import Adapter, Checkpoint, CheckpointError, latest
from align.train._config import LoraConfig
from align.train._lora import adapter_config, adapter_tensors, load_adapter, lora_layers, merged_weights
from align.train._module import TrainModule
from align.train._ranks import Ranks
from align.train._resume import environment, random_state, restore_random_state


def trainer_state(module: TrainModule, ranks: Ranks) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(JSON, tensors): random numbers and the module's extra state of every rank, and what bit-equality depends on.

    Extra state that is the same on a rank as on rank 0 is stored once.
    """
    randoms, extra = ranks.gather(random_state()), module.extra_state()
    digests = ranks.gather(_digest(extra) if ranks.world > 1 else "")
    extras = ranks.gather(extra if digests[ranks.rank] != digests[0] else None)
    extras[0] = extra if ranks.main else None
    tensors: dict[str, Tensor] = {}
    for rank, (_, own) in enumerate(randoms):
        tensors |= {_of_rank(name, rank): value for name, value in own.items()}
    for rank, other in enumerate(extras):
        tensors |= {_of_rank(f"extra.{name}", rank): value for name, value in (other or {}).items() if isinstance(value, Tensor)}
    plain = [None if other is None else {name: value for name, value in other.items() if not isinstance(value, Tensor)} for other in extras]
    state = {
        "environment": environment(module),
        "random": randoms[0][0],
        "extra": plain[0],
        "other_ranks": [{"random": python, "extra": other} for (python, _), other in zip(randoms[1:], plain[1:], strict=True)],
    }
    return state, tensors


def restore_trainer_state(checkpoint: Checkpoint, module: TrainModule, ranks: Ranks, seed: int) -> None:
    """Takes what `trainer_state` gave. A rank that was not there then takes rank 0's extra state, and random numbers of its own, made from
    seed, rank and step."""
    state = checkpoint.trainer_state
    others: list[dict[str, Any]] = [{"random": state["random"], "extra": state["extra"]}, *state.get("other_ranks", [])]
    known = ranks.rank < len(others)
    extra_of = ranks.rank if known and others[ranks.rank]["extra"] is not None else 0
    plain: dict[str, Any] = others[extra_of]["extra"]
    module.load_extra_state({**plain, **_tensors_of(checkpoint, "extra.", extra_of)})
    if known:
        own = _tensors_of(checkpoint, "rng.", ranks.rank)
        restore_random_state(others[ranks.rank]["random"], {f"rng.{name}": value for name, value in own.items()})
    else:
        fresh = random.Random(f"{seed}:{ranks.rank}:{checkpoint.step}").getrandbits(62)
        random.seed(fresh)
        torch.manual_seed(fresh)


def _of_rank(name: str, rank: int) -> str:
    return f"{name}@{rank}" if rank else name


def _tensors_of(checkpoint: Checkpoint, prefix: str, rank: int) -> dict[str, Tensor]:
    """A rank's tensors whose names begin with `prefix`, without it."""
    found = {}
    for name, value in checkpoint.tensors.items():
        plain, at, number = name.rpartition("@")
        if not at or not number.isdigit():
            plain, number = name, "0"
        if int(number) == rank and plain.startswith(prefix):
            found[plain.removeprefix(prefix)] = value
    return found


def _digest(extra: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(extra.items()):
        told = repr(value.tolist() if isinstance(value, Tensor) else value).encode()
        digest.update(f"{name} {len(told)} ".encode() + told)
    return digest.hexdigest()


def find_latest(directory: Path, ranks: Ranks) -> Path | None:
    """The newest whole checkpoint; rank 0 compares the digests for all. Raises CheckpointError on all ranks when on one."""
    told: Path | CheckpointError | None = None
    if ranks.main:
        try:
            told = latest(directory)
        except CheckpointError as error:
            told = error
    told = ranks.agree(told)
    if isinstance(told, CheckpointError):
        raise told
    return told


def adapter_of(model: nn.Module, config: LoraConfig) -> Adapter | None:
    """What a checkpoint holds of a model that trains an adapter."""
    if not lora_layers(model):
        return None
    return Adapter(adapter_config(config), adapter_tensors(model), merged_weights(model) if config.save_merged else None)


def restore_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """The weights, or only the adapter's where there is one: the base is the same, which `refuse_changes` has seen to."""
    if not lora_layers(model):
        checkpoint.load_model(model)
        return
    tensors = checkpoint.adapter
    if tensors is None:
        raise CheckpointError(f"{checkpoint.path} has no adapter_model.safetensors; it is of a run without lora.rank, restore that setting")
    load_adapter(model, tensors)
