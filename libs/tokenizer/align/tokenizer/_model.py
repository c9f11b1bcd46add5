"""tokenizer.json's `model` as a Bpe, checked whole at load."""

from typing import Any, NoReturn

from align.tokenizer._bpe import Bpe
from align.tokenizer._errors import TokenizerError
from align.tokenizer._json_parts import Node, is_text
from align.tokenizer._unicode import ASSETS


def model_from(node: Node, byte_level: bool) -> Bpe:
    """The model. Raises TokenizerError on what is not BPE, on options that are not supported, and on merges without their tokens."""
    if node.value is None:
        node.fail("the file has no model")
    if node.get("type", str, "BPE") != "BPE":
        node.unsupported()
    for option in ("continuing_subword_prefix", "end_of_word_suffix"):
        if node.get(option, str, ""):
            node.fail(f"{option!r} is not supported")
    if node.get("dropout", (int, float), 0):
        node.fail("'dropout' is not supported: ids would differ from call to call")
    vocab = _vocabulary(node)
    if node.value.get("ranks") is not None:  # our own form of tiktoken-style files
        ranks, separator = node.get("ranks", dict), ""
    else:
        ranks, separator = _merges(node, vocab)
    unk = node.get("unk_token", str, None)
    if unk is not None and unk not in vocab:
        node.fail(f"unk_token {unk!r} is not in the vocabulary")
    return Bpe(
        vocab, ranks, separator,
        unk=unk,
        fuse_unk=node.get("fuse_unk", bool, False),
        byte_fallback=node.get("byte_fallback", bool, False),
        ignore_merges=node.get("ignore_merges", bool, False),
        byte_level=byte_level,
    )  # fmt: skip


def _vocabulary(node: Node) -> dict[str, int]:
    vocab: dict[str, int] = node.get("vocab", dict)
    if not set(map(type, vocab.values())) <= {int}:
        token = next(t for t, i in vocab.items() if type(i) is not int)
        node.fail(f"vocab[{token!r}] should be a number, not {vocab[token]!r}")
    if not is_text("".join(vocab)):
        node.fail(f"vocab[{next(t for t in vocab if not is_text(t))!r}] holds a lone surrogate, which is no text")
    ids = set(vocab.values())
    if vocab and not (min(ids) >= 0 and max(ids) < 1 << 32):
        node.fail("the ids in 'vocab' are out of range")
    if len(ids) != len(vocab):
        seen: dict[int, str] = {}
        for token, token_id in vocab.items():
            if token_id in seen:
                node.fail(f"vocab[{token!r}] and vocab[{seen[token_id]!r}] have the same id {token_id}")
            seen[token_id] = token
    return vocab


def _merges(node: Node, vocab: dict[str, int]) -> tuple[dict[str, int], str]:
    """Rank of every "left<separator>right", in the file's order (a repeated merge keeps its last rank, as in the reference)."""
    merges = node.get("merges", list)
    separator = " "
    kinds = set(map(type, merges))
    if kinds <= {str}:
        pairs = merges
        bad = next((i for i, m in enumerate(merges) if m.count(" ") != 1), None)
    elif kinds <= {list}:
        try:
            pairs = list(map(" ".join, merges))
            bad = next((i for i, m in enumerate(merges) if len(m) != 2), None)
            if bad is None and any(p.count(" ") != 1 for p in pairs):
                separator = next(s for s in "\0\1\2\3\4\5\6\7" if not any(s in t for t in vocab))
                pairs = list(map(separator.join, merges))
        except TypeError:
            bad = next(i for i, m in enumerate(merges) if not all(isinstance(t, str) for t in m))
        except StopIteration:
            raise TokenizerError(f"{node.path}.merges: the tokens use every separator that could be used") from None
    else:
        bad = next(i for i, m in enumerate(merges) if not isinstance(m, (str, list)) or type(m) is not type(merges[0]))
    if bad is not None:
        raise TokenizerError(f"{node.path}.merges[{bad}]: should be a pair of tokens, not {str(merges[bad])[:60]!r}")
    if pairs:
        sides = set(separator.join(pairs).split(separator))
        made = {pair.replace(separator, "") for pair in pairs}
        if not (sides | made) <= vocab.keys():
            _name_missing(node, pairs, separator, vocab)
    return dict(zip(pairs, range(len(pairs)), strict=False)), separator


def _name_missing(node: Node, pairs: list[str], separator: str, vocab: dict[str, int]) -> NoReturn:
    for i, pair in enumerate(pairs):
        left, right = pair.split(separator)
        for token in (left, right, left + right):
            if token not in vocab:
                raise TokenizerError(f"{node.path}.merges[{i}]: token {token!r} is not in the vocabulary")
    node.fail("the merges do not fit the vocabulary")


def fingerprint(data: dict[str, Any], bpe: Bpe) -> str:
    """sha256 over all that ids and texts depend on; the two spellings of merges give the same one."""
    import hashlib
    import json

    model = {key: value for key, value in data["model"].items() if key not in ("vocab", "merges", "ranks")}
    parts = [
        sorted(bpe.vocab.items(), key=lambda item: item[1]),
        [rank.split(bpe.separator) if bpe.separator else rank for rank in bpe.ranks],
        model,
        {key: value for key, value in data.items() if key in ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder")},
        [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((ASSETS / "unicode").glob("*.json"))],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
