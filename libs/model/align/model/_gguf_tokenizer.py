"""tokenizer.json and tokenizer_config.json from a GGUF file's metadata, and the metadata from them."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from align.model._config import ModelConfig
from align.model._errors import ModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)  # tokenizer.ggml.token_type
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


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
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER)
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
        "type": "BPE",
        "dropout": None,
        "unk_token": unk,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unk is not None,
        "byte_fallback": unk is not None,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": merges,
    }
    config = _config(metadata, tokens, added, default_bos=model == "llama" or pre == "llama-bpe")
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _template(config, vocab),
        "decoder": decoder,
        "model": bpe,
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
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
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


def tokenizer_metadata(directory: Path, config: ModelConfig, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """The tokenizer.ggml.* metadata of a directory's tokenizer.json and tokenizer_config.json: what `tokenizer_files` reads.

    Raises:
        ModelError: no tokenizer.json, or one that GGUF has no form for; nothing is written that would tokenize otherwise.
    """
    place = directory / "tokenizer.json"
    if not place.is_file():
        raise ModelError(f"{directory} has no tokenizer.json, which a GGUF file includes")
    tokenizer = read(place)
    settings = read(directory / "tokenizer_config.json") if (directory / "tokenizer_config.json").is_file() else {}
    model, added = tokenizer.get("model", {}), tokenizer.get("added_tokens") or []
    if model.get("type") != "BPE":
        raise ModelError(f"{place}: model.type is {model.get('type')!r}; BPE can be exported")
    ids = {**model["vocab"], **{item["content"]: item["id"] for item in added}}
    if max(ids.values()) >= config.vocab_size:
        raise ModelError(f"{place} has id {max(ids.values())}, the model a vocabulary of {config.vocab_size}")
    tokens = [f"[PAD{i}]" for i in range(config.vocab_size)]
    kinds = [_UNUSED] * config.vocab_size
    for token, i in ids.items():
        tokens[i] = token
        kinds[i] = _BYTE if model.get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", token) else _NORMAL
    for item in added:
        kinds[item["id"]] = _CONTROL if item.get("special") else _USER
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    data: dict[str, Any] = {"tokenizer.ggml.tokens": tokens}
    if model.get("byte_fallback"):
        kinds[ids[model["unk_token"]]] = _UNKNOWN
        scores = _scores(tokens, kinds, merges, place)
        data |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": kinds}
        data["tokenizer.ggml.add_space_prefix"] = _space_prefix(tokenizer, place)
        data["tokenizer.ggml.unknown_token_id"] = ids[model["unk_token"]]
    else:
        data |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": _pre(tokenizer, place), "tokenizer.ggml.token_type": kinds}
        data["tokenizer.ggml.merges"] = merges
    ends = (("bos", "bos", config.bos_token_id), ("eos", "eos", config.eos_token_id), ("pad", "padding", config.pad_token_id))
    for name, key, known in ends:
        token = settings.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        number = ids.get(text) if text is not None else known[0] if isinstance(known, tuple) else known
        if number is not None:
            data[f"tokenizer.ggml.{key}_token_id"] = number
    around = _around(tokenizer.get("post_processor"))
    for name, key in (("bos", "bos"), ("eos", "eos")):
        data[f"tokenizer.ggml.add_{name}_token"] = data.get(f"tokenizer.ggml.{key}_token_id") in [ids.get(token) for token in around[name]]
    if isinstance(settings.get("chat_template"), str):
        data["tokenizer.chat_template"] = settings["chat_template"]
    return data


def _pre(tokenizer: Mapping[str, Any], place: Path) -> str:
    """The name that readers know a byte-level pre-tokenizer by."""
    normalizer, ignore = tokenizer.get("normalizer"), bool(tokenizer["model"].get("ignore_merges"))
    for name, (pre_tokenizer, wanted, ignore_merges) in _BYTE_LEVEL.items():
        if _plain(tokenizer.get("pre_tokenizer")) == _plain(pre_tokenizer) and normalizer == wanted and ignore == ignore_merges:
            return name
    raise ModelError(
        f"{place}: its pre-tokenizer is none that GGUF files have a name for here ({', '.join(_BYTE_LEVEL)}); train with one of those "
        "tokenizers to export, or use the directory as it is, with transformers or vLLM"
    )


def _plain(part: Any) -> Any:
    """Without what changes no token: offsets, and the order of keys."""
    if isinstance(part, dict):
        return {key: _plain(value) for key, value in part.items() if key != "trim_offsets"}
    return [_plain(item) for item in part] if isinstance(part, list) else part


def _space_prefix(tokenizer: Mapping[str, Any], place: Path) -> bool:
    pre, normalizer = tokenizer.get("pre_tokenizer"), tokenizer.get("normalizer")
    if pre is None:
        for prefix in (True, False):
            wanted = _sentencepiece(prefix)[0]
            if normalizer in (wanted, *([wanted["normalizers"][0]] if not prefix else [])):
                return prefix
    elif pre.get("type") == "Metaspace" and pre.get("replacement") == "▁" and not pre.get("split", True) and normalizer is None:
        return bool(pre.get("prepend_scheme", "always") != "never")
    raise ModelError(f"{place}: its way with spaces is none that GGUF files have (SentencePiece with or without a space in front)")


def _scores(tokens: list[str], kinds: list[int], merges: list[str], place: Path) -> list[float]:
    """Scores from which a SentencePiece reader derives the same merges in the same order; checked, not hoped for."""
    first: dict[str, int] = {}
    for merge in merges:
        first.setdefault(merge.replace(" ", "", 1), len(first))
    scores = [-float(first.get(token, len(first))) for token in tokens]
    if _merges_from_scores(tokens, kinds, scores, str(place)) != merges:
        raise ModelError(f"{place}: its merges are in no order that scores can give; GGUF files have scores for such a tokenizer")
    return scores


def _around(post: Any) -> dict[str, list[str]]:
    """The special tokens that a TemplateProcessing puts in front of and behind a text."""
    found: dict[str, list[str]] = {"bos": [], "eos": []}
    for part in post.get("processors", [post]) if isinstance(post, dict) else []:
        side = "bos"
        for item in part.get("single", []) if part.get("type") == "TemplateProcessing" else []:
            if "Sequence" in item:
                side = "eos"
            else:
                found[side].append(item["SpecialToken"]["id"])
    return found
