"""Ids back to text: the decoder chains of tokenizer.json, whole and streaming.

A chain is compiled to three steps: each token to text (`per_token`), runs of byte tokens to characters (`byte_fallback`), and
what happens to the joined text (`after`). ByteLevel is a chain of its own: tokens are bytes.
"""

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from align.tokenizer._bpe import CHAR_TO_BYTE

if TYPE_CHECKING:
    from align.tokenizer._regex import Finder
    from align.tokenizer._tokenizer import Tokenizer


def byte_level_bytes(token: str) -> bytes:
    """A token of a byte-level vocabulary as bytes; one with a character outside the byte alphabet stands for its own UTF-8."""
    try:
        return bytes(map(CHAR_TO_BYTE.__getitem__, token))
    except KeyError:
        return token.encode()


def byte_value(token: str) -> int | None:
    """0x0A for "<0x0A>", None for any other token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


class Chain:
    """A decoder. `per_token(text, is_first)`, then bytes, then `after` on the joined text; `joiner` goes between tokens."""

    def __init__(
        self, *, byte_level: bool = False, per_token: Any = (), byte_fallback: bool = False, after: Any = (), joiner: str = ""
    ) -> None:
        self.byte_level, self.byte_fallback, self.joiner = byte_level, byte_fallback, joiner
        self._per_token, self._after = tuple(per_token), tuple(after)
        self.strip_start = self._after[0] if len(self._after) == 1 and isinstance(self._after[0], StripStart) else None
        self.streams = not self._after or self.strip_start is not None

    def piece(self, token: str, first: bool) -> str:
        for step in self._per_token:
            token = step(token, first)
        return token

    def text(self, tokens: list[str]) -> str:
        if self.byte_level:
            return b"".join(map(byte_level_bytes, tokens)).decode("utf-8", "replace")
        pieces = [self.piece(token, i == 0) for i, token in enumerate(tokens)]
        return self.finish(self.joiner.join(_join_bytes(pieces) if self.byte_fallback else pieces))

    def finish(self, text: str) -> str:
        for step in self._after:
            text = step(text, True)
        return text

    def bytes(self, tokens: list[str]) -> bytes:
        """Like `text`, with the bytes of byte tokens as they are, valid UTF-8 or not."""
        if self.byte_level:
            return b"".join(map(byte_level_bytes, tokens))
        out = []
        for i, token in enumerate(tokens):
            piece = self.piece(token, i == 0)
            value = byte_value(piece) if self.byte_fallback else None
            out.append(piece.encode() if value is None else bytes([value]))
        whole = self.joiner.encode().join(out)
        if not self._after:
            return whole
        # Steps on the joined text see characters; bytes that are none ride along as lone surrogates.
        return self.finish(whole.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def _join_bytes(pieces: list[str]) -> list[str]:
    """Each run of byte tokens as text, or, where the run is not UTF-8, one U+FFFD for every byte of it (as the reference does)."""
    out: list[str] = []
    run = bytearray()
    for piece in [*pieces, None]:
        value = None if piece is None else byte_value(piece)
        if value is not None:
            run.append(value)
            continue
        if run:
            out += run_text(run)
            run.clear()
        if piece is not None:
            out.append(piece)
    return out


def run_text(run: bytes | bytearray) -> list[str]:
    try:
        return [run.decode()]
    except UnicodeDecodeError:
        return ["\ufffd"] * len(run)


class ReplaceAll:
    def __init__(self, finder: "Finder", old: str | None, new: str) -> None:
        self._finder, self._old, self._new = finder, old, new

    def __call__(self, text: str, first: bool) -> str:
        if self._old is not None:
            return text.replace(self._old, self._new)
        return "".join(self._new if hit else piece for piece, hit in self._finder.pieces(text))


class StripStart:
    """Strip: up to `start` times `char` from the front and up to `stop` times from the end."""

    def __init__(self, char: str, start: int, stop: int) -> None:
        self.char, self.start, self.stop = char, start, stop

    def __call__(self, text: str, first: bool) -> str:
        begin = 0
        while begin < min(self.start, len(text)) and text[begin] == self.char:
            begin += 1
        end = len(text)
        while end > max(begin, len(text) - self.stop) and text[end - 1] == self.char:
            end -= 1
        return text[begin:end]


class MetaspacePiece:
    """Replacement characters are spaces again; the first token loses all of its own, as in the reference."""

    def __init__(self, replacement: str, strip_first: bool) -> None:
        self._replacement, self._strip_first = replacement, strip_first

    def __call__(self, text: str, first: bool) -> str:
        if first and self._strip_first:
            return text.replace(self._replacement, "")
        return text.replace(self._replacement, " ")


class Decoder:
    """Streaming decoding: the concatenation of every `push` and `finish` equals `tokenizer.decode` of the same ids, for every stream.

    A push returns what is certain: an unfinished character, and with byte fallback an unfinished run of byte tokens, waits (one more byte
    can turn a whole run into U+FFFD). `prefix` are ids already shown, such as a prompt: they shape what follows and are not returned;
    where it ends between two characters, `decode(prefix)` and the pushes are together the decode of all.
    """

    def __init__(self, tokenizer: "Tokenizer", *, skip_special: bool = False, prefix: Iterable[int] = ()) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._chain: Chain = tokenizer._chain
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True
        self._run = bytearray()
        self._held: list[str] = []  # tokens of a chain that cannot stream
        self._to_strip = self._chain.strip_start.start if self._chain.strip_start else 0
        self._tail = ""  # what a strip at the end may still take
        for token_id in prefix:
            self.push(token_id)
        self._shown = self._chain.text(self._held) if self._held else ""
        self._drop_shown()

    def push(self, token_id: int) -> str:
        """The text that this id completes, often "" and sometimes several characters. Raises TokenizerError on an id that is none."""
        token = self._tokenizer._token_text(token_id, self._skip_special)
        if token is None:
            return ""
        first, self._first = self._first, False
        chain = self._chain
        if chain.byte_level:
            return self._utf8.decode(byte_level_bytes(token))
        if not chain.streams:
            self._held.append(token)
            return ""
        piece = chain.piece(token, first)
        value = byte_value(piece) if chain.byte_fallback else None
        if value is not None:
            self._run.append(value)
            return ""
        text = self._flush_run() + piece
        if chain.joiner and not first:
            text = chain.joiner + text
        return self._stripped(text)

    def finish(self) -> str:
        """The rest, at the end of the stream."""
        chain = self._chain
        if chain.byte_level:
            return self._utf8.decode(b"", True)
        if not chain.streams:
            text = chain.text(self._held)
            same = next((i for i, (a, b) in enumerate(zip(text, self._shown, strict=False)) if a != b), min(len(text), len(self._shown)))
            return text[same:]
        text = self._stripped(self._flush_run())
        if not self._tail or chain.strip_start is None:
            return text
        stop = chain.strip_start.stop
        return text + StripStart(chain.strip_start.char, 0, stop)(self._tail, False)

    def _drop_shown(self) -> None:
        """Lets go of the whole characters of a run of bytes that the prefix ends in: a prompt's line break is no part of the answer."""
        if not self._run:
            return
        reader = codecs.getincrementaldecoder("utf-8")()
        try:
            self._stripped(reader.decode(self._run))
            self._run = bytearray(reader.getstate()[0])
        except UnicodeDecodeError:  # shown as U+FFFD, whatever follows
            self._stripped(self._flush_run())

    def _flush_run(self) -> str:
        text = "".join(run_text(self._run)) if self._run else ""
        self._run.clear()
        return text

    def _stripped(self, text: str) -> str:
        strip = self._chain.strip_start
        if strip is None or not text:
            return text
        while self._to_strip and text:
            if text[0] != strip.char:
                self._to_strip = 0
                break
            text = text[1:]
            self._to_strip -= 1
        if not strip.stop:
            return text
        text = self._tail + text
        kept = len(text.rstrip(strip.char))
        self._tail = text[kept:]
        return text[:kept]
