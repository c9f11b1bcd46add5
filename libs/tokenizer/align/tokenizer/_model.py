"""tokenizer.json's `model` as a Bpe, checked whole at load."""

from itertools import chain, repeat
from typing import Any

from align.tokenizer._bpe import Bpe, Merges, merges_of, merges_of_ranks
from align.tokenizer._errors import TokenizerError
from align.tokenizer._json_parts import Node, is_text, short
from align.tokenizer._unicode import ASSETS


def model_from(node: Node, byte_level: bool) -> tuple[Bpe, list[str]]:
    """The model, and its merges as the tokens left, right, left, right, … in order of rank. Raises
    TokenizerError on what is not BPE, on options that are not supported, and on merges without their tokens."""
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
    merges, flat = _ranks(node, vocab) if node.value.get("ranks") is not None else _merges(node, vocab)
    unk = node.get("unk_token", str, None)
    if unk is not None and unk not in vocab:
        node.fail(f"unk_token {unk!r} is not in the vocabulary")
    bpe = Bpe(
        vocab, merges,
        unk=unk,
        fuse_unk=node.get("fuse_unk", bool, False),
        byte_fallback=node.get("byte_fallback", bool, False),
        ignore_merges=node.get("ignore_merges", bool, False),
        byte_level=byte_level,
    )  # fmt: skip
    return bpe, flat


def _vocabulary(node: Node) -> dict[str, int]:
    vocab: dict[str, int] = node.get("vocab", dict)
    if not set(map(type, vocab.values())) <= {int}:
        token = next(t for t, i in vocab.items() if type(i) is not int)
        node.fail(f"vocab[{short(token)}] should be a number, not {short(vocab[token])}")
    joined = "".join(vocab)
    if not (joined.isascii() or is_text(joined)):
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


def _ranks(node: Node, vocab: dict[str, int]) -> tuple[Merges, list[str]]:
    """Our own form of tiktoken-style files: the rank of every token that merging can make."""
    ranks: dict[str, int] = node.get("ranks", dict)
    for token, rank in ranks.items():
        if type(rank) is not int or token not in vocab:
            node.fail(f"ranks[{short(token)}] should be the number of a token of the vocabulary, not {short(rank)}")
    if len(set(ranks.values())) != len(ranks):
        node.fail("two tokens of 'ranks' have the same rank")
    return merges_of_ranks(vocab, ranks), []


def _merges(node: Node, vocab: dict[str, int]) -> tuple[Merges, list[str]]:
    merges = node.get("merges", list)
    kinds = set(map(type, merges))
    flat: list[str] = []
    if kinds == {str} and set(map(str.count, merges, repeat(" "))) == {1}:
        flat = " ".join(merges).split(" ")
    elif kinds == {list} and set(map(len, merges)) == {2}:
        flat = list(chain.from_iterable(merges))
    if merges and set(map(type, flat)) != {str}:
        first = next(i for i, merge in enumerate(merges) if not _is_merge(merge) or type(merge) is not type(merges[0]))
        raise TokenizerError(f"{node.path}.merges[{first}]: should be a pair of tokens, not {str(merges[first])[:60]!r}")
    try:
        return merges_of(vocab, flat), flat
    except KeyError:
        for i, (left, right) in enumerate(zip(flat[::2], flat[1::2], strict=True)):
            for token in (left, right, left + right):
                if token not in vocab:
                    raise TokenizerError(f"{node.path}.merges[{i}]: token {token!r} is not in the vocabulary") from None
        raise


def _is_merge(merge: Any) -> bool:
    if isinstance(merge, str):
        return merge.count(" ") == 1
    return isinstance(merge, list) and len(merge) == 2 and all(isinstance(token, str) for token in merge)


def fingerprint(data: dict[str, Any], bpe: Bpe) -> str:
    """sha256 over all that ids and texts depend on; the two spellings of merges give the same one."""
    import hashlib
    import json

    model = data["model"]
    parts = [
        sorted(bpe.vocab.items(), key=lambda item: item[1]),
        list(model.get("ranks") or (m.split(" ") if isinstance(m, str) else m for m in model["merges"])),
        {key: value for key, value in model.items() if key not in ("vocab", "merges", "ranks")},
        {key: value for key, value in data.items() if key in ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder")},
        [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((ASSETS / "unicode").glob("*.json"))],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
