"""Other files as tokenizer.json data: Mistral's tekken.json and SentencePiece's .model."""

import base64
import binascii
import struct
from collections.abc import Iterator
from typing import Any

from align.tokenizer._bpe import BYTE_TO_CHAR
from align.tokenizer._errors import TokenizerError


def _added(token_id: int, content: str) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def _bos(name: str, token_id: int) -> dict[str, Any]:
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {name: {"id": name, "ids": [token_id], "tokens": [name]}},
    }


def from_tekken(data: dict[str, Any], where: str) -> dict[str, Any]:
    """tekken.json: special tokens first, then byte strings by rank; neighbours merge by the rank of what they make."""
    config: Any = data.get("config")
    try:
        shift = config["default_num_special_tokens"]
        size = config["default_vocab_size"] - shift
        pattern = config["pattern"]
        entries = data["vocab"][:size]
        tokens = ["".join(map(BYTE_TO_CHAR.__getitem__, base64.b64decode(entry["token_bytes"], validate=True))) for entry in entries]
        if [entry["rank"] for entry in entries] != list(range(len(entries))) or len(set(tokens)) != len(tokens) or not 0 <= shift < 1 << 20:
            raise ValueError("the ranks are not 0, 1, 2, … of different tokens")
        named: dict[int, str] = {entry["rank"]: entry["token_str"] for entry in data.get("special_tokens") or _OLD_TEKKEN_SPECIAL}
        if not all(isinstance(v, str) and v for v in named.values()) or not all(0 <= k < shift for k in named):
            raise ValueError("special_tokens are not readable")
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise TokenizerError(f"{where}: not a tekken.json that can be read: {type(error).__name__}: {error}") from None
    special = [named.get(i, f"<SPECIAL_{i}>") for i in range(shift)]
    vocab = {token: shift + i for i, token in enumerate(tokens)}
    return {
        "added_tokens": [_added(i, content) for i, content in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": _bos("<s>", special.index("<s>")) if "<s>" in special else None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": vocab,
            "ranks": {token: i for i, token in enumerate(tokens) if len(token) > 1},
            "merges": [],
        },
    }


# Files before version v7 name no special tokens; these are mistral-common's.
_OLD_TEKKEN_SPECIAL: list[dict[str, Any]] = [
    {"rank": i, "token_str": token}
    for i, token in enumerate(
        [
            "<unk>",
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
            "[TOOL_CALLS]",
            "[IMG]",
            "<pad>",
            "[IMG_BREAK]",
            "[IMG_END]",
            "[PREFIX]",
            "[MIDDLE]",
            "[SUFFIX]",
            "[SYSTEM_PROMPT]",
            "[/SYSTEM_PROMPT]",
            "[TOOL_CONTENT]",
        ]
    )
]


def _fields(data: bytes, where: str) -> Iterator[Any]:
    """(field number, value) of a protobuf message: int, or bytes for the wire types of fixed and given length."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(data) or shift > 63:
                raise TokenizerError(f"{where}: not a SentencePiece model (a number breaks off at byte {at})")
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        wire = key & 7
        if wire == 0:
            yield key >> 3, varint()
            continue
        if wire not in (1, 2, 5):
            raise TokenizerError(f"{where}: not a SentencePiece model (wire type {wire} at byte {at})")
        size = varint() if wire == 2 else 8 if wire == 1 else 4
        if at + size > len(data):
            raise TokenizerError(f"{where}: not a SentencePiece model (a field of {size} bytes breaks off at byte {at})")
        yield key >> 3, data[at : at + size]
        at += size


_NORMAL, _UNKNOWN, _CONTROL, _USER, _BYTE = 1, 2, 3, 4, 6


def _pieces(data: bytes, where: str) -> tuple[list[tuple[str, float, int]], dict[int, Any], dict[int, Any]]:
    """(piece, score, type) in order of ids, the trainer's and the normaliser's settings."""
    pieces: list[tuple[str, float, int]] = []
    settings: list[dict[int, Any]] = [{}, {}]
    try:
        for number, value in _fields(data, where):
            if number == 1:
                piece = dict(_fields(value, where))
                score = struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0
                pieces.append((piece.get(1, b"").decode(), score, piece.get(3, _NORMAL)))
            elif number in (2, 3):
                settings[number - 2] = dict(_fields(value, where))
    except (TypeError, AttributeError, struct.error, UnicodeDecodeError) as error:
        raise TokenizerError(f"{where}: not a SentencePiece model ({type(error).__name__}: {error})") from None
    if not pieces:
        raise TokenizerError(f"{where}: not a SentencePiece model (it has no pieces)")
    return pieces, settings[0], settings[1]


def from_sentencepiece(data: bytes, where: str) -> dict[str, Any]:
    """A SentencePiece BPE model, with SentencePiece's own spaces: a mark before every stretch of text. Control tokens are added tokens."""
    pieces, trainer, normaliser = _pieces(data, where)
    if trainer.get(3, 1) != 2:
        raise TokenizerError(f"{where}: model_type {trainer.get(3, 1)} is not supported, only BPE (2)")
    if normaliser.get(2):
        raise TokenizerError(f"{where}: the normaliser's character map is not supported")
    if normaliser.get(4, 1):
        raise TokenizerError(f"{where}: remove_extra_whitespaces is not supported")
    if trainer.get(24):
        raise TokenizerError(f"{where}: treat_whitespace_as_suffix is not supported")
    vocab = {piece: i for i, (piece, _, _) in enumerate(pieces)}
    if len(vocab) != len(pieces):
        raise TokenizerError(f"{where}: two pieces are the same")
    kinds = [kind for _, _, kind in pieces]
    unknown = pieces[kinds.index(_UNKNOWN)][0] if _UNKNOWN in kinds else None
    bos = trainer.get(41, 1)
    prefix = [{"type": "Prepend", "prepend": "\u2581"}] if normaliser.get(3, 1) else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "added_tokens": [_added(i, piece) for i, (piece, _, kind) in enumerate(pieces) if kind in (_UNKNOWN, _CONTROL, _USER)],
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
        "pre_tokenizer": None,
        "post_processor": _bos(pieces[bos][0], bos) if isinstance(bos, int) and bos < len(pieces) and kinds[bos] == _CONTROL else None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip
            ],
        },
        "model": {
            "type": "BPE", "unk_token": unknown, "fuse_unk": True, "byte_fallback": _BYTE in kinds,
            "vocab": vocab, "merges": _merges(pieces, vocab),
        },
    }  # fmt: skip


def _merges(pieces: list[tuple[str, float, int]], vocab: dict[str, int]) -> list[list[str]]:
    """Every split of every piece into two pieces: the best-scored piece first, then in order of the pieces, then of the parts' ids."""
    ordinary = {piece for piece, _, kind in pieces if kind == _NORMAL}
    found = []
    for i, (piece, score, kind) in enumerate(pieces):
        if kind == _NORMAL and len(piece) > 1:
            splits = [(piece[:k], piece[k:]) for k in range(1, len(piece)) if piece[:k] in ordinary and piece[k:] in ordinary]
            found += [(-score, i, vocab[a], vocab[b], a, b) for a, b in splits]
    found.sort()
    return [[a, b] for *_, a, b in found]
