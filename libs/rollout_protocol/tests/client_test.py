"""Client, server and what happens to them: hangs, other versions, other weights, half lines; nothing is lost and nothing comes twice."""

import doctest
import os
import select
import socket
import threading
import time
from pathlib import Path

import pytest
from rollout_protocol_cases import FakeEngine, Serving, answers, write_weights

from align.rollout_protocol import (
    FROM_SAMPLER,
    FROM_TRAINER,
    PROTOCOL,
    Alive,
    Cancel,
    Channel,
    ChannelClosed,
    Client,
    Drawn,
    Error,
    Generate,
    Hello,
    Patience,
    RemoteSampler,
    RolloutProtocolError,
    SamplerRefused,
    Samples,
    Weights,
    WeightsUpdated,
    Welcome,
    WrongWeights,
    encode,
)

SHA, OTHER = "ab" * 32, "cd" * 32
SHORT = Patience(silence_s=0.3, load_s=0.6, attempts=2, pause_s=0.01)
HERE = Weights(sha256=SHA, version=0)
ASKED = {"n": 2, "max_new_tokens": 6, "seeds": [3, 4, 5]}
PROMPTS = [[1, 2], [3], [4, 5, 6]]


def sampler(connect, *, weights=HERE, patience=SHORT, eos_ids=(7,), **more) -> RemoteSampler:
    return RemoteSampler(Client(connect, weights=weights, patience=patience, **more), eos_ids=eos_ids)


def expected(weights: str = SHA, stops=(7,)) -> list[list[int]]:
    pairs = zip(PROMPTS, ASKED["seeds"], strict=True)
    asked = [Generate("", weights, prompt, 2, 6, 1.0, 1.0, 0, 0.0, [*stops], [], seed) for prompt, seed in pairs]
    return [drawn.ids for request in asked for drawn in answers(weights, request)]


class Scripted:
    """A sampler that says what it is told to: a generator a connection, which takes the messages that came and yields bytes or "close"."""

    def __init__(self, *scripts) -> None:
        self.scripts, self.asked, self.threads = list(scripts), [], []

    def __call__(self) -> Channel:
        ours, theirs = socket.socketpair()
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        thread = threading.Thread(target=self._speak, args=(theirs, script), daemon=True)
        thread.start()
        self.threads.append(thread)
        return Channel.of_socket(ours, limit=1 << 20)

    def _speak(self, theirs: socket.socket, script) -> None:
        descriptor = theirs.fileno()
        channel = Channel.of_socket(theirs)
        try:
            for act in script(lambda: self._take(channel)):
                if act == "close":
                    return
                while act:
                    select.select([], [descriptor], [], 5)
                    act = act[os.write(descriptor, act) :]
            while True:
                channel.receive(FROM_TRAINER, timeout_s=5)
        except (RolloutProtocolError, OSError):
            pass
        finally:
            channel.close()

    def _take(self, channel: Channel):
        message = channel.receive(FROM_TRAINER, timeout_s=5)
        self.asked.append(message)
        return message


def welcome(weights: str = SHA, version: int = 0, protocol: int = PROTOCOL, tokenizer: str = "") -> bytes:
    return encode(Welcome(protocol, "scripted", weights, version, tokenizer, ["seed", "raw_logprobs", "cancel"]))


def reply(request: Generate, *, weights: str = SHA, version: int = 0) -> bytes:
    return encode(Samples(request.id, weights, version, answers(request.weights, request)))


def good(take):
    take()
    yield welcome()
    while True:
        yield reply(take())


def test_answers_come_in_the_order_of_the_prompts():
    with Serving(FakeEngine(SHA, steps=3)) as serving:
        remote = sampler(serving)
        samples = remote.generate(PROMPTS, **ASKED)
        assert [sample.ids for sample in samples] == expected()
        assert [sample.prompt_ids for sample in samples] == [prompt for prompt in PROMPTS for _ in range(2)]
        assert {sample.weights_version for sample in samples} == {0} and remote.weights_version == 0
        one = samples[0]
        assert one.logprobs == [-1.0 - token for token in one.ids] and one.raw_logprobs == [-2.0 - token for token in one.ids]
        assert remote.generate(PROMPTS[1:2], n=2, max_new_tokens=6, seeds=[4]) == samples[2:4], "whatever it is asked with"
        assert remote.generate([], max_new_tokens=1) == [] and serving.dialled == 1
        assert len(remote.generate([[1]], max_new_tokens=3)) == 1, "without seeds"


def test_the_samples_may_be_of_another_class():
    with Serving(FakeEngine(SHA)) as serving:
        client = Client(serving, weights=HERE, patience=SHORT)
        made = RemoteSampler(client, eos_ids=[7], sample=dict).generate([[1]], max_new_tokens=2, seeds=[1])
        assert sorted(made[0]) == ["finish_reason", "ids", "logprobs", "prompt_ids", "raw_logprobs", "weights_version"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"top_p": 2.0}, "generate.top_p"),
        ({"n": 0}, "generate.n"),
        ({"temperature": float("nan")}, "generate.temperature"),
        ({"seeds": [1, 2]}, "2 seeds for 1 prompts"),
        ({"seeds": [1.5]}, "seed 0 has 1.5 where an integer must be"),
        ({"n": 1.5}, "n has 1.5 where an integer must be"),
        ({"stop_strings": "END"}, "stop_strings is the text 'END'"),
        ({"top_k": 5}, "fake 1 cannot do top_k"),
        ({"stop_strings": ["a"]}, "cannot do stop_strings"),
    ],
)
def test_a_wrong_request_is_refused_at_once_and_not_sent_again(more, told):
    with Serving(FakeEngine(SHA)) as serving:
        with pytest.raises(RolloutProtocolError, match=told) as caught:
            sampler(serving).generate([[1]], max_new_tokens=4, **{"seeds": [1], **more})
        assert caught.value.exit_code == 2 and serving.dialled <= 1


def test_what_the_engine_cannot_do_is_its_own_word():
    with Serving(FakeEngine(SHA)) as serving, pytest.raises(SamplerRefused, match="prompt holds token 99") as caught:
        sampler(serving).generate([[1], [99]], max_new_tokens=4, seeds=[1, 2])
    assert caught.value.code == "unsupported"


def test_weights_are_exchanged_and_told_in_every_sample(tmp_path):
    first, second = write_weights(tmp_path / "a"), write_weights(tmp_path / "b", b"\1" * 8)
    engine = FakeEngine(first)
    with Serving(engine) as serving:
        remote = sampler(serving, weights=Weights(sha256=first, version=0))
        assert [one.ids for one in remote.generate(PROMPTS, **ASKED)] == expected(first)
        remote.update(Weights(sha256=second, version=1, path=str(tmp_path / "b")))
        samples = remote.generate(PROMPTS, **ASKED)
        assert [one.ids for one in samples] == expected(second) and {one.weights_version for one in samples} == {1}
        remote.update(Weights(sha256=second, version=2, path=str(tmp_path / "b")))
        assert remote.generate([[1]], max_new_tokens=2, seeds=[1])[0].weights_version == 2 and engine.loads == 1, "the same bytes again"


def test_after_a_resume_the_sampler_first_hears_of_the_resumed_weights(tmp_path):
    old, resumed = write_weights(tmp_path / "old"), write_weights(tmp_path / "step-000060", b"\2" * 8)
    script = Scripted(good)
    with pytest.raises(WrongWeights):  # scripted says SHA, whatever it is told
        sampler(script, weights=Weights(sha256=resumed, version=60)).generate([[1]], max_new_tokens=2, seeds=[1])
    assert script.asked == [Hello(PROTOCOL, resumed, "")], "the first message, and nothing was asked of the other weights"
    with Serving(FakeEngine(old)) as serving:
        with pytest.raises(WrongWeights, match="start it on the checkpoint that is resumed"):
            sampler(serving, weights=Weights(sha256=resumed, version=60)).generate([[1]], max_new_tokens=2, seeds=[1])
        lying = Weights(sha256=resumed, version=60, path=str(tmp_path / "old"))
        with pytest.raises(SamplerRefused, match="the present ones stay"):
            sampler(serving, weights=lying).generate([[1]], max_new_tokens=2, seeds=[1])
        with pytest.raises(SamplerRefused, match=r"no \*\.safetensors"):
            sampler(serving, weights=Weights(sha256=resumed, version=60, path=str(tmp_path))).generate([[1]], max_new_tokens=2, seeds=[1])
        told = Weights(sha256=resumed, version=60, path=str(tmp_path / "step-000060"))
        assert sampler(serving, weights=told).generate([[1]], max_new_tokens=2, seeds=[1])[0].weights_version == 60


def test_the_server_refuses_requests_for_weights_that_it_does_not_hold():
    with Serving(FakeEngine(SHA)) as serving:
        channel = serving()
        channel.send(Hello(PROTOCOL, OTHER, ""), timeout_s=1)
        assert channel.receive(FROM_SAMPLER, timeout_s=1).weights == SHA
        channel.send(Generate("x", OTHER, [1], 1, 2, 1.0, 1.0, 0, 0.0, [], [], 1), timeout_s=1)
        refused = channel.receive(FROM_SAMPLER, timeout_s=1)
        assert (refused.id, refused.code) == ("x", "wrong_weights")


@pytest.mark.parametrize(
    ("script", "error", "told"),
    [
        (lambda take: (take(), [welcome(protocol=2)])[1], RolloutProtocolError, "scripted speaks version 2 .* this trainer 1"),
        (
            lambda take: (take(), [welcome(tokenizer="f" * 64)])[1],
            RolloutProtocolError,
            "has tokenizer ffffffffffff, the trainer eeeeeeeeeeee",
        ),
        (lambda take: (take(), [encode(Error(None, "wrong_protocol", "install 1"))])[1], SamplerRefused, "install 1"),
        (lambda take: (take(), [welcome(OTHER)])[1], WrongWeights, "cdcdcdcdcdcd"),
    ],
)
def test_other_versions_tokenizers_and_weights_are_refused_at_once(script, error, told):
    scripted = Scripted(script)
    with pytest.raises(error, match=told):
        sampler(scripted, tokenizer="e" * 64 if "tokenizer" in told else "").generate([[1]], max_new_tokens=2, seeds=[1])
    assert len(scripted.threads) == 1


def test_the_server_refuses_another_version():
    with Serving(FakeEngine(SHA)) as serving:
        channel = serving()
        channel.send(Hello(PROTOCOL + 1, SHA, ""), timeout_s=1)
        assert channel.receive(FROM_SAMPLER, timeout_s=1).code == "wrong_protocol"
        with pytest.raises(ChannelClosed):
            channel.receive(FROM_SAMPLER, timeout_s=1)
        channel = serving()
        channel.send(Cancel("1"), timeout_s=1)
        assert channel.receive(FROM_SAMPLER, timeout_s=1).message == "the first message must be hello"


def test_samples_of_other_weights_are_not_taken():
    def script(take):
        take()
        yield welcome()
        request = take()
        yield encode(Samples(request.id, OTHER, 0, answers(SHA, request)))

    with pytest.raises(WrongWeights, match="answered from weights cdcdcdcdcdcd"):
        sampler(Scripted(script)).generate([[1]], max_new_tokens=2, seeds=[1])


def bad_ends():
    def half(take):
        take()
        yield welcome()
        yield reply(take())
        begun = reply(take())
        take()  # who closes on a request still on its way loses what was said before with it
        yield begun[:40]
        yield "close"

    def drip(take):
        take()
        yield welcome()
        yield reply(take())
        for byte in reply(take()):
            time.sleep(0.02)
            yield bytes([byte])

    def hang(take):
        take()
        yield welcome()
        yield reply(take())
        time.sleep(1.0)

    def oversized(take):
        take()
        yield welcome()
        yield reply(take())
        for _ in range(2):
            yield b"x" * (1 << 20)

    def senseless(take):
        take()
        yield welcome()
        yield reply(take())
        yield b"{]\n"

    def unasked(take):
        take()
        yield welcome()
        request = take()
        yield reply(request)
        yield encode(Samples("nobody", SHA, 0, answers(SHA, request)))

    def too_few(take):
        take()
        yield welcome()
        yield reply(take())
        request = take()
        yield encode(Samples(request.id, SHA, 0, answers(SHA, request)[:1]))

    def silent(take):
        take()
        time.sleep(1.0)
        yield b""

    def gone(take):
        yield "close"

    return [half, drip, hang, oversized, senseless, unasked, too_few, silent, gone]


@pytest.mark.parametrize("end", bad_ends(), ids=lambda end: end.__name__)
def test_a_bad_end_loses_nothing_and_doubles_nothing(end):
    """The first connection goes wrong in the middle of a generate; over the second only what is unanswered is asked."""
    told = []
    scripted = Scripted(end, good)
    samples = sampler(scripted, tell=told.append).generate(PROMPTS, **ASKED)
    assert [sample.ids for sample in samples] == expected()
    asked = [message for message in scripted.asked if isinstance(message, Generate)]
    again = [message.id for message in asked if [other.id for other in asked].count(message.id) > 1]
    answered_first = end.__name__ not in ("silent", "gone")
    assert len({message.id for message in asked}) == 3 and (asked[0].id not in again if answered_first else not again)
    assert len(told) == 1 and told[0].startswith("sampler: ")


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("half", "in the middle of a message"),
        ("drip", "no whole message for 0.3 s, .* bytes of one"),
        ("hang", "no whole message for 0.3 s"),
        ("oversized", "more than 1048576 bytes"),
        ("senseless", "no JSON"),
        ("unasked", "which nobody asked"),
        ("too_few", "1 answers where 2"),
    ],
)
def test_one_that_is_bad_for_ever_is_given_up_with_its_reason(end, told):
    only = next(each for each in bad_ends() if each.__name__ == end)
    once = Patience(silence_s=0.3, load_s=0.6, attempts=1, pause_s=0)

    def worse(take):  # nothing is answered on the second connection and later
        take()
        yield welcome()
        take()
        yield "close"

    with pytest.raises(RolloutProtocolError, match="gave no answer over 2 connections"):
        sampler(Scripted(only, worse)).generate(PROMPTS, **ASKED)
    with pytest.raises(RolloutProtocolError, match=f"over 1 connections; the last: .*{told}"):
        sampler(Scripted(only), patience=once).generate(PROMPTS, **ASKED)


def test_the_same_answer_twice_counts_once():
    def doubling(take):
        take()
        yield welcome()
        first = reply(take())
        yield first + first + reply(take())
        yield first + reply(take())

    assert [sample.ids for sample in sampler(Scripted(doubling)).generate(PROMPTS, **ASKED)] == expected()


def test_a_sampler_that_works_long_says_so():
    class Slow(FakeEngine):
        def step(self):
            time.sleep(0.05)
            return super().step()

    with Serving(Slow(SHA, steps=12), alive_s=0.1) as serving:
        assert len(sampler(serving).generate([[1]], max_new_tokens=2, seeds=[1])) == 1, "0.6 s, and 0.3 s of silence are allowed"
        assert serving.dialled == 1
        channel = serving()
        channel.send(Hello(PROTOCOL, SHA, ""), timeout_s=1)
        channel.receive((Welcome,), timeout_s=1)
        channel.send(Generate("x", SHA, [1], 1, 2, 1.0, 1.0, 0, 0.0, [], [], 1), timeout_s=1)
        assert channel.receive(FROM_SAMPLER, timeout_s=1) == Alive(1)


def test_cancel_frees_the_request(tmp_path):
    pause, second = threading.Event(), write_weights(tmp_path / "b")
    engine = FakeEngine(SHA, pause=pause)
    with Serving(engine) as serving:
        channel = serving()
        channel.send(Hello(PROTOCOL, SHA, ""), timeout_s=1)
        channel.receive((Welcome,), timeout_s=1)
        for name in ("a", "b", "a"):
            channel.send(Generate(name, SHA, [1], 1, 2, 1.0, 1.0, 0, 0.0, [], [], 1), timeout_s=1)
        assert channel.receive(FROM_SAMPLER, timeout_s=1).message.startswith("request a is running already")
        channel.send(WeightsUpdated(str(tmp_path / "b"), second, 1), timeout_s=1)
        assert channel.receive(FROM_SAMPLER, timeout_s=1).code == "busy"
        channel.send(Cancel("a"), timeout_s=1)
        assert channel.receive(FROM_SAMPLER, timeout_s=1) == Error("a", "cancelled", "as it was asked")
        assert engine.aborted == ["1:a"] and list(engine.running) == ["1:b"]
        channel.close()
        until(lambda: engine.aborted == ["1:a", "1:b"] and not engine.running)  # who leaves takes its requests with it


def until(true, patience=5.0):
    end = time.monotonic() + patience
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_call_that_is_broken_off_calls_off_its_requests(monkeypatch):
    engine = FakeEngine(SHA, pause=threading.Event())
    with Serving(engine) as serving:
        remote = sampler(serving)
        remote.generate([], max_new_tokens=1)

        def interrupted(self, allowed, *, timeout_s, original=Channel.receive):
            if Samples in allowed and engine.running:
                raise KeyboardInterrupt
            return original(self, allowed, timeout_s=min(timeout_s or 0.05, 0.05) if Samples in allowed else timeout_s)

        monkeypatch.setattr(Channel, "receive", lambda self, allowed, *, timeout_s: wait_then(interrupted, self, allowed, timeout_s))

        def wait_then(call, self, allowed, timeout_s):
            if Samples in allowed:
                until(lambda: len(engine.running) == 3)
            return call(self, allowed, timeout_s=timeout_s)

        with pytest.raises(KeyboardInterrupt):
            remote.generate(PROMPTS, **ASKED)
        until(lambda: len(engine.aborted) == 3)


def test_two_trainers_share_a_sampler():
    with Serving(FakeEngine(SHA, steps=4)) as serving:
        found = {}

        def ask(name):
            found[name] = [one.ids for one in sampler(serving, patience=Patience()).generate(PROMPTS, **ASKED)]

        threads = [threading.Thread(target=ask, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert [found[name] for name in range(4)] == [expected()] * 4


def test_an_engine_that_fails_to_load_ends_the_server(tmp_path):
    class Broken(FakeEngine):
        def load(self, path):
            return 1 / 0

    second = write_weights(tmp_path / "b")
    with Serving(Broken(SHA)) as serving:
        with pytest.raises(SamplerRefused, match="ZeroDivisionError"):
            sampler(serving).update(Weights(sha256=second, version=1, path=str(tmp_path / "b")))
        serving.thread.join(5)
        assert not serving.thread.is_alive()


def test_an_answer_that_is_none_is_the_request_s_error():
    class Wrong(FakeEngine):
        def step(self):
            return [(key, [Drawn([1], [0.5], [-1.0], "stop")]) for key in list(self.running)]

    with Serving(Wrong(SHA)) as serving, pytest.raises(SamplerRefused, match=r"samples\.samples\[0\]\.logprobs\[0\]"):
        sampler(serving).generate([[1]], max_new_tokens=2, seeds=[1])


def test_the_readme_runs_and_names_every_public_name():
    import align.rollout_protocol as library

    path = Path(__file__).parents[1] / "README.md"
    text = path.read_text(encoding="utf-8")
    assert [name for name in library.__all__ if f"`{name}" not in text and f" {name}" not in text and f"({name}" not in text] == []
    assert doctest.testfile(str(path), module_relative=False).failed == 0
