"""A sampler in a process of its own, in place of the one in the trainer's: how it is started, given weights, and asked."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from _common import find, say
from _fields import of_field
from _rl import Loaded, WholeSampler

import align.rollout_protocol
from align.config import ConfigError, workspace_root
from align.model import Decoder, save
from align.rl import RolloutConfig
from align.rollout import Sample, Sampler
from align.rollout_protocol import Client, Launched, Patience, RemoteSampler, Weights, dial, tokenizer_sha256, weights_sha256
from align.train import Ranks, whole

ADAPTER = Path("stages/extras/vllm_rollout")


@dataclass(frozen=True, kw_only=True)
class ExternalSection:
    """The sampler in a process of its own, with rollout.sampler=vllm."""

    command: Annotated[
        list[str], "a program that speaks the rollout protocol, in place of vLLM; it is given --model DIR --listen ADDRESS --lifeline"
    ] = field(default_factory=list)
    options: Annotated[list[str], "further arguments of the program, such as ['--gpu-memory-utilization', '0.4']"] = field(
        default_factory=list
    )
    address: Annotated[str | None, "unix:PATH or tcp:HOST:PORT of one that runs already; none: one is started"] = None
    weights: Annotated[Path | None, "where new weights are handed over, such as /dev/shm; none: in the run directory"] = None
    start_s: Annotated[float, "seconds for it to start, and to load weights"] = 900.0
    silence_s: Annotated[float, "seconds without a word after which it is given up and asked anew"] = 300.0
    attempts: Annotated[int, "connections in a row without an answer after which the run ends"] = 3


def check_external(section: ExternalSection, rollout: RolloutConfig) -> None:
    """Raises ConfigError, naming the field, for values that no run can have."""
    for name, value in (("start_s", section.start_s), ("silence_s", section.silence_s), ("attempts", section.attempts)):
        if not value > 0:
            raise ConfigError(f"vllm.{name} is {value}; it must be above 0")
    if rollout.sampler == "native" and section != ExternalSection():
        raise ConfigError("section vllm is set, and rollout.sampler is native; set rollout.sampler=vllm, or leave the section out")
    if section.address is not None and (section.command or section.options):
        raise ConfigError("vllm.address names a sampler that runs already; leave out vllm.command and vllm.options")
    if rollout.sampler == "vllm" and section.address is None and not section.command:
        interpreter()


def interpreter() -> Path:
    """The Python of vLLM's own environment. Raises ConfigError: it is not there."""
    places = [workspace_root() / ADAPTER / "venv/bin/python", find(ADAPTER) / "venv/bin/python"]
    if found := next((place for place in places if place.exists()), None):
        return found
    raise ConfigError(
        f"rollout.sampler is vllm, and there is no {places[0]}; make it as {ADAPTER}/README.md says, or name a program in vllm.command"
    )


def sampler_of(config: Any, loaded: Loaded, model: Decoder) -> Sampler:
    """What `rollout.sampler` asks for."""
    if config.rollout.sampler == "native":
        return WholeSampler(
            model, eos_ids=loaded.eos_ids, max_batch=config.rollout.batch, alive=loaded.alive, kv_budget_gb=config.rollout.kv_budget_gb,
            strict=config.forward_impl == "invariant",
        )  # fmt: skip
    return ExternalSampler(config.vllm, model, loaded)


class ExternalSampler:
    """Samples from another process, which gets the trained weights through a directory, whenever `weights_version` has changed.

    Every rank has a connection of its own to the one sampler, which the first starts.
    """

    def __init__(self, section: ExternalSection, model: Decoder, loaded: Loaded) -> None:
        self._section, self._model, self._loaded = section, model, loaded
        with of_field("vllm.weights"):
            place = find(section.weights) if section.weights else loaded.run_dir
        self._folder = place / f"sampler-weights-{loaded.ranks.agree(os.getpid())}"
        self._address = section.address or f"unix:{loaded.ranks.agree(socket_folder() if loaded.ranks.main else None)}/sampler"
        self._sampler: RemoteSampler[Sample] | None = None
        self._held: Weights | None = None
        self.weights_version = 0

    def generate(self, prompts_ids: Sequence[Sequence[int]], **options: Any) -> list[Sample]:
        """As NativeSampler.generate, without on_token; all ranks call it together."""
        if self._held is None or self._held.version != self.weights_version:
            self._hand_over()
        assert self._sampler is not None
        return self._sampler.generate(prompts_ids, **options)

    def _hand_over(self) -> None:
        ranks, before = self._loaded.ranks, self._held
        decoder = whole(self._model)
        path = self._folder / f"step-{self.weights_version:06d}"
        if ranks.main:
            save(decoder, path)
            for file in self._loaded.tokenizer.files:
                shutil.copy(file, path / file.name)
        digest = ranks.agree(weights_sha256(path) if ranks.main else None)
        weights = Weights(sha256=digest, version=self.weights_version, path=str(path))
        self._offered = path
        for turn in (True, False):  # the first rank's connection first: it starts the sampler, and has it load
            if turn == ranks.main:
                if self._sampler is None:
                    self._sampler = self._connect(weights, ranks)
                self._sampler.update(weights)
            ranks.agree(None)
        self._held = weights
        if ranks.main and before is not None and before.path is not None:
            shutil.rmtree(before.path, ignore_errors=True)

    def _connect(self, weights: Weights, ranks: Ranks) -> RemoteSampler[Sample]:
        section = self._section
        address = self._address
        connect: Callable[[], Any] = partial(dial, address, wait_s=0.0 if section.address else section.start_s)
        if section.address is None and ranks.main:
            own = None if section.command else adapter_environment()
            connect = Launched(self._command, address=address, start_s=section.start_s, env=own)
            atexit.register(connect.end)
        if ranks.main:
            atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        client = Client(
            connect, weights=weights, tokenizer=tokenizer_sha256(str(weights.path)), tell=say, heard=self._loaded.alive,
            patience=Patience(silence_s=section.silence_s, load_s=section.start_s, attempts=section.attempts),
        )  # fmt: skip
        return RemoteSampler(client, eos_ids=self._loaded.eos_ids, sample=Sample)

    def _command(self) -> list[str]:
        """What starts a sampler on the weights of now."""
        section = self._section
        program = section.command or [str(interpreter()), str(find(ADAPTER) / "vllm_serve.py")]
        return [*program, "--model", str(self._offered), "--listen", self._address, "--lifeline", *section.options]


def adapter_environment() -> dict[str, str]:
    """Of vLLM's process: beside its own venv it finds the protocol, which is all of this repository that it may use."""
    return {**os.environ, "PYTHONPATH": str(Path(align.rollout_protocol.__file__).parents[2])}


def socket_folder() -> str:
    """A new folder with a short name, as the path of a Unix socket must be; it goes with this process."""
    folder = tempfile.mkdtemp(prefix="align-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
