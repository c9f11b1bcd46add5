"""The messages, version 1: a JSON object a line, with a "type"; every field is checked, none may be missing, none may be added."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from align.rollout_protocol._errors import MessageError
from align.rollout_protocol._schema import Kind, choice, digest, fields, integer, listing, number, numbers, optional, text, wrong

PROTOCOL = 1
"""The version of the messages; both ends say theirs first, and other versions are refused."""
MAX_LINE = 64 << 20
"""Bytes of the longest line that is read or written, its end included."""
ERROR_CODES = ("bad_message", "wrong_protocol", "wrong_weights", "unsupported", "cancelled", "busy", "failed")
FEATURES = ("seed", "stop_strings", "raw_logprobs", "top_p", "top_k", "min_p", "cancel")
"""What a sampler may or may not be able to do; a request for what it did not name is refused before it is sent."""

_TOKENS = 1 << 22  # the longest prompt or answer
_ID = 2**31 - 1
_INTEGER = 2**63 - 1

_token = integer(0, _ID)
_tokens = numbers(_token, int, 0, _ID, most=_TOKENS)
_prompt = numbers(_token, int, 0, _ID, least=1, most=_TOKENS)
_logprobs = numbers(number(-1e30, 1e-3), float, -1e30, 1e-3, least=1, most=_TOKENS)


class Message:
    """A message; its fields are those of the dataclass, and KINDS says what each may be."""

    TYPE: ClassVar[str]
    KINDS: ClassVar[dict[str, Kind]]


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """The trainer's first message: which weights it is about to sample from, and the fingerprint of the tokenizer that made its ids."""

    protocol: int
    weights: str
    tokenizer: str

    TYPE: ClassVar[str] = "hello"
    KINDS: ClassVar[dict[str, Kind]] = {"protocol": integer(0, _ID), "weights": digest, "tokenizer": text(200)}


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """The sampler's answer: what it is, the weights that it holds, and of `FEATURES` what it can do."""

    protocol: int
    server: str
    weights: str
    version: int
    tokenizer: str
    features: list[str]

    TYPE: ClassVar[str] = "welcome"
    KINDS: ClassVar[dict[str, Kind]] = {
        "protocol": integer(0, _ID), "server": text(200), "weights": digest, "version": integer(0, _INTEGER), "tokenizer": text(200),
        "features": listing(text(40), most=100),
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Generate(Message):
    """n samples of one prompt, from these weights and no others. The fields are those of a sampler's `generate`."""

    id: str
    weights: str
    prompt: list[int]
    n: int
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop_ids: list[int]
    stop_strings: list[str]
    seed: int

    TYPE: ClassVar[str] = "generate"
    KINDS: ClassVar[dict[str, Kind]] = {
        "id": text(100, 1), "weights": digest, "prompt": _prompt, "n": integer(1, 1 << 16), "max_new_tokens": integer(1, _TOKENS),
        "temperature": number(0, 1e6), "top_p": number(0, 1), "top_k": integer(0, _ID), "min_p": number(0, 1),
        "stop_ids": numbers(_token, int, 0, _ID, most=10_000), "stop_strings": listing(text(1000, 1), most=100),
        "seed": integer(0, _INTEGER),
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class WeightsUpdated(Message):
    """The trainer has written new weights into a directory that both ends can read; `sha256` is `weights_sha256` of it."""

    path: str
    sha256: str
    version: int

    TYPE: ClassVar[str] = "weights_updated"
    KINDS: ClassVar[dict[str, Kind]] = {"path": text(4096, 1), "sha256": digest, "version": integer(0, _INTEGER)}


@dataclass(frozen=True, slots=True)
class WeightsLoaded(Message):
    """The sampler holds them now."""

    sha256: str
    version: int

    TYPE: ClassVar[str] = "weights_loaded"
    KINDS: ClassVar[dict[str, Kind]] = {"sha256": digest, "version": integer(0, _INTEGER)}


@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """The samples of this request are not wanted any more; it is answered by an Error with code "cancelled"."""

    id: str

    TYPE: ClassVar[str] = "cancel"
    KINDS: ClassVar[dict[str, Kind]] = {"id": text(100, 1)}


@dataclass(frozen=True, slots=True)
class Drawn:
    """One answer as it travels: N token ids, their log-probabilities under the distribution they were drawn from and at temperature 1."""

    ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    finish_reason: str


_DRAWN: dict[str, Kind] = {
    "ids": numbers(_token, int, 0, _ID, least=1, most=_TOKENS), "logprobs": _logprobs, "raw_logprobs": _logprobs,
    "finish_reason": choice("stop", "length"),
}  # fmt: skip


def _drawn(value: Any, where: str) -> Drawn:
    if isinstance(value, Drawn):
        value = {name: getattr(value, name) for name in _DRAWN}
    made = Drawn(**fields(value, _DRAWN, where))
    for name in ("logprobs", "raw_logprobs"):
        if len(getattr(made, name)) != len(made.ids):
            place = f"{where}.{name}"
            raise MessageError(f"{place} has {len(getattr(made, name))} numbers for {len(made.ids)} ids", place)
    return made


@dataclass(frozen=True, slots=True)
class Samples(Message):
    """The n answers to one request, and the weights that they were drawn from."""

    id: str
    weights: str
    version: int
    samples: list[Drawn]

    TYPE: ClassVar[str] = "samples"
    KINDS: ClassVar[dict[str, Kind]] = {
        "id": text(100, 1), "weights": digest, "version": integer(0, _INTEGER), "samples": listing(_drawn, least=1, most=1 << 16),
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Alive(Message):
    """The sampler works on `running` requests: sent between steps, so a sampler that hangs says nothing."""

    running: int

    TYPE: ClassVar[str] = "alive"
    KINDS: ClassVar[dict[str, Kind]] = {"running": integer(0, _ID)}


@dataclass(frozen=True, slots=True)
class Error(Message):
    """Request `id` is not answered, or with no id, the last message was no good. code: one of `ERROR_CODES`."""

    id: str | None
    code: str
    message: str

    TYPE: ClassVar[str] = "error"
    KINDS: ClassVar[dict[str, Kind]] = {"id": optional(text(100, 1)), "code": choice(*ERROR_CODES), "message": text(4000)}


FROM_TRAINER: tuple[type[Message], ...] = (Hello, Generate, WeightsUpdated, Cancel)
FROM_SAMPLER: tuple[type[Message], ...] = (Welcome, Samples, WeightsLoaded, Alive, Error)


def checked(message: Message) -> dict[str, Any]:
    """The fields of a message. Raises MessageError, naming the field, for one that may not be so."""
    return fields({name: getattr(message, name) for name in message.KINDS}, message.KINDS, message.TYPE)


def encode(message: Message, *, limit: int = MAX_LINE) -> bytes:
    """The message as a line. Raises MessageError: a field that may not be so, or a line of more than `limit` bytes."""
    values = checked(message)
    line = json.dumps({"type": message.TYPE, **values}, separators=(",", ":"), allow_nan=False, default=_plain).encode() + b"\n"
    if len(line) > limit:
        raise MessageError(f"{message.TYPE} would be a line of {len(line)} bytes; the limit is {limit}; ask for fewer or shorter samples")
    return line


def decode(line: bytes, allowed: tuple[type[Message], ...] = FROM_TRAINER + FROM_SAMPLER, *, limit: int = MAX_LINE) -> Message:
    """The message of a line, without or with its end. allowed: the messages that may come now.

    Raises MessageError, and nothing else, whatever the bytes are.
    """
    if len(line) > limit:
        raise MessageError(f"a line of {len(line)} bytes; the limit is {limit}")
    try:
        found = json.loads(line.decode(), parse_constant=_no_number, object_pairs_hook=_object)
    except MessageError:
        raise
    except (ValueError, RecursionError) as error:
        raise MessageError(f"a line that is no JSON ({error if isinstance(error, ValueError) else 'nested too deeply'})") from None
    if type(found) is not dict:
        raise MessageError(f"a line that is a JSON {type(found).__name__}, no object")
    kind = found.pop("type", None)
    for message in allowed:
        if kind == message.TYPE:
            return message(**fields(found, message.KINDS, message.TYPE))
    raise wrong("type", f"one of {', '.join(message.TYPE for message in allowed)} here", kind)


def _plain(value: Any) -> Any:
    return {name: getattr(value, name) for name in _DRAWN}


def _no_number(name: str) -> NoReturn:
    raise MessageError(f"{name} is no number that JSON knows")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise MessageError(f"field {twice[:40]!r} stands twice in one object", twice[:40])
    return made
