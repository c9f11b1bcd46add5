"""Damaged tokenizer files and random texts: an error that names the place, or right output; never another exception, never a hang."""

import json
import random
import time
from pathlib import Path

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
            other = component_json(draw.randrange(len(components()["configs"])))
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


def load_damaged(data: dict, draw: random.Random, folder: Path) -> Tokenizer:
    """From the parsed value, or from a file, some of whose bytes may be damaged too."""
    kind = draw.random()
    if kind < 0.7:
        return Tokenizer.from_dict(data)
    raw = bytearray(json.dumps(data, ensure_ascii=kind < 0.8).encode("utf-8", "surrogatepass"))
    for _ in range(draw.choice((0, 1, 1, 2, 5))):
        place = draw.randrange(len(raw) + 1)
        raw[place : place + draw.choice((0, 1, 1, 3, 1000))] = draw.choice(
            (b"", b"", b'"', b"}", b"]", b",", b"9", b"\xff", b"\\ud800", b"null")
        )
    path = folder / "tokenizer.json"
    path.write_bytes(raw)
    return Tokenizer.load(path)


def fuzz_files(count: int, seed: int, folder: Path) -> tuple[int, int]:
    """(worked, refused) of `count` changes of the small files that together use every component. Nothing else may come of it."""
    draw = random.Random(seed)
    worked = refused = 0
    paths = [list(places(component_json(i))) for i in range(len(components()["configs"]))]
    for number in range(count):
        index = draw.randrange(len(paths))
        data = component_json(index)
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            damage(data, paths[index], draw)
        start = time.process_time()
        try:
            use(load_damaged(data, draw, folder))
            worked += 1
        except TokenizerError as error:
            assert "\n" not in str(error) and len(str(error)) < 2000
            refused += 1
        assert time.process_time() - start < 10, f"change {number} of seed {seed} took too long"
    return worked, refused


def fuzz_full_files(count: int, seed: int, folder: Path, names=("mistral-7b-v0.3", "gpt2", "smollm2")) -> tuple[int, int]:
    """The same with whole published files."""
    draw = random.Random(seed)
    worked = refused = 0
    sources = {name: json.dumps(load(name)._data) for name in names}
    for number in range(count):
        data = json.loads(sources[draw.choice(names)])
        paths = [path for path in places(data) if path[:2] != ("model", "vocab")]
        for _ in range(draw.choice((1, 1, 2))):
            damage(data, paths, draw)
        start = time.process_time()
        try:
            use(load_damaged(data, draw, folder))
            worked += 1
        except TokenizerError as error:
            assert "\n" not in str(error) and len(str(error)) < 2000
            refused += 1
        assert time.process_time() - start < 60, f"change {number} of seed {seed} took too long"
    return worked, refused


def fuzz_bytes(name: str, count: int, seed: int) -> int:
    """Random byte strings, read as UTF-8 with U+FFFD for what is none, or as Latin-1; the number of strings tried."""
    tokenizer, draw = load(name), random.Random(seed)
    for _ in range(count):
        data = draw.randbytes(draw.randrange(1, 24))
        text = data.decode("utf-8", "replace") if draw.random() < 0.5 else data.decode("latin-1")
        ids = tokenizer.encode(text)
        assert tokenizer.encode_with_offsets(text).ids == ids, (name, text)
        back = tokenizer.decode_bytes(ids)
        assert back == text.encode() or name not in LOSSLESS, (name, text)
    return count


LOSSLESS = ("gpt2", "mistral-tekken-240911")  # every byte is a token, and nothing is normalised


def test_damaged_files(tmp_path):
    worked, refused = fuzz_files(20_000, 2026, tmp_path)
    print(f"{worked} worked, {refused} were refused")
    assert worked > 500 and refused > 5000


def test_damaged_full_files(tmp_path):
    worked, refused = fuzz_full_files(12, 2026, tmp_path)
    assert worked + refused == 12


@pytest.mark.parametrize("name", ("mistral-7b-v0.3", "gpt2", "smollm2"))
def test_random_bytes(name):
    assert fuzz_bytes(name, 20_000, 2026) == 20_000


@pytest.mark.parametrize("name", ("mistral-7b-v0.3", "mistral-7b-v0.3-legacy", "gpt2", "smollm2"))
@pytest.mark.parametrize("unit", ("a", " ", "\n", "\u0301", "1", "ab", "^", "\u4e2d", " \n", "\U0001f642", "/\n", "\u0bcd\u0334"))
def test_a_megabyte_of_one_thing(name, unit):
    """No input takes quadratic time, nor much memory; 20 s, for busy machines, would be hours if one did."""
    tokenizer = load(name)
    text = unit * (1_000_000 // len(unit.encode()))
    start = time.process_time()
    assert tokenizer.decode(tokenizer.encode(text, special="literal")).strip() == text.strip()
    assert time.process_time() - start < 20
