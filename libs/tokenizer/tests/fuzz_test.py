"""Damaged tokenizer files and random texts: an error that names the place, or right output; never another exception, never a hang."""

import json
import random

import pytest
from tokenizer_cases import component_json, components, load

from align.tokenizer import Decoder, Tokenizer, TokenizerError

pytestmark = pytest.mark.slow

VALUES = [
    None, True, False, 0, 1, -1, 1 << 40, 1.5, "", "a", " ", "▁", "\\", "(", ")", "[a", "a{2", "\\p{X}", "(?=a)",
    "a*", "(a+)+$", [], {}, "x" * 50,
    "NFC", "ByteLevel", "Isolated", "Removed", ["a"], {"a": 1}, "\ud800", "(?:a|b)+", "(?:a+)+", "[^\\s]+", "\\s+(?!\\S)",
]  # fmt: skip
TEXTS = ("", "hello world ab", "<s>12 é日🙂 a-b</s>", "  \n x\x1f")


def places(value, path=()):
    """Paths of everything in a JSON value but the vocabulary's entries."""
    if isinstance(value, (dict, list)) and path != ("model", "vocab"):
        keys = list(value) if isinstance(value, dict) else range(min(len(value), 20))
        for key in keys:
            yield (*path, key)
            yield from places(value[key], (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def damage(data: dict, paths: list, draw: random.Random):
    """One change somewhere: a field deleted, another value put in its place or beside it, or a part of another file."""
    path = draw.choice(paths) if draw.random() < 0.9 else ("model", "vocab", draw.choice(list(components()["chars"])))
    try:
        parent, key = at(data, path[:-1]), path[-1]
        kind = draw.random()
        if kind < 0.15 and isinstance(parent, dict):
            parent.pop(key, None)
        elif kind < 0.3 and isinstance(parent, list):
            parent.insert(key, json.loads(json.dumps(draw.choice(VALUES))))
        elif kind < 0.45:
            other = component_json(draw.randrange(86))
            part = at(other, draw.choice(list(places(other))))
            parent[key] = 1 if isinstance(part, dict) and len(part) > 150 else part
        else:
            parent[key] = json.loads(json.dumps(draw.choice(VALUES)))
    except (KeyError, IndexError, TypeError):
        pass  # an earlier change took the place away


def use(tokenizer: Tokenizer):
    for text in TEXTS:
        encoding = tokenizer.encode_with_offsets(text)
        assert encoding.ids == tokenizer.encode(text)
        decoder = Decoder(tokenizer)
        assert "".join(map(decoder.push, encoding.ids)) + decoder.finish() == tokenizer.decode(encoding.ids)
        tokenizer.decode_bytes(tokenizer.encode(text, add_special_tokens=True))
        tokenizer.encode(text, special="literal")
        tokenizer.encode_with_offsets(text, unit="byte")
        tokenizer.loss_report(text)


def test_damaged_files():
    """20,000 changes of the small files that together use every component."""
    draw = random.Random(2026)
    worked = refused = 0
    paths = [list(places(component_json(i))) for i in range(86)]
    for _ in range(20_000):
        index = draw.randrange(86)
        data = component_json(index)
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            damage(data, paths[index], draw)
        try:
            use(Tokenizer.from_dict(data))
            worked += 1
        except TokenizerError as error:
            assert "\n" not in str(error)
            refused += 1
    print(f"{worked} worked, {refused} were refused")
    assert worked > 500 and refused > 5000


@pytest.mark.parametrize("name", ("mistral-7b-v0.3", "gpt2", "smollm2"))
def test_random_bytes(name):
    """20,000 random byte strings, read as UTF-8 with U+FFFD for what is none."""
    tokenizer, draw = load(name), random.Random(2026)
    for _ in range(20_000):
        data = draw.randbytes(draw.randrange(1, 24))
        text = data.decode("utf-8", "replace") if draw.random() < 0.5 else data.decode("latin-1")
        ids = tokenizer.encode(text)
        assert tokenizer.encode_with_offsets(text).ids == ids
        if name == "gpt2":
            assert tokenizer.decode_bytes(ids) == text.encode()


@pytest.mark.parametrize("name", ("mistral-7b-v0.3", "gpt2"))
@pytest.mark.parametrize("unit", ("a", " ", "\n", "\u0301", "1", "ab", "^", "\u4e2d"))
def test_a_megabyte_of_one_thing(name, unit):
    """No input takes quadratic time; 60 s of the suite's limit would be hours if it did."""
    tokenizer = load(name)
    text = unit * (1_000_000 // len(unit.encode()))
    assert tokenizer.decode(tokenizer.encode(text, special="literal")).strip() == text.strip()
