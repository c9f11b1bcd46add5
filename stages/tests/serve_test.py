"""The HTTP endpoint as a harness uses it, on the checked-in checkpoint, over a real socket."""

import http.client
import json
import socket
import threading
from pathlib import Path

import pytest
import serve as stage
import torch
from _common import run_stage
from _completions import Completer, RequestError

from align.evals import encode_prompt
from align.model import load
from align.rollout import Sample
from align.tokenizer import Tokenizer

CHECKPOINT = Path(stage.__file__).parent / "assets/arithmetic_sft"
PROMPT = "Leo has 19 coins. Leo gets 4 more. How many coins now?"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def parts():
    return load(CHECKPOINT), Tokenizer.load(CHECKPOINT)


@pytest.fixture(scope="module")
def port(parts):
    server = stage.Server(("127.0.0.1", 0), Completer(*parts, name="tiny", batch=8, seed=0))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def call(port, path, body=None, raw=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    connection.request("GET" if data is None else "POST", path, data, headers or {})
    reply = connection.getresponse()
    text = reply.read().decode()
    return reply.status, json.loads(text) if reply.headers["Content-Type"] == "application/json" else text


def complete(port, **body):
    status, answer = call(port, "/v1/completions", body)
    assert status == 200, answer
    return answer


def test_models_and_health(port):
    assert call(port, "/v1/models")[1]["data"][0]["id"] == "tiny" and call(port, "/health") == (200, {"status": "ok", "model": "tiny"})


def test_an_answer_has_text_reason_and_usage(port):
    answer = complete(port, prompt=PROMPT, temperature=0, max_tokens=40)
    (choice,) = answer["choices"]
    assert "23" in choice["text"] and choice["finish_reason"] == "stop" and choice["logprobs"] is None
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] and usage["completion_tokens"] > 3
    assert complete(port, prompt=PROMPT, temperature=0, max_tokens=2)["choices"][0]["finish_reason"] == "length"


def test_prompts_of_a_request_are_a_batch_and_seeds_repeat(port, parts):
    _, tokenizer = parts
    one = complete(port, prompt=[PROMPT, PROMPT], n=3, max_tokens=30, seed=5)
    assert [choice["index"] for choice in one["choices"]] == list(range(6))
    assert one["choices"] == complete(port, prompt=[PROMPT, PROMPT], n=3, max_tokens=30, seed=5)["choices"]
    ids = encode_prompt(tokenizer, {"prompt": PROMPT})
    assert complete(port, prompt=ids, n=3, max_tokens=30, seed=5)["choices"] == one["choices"][:3]


def test_echo_scores_a_text_without_adding_to_it(port, parts):
    """What a harness does: the log-probability of a continuation, and whether greedy decoding would give it."""
    model, tokenizer = parts
    ids = encode_prompt(tokenizer, {"prompt": PROMPT + " 19+4=23."})
    (choice,) = complete(port, prompt=ids, echo=True, logprobs=2, max_tokens=0)["choices"]
    scored = choice["logprobs"]
    assert choice["text"] == tokenizer.decode(ids, skip_special=True) and len(scored["tokens"]) == len(ids)
    exact = torch.log_softmax(model.lm_head(model(torch.tensor([ids])))[0].double(), -1)
    assert scored["token_logprobs"][0] is None and scored["top_logprobs"][0] is None
    for place in range(1, len(ids)):
        assert scored["token_logprobs"][place] == pytest.approx(exact[place - 1, ids[place]].item(), abs=1e-4)
        best = max(scored["top_logprobs"][place].values())
        assert best == pytest.approx(exact[place - 1].max().item(), abs=1e-4) and len(scored["top_logprobs"][place]) == 2
    assert scored["text_offset"][:3] == [0, len(scored["tokens"][0]), len(scored["tokens"][0] + scored["tokens"][1])]


def test_logprobs_of_an_answer_are_those_of_its_own_tokens(port):
    (choice,) = complete(port, prompt=PROMPT, temperature=0, max_tokens=5, logprobs=1)["choices"]
    scored = choice["logprobs"]
    assert len(scored["tokens"]) == 5 and all(max(top.values()) == value for top, value in
                                              zip(scored["top_logprobs"], scored["token_logprobs"], strict=True))  # fmt: skip


def test_a_stop_text_is_no_part_of_the_answer(port):
    whole = complete(port, prompt=PROMPT, temperature=0, max_tokens=40)["choices"][0]["text"]
    middle = whole[3:6]
    (choice,) = complete(port, prompt=PROMPT, temperature=0, max_tokens=40, stop=middle)["choices"]
    assert choice["text"] == whole[: whole.index(middle)] and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stop", [None, ["23"]])
def test_a_stream_is_the_same_text_in_pieces(port, stop):
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40} | ({"stop": stop} if stop else {})
    whole = complete(port, **body)["choices"][0]["text"]
    status, text = call(port, "/v1/completions", {**body, "stream": True})
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert status == 200 and events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(choice["text"] for choice in choices) == whole and len(choices) > 2
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, "prompt="),
        ({"prompt": []}, "prompt="),
        ({"prompt": [5, 10**9]}, "prompt="),
        ({"prompt": "x", "n": 0}, "n=0"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens=1.5"),
        ({"prompt": "x", "temperature": "hot"}, "temperature='hot'"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "temperature": 0, "n": 2}, "temperature 0"),
        ({"prompt": "x", "logprobs": 21}, "logprobs=21"),
        ({"prompt": "x", "stop": [3]}, "stop="),
        ({"prompt": "x", "temperature": 10**400}, "temperature is an integer of 401 digits"),
        ({"prompt": "x", "echo": "false"}, "echo='false'"),
        ({"prompt": "x", "stream": "yes"}, "stream='yes'"),
        ({"prompt": "x", "stream": True, "temperature": -1}, "temperature -1"),
        ({"prompt": "5 " * 5000, "stream": True}, "window"),
        ({"prompt": "x", "logit_bias": {"5": 1}}, "logit_bias"),
        ({"prompt": "x", "presence_penalty": 0.5}, "presence_penalty"),
        ({"prompt": "x", "best_of": 4}, "best_of"),
        ({"prompt": "x", "nonsense": 1}, "nonsense"),
        ({"prompt": "x", "stream": True, "n": 2}, "stream"),
        ({"prompt": "5 " * 5000}, "window"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(port, body, wanted):
    status, answer = call(port, "/v1/completions", body)
    assert status == 400 and wanted in answer["error"]["message"]
    assert complete(port, prompt="x", max_tokens=1)["choices"]  # and the server lives


def test_a_body_that_is_not_read_is_not_taken_for_the_next_request(port):
    """On a connection that stays open it would be: a 400 of its own, and the client's next answer is that of another request."""
    for method, path in (("POST", "/v1/nothing"), ("GET", "/health")):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(method, path, b"GET /v1/models HTTP/1.1\r\n\r\n")
        assert connection.getresponse().read()
        connection.request("GET", "/health")  # on another connection, where the server closed the first
        assert json.loads(connection.getresponse().read()) == {"status": "ok", "model": "tiny"}
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
        assert b"".join(iter(lambda: raw.recv(1 << 16), b"")).count(b"HTTP/1.1 ") == 1


def test_max_completion_tokens_counts_where_max_tokens_is_null(port):
    answer = complete(port, prompt=PROMPT, max_tokens=None, max_completion_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2


def test_a_character_that_a_stop_text_cut_is_no_part_of_a_stream(parts, monkeypatch):
    """A token of a byte-level vocabulary may end a stop text and begin a character that never comes."""
    tokenizer = Tokenizer.from_dict({
        "model": {"type": "BPE", "vocab": {"a": 0, "âĢ": 1, "!": 2, "!âĢ": 3}, "merges": [["!", "âĢ"]]}, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": {"type": "ByteLevel"},
    })  # fmt: skip
    completer, said = Completer(parts[0], tokenizer, name="tiny", batch=1, seed=0), []
    made = Sample([0], [0, 3], [0.0] * 2, [0.0] * 2, "stop", 0)

    def sampled(ask, on_token=None):
        for token in made.ids if on_token else []:
            on_token(0, token)
        return [made]

    monkeypatch.setattr(completer, "_sample", sampled)
    body = {"prompt": [0], "stop": "!"}
    completer.stream(completer.check_stream({**body, "stream": True}, chat=False), said.append)
    text = "".join(event["choices"][0]["text"] for event in said)
    assert text == completer.answer(body, chat=False)["choices"][0]["text"] == "a"


def test_weights_that_break_amid_a_stream_are_told_in_it(port, parts, monkeypatch):
    def broken(ask, on_token):
        on_token(0, ask.prompts[0][-1])
        raise RequestError("logits are not finite")

    monkeypatch.setattr(Completer, "_sample", lambda self, ask, on_token=None: broken(ask, on_token))
    status, text = call(port, "/v1/completions", {"prompt": PROMPT, "stream": True})
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert status == 200 and json.loads(events[-2])["error"]["message"] == "logits are not finite" and events[-1] == "[DONE]"


def test_broken_requests_are_answered(port):
    assert call(port, "/v1/completions", raw=b"{")[0] == 400 and call(port, "/v1/completions", raw=b"[1]")[0] == 400
    assert call(port, "/v1/completions", raw=b"[" * 100_000)[0] == 400
    assert call(port, "/nothing")[0] == 404 and call(port, "/v1/nothing", {})[0] == 404
    assert call(port, "/v1/completions", raw=b"{}", headers={"Content-Length": str(1 << 40)})[0] == 413
    status, answer = call(port, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert status == 400 and "no chat template" in answer["error"]["message"]


def test_chat_goes_through_the_template(parts):
    model, tokenizer = parts
    tokens = json.loads((CHECKPOINT / "tokenizer.json").read_text())
    config = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())
    templated = Tokenizer.from_dict(tokens, {**config, "chat_template": TEMPLATE})
    completer = Completer(model, templated, name="tiny", batch=8, seed=0)
    ask = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 40}
    (choice,) = completer.answer(ask, chat=True)["choices"]
    assert choice["message"]["role"] == "assistant" and "23" in choice["message"]["content"]
    events = []
    completer.stream(completer.check_stream({**ask, "stream": True}, chat=True), events.append)
    deltas = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(deltas) == choice["message"]["content"] and events[-1]["choices"][0]["finish_reason"] == "stop"
    assert tokenizer.chat_template is None


def test_a_port_that_is_taken_is_named(port, capsys):
    assert run_stage("serve", stage.ServeConfig, stage.serve, "", [f"port={port}"]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
