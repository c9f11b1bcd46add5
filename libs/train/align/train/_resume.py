"""What makes a run the run it was: recorded with every checkpoint, compared before a resume."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from align.checkpoint import Checkpoint
from align.train._errors import TrainError
from align.train._module import TrainModule

# What may change on a resume. Sections end with a dot. Everything else is refused unless --allow-change names it.
MAY_CHANGE = ("run_dir", "train.max_steps", "train.max_hours", "train.log_every", "train.threads", "train.per_rank_optimizer_state",
              "train.hang_timeout", "train.profile", "train.peak_tflops", "checkpoint.", "eval.", "launch.", "lora.base_name",
              "lora.save_merged")  # fmt: skip
OPTIMIZER_STATE = "optimizer.state"  # allow-change of it goes on with a fresh optimizer


def identity(config: Any, module: TrainModule, data_digest: str, tokenizer_files: str | os.PathLike[str] | None) -> dict[str, Any]:
    """JSON: every field of the configuration by its dotted name, and under `data`, `tokenizer` and `model.config` what they name.

    With an adapter also `model.base`, a digest of the frozen weights. Call it before the model is sharded. Raises TrainError where
    tokenizer.json cannot be read.
    """
    model: Any = module.model
    document = {
        **dict(_flat(dataclasses.asdict(config), "")),
        "data": data_digest,
        "tokenizer": _tokenizer_digest(tokenizer_files),
        "model.config": model.config.to_hf(),
    }
    if config.lora.rank:
        document["model.base"] = _weights_digest(model)  # its checkpoints hold the adapter's weights, not these
    plain: dict[str, Any] = json.loads(json.dumps(document, default=str))
    return plain


@torch.no_grad()
def _weights_digest(model: Any) -> str:
    """sha256 of every weight's name, shape, sum and sum of absolute values, in float64; not of an adapter's."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        if not name.endswith((".lora_A", ".lora_B")):
            sums = weight.sum(dtype=torch.float64).item(), torch.linalg.vector_norm(weight, 1, dtype=torch.float64).item()
            digest.update(f"{name} {tuple(weight.shape)} {sums[0]!r} {sums[1]!r}\n".encode())
    return digest.hexdigest()


def refuse_changes(
    checkpoint: Checkpoint, now: Mapping[str, Any], *, allow_change: Sequence[str] = (), may_change: Sequence[str] = ()
) -> None:
    """Compares the recorded identity with this run's.

    Args:
        now: from `identity`.
        allow_change: fields or sections that the user admits.
        may_change: fields that the stage knows to be harmless, such as a path whose contents are in the data digest.

    Raises:
        TrainError: names every field that changed, with both values; or says that the optimizer's state is missing.
    """
    if not checkpoint.has_optimizer_state and OPTIMIZER_STATE not in allow_change:
        raise TrainError(
            f"{checkpoint.path} has no {OPTIMIZER_STATE}: a resumed run would not be the same run; use another checkpoint, or add "
            f"--allow-change {OPTIMIZER_STATE} to go on with a fresh optimizer"
        )
    then = checkpoint.trainer_state["identity"]
    free = (*MAY_CHANGE, *may_change, *(name for each in allow_change for name in (each, f"{each}.")))
    bound = [
        name for name in then if name in now and not any(name == each or (each[-1:] == "." and name.startswith(each)) for each in free)
    ]
    changed = [name for name in bound if then[name] != now[name]]
    if changed:
        told = ", ".join(f"{name} was {_short(then[name], now[name])} and is {_short(now[name], then[name])}" for name in changed)
        raise TrainError(
            f"{checkpoint.path.name} is of another run: {told}; restore what changed, or add "
            + " ".join(f"--allow-change {name}" for name in changed)
        )


def environment(module: TrainModule) -> dict[str, Any]:
    """What bit-equality of the continuation depends on besides the state."""
    device = next(module.model.parameters()).device
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "forward_impl": module.forward_impl,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}",
    }


def random_state() -> tuple[list[Any], dict[str, Tensor]]:
    """(Python's generator as JSON, torch's as tensors)."""
    version, words, gauss = random.getstate()
    tensors = {"rng.torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    return [version, list(words), gauss], tensors


def restore_random_state(python: Sequence[Any], tensors: Mapping[str, Tensor]) -> None:
    """Takes what `random_state` gave. A GPU's generator is left alone where there is none now or was none then."""
    version, words, gauss = python
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(tensors["rng.torch"])
    if torch.cuda.is_available() and "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"])


def _flat(document: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _tokenizer_digest(directory: str | os.PathLike[str] | None) -> str | None:
    """sha256 of tokenizer.json, which alone decides the ids."""
    if directory is None:
        return None
    path = Path(directory) / "tokenizer.json"
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise TrainError(f"{path} can't be read ({error.strerror}); tokenizer_files must be a directory with a tokenizer.json") from None


def _short(value: Any, other: Any) -> str:
    """A value in a message; of two dicts only what differs."""
    if isinstance(value, dict) and isinstance(other, dict):
        value = {key: item for key, item in value.items() if other.get(key) != item}
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
