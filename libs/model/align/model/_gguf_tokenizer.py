"""tokenizer.json and tokenizer_config.json from a GGUF file's metadata."""

from collections.abc import Mapping
from typing import Any

from align.model._errors import ModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)  # tokenizer.ggml.token_type
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool, trim_offsets: bool, add_prefix_space: bool = False) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": trim_offsets, "use_regex": use_regex}


def _split(digits: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": _SPLIT % digits}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(False, False)]}


_DIGITS_THEN_BYTES = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(True, True)]}
# tokenizer.ggml.pre -> pre-tokenizer, normaliser, ignore_merges
_BYTE_LEVEL: dict[str, tuple[dict[str, Any], dict[str, Any] | None, bool]] = {
    "smollm": (_DIGITS_THEN_BYTES, None, False),
    "gpt-2": (_byte_level(True, True), None, False),
    "llama-bpe": (_split("{1,3}"), None, True),
    "qwen2": (_split(""), {"type": "NFC"}, False),
}


def tokenizer_files(metadata: Mapping[str, Any], place: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the objects of tokenizer.json and tokenizer_config.json.

    Byte-level BPE ("gpt2") comes back as it was; of SentencePiece BPE ("llama") the merges are derived from the scores, and text is
    prepended with a space as SentencePiece does.

    Raises:
        ModelError: no tokenizer in the metadata, or one that cannot be rebuilt.
    """
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if not tokens:
        raise ModelError(f"{place} has no tokenizer.ggml.tokens; the tokenizer cannot be rebuilt")
    kinds = kinds or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelError(f"{place} has {len(kinds)} tokenizer.ggml.token_type for {len(tokens)} tokens")
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
    added = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": kind != _USER}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind in (_UNKNOWN, _CONTROL, _USER)
    ]
    if model == "gpt2" and pre in _BYTE_LEVEL:
        pre_tokenizer, normalizer, ignore_merges = _BYTE_LEVEL[pre]
        merges, unk, decoder = metadata.get("tokenizer.ggml.merges", []), None, _byte_level(True, True, True)
    elif model == "llama":
        pre_tokenizer, ignore_merges = None, False
        normalizer, decoder = _sentencepiece(metadata.get("tokenizer.ggml.add_space_prefix", True))
        merges = _merges_from_scores(tokens, kinds, metadata.get("tokenizer.ggml.scores", []), place)
        unk = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    else:
        supported = ", ".join(f"gpt2/{name}" for name in _BYTE_LEVEL)
        raise ModelError(f"{place}: tokenizer {model}/{pre} is not supported; supported are {supported} and llama")
    bpe = {
        "type": "BPE", "dropout": None, "unk_token": unk, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": unk is not None, "byte_fallback": unk is not None, "ignore_merges": ignore_merges, "vocab": vocab, "merges": merges,
    }
    config = _config(metadata, tokens, added, default_bos=model == "llama" or pre == "llama-bpe")
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "post_processor": _template(config, vocab), "decoder": decoder, "model": bpe,
    }
    return tokenizer, config


def _config(metadata: Mapping[str, Any], tokens: list[str], added: list[dict[str, Any]], *, default_bos: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token", default_bos),
        "add_eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
        "added_tokens_decoder": {str(item["id"]): {k: v for k, v in item.items() if k != "id"} for item in added},
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and token < len(tokens):
            config[f"{name}_token"] = tokens[token]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def _template(config: Mapping[str, Any], vocab: Mapping[str, int]) -> dict[str, Any] | None:
    """The post-processor that adds the begin and end tokens, where the file says so."""
    bos = config.get("bos_token") if config["add_bos_token"] else None
    eos = config.get("eos_token") if config["add_eos_token"] else None
    if bos is None and eos is None:
        return None

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        parts = [(bos, "SpecialToken"), (sequence, "Sequence"), (eos, "SpecialToken")]
        return [{kind: {"id": name, "type_id": type_id}} for name, kind in parts if name is not None]

    special = {token: {"id": token, "ids": [vocab[token]], "tokens": [token]} for token in (bos, eos) if token is not None}
    return {"type": "TemplateProcessing", "single": around("A", 0), "pair": around("A", 0) + around("B", 1), "special_tokens": special}


def _sentencepiece(space_prefix: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizers = [{"type": "Prepend", "prepend": "▁"}, replace] if space_prefix else [replace]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]
    if space_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "normalizers": normalizers}, {"type": "Sequence", "decoders": decoders}


def _merges_from_scores(tokens: list[str], kinds: list[int], scores: list[float], place: str) -> list[str]:
    """Every pair of pieces that joins to a piece, best score first: what a SentencePiece BPE model merges, in its order."""
    if len(scores) != len(tokens):
        raise ModelError(f"{place} has {len(scores)} tokenizer.ggml.scores for {len(tokens)} tokens; the merges cannot be derived")
    ids = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == _NORMAL}
    found = []
    for piece, i in ids.items():
        for cut in range(1, len(piece)):
            left, right = ids.get(piece[:cut]), ids.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-scores[i], left, right, f"{piece[:cut]} {piece[cut:]}"))
    return [merge[3] for merge in sorted(found)]
