"""What is lost between text and ids: losses of a text, drift of ids, prefixes of a conversation."""

import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from align.tokenizer._errors import PrefixWarning

if TYPE_CHECKING:
    from align.tokenizer._tokenizer import Tokenizer


class Loss(NamedTuple):
    """text[start:end] does not come back. reason: "normalised" (another spelling comes back), "dropped" (the vocabulary lacks its bytes),
    "unknown" (the unknown token comes back), "mark" (a typed U+2581 comes back as a space), "space" (a leading space is taken for
    the one that encoding adds), "split" (the pre-tokenizer leaves it out), "other"."""

    start: int
    end: int
    text: str
    reason: str


class LossReport(NamedTuple):
    """lossless: decoding gives the text back, byte for byte, with added tokens' text taken as text. losses: what does not come back."""

    lossless: bool
    losses: list[Loss]


class Drift(NamedTuple):
    """same: encode(decode(ids)) == ids. at: index of the first id that differs, or None. text: decode(ids). ids: encode(text)."""

    same: bool
    at: int | None
    text: str
    ids: list[int]


def loss_report(tokenizer: "Tokenizer", text: str) -> LossReport:
    ids = tokenizer.encode(text, special="literal")
    if tokenizer.decode_bytes(ids) == text.encode():
        return LossReport(True, [])
    marks = dict(_normalised(tokenizer, text))
    marks.update(_not_in_vocabulary(tokenizer, text, set(marks)))
    if tokenizer._bpe.space == "\u2581" or tokenizer._normal(" ").endswith("\u2581"):
        marks.update((i, "mark") for i, char in enumerate(text) if char == "\u2581")
    if text[0] == " " and not tokenizer.decode(ids).startswith(" "):
        marks.setdefault(0, "space")
    if not marks:
        return LossReport(False, [Loss(0, len(text), text, "other")])
    out: list[Loss] = []
    for at in sorted(marks):
        if out and out[-1].end == at and out[-1].reason == marks[at]:
            out[-1] = Loss(out[-1].start, at + 1, text[out[-1].start : at + 1], marks[at])
        else:
            out.append(Loss(at, at + 1, text[at], marks[at]))
    return LossReport(False, out)


def _normalised(tokenizer: "Tokenizer", text: str) -> Iterator[Any]:
    """Characters that the normaliser spells otherwise; space marks come back as spaces and do not count."""
    if tokenizer._normaliser is None:
        return
    now, spans = tokenizer._normaliser.aligned(text, [(i, i + 1) for i in range(len(text))])
    made: dict[int, str] = {}
    for char, (start, _) in zip(now, spans, strict=False):
        made[start] = made.get(start, "") + char
    for i, char in enumerate(text):
        got = made.get(i, "")
        if got != char and got.replace("\u2581", " ") not in (char, " " + char):
            yield i, "normalised"


def _not_in_vocabulary(tokenizer: "Tokenizer", text: str, skip: set[int]) -> Iterator[Any]:
    """Characters that become nothing or the unknown token, and those that the pre-tokenizer leaves out."""
    bpe = tokenizer._bpe
    spans = [(i, i + 1) for i in range(len(text))]
    now = text
    if tokenizer._normaliser:
        now, spans = tokenizer._normaliser.aligned(text, spans)
    seen: set[int] = set()
    for piece, piece_spans in tokenizer._pretokenizer.pieces(now, spans, True):
        for char, (start, end) in zip(piece, piece_spans or (), strict=False):
            seen.update(range(start, end))
            symbols = [bpe.first_symbols(part) for part in bpe.written(char)]
            if [] in symbols:
                yield start, "dropped"
            elif bpe.unk is not None and [bpe.unk] in symbols and char != bpe.unk:
                yield start, "unknown"
    for i in range(len(text)):
        if i not in seen and i not in skip:
            yield i, "split"


def drift(tokenizer: "Tokenizer", ids: Iterable[int]) -> Drift:
    ids = list(ids)
    text = tokenizer.decode(ids)
    again = tokenizer.encode(text)
    if again == ids:
        return Drift(True, None, text, again)
    at = next((i for i, (a, b) in enumerate(zip(ids, again, strict=False)) if a != b), min(len(ids), len(again)))
    return Drift(False, at, text, again)


def check_prefixes(tokenizer: "Tokenizer", messages: Any, options: dict[str, Any]) -> list[int]:
    from align.tokenizer._chat import checked

    messages = checked(messages)
    broken = []
    for k in range(1, len(messages)):
        if messages[k - 1]["role"] != "assistant":
            continue
        end = next((i for i in range(k, len(messages)) if messages[i]["role"] == "assistant"), len(messages))
        short = tokenizer.render_chat(messages[:k], compat=True, **options).ids
        long = tokenizer.render_chat(messages[:end], compat=True, **options).ids
        if long[: len(short)] != short:
            at = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), min(len(short), len(long)))
            broken.append(k)
            warnings.warn(
                f"the conversation of messages[:{k}] is no prefix of the longer one: its ids differ from place {at} on (the template "
                "rewrites earlier turns, such as dropping their thinking)", PrefixWarning, stacklevel=3,
            )  # fmt: skip
    return broken
