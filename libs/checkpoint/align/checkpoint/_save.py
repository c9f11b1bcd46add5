"""Writing a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from align.checkpoint import _files, _shelf
from align.checkpoint._errors import CheckpointError, CheckpointWarning
from align.checkpoint._optimizer import pack
from align.checkpoint._tensor_file import bytes_of, write_tensors

FORMAT = 1  # of trainer.json and the optimizer files
SHARD_BYTES = 5 * 10**9
SLACK_BYTES = 2**20  # JSON, headers and directory blocks
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "tekken.json",
    "chat_template.jinja",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)


def save(
    directory: str | os.PathLike[str],
    step: int,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    tokenizer_files: str | os.PathLike[str] | None,
    trainer_state: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    keep: int,
    metric: float | None = None,
    per_rank_optimizer_state: bool = True,
    fallback_tokenizer: str | os.PathLike[str] | None = None,
) -> Path:
    """Writes `directory/step-NNNNNN`, durable and whole, then removes what `keep` no longer covers.

    The files are written and synced in a directory whose name begins with a dot, the manifest with their sha256 last; then the directory is
    renamed. Killed anywhere, or out of disk anywhere, there is the new checkpoint or the ones before it. A checkpoint of the same step
    is replaced.

    Args:
        model: `state_dict()` has the names of an HF checkpoint, tied weights once; `config.with_dtype(name).to_hf()` gives config.json.
        tokenizer_files: a directory whose tokenizer files are copied, all of them or none.
        trainer_state: JSON.
        tensors: what of the trainer's state is tensors; any names.
        keep: how many checkpoints stay, the one just written included.
        metric: higher is better; the checkpoint with the highest stays beside the `keep` newest. None for no measurement.
        per_rank_optimizer_state: one optimizer file a rank, or one for all.
        fallback_tokenizer: a directory with the same tokenizer, such as a vendored one; its files are copied, with a CheckpointWarning,
            when one of `tokenizer_files` can't be read. None: then the checkpoint has no tokenizer files, and the warning says so.

    Raises:
        CheckpointError: not enough room (checked before anything is written), a disk error, or state that can't be stored.
    """
    directory = Path(directory)
    if keep < 1:
        raise CheckpointError(f"checkpoint.keep is {keep}; it must be at least 1, the checkpoint just written")
    target, partial = directory / _shelf.name_of(step), directory / _shelf.partial_name(step)
    try:
        contents = _Contents.gather(
            model, optimizer, _tokenizer(tokenizer_files, fallback_tokenizer), trainer_state, tensors, per_rank_optimizer_state
        )
        _shelf.sweep(directory, ("partial",))
        _check_room(directory, contents)
        found, _ = _shelf.entries(directory)
        order = 1 + max((entry.order for entry in found), default=0)
        _files.make_directory(partial)
        written = contents.write(partial)
        _files.write(partial / _shelf.MANIFEST, _shelf.manifest(step, order, metric, written))
        _files.sync_directory(partial)
        if target.exists():
            _shelf.sweep(directory, ("old",))
            _files.rename(target, directory / _shelf.old_name(step))
        _files.rename(partial, target)
        _files.sync_directory(directory)
    except (OSError, CheckpointError) as error:
        with contextlib.suppress(OSError):  # what a full disk needs most; the next save tries again
            _shelf.sweep(directory, ("partial",))
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"step {step} was not saved: {error.strerror or error} ({error.filename or directory}); "
            "the checkpoints before it stand; make room or fix the directory, then --resume"
        ) from error
    try:
        _shelf.sweep(directory, ("old",))
        _shelf.prune(directory, target, keep)
    except OSError as error:
        warnings.warn(f"an older checkpoint could not be removed: {error}", CheckpointWarning, stacklevel=2)
    return target


def _check_room(directory: Path, contents: _Contents) -> None:
    needed, free = contents.bytes() + SLACK_BYTES, _files.free_bytes(directory)
    if needed > free:
        raise CheckpointError(
            f"{directory} has {free / 2**30:.2f} GiB free and the checkpoint takes {needed / 2**30:.2f} GiB; nothing was written; "
            "make room or lower checkpoint.keep"
        )


@dataclasses.dataclass(frozen=True)
class _Contents:
    """What goes into the directory."""

    texts: dict[str, bytes]
    tensors: dict[str, tuple[Mapping[str, Tensor], dict[str, str]]]  # file: (tensors, metadata)

    @classmethod
    def gather(
        cls,
        model: nn.Module,
        optimizer: Optimizer,
        tokenizer: Mapping[str, bytes],
        trainer_state: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        per_rank: bool,
    ) -> _Contents:
        optimizer_tensors, optimizer_document = pack(optimizer, model)
        shards, index = _weights(model)
        name = "optimizer-00000-of-00001" if per_rank else "optimizer"
        texts = {
            "config.json": _json(_model_config(model)),
            "trainer.json": _json({"format": FORMAT, "state": trainer_state}),
            f"{name}.json": _json({"format": FORMAT, **optimizer_document}),
        }
        if index is not None:
            texts["model.safetensors.index.json"] = _json(index)
        texts |= tokenizer
        # transformers wants to know that the tensors are torch's.
        files: dict[str, tuple[Mapping[str, Tensor], dict[str, str]]] = {file: (part, {"format": "pt"}) for file, part in shards.items()}
        files[f"{name}.safetensors"] = (optimizer_tensors, {})
        files["trainer.safetensors"] = (tensors, {})
        return cls(texts, files)

    def bytes(self) -> int:
        return sum(map(len, self.texts.values())) + sum(bytes_of(tensors) for tensors, _ in self.tensors.values())

    def write(self, directory: Path) -> dict[str, _files.Written]:
        written = {name: _files.write(directory / name, text) for name, text in self.texts.items()}
        for name, (tensors, metadata) in self.tensors.items():
            written[name] = write_tensors(directory / name, tensors, metadata)
        return written


def _weights(model: nn.Module) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any] | None]:
    """({file: tensors}, the index where there is more than one file), as transformers splits them."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in model.state_dict().items():
        if shards[-1] and bytes_of(shards[-1]) + bytes_of({name: tensor}) > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}, None
    files = {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}
    return files, {
        "metadata": {"total_size": sum(map(bytes_of, shards))},
        "weight_map": {name: file for file, shard in files.items() for name in shard},
    }


def _model_config(model: nn.Module) -> dict[str, Any]:
    """config.json, with the dtype that the weights have now."""
    config: Any = model.config
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    document: dict[str, Any] = config.with_dtype(dtype).to_hf()
    return document


def _tokenizer(source: str | os.PathLike[str] | None, fallback: str | os.PathLike[str] | None) -> dict[str, bytes]:
    """The tokenizer's files, all that there are, or none of them: half a tokenizer loads and is another one."""
    if source is None:
        return {}
    try:
        return _tokenizer_files(Path(source))
    except OSError as error:
        instead = "the checkpoint has NONE of them, copy them yourself" if fallback is None else f"the checkpoint has those of {fallback}"
        warnings.warn(f"the tokenizer files of {source} could not be read ({error}); {instead}", CheckpointWarning, stacklevel=3)
        return {} if fallback is None else _tokenizer_files(Path(fallback))


def _tokenizer_files(directory: Path) -> dict[str, bytes]:
    found = {name: (directory / name).read_bytes() for name in TOKENIZER_FILES if name in os.listdir(directory)}
    if "tokenizer.json" not in found:
        raise FileNotFoundError(errno.ENOENT, "there is no tokenizer.json", str(directory))
    return found


def _json(document: Any) -> bytes:
    try:
        return (json.dumps(document, indent=1) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"trainer_state can't be written as JSON: {error}; put tensors into `tensors`") from None
