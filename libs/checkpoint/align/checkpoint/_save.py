"""Writing a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from align.checkpoint import _files, _shelf
from align.checkpoint._errors import CheckpointError, CheckpointWarning
from align.checkpoint._optimizer import joined, pack
from align.checkpoint._ranks import Alone, Ranks, local, sharded, together, whole
from align.checkpoint._tensor_file import Later, bytes_of, check_dtype, order_of, write_tensors

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
    adapter: Adapter | None = None,
    ranks: Ranks | None = None,
) -> Path:
    """Writes `directory/step-NNNNNN`, durable and whole, then removes what `keep` no longer covers.

    The files are written and synced in a directory whose name begins with a dot, the manifest with their sha256 last; then the directory is
    renamed. Killed anywhere, or out of disk anywhere, there is the new checkpoint or the ones before it. A checkpoint of the same step
    is replaced.

    Args:
        model: `state_dict()` has the names of an HF checkpoint, tied weights once; `config.with_dtype(name).to_hf()` gives config.json.
        tokenizer_files: a directory whose tokenizer files are copied, all of them or none.
        trainer_state: JSON; rank 0's counts.
        tensors: what of the trainer's state is tensors; any names; rank 0's count.
        keep: how many checkpoints stay, the one just written included.
        metric: higher is better; the checkpoint with the highest stays beside the `keep` newest. None for no measurement.
        per_rank_optimizer_state: one optimizer file a rank, or one for all, gathered on rank 0's host.
        fallback_tokenizer: a directory with the same tokenizer, such as a vendored one; its files are copied, with a CheckpointWarning,
            when one of `tokenizer_files` can't be read. None: then the checkpoint has no tokenizer files, and the warning says so.
        adapter: an adapter's own files; its `weights` stand for the model's.
        ranks: several processes; all call it together, `directory` being the same for all. Each file of weights is written by one rank, in
            turn, and a weight is gathered only while it is copied.

    Raises:
        CheckpointError: not enough room (checked before anything is written), a disk error, or state that can't be stored; on all ranks
            when on one.
    """
    saver = Saver(ranks, mode="stream")
    path = saver.save(
        directory, step, model=model, optimizer=optimizer, tokenizer_files=tokenizer_files, trainer_state=trainer_state, tensors=tensors,
        keep=keep, metric=metric, per_rank_optimizer_state=per_rank_optimizer_state, fallback_tokenizer=fallback_tokenizer,
        adapter=adapter,
    )  # fmt: skip
    saver.wait()
    return path


@dataclasses.dataclass(frozen=True)
class Adapter:
    """What a run that trains an adapter writes: its own two files in PEFT's layout, and merged weights or none."""

    config: Mapping[str, Any]  # adapter_config.json
    tensors: Mapping[str, Tensor]  # adapter_model.safetensors
    weights: Mapping[str, Callable[[], Tensor]] | None  # the whole model, merged, by the names of the model; None: the adapter alone


class Saver:
    """Saves, one checkpoint after the other.

    mode "snapshot": `save` returns when everything is copied to the host (of the weights each rank has its files' share); a thread
    writes it while the run goes on, and the next `save` waits for it. "stream": `save` returns when everything is on the disk, and at most
    one tensor is on the host at a time.
    """

    def __init__(
        self, ranks: Ranks | None = None, *, mode: Literal["snapshot", "stream"] = "snapshot", alive: Callable[[], None] = lambda: None
    ) -> None:
        """alive: called with every tensor that was copied or written, from the thread that does it, to show that a long save lives."""
        self._ranks: Ranks = ranks or Alone()
        self._mode, self._alive = mode, alive
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._host: dict[tuple[str, str], Tensor] = {}  # kept from one snapshot to the next: fresh memory is slow to touch
        self.last_stall_s = 0.0  # how long the last `save` kept the run waiting

    def save(
        self,
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
        adapter: Adapter | None = None,
    ) -> Path:
        """As the function `save`, any shapes and dtypes. Returns the path, which in mode "snapshot" is there after `wait` only.

        Raises:
            CheckpointError: also of the save before, when its thread failed.
        """
        started = time.perf_counter()
        self.wait()
        directory = Path(directory)
        if keep < 1:
            raise CheckpointError(f"checkpoint.keep is {keep}; it must be at least 1, the checkpoint just written")
        tokenizer = _tokenizer(tokenizer_files, fallback_tokenizer) if self._ranks.rank == 0 else {}
        job = _Job(directory, step, keep, metric, self._ranks)
        with job.cleaning():
            contents = together(
                self._ranks,
                lambda: _Contents.gather(
                    self._ranks, model, optimizer, tokenizer, trainer_state, tensors, per_rank_optimizer_state, adapter
                ),
            )
            total = sum(self._ranks.gather(contents.bytes()))
            together(self._ranks, lambda: job.begin(total))
            if self._mode == "snapshot":
                contents = contents.on_host(self._host, self._alive)
        if self._mode == "snapshot":
            self._thread = threading.Thread(target=self._run, args=(job, contents), name=f"save step {step}")
            self._thread.start()
        else:
            job.run(contents, self._alive)
        self.last_stall_s = time.perf_counter() - started
        return job.target

    def reserve(self, *, model: nn.Module, optimizer: Optimizer, adapter: Adapter | None = None) -> None:
        """Has a thread touch the host memory that the snapshots will take, so that the first is as quick as the others.

        For files per rank; in mode "stream" there is nothing to reserve.
        """
        if self._mode == "stream":
            return
        files, _ = _weights(model, self._ranks, adapter)
        optimizer_tensors, _ = pack(optimizer, model, self._ranks.rank)
        own = {(file.name, name): later for file in files if file.mine for name, later in file.tensors.items()}
        file = f"{_optimizer_name(self._ranks)}.safetensors"
        own |= {(file, name): Later.of(local(tensor)) for name, tensor in optimizer_tensors.items()}
        shapes = {key: (later.shape, later.dtype) for key, later in own.items()}

        def touch() -> None:
            for key, (shape, dtype) in shapes.items():
                self._host[key] = torch.zeros((), dtype=dtype).expand(shape).clone(memory_format=torch.contiguous_format)

        self._thread = threading.Thread(target=touch, name="reserve memory for snapshots")
        self._thread.start()

    def wait(self) -> None:
        """Returns when the last save is on the disk.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self, job: _Job, contents: _Contents) -> None:
        try:
            job.run(contents, self._alive)
        except Exception as error:  # raised by `wait`, in the thread of the run
            self._error = error


class _Job:
    """One save: a directory that is made, filled and put in its place."""

    def __init__(self, directory: Path, step: int, keep: int, metric: float | None, ranks: Ranks) -> None:
        self._directory, self._step, self._keep, self._metric, self._ranks = directory, step, keep, metric, ranks
        self.target, self._partial = directory / _shelf.name_of(step), directory / _shelf.partial_name(step)
        self._order = 0

    def begin(self, needed: int) -> None:
        """Rank 0: compares with the room there is, and makes the directory."""
        if self._ranks.rank:
            return
        _shelf.sweep(self._directory, ("partial",))
        self._check_room(needed)
        found, _ = _shelf.entries(self._directory)
        self._order = 1 + max((entry.order for entry in found), default=0)
        _files.make_directory(self._partial)

    def run(self, contents: _Contents, alive: Callable[[], None]) -> None:
        """Writes every rank's files, then puts the whole in its place and removes what is no longer kept."""
        with self.cleaning():
            own = together(self._ranks, lambda: contents.write(self._partial, alive))
            written = {name: file for part in self._ranks.gather(own) for name, file in part.items()}
            together(self._ranks, lambda: self._commit(written))

    def _commit(self, written: Mapping[str, _files.Written]) -> None:
        if self._ranks.rank:
            return
        _files.write(self._partial / _shelf.MANIFEST, _shelf.manifest(self._step, self._order, self._metric, dict(written)))
        _files.sync_directory(self._partial)
        if self.target.exists():
            _shelf.sweep(self._directory, ("old",))
            _files.rename(self.target, self._directory / _shelf.old_name(self._step))
        _files.rename(self._partial, self.target)
        _files.sync_directory(self._directory)
        try:
            _shelf.sweep(self._directory, ("old",))
            _shelf.prune(self._directory, self.target, self._keep)
        except OSError as error:
            warnings.warn(f"an older checkpoint could not be removed: {error}", CheckpointWarning, stacklevel=2)

    @contextlib.contextmanager
    def cleaning(self) -> Iterator[None]:
        """After an error nothing half-written stays, and a disk's error says what to do."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            if self._ranks.rank == 0:
                with contextlib.suppress(OSError):  # what a full disk needs most; the next save tries again
                    _shelf.sweep(self._directory, ("partial",))
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"step {self._step} was not saved: {error.strerror or error} ({error.filename or self._directory}); "
                "the checkpoints before it stand; make room or fix the directory, then --resume"
            ) from error

    def _check_room(self, needed: int) -> None:
        needed, free = needed + SLACK_BYTES, _files.free_bytes(self._directory)
        if needed > free:
            raise CheckpointError(
                f"{self._directory} has {_amount(free)} free and the checkpoint takes {_amount(needed)}; "
                "nothing was written; make room or lower checkpoint.keep"
            )


@dataclasses.dataclass(frozen=True)
class _File:
    """One file of tensors, and the rank that writes it. All ranks walk through the files in one order: some tensors are gathered."""

    name: str
    tensors: Mapping[str, Later]
    metadata: Mapping[str, str]
    mine: bool


@dataclasses.dataclass(frozen=True)
class _Contents:
    """What goes into the directory from this rank."""

    texts: dict[str, bytes]
    files: list[_File]

    @classmethod
    def gather(
        cls,
        ranks: Ranks,
        model: nn.Module,
        optimizer: Optimizer,
        tokenizer: Mapping[str, bytes],
        trainer_state: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        per_rank: bool,
        adapter: Adapter | None,
    ) -> _Contents:
        main = ranks.rank == 0
        optimizer_tensors, optimizer_document = pack(optimizer, model, ranks.rank)
        name = _optimizer_name(ranks)
        if not per_rank:
            name = "optimizer"
            optimizer_tensors, optimizer_document = joined(ranks, optimizer_tensors, optimizer_document)
        texts = {}
        if main or per_rank:
            texts[f"{name}.json"] = _json({"format": FORMAT, **optimizer_document})
        if main:
            texts["config.json"] = _json(_model_config(model))
            texts["trainer.json"] = _json({"format": FORMAT, "state": trainer_state})
            texts |= tokenizer
        if adapter is not None and main:
            texts["adapter_config.json"] = _json(adapter.config)
        files, index = _weights(model, ranks, adapter)
        if index is not None and main:
            texts["model.safetensors.index.json"] = _json(index)
        own = {f"{name}.safetensors": optimizer_tensors} if main or per_rank else {}
        if main:
            own["trainer.safetensors"] = dict(tensors)
            if adapter is not None:
                own["adapter_model.safetensors"] = dict(adapter.tensors)
        files += [
            _File(file, {key: Later.of(local(value)) for key, value in part.items()}, {"format": "pt"} if file[0] == "a" else {}, True)
            for file, part in own.items()
        ]
        for file in files:
            for key, value in file.tensors.items():
                check_dtype(key, value)
        return cls(texts, files)

    def bytes(self) -> int:
        return sum(map(len, self.texts.values())) + sum(bytes_of(file.tensors) for file in self.files if file.mine)

    def on_host(self, kept: dict[tuple[str, str], Tensor], alive: Callable[[], None]) -> _Contents:
        """The same with every tensor of this rank's files in host memory, in the buffers of the last time where they fit."""
        files = []
        for file in self.files:
            copies = {}
            for name in order_of(file.tensors):
                later = file.tensors[name]
                if not file.mine and not later.gathered:
                    continue
                value = later.fetch()
                if not file.mine:
                    continue
                buffer = kept.get((file.name, name))
                if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                    buffer = kept[file.name, name] = torch.empty(value.shape, dtype=value.dtype)
                copies[name] = Later.of(buffer.copy_(value))
                alive()
            if file.mine:
                files.append(_File(file.name, copies, file.metadata, True))
        return _Contents(self.texts, files)

    def write(self, directory: Path, alive: Callable[[], None]) -> dict[str, _files.Written]:
        error: Exception | None = None
        written: dict[str, _files.Written] = {}
        try:
            written = {name: _files.write(directory / name, text) for name, text in self.texts.items()}
        except OSError as caught:
            error = caught
        for file in self.files:
            if file.mine and error is None:
                counted = _Counted(file.tensors, alive)
                try:
                    written[file.name] = write_tensors(directory / file.name, counted.tensors, file.metadata)
                except OSError as caught:
                    error = caught
                counted.finish()  # the other ranks wait for this one in every gather
            else:
                _Counted(file.tensors, alive).finish()
        if error is not None:
            raise error
        return written


def _optimizer_name(ranks: Ranks) -> str:
    return f"optimizer-{ranks.rank:05d}-of-{ranks.world:05d}"


class _Counted:
    """Tensors of a file that remember which of them were fetched."""

    def __init__(self, tensors: Mapping[str, Later], alive: Callable[[], None]) -> None:
        self._left, self._alive = dict(tensors), alive
        self.tensors = {
            name: dataclasses.replace(later, fetch=functools.partial(self._fetch, name, later)) for name, later in tensors.items()
        }

    def finish(self) -> None:
        """Takes part in the gathering of those that nobody asked for here."""
        for name in order_of(self._left):
            if self._left[name].gathered:
                self._left[name].fetch()

    def _fetch(self, name: str, later: Later) -> Tensor:
        del self._left[name]
        self._alive()
        return later.fetch()


def _whole(tensor: Any) -> Later:
    return Later(tensor.dtype, tuple(tensor.shape), lambda: whole(tensor), sharded(tensor))


def _weights(model: nn.Module, ranks: Ranks, adapter: Adapter | None) -> tuple[list[_File], dict[str, Any] | None]:
    """(the files, the index where there is more than one), as transformers splits them; their writers take turns."""
    if adapter is not None and adapter.weights is None:
        return [], None
    of_model: dict[str, Any] = model.state_dict()
    if adapter is not None and adapter.weights is not None:
        weights = {
            name: Later(of_model[name].dtype, tuple(of_model[name].shape), fetch, sharded(of_model[name]))
            for name, fetch in adapter.weights.items()
        }
    else:
        weights = {name: _whole(tensor) for name, tensor in of_model.items()}
    shards: list[dict[str, Later]] = [{}]
    for name, later in weights.items():
        if shards[-1] and bytes_of(shards[-1]) + later.bytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = later
    single = len(shards) == 1
    names = ["model.safetensors"] if single else [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    # transformers wants to know that the tensors are torch's.
    files = [
        _File(file, shard, {"format": "pt"}, number % ranks.world == ranks.rank)
        for number, (file, shard) in enumerate(zip(names, shards, strict=True))
    ]
    if single:
        return files, None
    return files, {
        "metadata": {"total_size": sum(map(bytes_of, shards))},
        "weight_map": {name: file.name for file in files for name in file.tensors},
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


def _amount(size: int) -> str:
    """Bytes for people: in MiB where GiB would say 0.00."""
    return f"{size / 2**30:.2f} GiB" if size >= 0.1 * 2**30 else f"{size / 2**20:.2f} MiB"


def _json(document: Any) -> bytes:
    try:
        return (json.dumps(document, indent=1) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"trainer_state can't be written as JSON: {error}; put tensors into `tensors`") from None
