"""Messages and lines: what is written is read back, and whatever else comes is a MessageError that names the place."""

import json
import math
import random
from dataclasses import fields
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_protocol_strategies import MESSAGES

from align.rollout_protocol import FROM_SAMPLER, FROM_TRAINER, Alive, Drawn, Framer, Generate, Hello, MessageError, Samples, decode, encode

SHA = "ab" * 32
ASK = Generate("1", SHA, [1, 2], 2, 8, 1.0, 1.0, 0, 0.0, [2], ["stop"], 7)
TOLD = Samples("1", SHA, 3, [Drawn([4, 2], [-0.5, -1.0], [-0.25, -2.0], "stop")])


@given(MESSAGES)
def test_what_is_written_is_read_back(message):
    line = encode(message)
    assert line.endswith(b"\n") and line.count(b"\n") == 1 and line.isascii()
    assert decode(line) == message and decode(line[:-1]) == message
    assert json.loads(line)["type"] == message.TYPE


@given(st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), max_size=6), st.lists(st.integers(0, 200), max_size=8))
def test_any_cut_of_the_stream_gives_the_same_lines(lines, cuts):
    stream, framer, found = b"".join(line + b"\n" for line in lines), Framer(), []
    bounds = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    for begin, end in pairwise(bounds):
        found += framer.feed(stream[begin:end])
    assert found == lines and framer.unfinished == 0


def test_a_float_keeps_its_bits():
    value = -math.pi * 1e-7
    assert decode(encode(Samples("1", SHA, 0, [Drawn([1], [value], [-1.0], "stop")]))).samples[0].logprobs == [value]


def test_every_message_has_kinds_for_its_fields_and_one_direction():
    for message in FROM_TRAINER + FROM_SAMPLER:
        assert [field.name for field in fields(message)] == list(message.KINDS)
    assert len({message.TYPE for message in FROM_TRAINER + FROM_SAMPLER}) == len(FROM_TRAINER + FROM_SAMPLER)
    with pytest.raises(MessageError, match="type must be one of welcome"):
        decode(encode(ASK), FROM_SAMPLER)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (["id"], "", "generate.id"),
        (["id"], 5, "generate.id"),
        (["id"], "x" * 101, "generate.id"),
        (["weights"], "AB" * 32, "generate.weights"),
        (["weights"], None, "generate.weights"),
        (["prompt"], [], "generate.prompt"),
        (["prompt"], "12", "generate.prompt"),
        (["prompt"], [1, -1], "generate.prompt[1]"),
        (["prompt"], [1, 2**31], "generate.prompt[1]"),
        (["prompt"], [1.0], "generate.prompt[0]"),
        (["prompt"], [True], "generate.prompt[0]"),
        (["prompt"], [[1]], "generate.prompt[0]"),
        (["n"], 0, "generate.n"),
        (["n"], True, "generate.n"),
        (["max_new_tokens"], 0, "generate.max_new_tokens"),
        (["temperature"], -0.1, "generate.temperature"),
        (["temperature"], "1", "generate.temperature"),
        (["top_p"], 1.5, "generate.top_p"),
        (["top_k"], -1, "generate.top_k"),
        (["min_p"], 2, "generate.min_p"),
        (["stop_ids"], [None], "generate.stop_ids[0]"),
        (["stop_strings"], [""], "generate.stop_strings[0]"),
        (["stop_strings"], ["\ud800"], "generate.stop_strings[0]"),
        (["seed"], -1, "generate.seed"),
        (["seed"], 2**63, "generate.seed"),
    ],
)
def test_a_wrong_field_is_named(path, value, field):
    found = json.loads(encode(ASK))
    found[path[0]] = value
    with pytest.raises(MessageError) as caught:
        decode(json.dumps(found).encode())
    assert caught.value.field == field and str(caught.value).startswith(field) and caught.value.exit_code == 2
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"ids": []}, "samples.samples[0].ids"),
        ({"ids": [1]}, "samples.samples[0].logprobs"),
        ({"logprobs": [-1.0]}, "samples.samples[0].logprobs"),
        ({"logprobs": [-1.0, 0.5]}, "samples.samples[0].logprobs[1]"),
        ({"raw_logprobs": [-1.0, "x"]}, "samples.samples[0].raw_logprobs[1]"),
        ({"finish_reason": "eos"}, "samples.samples[0].finish_reason"),
        ({"more": 1}, "samples.samples[0].more"),
    ],
)
def test_a_wrong_sample_is_named(change, field):
    found = json.loads(encode(TOLD))
    found["samples"][0].update(change)
    with pytest.raises(MessageError) as caught:
        decode(json.dumps(found).encode())
    assert caught.value.field == field


def test_missing_and_added_fields_are_named():
    for name in Generate.KINDS:
        found = json.loads(encode(ASK))
        del found[name]
        with pytest.raises(MessageError, match=rf"^generate\.{name} is missing"):
            decode(json.dumps(found).encode())
    with pytest.raises(MessageError, match=r"^generate\.top_q is no field of the protocol"):
        decode(json.dumps({**json.loads(encode(ASK)), "top_q": 1}).encode())
    with pytest.raises(MessageError, match=r"generate\.top_p must be a number from 0 to 1, not 7"):
        encode(Generate("1", SHA, [1], 1, 1, 1.0, 7, 0, 0.0, [], [], 0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line",
    [
        b"", b" ", b"\n", b"null", b"[]", b"7", b'"hello"', b"{", b"{}", b"\xff\xfe", b'{"type":"hello"', b'{"type":[[]]}', b"[" * 100_000,
        b'{"type":"alive","running":NaN}', b'{"type":"alive","running":1e999}', b'{"type":"alive","running":Infinity}',
        b'{"type":"alive","running":1,"running":2}', b'{"type":"alive","running":' + b"9" * 5000 + b"}", b'{"type":"alive","running":1}}',
        b'{"type":' + b"[" * 400 + b"]" * 400 + b"}", b'{"type":"alive","running":"\x01"}',
    ],
)  # fmt: skip
def test_what_is_no_message_is_a_message_error(line):
    with pytest.raises(MessageError) as caught:
        decode(line)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_lines_have_a_limit():
    line = encode(ASK)
    assert decode(line, limit=len(line)) == ASK == decode(encode(ASK, limit=len(line)))
    for limit in (len(line) - 1, 10):
        with pytest.raises(MessageError, match="the limit is"):
            decode(line, limit=limit)
        with pytest.raises(MessageError, match="the limit is"):
            encode(ASK, limit=limit)
    framer = Framer(100)
    assert framer.feed(b"x" * 99) == [] and framer.unfinished == 99
    with pytest.raises(MessageError, match="more than 100 bytes"):
        framer.feed(b"x")
    with pytest.raises(MessageError, match="more than 100 bytes"):
        Framer(100).feed(b"a\n" + b"x" * 200 + b"\n")


def fuzz(count: int, seed: int) -> int:
    """Random bytes, messages with bytes changed, and JSON of random parts; returns how many were messages all the same."""
    chance, good = random.Random(seed), 0
    models = [encode(each) for each in (ASK, TOLD, Hello(1, SHA, "t"), Alive(3))]
    words = '"type" "generate" "alive" "running" : , { } [ ] 1 -1 1e9 null " \\u'
    parts = [b" ", *words.encode().split()]
    for number in range(count):
        if number % 3 == 0:
            line = chance.randbytes(chance.randrange(60))
        elif number % 3 == 1:
            changed = bytearray(chance.choice(models))
            for _ in range(chance.randrange(1, 4)):
                at = chance.randrange(len(changed))
                changed[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
            line = bytes(changed)
        else:
            line = b"".join(chance.choices(parts, k=chance.randrange(1, 14)))
        framer = Framer(1 << 20)
        for piece in framer.feed(line + b"\n"):
            try:
                message = decode(piece)
            except MessageError as error:
                assert "\n" not in str(error)
                continue
            assert decode(encode(message)) == message
            good += 1
    return good


def test_random_bytes_are_messages_or_message_errors():
    assert fuzz(6_000, seed=1) > 50


@pytest.mark.slow
def test_a_hundred_thousand_random_lines():
    assert fuzz(100_000, seed=2) > 1_000
