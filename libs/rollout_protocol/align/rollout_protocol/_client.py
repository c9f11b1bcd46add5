"""The trainer's end: asks, waits, connects again. Every request is answered once, or the call says why not."""

from __future__ import annotations

import contextlib
import operator
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, SupportsIndex, TypeVar, cast

from align.rollout_protocol._channel import Channel
from align.rollout_protocol._errors import (
    ChannelClosed,
    ChannelTimeout,
    MessageError,
    RolloutProtocolError,
    SamplerRefused,
    WrongWeights,
)
from align.rollout_protocol._messages import (
    PROTOCOL,
    Alive,
    Cancel,
    Drawn,
    Error,
    Generate,
    Hello,
    Samples,
    WeightsLoaded,
    WeightsUpdated,
    Welcome,
    checked,
)
from align.rollout_protocol._process import Launched

S = TypeVar("S")
_LOST = (ChannelClosed, ChannelTimeout, MessageError)  # what another connection may mend


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights that are sampled from. path: the model directory that holds them, None where only their digest is known."""

    sha256: str
    version: int
    path: str | None = None


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Seconds that the trainer waits, and how often it begins anew."""

    silence_s: float = 120.0  # without a whole message while samples are made; a sampler that works says so between its steps
    load_s: float = 600.0  # for the sampler to load weights, and for its first word
    attempts: int = 3  # connections in a row that bring no answer
    pause_s: float = 1.0  # before another connection


class Client:
    """A connection to one sampler, which is made when it is first needed and again when it is lost.

    Before anything else on every connection the sampler is told the weights' digest. One that holds others is told where they lie, if that
    is known; one that then still holds others is refused.
    """

    def __init__(
        self, connect: Callable[[], Channel], *, weights: Weights, tokenizer: str = "", patience: Patience | None = None,
        tell: Callable[[str], None] = lambda text: None, heard: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """connect: `Launched`, or a call of `dial`. tokenizer: `tokenizer_sha256`; "" for any. tell: is given a line when one is lost.
        heard: called with every message while samples are made.
        """
        self._connect, self._tokenizer, self._patience, self._tell, self._heard = connect, tokenizer, patience or Patience(), tell, heard
        self.weights = weights
        self.server, self.features = "", frozenset[str]()
        """The name and the abilities of the sampler that was last met."""
        self._channel: Channel | None = None
        self._session, self._asked = uuid.uuid4().hex[:12], 0

    def update(self, weights: Weights) -> None:
        """The sampler loads other weights; from here on only samples of these are taken. Raises as `generate`."""
        self.weights = weights
        self._again(lambda: None)

    def generate(self, requests: Sequence[Generate]) -> list[Samples]:
        """The answers in the order of the requests, whose `id` and `weights` are written here.

        A connection that is lost, silent or senseless is made again and what is unanswered is asked again; what is answered stays. A
        process that `Launched` started and that is silent for too long is ended and started anew.

        Raises:
            RolloutProtocolError: no answer over `attempts` connections in a row; WrongWeights; SamplerRefused.
        """
        waiting: dict[str, Generate] = {}
        for request in requests:
            self._asked += 1
            name = f"{self._session}-{self._asked}"
            waiting[name] = replace(request, id=name, weights=self.weights.sha256)
            checked(waiting[name])
        order, found = list(waiting), dict[str, Samples]()
        self._again(lambda: self._collect(waiting, found), progress=lambda: len(found))
        return [found[name] for name in order]

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _again(self, work: Callable[[], None], progress: Callable[[], int] = lambda: 0) -> None:
        """Works over a connection, over the next when it is lost, until `attempts` of them brought nothing."""
        failed, before = 0, progress()
        while True:
            try:
                self._connected()
                work()
                return
            except _LOST as error:
                self.close()
                if isinstance(error, ChannelTimeout) and isinstance(self._connect, Launched):
                    self._connect.end()  # it hangs; the next connection is to a new one
                failed = 1 if progress() > before else failed + 1
                before = progress()
                if failed >= self._patience.attempts:
                    name = self.server or "the sampler"
                    raise RolloutProtocolError(f"{name} gave no answer over {failed} connections; the last: {error}") from error
                self._tell(f"sampler: {error}; connecting again")
                time.sleep(self._patience.pause_s)

    def _connected(self) -> Channel:
        if self._channel is None:
            channel = self._connect()
            try:
                self._greet(channel)
            except BaseException:
                channel.close()
                raise
            self._channel = channel
        if self._held != (self.weights.sha256, self.weights.version):
            self._load(self._channel)
        return self._channel

    def _greet(self, channel: Channel) -> None:
        patience = self._patience.load_s
        channel.send(Hello(PROTOCOL, self.weights.sha256, self._tokenizer), timeout_s=patience)
        welcome = channel.receive((Welcome, Error), timeout_s=patience)
        if isinstance(welcome, Error):
            raise SamplerRefused(f"the sampler refused the connection: {welcome.message}", welcome.code)
        assert isinstance(welcome, Welcome)
        if welcome.protocol != PROTOCOL:
            raise RolloutProtocolError(
                f"{welcome.server} speaks version {welcome.protocol} of the rollout protocol, this trainer {PROTOCOL}; "
                "install the align-rollout-protocol of this release in the sampler's environment"
            )
        if self._tokenizer and welcome.tokenizer != self._tokenizer:
            raise RolloutProtocolError(
                f"{welcome.server} has tokenizer {welcome.tokenizer[:12] or 'none'}, the trainer {self._tokenizer[:12]}; start it on the "
                "trainer's own model directory"
            )
        self.server, self.features = welcome.server, frozenset(welcome.features)
        self._held = (welcome.weights, welcome.version)

    def _load(self, channel: Channel) -> None:
        """Has the sampler hold `self.weights`."""
        held, wanted = self._held, self.weights
        if wanted.path is None:
            if held[0] == wanted.sha256:
                raise WrongWeights(f"{self.server} has these weights as version {held[1]}, the trainer as {wanted.version}; start it anew")
            raise WrongWeights(
                f"{self.server} has weights {held[0][:12]}, the trainer {wanted.sha256[:12]}, and they lie in no directory that it could "
                "load; start it on the checkpoint that is resumed"
            )
        order = WeightsUpdated(wanted.path, wanted.sha256, wanted.version)
        end = time.monotonic() + self._patience.load_s
        channel.send(order, timeout_s=self._patience.silence_s)
        told = (WeightsLoaded, Alive, Error)
        while not isinstance(answer := channel.receive(told, timeout_s=max(end - time.monotonic(), 0)), WeightsLoaded):
            if not isinstance(answer, Error):
                continue
            if answer.code != "busy" or time.monotonic() > end:
                raise SamplerRefused(f"{self.server} did not load {wanted.path}: {answer.message}", answer.code)
            time.sleep(self._patience.pause_s)  # it has not yet noticed that an earlier connection is gone
            channel.send(order, timeout_s=self._patience.silence_s)
        self._held = (answer.sha256, answer.version)
        if self._held != (wanted.sha256, wanted.version):
            raise WrongWeights(
                f"{self.server} says it loaded weights {answer.sha256[:12]}, version {answer.version}, from {wanted.path}; the trainer "
                f"has {wanted.sha256[:12]}, version {wanted.version}; look at who else writes there"
            )

    def _collect(self, waiting: dict[str, Generate], found: dict[str, Samples]) -> None:
        """Asks for everything that waits and takes answers until nothing does."""
        channel = cast(Channel, self._channel)
        try:
            for request in waiting.values():
                channel.send(request, timeout_s=self._patience.silence_s)
            while waiting:
                answer = channel.receive((Samples, Alive, Error), timeout_s=self._patience.silence_s)
                self._heard()
                if isinstance(answer, Error):
                    raise SamplerRefused(f"{self.server} refused a request: {answer.message}", answer.code)
                if isinstance(answer, Samples) and answer.id not in found:
                    self._check(answer, waiting)
                    found[answer.id] = answer
                    del waiting[answer.id]
        except _LOST:
            raise
        except BaseException:
            self._cancel(channel, waiting)
            raise

    def _check(self, answer: Samples, waiting: dict[str, Generate]) -> None:
        request = waiting.get(answer.id)
        if request is None:
            raise MessageError(f"samples.id is {answer.id!r}, which nobody asked", "samples.id")
        if (answer.weights, answer.version) != (self.weights.sha256, self.weights.version):
            raise WrongWeights(
                f"{self.server} answered from weights {answer.weights[:12]}, version {answer.version}; the trainer has "
                f"{self.weights.sha256[:12]}, version {self.weights.version}"
            )
        if len(answer.samples) != request.n:
            raise MessageError(f"samples.samples has {len(answer.samples)} answers where {request.n} were asked", "samples.samples")
        longest = max(len(each.ids) for each in answer.samples)
        if longest > request.max_new_tokens:
            raise MessageError(f"samples.samples has {longest} ids where at most {request.max_new_tokens} were asked", "samples.samples")

    def _cancel(self, channel: Channel, waiting: dict[str, Generate]) -> None:
        """Nobody will take the answers that are still to come: the work is called off and the connection, with what is on it, given up."""
        with contextlib.suppress(RolloutProtocolError):
            for name in waiting if "cancel" in self.features else ():
                channel.send(Cancel(name), timeout_s=1.0)
        self.close()

    _held: tuple[str, int] = ("", -1)  # the sampler's weights and their version, as it last said


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer with the fields of `align.rollout.Sample`, for who does not have that library."""

    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    finish_reason: str
    weights_version: int


_SAMPLE: Any = Sample


class RemoteSampler(Generic[S]):
    """A sampler in another process with the methods of one in this: what `align.rollout.Sampler` asks for.

    `RemoteSampler(client, eos_ids=[2], sample=align.rollout.Sample)` gives that library's own samples.
    """

    def __init__(self, client: Client, *, eos_ids: Sequence[int], sample: Callable[..., S] = _SAMPLE) -> None:
        """eos_ids: tokens that end every sample. sample: makes one of the fields of `Sample`, given by name."""
        self._client, self._eos_ids, self._sample = client, [_integer(token, "eos_ids") for token in eos_ids], sample
        self.weights_version = client.weights.version

    def update(self, weights: Weights) -> None:
        """As `Client.update`."""
        self._client.update(weights)
        self.weights_version = weights.version

    def generate(
        self, prompts_ids: Sequence[Sequence[int]], *, n: int = 1, max_new_tokens: int, temperature: float = 1.0, top_p: float = 1.0,
        top_k: int = 0, min_p: float = 0.0, stop_ids: Sequence[int] = (), stop_strings: Sequence[str] = (), tokenizer: Any = None,
        seeds: Sequence[int] | None = None,
    ) -> list[S]:  # fmt: skip
        """n samples for each prompt, prompt by prompt, as `align.rollout.NativeSampler.generate`; the tokenizer is the sampler's own.

        Raises:
            RolloutProtocolError: a parameter out of its range, by name; see `Client.generate`.
        """
        if seeds is None:
            seeds = [random.getrandbits(63) for _ in prompts_ids]
        elif len(seeds) != len(prompts_ids):
            raise RolloutProtocolError(f"{len(seeds)} seeds for {len(prompts_ids)} prompts; give one a prompt")
        if isinstance(stop_strings, str):
            raise RolloutProtocolError(f"stop_strings is the text {stop_strings!r}, each letter of which would end a sample; give a list")
        n, max_new_tokens, top_k = _integer(n, "n"), _integer(max_new_tokens, "max_new_tokens"), _integer(top_k, "top_k")
        stops = [*self._eos_ids, *(_integer(token, "stop_ids") for token in stop_ids)]
        shared = {"stop_ids": stops, "stop_strings": list(stop_strings), "temperature": temperature, "top_p": top_p, "top_k": top_k}
        requests = [
            Generate(
                "",
                "",
                [_integer(token, f"prompt {index}") for token in prompt],
                n,
                max_new_tokens,
                min_p=min_p,
                seed=_integer(seed, f"seed {index}"),
                **shared,  # type: ignore[arg-type]
            )
            for index, (prompt, seed) in enumerate(zip(prompts_ids, seeds, strict=True))
        ]
        if not requests:
            return []
        self._require(requests[0])
        return [
            self._sample(prompt_ids=request.prompt, **_fields(drawn), weights_version=answer.version)
            for request, answer in zip(requests, self._client.generate(requests), strict=True)
            for drawn in answer.samples
        ]

    def _require(self, request: Generate) -> None:
        """Raises RolloutProtocolError: the sampler, if one was met, cannot do what is asked."""
        asked = {
            "top_p": request.top_p < 1, "top_k": request.top_k > 0, "min_p": request.min_p > 0, "stop_strings": bool(request.stop_strings),
            "seed": True, "raw_logprobs": True,
        }  # fmt: skip
        self._client.update(self._client.weights)
        for name, wanted in asked.items():
            if wanted and name not in self._client.features:
                raise RolloutProtocolError(f"{self._client.server} cannot do {name}; leave it out, or take another sampler")


def _integer(value: SupportsIndex, what: str) -> int:
    """As Python's own, numpy's and torch's among them; a float cut to an integer would be another request."""
    try:
        return operator.index(value)
    except TypeError:
        raise RolloutProtocolError(f"{what} has {value!r} where an integer must be") from None


def _fields(drawn: Drawn) -> dict[str, Any]:
    return {"ids": drawn.ids, "logprobs": drawn.logprobs, "raw_logprobs": drawn.raw_logprobs, "finish_reason": drawn.finish_reason}
