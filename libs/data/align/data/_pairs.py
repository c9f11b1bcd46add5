"""Preference rows to pairs of documents that share their prompt."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ._encode import Encoder, Example, Tokenizer, nothing_left
from ._errors import DataError


@dataclass(frozen=True, eq=False)
class EncodedPairs:
    """Pairs (chosen, rejected) in the order of their rows, and what became of the rows.

    The two of a pair have the prompt's ids in common, and exactly what follows them is trained; `prompt_lengths` (N,) int64 counts those.
    `dropped` counts rows by reason: "overlong" (a prompt without room for an answer, or with "drop" a side that is too long), "empty" (a
    side without text), "same" (the sides are alike, perhaps only after truncation). `tokens` is over both sides, `trained_tokens` counts
    targets. `digest` is a sha256 over all ids and masks.
    """

    pairs: list[tuple[Example, Example]]
    kept: int
    dropped: Counter[str]
    truncated: int
    tokens: int
    trained_tokens: int
    digest: str

    @cached_property
    def prompt_lengths(self) -> np.ndarray:
        return np.fromiter((int(chosen.mask.argmax()) for chosen, _ in self.pairs), np.int64, len(self.pairs))

    def summary(self) -> str:
        """One line: "2412 pairs kept, 17 dropped (overlong 17), 3 truncated; 803021 tokens, 500310 trained"."""
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.dropped.items()))
        dropped = f"{self.dropped.total()} dropped" + (f" ({reasons})" if reasons else "")
        return f"{self.kept} pairs kept, {dropped}, {self.truncated} truncated; {self.tokens} tokens, {self.trained_tokens} trained"


def encode_preferences(
    rows: Iterable[dict[str, Any]],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    overlong: Literal["truncate", "drop", "error"] = "truncate",
    chat: bool = False,
    template: str | None = None,
    system: str | None = None,
) -> EncodedPairs:
    """Encodes rows {"prompt", "chosen", "rejected"}, as `read_rows` returns them, for DPO and its kin.

    A prompt that is a string is encoded as `encode_rows` encodes a completion's; with `chat` it is the user's turn of the chat template,
    as a prompt of messages always is (`template`, `system` as in `encode_rows`). Trained are the tokens of the answer with their end token,
    not those of the assistant's earlier turns. The ids before the answer are the same on both sides; a template that looks at the
    answer there is an error, since the two log-probabilities would be of different prompts.

    overlong: "truncate" cuts each side at max_length, "drop" leaves out a row with a side that is longer, "error" raises. Raises DataError
    with the row's place, and when no row is left.
    """
    if overlong not in ("truncate", "drop", "error"):
        raise DataError(f"overlong {overlong!r} is not known; for pairs it is truncate, drop or error")
    encoders = _Encoders(tokenizer, max_length, template, system)
    pairs: list[tuple[Example, Example]] = []
    dropped: Counter[str] = Counter()
    truncated = seen = 0
    for seen, row in enumerate(rows, 1):
        place = getattr(row, "place", f"row {seen - 1}")
        sides = [encoders.side(row, side, place, chat=chat) for side in ("chosen", "rejected")]
        longest = max(len(ids) for ids, _ in sides)
        if not all(any(mask) for _, mask in sides):
            dropped["empty"] += 1
            continue
        if longest > max_length and overlong == "error":
            raise DataError(f"{place}: {longest} tokens, more than max_length {max_length}; raise it, or let overlong be truncate or drop")
        prompt = _shared_prompt(sides, place)
        if prompt >= max_length or (longest > max_length and overlong == "drop"):
            dropped["overlong"] += 1
            continue
        chosen, rejected = (Example(np.array(ids[:max_length], np.int32), np.array(mask[:max_length], np.bool_)) for ids, mask in sides)
        if np.array_equal(chosen.ids, rejected.ids):
            dropped["same"] += 1
            continue
        truncated += longest > max_length
        pairs.append((chosen, rejected))
    if not pairs:
        raise DataError(nothing_left(seen, dropped, max_length))
    digest = hashlib.sha256()
    for example in (side for pair in pairs for side in pair):
        digest.update(len(example.ids).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(example.ids, "<i4").data)
        digest.update(np.packbits(example.mask).data)
    return EncodedPairs(
        pairs=pairs,
        kept=len(pairs),
        dropped=dropped,
        truncated=truncated,
        tokens=sum(len(side.ids) for pair in pairs for side in pair),
        trained_tokens=int(sum(side.mask[1:].sum() for pair in pairs for side in pair)),
        digest=digest.hexdigest(),
    )


class _Encoders:
    """The encoders of both forms, each made when it is first needed: a base model has no chat template."""

    def __init__(self, tokenizer: Tokenizer, max_length: int, template: str | None, system: str | None):
        self._tokenizer, self._max_length, self._template, self._system = tokenizer, max_length, template, system
        self._made: dict[str, Encoder] = {}

    def side(self, row: dict[str, Any], side: str, place: str, *, chat: bool) -> tuple[list[int], list[bool]]:
        """ids and mask of prompt and answer, the mask True for the answer alone."""
        for field in ("prompt", side):
            if field not in row:
                raise DataError(f"{place}: field {field!r} is missing; a preference row has prompt, chosen and rejected")
        prompt, answer = row["prompt"], row[side]
        if isinstance(prompt, str) and not chat:
            return self._get("completion")({"prompt": prompt, "completion": answer}, place)
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if turns[-1]["role"] == "assistant":
            raise DataError(f"{place}: the prompt ends with the assistant's turn; the answer must be one of its own")
        if not answer.strip():
            return [], []
        ids, mask = self._get("messages")({"messages": [*turns, {"role": "assistant", "content": answer}]}, place)
        first = len(mask)
        while first and not mask[first - 1]:  # what the template puts behind the last turn
            first -= 1
        while first and mask[first - 1]:
            first -= 1
        return ids, [trained and index >= first for index, trained in enumerate(mask)]

    def _get(self, kind: str) -> Encoder:
        if kind not in self._made:
            chat = kind == "messages"
            self._made[kind] = Encoder(
                self._tokenizer,
                kind=kind,
                max_length=self._max_length,
                overlong="truncate",
                template=self._template if chat else None,
                system=self._system if chat else None,
            )
        return self._made[kind]


def _shared_prompt(sides: list[tuple[list[int], list[bool]]], place: str) -> int:
    """Ids before the answers, which must be the same."""
    (chosen, chosen_mask), (rejected, rejected_mask) = sides
    first, other = chosen_mask.index(True), rejected_mask.index(True)
    if chosen[:first] != rejected[:other]:
        raise DataError(
            f"{place}: the prompt is encoded in two ways before chosen ({first} ids) and before rejected ({other}); "
            "does the template look at the answer? Use one that does not"
        )
    return first
