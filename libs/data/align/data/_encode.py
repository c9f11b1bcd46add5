"""Rows to token ids with a mask of what is trained."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np

from ._errors import DataError
from ._rows import Row

Overlong = Literal["truncate", "drop", "error", "split"]
TRAINABLE = ("messages", "completion", "text")


class Tokenizer(Protocol):
    """What is used of `align.tokenizer.Tokenizer`."""

    @property
    def eos_id(self) -> int | None: ...

    @property
    def fingerprint(self) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]: ...

    def render_chat(self, messages: list[dict[str, Any]], *, template: str | None = None) -> Any: ...


def encode_continued(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text that follows others: without the space that some tokenizers (SentencePiece's) put in front of every text."""
    before = tokenizer.encode("\n")
    if tokenizer.encode("\n0") != [*before, *tokenizer.encode("0")]:
        whole = tokenizer.encode("\n" + text)
        if whole[: len(before)] == before:
            return whole[len(before) :]
    return tokenizer.encode(text)


@dataclass(frozen=True, eq=False)
class Example:
    """One document. `ids` (T,) int32; `mask` (T,) bool, True where the token is trained, that is: where it is a target."""

    ids: np.ndarray
    mask: np.ndarray


@dataclass(frozen=True, eq=False)
class Encoded:
    """Documents in the order of their rows, and what became of the rows. There are more documents than rows kept where rows were split.

    `dropped` counts rows by reason: "overlong" (longer than max_length), "empty" (no text), "nothing_trained" (no trained token, or
    none left after truncation). `tokens` is the sum of T; `trained_tokens` counts targets: masked tokens that have one before them.
    `digest` is a sha256 over all ids and masks.
    """

    examples: Sequence[Example]
    kept: int
    dropped: Counter[str]
    truncated: int
    tokens: int
    trained_tokens: int
    digest: str

    @cached_property
    def lengths(self) -> np.ndarray:
        """(N,) int64, tokens of each document."""
        return np.fromiter((len(example.ids) for example in self.examples), np.int64, len(self.examples))

    @cached_property
    def trained(self) -> np.ndarray:
        """(N,) int64, targets of each document."""
        return np.fromiter((example.mask[1:].sum() for example in self.examples), np.int64, len(self.examples))

    def summary(self) -> str:
        """One line: "7473 rows kept, 12 dropped (overlong 12), 3 truncated; 1403021 tokens, 900310 trained"."""
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.dropped.items()))
        dropped = f"{self.dropped.total()} dropped" + (f" ({reasons})" if reasons else "")
        return f"{self.kept} rows kept, {dropped}, {self.truncated} truncated; {self.tokens} tokens, {self.trained_tokens} trained"


def encode_rows(
    rows: Iterable[dict[str, Any]],
    tokenizer: Tokenizer,
    *,
    kind: str,
    max_length: int,
    overlong: Overlong = "truncate",
    template: str | None = None,
    system: str | None = None,
) -> Encoded:
    """Encodes rows of kind messages, completion or text, as `read_rows` returns them.

    messages: the chat template (`template`, else the tokenizer's own) is rendered and the assistant's tokens are trained, their end token
    included; `system` is put in front of rows that have no system message of their own. completion: the prompt, then the completion and
    one eos, which are trained. text: all of it and one eos are trained. Where the tokenizer's own rule adds a bos, there is exactly one.

    overlong: "truncate" cuts ids and mask at max_length (no eos is put after a cut), "drop" leaves the row out, "error" raises, "split"
    (for text) makes documents of max_length tokens of it, each with positions from 0; the row counts as one that was kept. Rows that
    end up without a target are dropped and counted. Raises DataError: a kind with nothing to train on, no rows left, a
    tokenizer without eos, a template that fails on a row, each with the row's place.
    """
    block = encode_block(rows, Encoder(tokenizer, kind=kind, max_length=max_length, overlong=overlong, template=template, system=system))
    if not block.examples:
        raise DataError(nothing_left(block.rows, block.dropped, max_length))
    digest = hashlib.sha256()
    for example in block.examples:
        digest.update(len(example.ids).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(example.ids, "<i4").data)
        digest.update(np.packbits(example.mask).data)
    return Encoded(
        examples=block.examples,
        kept=block.kept,
        dropped=block.dropped,
        truncated=block.truncated,
        tokens=sum(len(example.ids) for example in block.examples),
        trained_tokens=int(sum(example.mask[1:].sum() for example in block.examples)),
        digest=digest.hexdigest(),
    )


def check_encoding(
    tokenizer: Tokenizer, *, kind: str, max_length: int, overlong: Overlong, template: str | None = None, system: str | None = None
) -> None:
    """Raises DataError where `encode_rows` would refuse these arguments whatever the rows: to be asked before rows are gathered."""
    Encoder(tokenizer, kind=kind, max_length=max_length, overlong=overlong, template=template, system=system)


def nothing_left(rows: int, dropped: Counter[str], max_length: int) -> str:
    why = ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items())) or "none given"
    return f"no rows are left of {rows} ({why}); look at max_length {max_length} and at the rows"


@dataclass(frozen=True, eq=False)
class Block:
    """Some rows, encoded; `rows` counts those that were given."""

    examples: list[Example]
    rows: int
    kept: int
    dropped: Counter[str]
    truncated: int


def encode_block(rows: Iterable[dict[str, Any]], encoder: "Encoder", alive: Callable[[], object] = lambda: None) -> Block:
    """As `encode_rows`, but none left is no error: a block is a part. `alive` is called after each row."""
    examples: list[Example] = []
    dropped: Counter[str] = Counter()
    truncated = seen = kept = 0
    for seen, row in enumerate(rows, 1):
        place = getattr(row, "place", f"row {seen - 1}")
        ids, mask = encoder(row, place)
        alive()
        if not ids:
            dropped["empty"] += 1
            continue
        if len(ids) > encoder.max_length:
            if encoder.overlong == "error":
                raise DataError(
                    f"{place}: {len(ids)} tokens, more than max_length {encoder.max_length}; raise max_length, or let overlong be truncate "
                    f"or drop"
                )
            if encoder.overlong == "drop":
                dropped["overlong"] += 1
                continue
        size = encoder.max_length
        stop = len(ids) if encoder.overlong == "split" else min(len(ids), size)
        starts = list(range(0, stop, size))
        if stop % size == 1 and len(starts) > 1 and size > 2:
            starts[-1] -= 1  # a last piece of one token would have no target
        pieces = [slice(at, to) for at, to in pairwise([*starts, stop]) if any(mask[at + 1 : to])]
        if not pieces:
            dropped["nothing_trained"] += 1
            continue
        kept += 1
        truncated += len(ids) > stop
        examples += [Example(np.array(ids[piece], np.int32), np.array(mask[piece], np.bool_)) for piece in pieces]
    return Block(examples, seen, kept, dropped, truncated)


def chat_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """{"prompt", "completion", ...} to {"messages": [user, assistant], ...}: the other fields stay, and so does the place."""
    made: list[dict[str, Any]] = []
    for row in rows:
        rest = {key: value for key, value in row.items() if key not in ("prompt", "completion")}
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        chat = Row(messages=turns, **rest)
        if isinstance(row, Row):
            chat.place = row.place
        made.append(chat)
    return made


class Encoder:
    """row -> (ids, mask), lists of equal length; empty for a row without text."""

    def __init__(self, tokenizer: Tokenizer, *, kind: str, max_length: int, overlong: Overlong, template: str | None, system: str | None):
        _check_arguments(kind, max_length, overlong, template, system)
        self.tokenizer, self.template, self.system, self.max_length, self.overlong = tokenizer, template, system, max_length, overlong
        self.make = {"messages": self._messages, "completion": self._completion, "text": self._text}[kind]
        self.eos = tokenizer.eos_id
        if kind != "messages" and self.eos is None:
            raise DataError("the tokenizer names no eos token, so no document's end can be trained; set eos_token in tokenizer_config.json")
        # What the tokenizer's own rule puts in front of a text; an eos that it puts behind is ours to place.
        self.bos = [] if kind == "messages" else [i for i in tokenizer.encode("", add_special_tokens=True) if i != self.eos]

    def __call__(self, row: dict[str, Any], place: str) -> tuple[list[int], list[bool]]:
        try:
            return self.make(row)
        except KeyError as error:
            raise DataError(f"{place}: field {error} is missing; is this a row of the kind that was asked for?") from None
        except ValueError as error:  # the template's or the tokenizer's own refusal
            raise DataError(f"{place}: {error}") from error

    def _messages(self, row: dict[str, Any]) -> tuple[list[int], list[bool]]:
        messages = row["messages"]
        if self.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        chat = self.tokenizer.render_chat(messages, template=self.template)
        return list(chat.ids), [bool(trained) for trained in chat.assistant_mask]

    def _completion(self, row: dict[str, Any]) -> tuple[list[int], list[bool]]:
        prompt, completion = row["prompt"], row["completion"]
        if not completion:
            return [], []
        # A sampler sees the prompt encoded alone; where the joined text encodes otherwise at the seam, the prompt's own ids stand.
        head = self.tokenizer.encode(prompt)
        joined = self.tokenizer.encode(prompt + completion)
        tail = joined[len(head) :] if joined[: len(head)] == head else encode_continued(self.tokenizer, completion)
        return self._finish(head, tail, trained_head=False)

    def _text(self, row: dict[str, Any]) -> tuple[list[int], list[bool]]:
        return self._finish([], self.tokenizer.encode(row["text"]), trained_head=True) if row["text"] else ([], [])

    def _finish(self, head: list[int], tail: list[int], *, trained_head: bool) -> tuple[list[int], list[bool]]:
        whole = head + tail
        bos = [] if whole[: len(self.bos)] == self.bos else self.bos
        end = [] if self.eos is None or tail[-1:] == [self.eos] else [self.eos]
        untrained = len(bos) + len(head)
        ids = bos + whole + end
        return ids, [trained_head or i >= untrained for i in range(len(ids))]


def _check_arguments(kind: str, max_length: int, overlong: str, template: str | None, system: str | None) -> None:
    if kind not in TRAINABLE:
        raise DataError(f"rows of kind {kind!r} hold nothing to train on directly; kinds are {', '.join(TRAINABLE)}")
    if overlong not in ("truncate", "drop", "error", "split"):
        raise DataError(f"overlong {overlong!r} is not known; it is truncate, drop, error or split")
    if overlong == "split" and kind != "text":
        raise DataError(f"overlong 'split' would train the tail of a row of kind {kind} without its prompt; use truncate or drop")
    if max_length < 2:
        raise DataError(f"max_length {max_length} leaves no target; it is at least 2")
    if kind != "messages" and (template is not None or system is not None):
        raise DataError(f"template and system are for rows of kind messages, these are {kind}; use chat_rows on completion rows")
