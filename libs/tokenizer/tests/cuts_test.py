"""Cuts that are proved from a pattern or from merges: cutting first and encoding the parts gives what encoding the whole gives."""

import itertools
import random
import re

import pytest
from tokenizer_cases import load

from align.tokenizer import Tokenizer
from align.tokenizer._cuts import chunk_pattern
from align.tokenizer._forms import Form
from align.tokenizer._pretokenise import GPT2_PATTERN
from align.tokenizer._regex import MARK, Finder, digits_first, many_at_once, parse
from align.tokenizer._unicode import intersect, property_set

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = TEKKEN.replace(r"\p{N}|", r"\p{N}{1,3}|").replace("+|[^", "+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^", 1)
PATTERNS = {
    "gpt2": parse(GPT2_PATTERN, ""),
    "smollm2": digits_first(parse(GPT2_PATTERN, ""), property_set("rust_is_numeric")),
    "llama3": parse(LLAMA3, ""),
    "qwen": parse(LLAMA3.replace("{1,3}", ""), ""),
    "tekken": parse(TEKKEN, ""),
    "gpt4o": parse(GPT4O, ""),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_chunks_do_not_change_the_words(name):
    """Every text of up to five of nine characters, and longer random ones of more kinds."""
    finder = Finder(PATTERNS[name], name)
    pattern = chunk_pattern(finder) or ""
    chunks, find_one = many_at_once(pattern, 3, 0), re.compile(pattern).findall

    def one_digit_each(piece: str) -> list[str]:
        return list(piece) if finder.runs and piece.isdigit() else [piece]

    def one_by_one(text: str) -> list[str]:
        return [part for part in find_one(text) if part]

    texts = ("".join(chars) for size in range(1, 6) for chars in itertools.product(" \n\ta1./'", repeat=size))
    draw = random.Random(4)
    alphabet = "   \n\n\r\t\u00a0\u2003\u3000\u2028\x1c\x85aAbsſ1٣./'!\u0301中🙂\U00010400"
    longer = ("".join(draw.choices(alphabet, k=draw.randrange(6, 25))) for _ in range(5000))
    for text in itertools.chain(texts, longer):
        parts = chunks(text)
        assert parts == one_by_one(text)
        assert "".join(parts) == text
        assert list(itertools.chain.from_iterable(map(finder.words, parts))) == finder.words(text), text
        if text.isascii():
            marked = finder.marked(MARK.join(parts))
            assert [w for piece in marked for w in one_digit_each(piece)] == [w for p in parts for w in (*finder.words(p), MARK)][:-1], text


def test_runs_of_digits_are_told_from_the_pattern():
    """Only where each ASCII digit is sure to be a match of its own."""
    known = {name: Finder(pattern, name).runs for name, pattern in PATTERNS.items()}
    assert known == {"gpt2": False, "smollm2": True, "llama3": False, "qwen": True, "tekken": True, "gpt4o": False}
    toys = {r"\s|\d|\D": True, r"\s|\d|x\d|\D": False, r"\s|[0-8]|9|\D": False, r"a+(?!\d)|\d|\D": True, r"\d|\d\d|\D": False}
    for pattern, runs in toys.items():
        assert Finder(parse(pattern, ""), "").runs == runs, pattern


def test_long_numbers():
    """Digits stay together in the caches, up to 16 of them; their ids and places do not."""
    for name in ("mistral-7b-v0.3", "mistral-7b-v0.3-legacy", "smollm2"):
        tokenizer = load(name)
        for text in ("7" * 40, "x=3.14159265358979323846,12 é٣12345678901234567890²"):
            ids, places = tokenizer.encode_with_offsets(text)
            assert ids == tokenizer.encode(text)
            digit = {tokenizer.token_to_id(char): char for char in "0123456789"}
            found = [(digit[i], text[a:b]) for i, (a, b) in zip(ids, places, strict=True) if i in digit]
            assert found == [(char, char) for char in text if char in digit.values()]


@pytest.mark.parametrize(
    "pattern",
    [
        r"\S+ ?|\s+",  # a match that ends in white space
        r"\p{L}+(?= )|\s+|[^\s]",  # looks for the white space after it
        r"\p{L}+(?!\s\s)|\s+|[^\s]",
        r"[^\s]+|\s+(?<!x)",
        r"[^\s]+|[^\s]\s*[\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",  # spaces, then line breaks, after a word
        r"\n?[^\s]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",  # a line break before a word
        r"[^\s]+[\r\n]*|\s|\s*[\r\n]+|\s+(?!\S)|\s+",  # white space one by one, before the rest is asked
        r"[^\s]+[\r\na]*|\s*[\r\n]+|\s+(?!\S)|\s+",  # a letter after line breaks
        r"[^\s]+[\r\n]*|\s+(?!\S)|\s+",
        r"[a-z]+|\s+",  # leaves text over
    ],
)
def test_what_is_not_proved_is_not_cut(pattern):
    assert chunk_pattern(Finder(parse(pattern, ""), "")) is None


def test_the_provided_tokenizers_are_cut_into_chunks():
    for name in ("mistral-7b-v0.3", "mistral-7b-v0.3-legacy", "smollm2", "gpt2"):
        assert load(name)._chunks is not None


def toy(*merges: str, **more) -> Tokenizer:
    tokens = [chr(c) for c in range(33, 127)] + ["▁", "é", "\n", *("".join(merge.split(" ")) for merge in merges)]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    model = {"type": "BPE", "vocab": {t: i for i, t in enumerate(dict.fromkeys(tokens))}, "merges": list(merges)}
    model |= {"byte_fallback": True, **more}
    return Tokenizer.from_dict({"model": model, "pre_tokenizer": {"type": "Metaspace", "prepend_scheme": "first", "split": False}})


@pytest.mark.parametrize(
    "merges, text, words",
    [
        (["a b"], "ab 1.a\n", [" ab", " ", "1", ".", "a", "\n"]),
        (["▁ a", ". 1"], "a.1 b", [" a.1", " b"]),  # a digit joins: the coarser cut
        (["\n \n"], "a\n\nb", [" a", "\n\n", "b"]),
        (["a ▁"], "a b", None),  # a mark at the end of a token: no cut
        (["\n a"], "a\nab", None),
    ],
)
def test_segments_follow_from_the_merges(merges, text, words):
    tokenizer = toy(*merges)
    assert (tokenizer._segments and tokenizer._segments.words(tokenizer._pretokenizer.prefixed(text, True))) == words
    whole = toy(*merges, byte_fallback=False)  # where characters can be dropped there is no cut
    assert whole._segments is None
    assert tokenizer.encode(text) == whole.encode(text)


def test_no_normal_form_changes_ascii():
    """What is beyond ASCII alone tells whether a text can change."""
    for compatible, compose in itertools.product((False, True), repeat=2):
        assert intersect(Form(compatible, compose)._touched, (0, 0x80)) == ()
