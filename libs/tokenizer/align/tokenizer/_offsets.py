"""Offsets of tokens, and the fingerprint."""

import hashlib
import json

from align.tokenizer import _unicode as U
from align.tokenizer._bpe import BYTE_TO_CHAR, Bpe, to_alphabet


def encode_with_offsets(tokenizer, text, add_special_tokens, skip, unit):
    from align.tokenizer._tokenizer import Encoding

    ids, offsets = [], []
    at = 0
    for start, end, token in [*tokenizer._raw_matcher.matches(text, skip), (len(text), len(text), None)]:
        if start > at:
            _stretch(tokenizer, text[at:start], at, skip, ids, offsets)
        if token is not None:
            ids.append(token.id)
            offsets.append((start, end))
        at = end
    if unit == "byte":
        offsets = _bytes_of(tokenizer, text, ids, offsets)
    elif tokenizer._post.trim_offsets:
        offsets = [_trimmed(tokenizer, i, *pair) for i, pair in enumerate(zip(ids, offsets))]
    if add_special_tokens:
        before, after = tokenizer._post.before, tokenizer._post.after
        return Encoding([*before, *ids, *after], [(0, 0)] * len(before) + offsets + [(0, 0)] * len(after))
    return Encoding(ids, offsets)


def _stretch(tokenizer, text, base, skip, ids, offsets):
    """Appends the ids and character offsets of a stretch without raw added tokens, which begins at `base`."""
    spans = [(i, i + 1) for i in range(base, base + len(text))]
    if tokenizer._normaliser:
        text, spans = tokenizer._normaliser.aligned(text, spans)

    def skip_here(token, start, end):  # `skip` takes places in the whole text
        return skip(token, spans[start][0], spans[end - 1][1])

    at = 0
    for start, end, token in [*tokenizer._normal_matcher.matches(text, skip_here), (len(text), len(text), None)]:
        if start > at:
            for piece, piece_spans in tokenizer._pretokenizer.pieces(text[at:start], spans[at:start], base == 0 and at == 0):
                _piece(tokenizer, piece, piece_spans, ids, offsets)
        if token is not None:
            ids.append(token.id)
            offsets.append((spans[start][0], spans[end - 1][1]))
        at = end


def _piece(tokenizer, piece, spans, ids, offsets):
    bpe, cache = tokenizer._bpe, tokenizer._offset_cache
    at = 0
    for word in tokenizer._segments(piece) if tokenizer._segments else [piece]:
        ids += bpe[word]
        where = cache.get(word)
        if where is None:
            where = char_ranges(bpe, word)
            if len(word) <= 256:
                if len(cache) >= bpe.cache_words:
                    cache.clear()
                cache[word] = where
        for first, last in where:
            offsets.append((spans[at + first][0], spans[at + last][1]))
        at += len(word)


def char_ranges(bpe: Bpe, word: str) -> list[tuple[int, int]]:
    """(first, last) character of each token of a word.

    As in the reference, a token's place is counted in bytes of the tokens before it: where characters were dropped because
    the vocabulary lacks them, what follows in the same word sits too far left.
    """
    symbols = bpe.symbols(word)
    text = to_alphabet(word) if bpe.byte_level else word
    parts, lengths = _first_parts(bpe, text)
    char_of_byte = [i for i, char in enumerate(text) for _ in char.encode()]
    if bpe.byte_level:
        origin = [i for i, char in enumerate(word) for _ in char.encode()]
        char_of_byte = [origin[i] for i in char_of_byte]
    out, at, k = [], 0, 0
    for symbol in symbols:
        size = taken = 0
        while taken < len(symbol):
            taken += len(parts[k])
            size += lengths[k]
            k += 1
        out.append((char_of_byte[at], char_of_byte[at + size - 1]))
        at += size
    return out


def _first_parts(bpe: Bpe, text: str) -> tuple[list[str], list[int]]:
    """What a word is made of before merging, with the bytes of each part."""
    if bpe.ignore_merges and text in bpe.vocab:
        return [text], [len(text.encode())]
    parts, lengths = [], []
    for char in text:
        known = bpe._known([char])
        size = len(char.encode())
        if known == [bpe.unk] and char not in bpe.vocab:
            if bpe.fuse_unk and parts and parts[-1] is bpe.unk:
                lengths[-1] += size
                continue
            parts.append(bpe.unk)
            lengths.append(size)
            continue
        parts += known
        lengths += [size] if len(known) == 1 else [1] * len(known)
    return parts, lengths


def _trimmed(tokenizer, index, token_id, span):
    """ByteLevel's trim_offsets: spaces at the ends of a token are not part of its place."""
    token = tokenizer._text_of[token_id]
    spaces = [char == BYTE_TO_CHAR[32] or U.contains(U.property_set("s"), ord(char)) for char in token]
    start, end = span
    leading = spaces.index(False) if False in spaces else len(spaces)
    trailing = spaces[::-1].index(False) if False in spaces else len(spaces)
    if leading and not ((index == 0 or start == 0) and tokenizer._post.add_prefix_space):
        start = min(start + leading, end)
    if trailing and end >= trailing:
        end = max(end - trailing, start)
    return start, end


def _bytes_of(tokenizer, text, ids, offsets):
    """Character offsets as byte offsets; tokens that share a character get their own bytes of it."""
    starts = [0]
    for char in text:
        starts.append(starts[-1] + len(char.encode()))
    return [(starts[a], starts[b]) for a, b in offsets]


def fingerprint(data: dict, bpe: Bpe) -> str:
    model = {key: value for key, value in data["model"].items() if key not in ("vocab", "merges")}
    parts = [
        sorted(bpe.vocab.items(), key=lambda item: item[1]),
        list(bpe.ranks) if bpe.separator == " " else [rank.split(bpe.separator) for rank in bpe.ranks],
        model,
        {key: value for key, value in data.items() if key in ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder")},
        [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((U.ASSETS / "unicode").glob("*.json"))],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
