"""A sampler in a process of its own: GRPO samples from one as from its own, whatever happens to it; and vLLM's side of the protocol."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rl_stage_cases import GRPO, STAGES, cut, result, start
from vllm_engine import VllmEngine

from align.rollout_protocol import Generate, weights_sha256
from align.tracking import read_history

PROGRAM = STAGES / "tests/native_program.py"
WORDS = [*GRPO, "eval.enabled=false", "train.max_steps=3"]


@pytest.fixture(autouse=True)
def caller(tmp_path, monkeypatch):
    """The person stands in an empty folder."""
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(tmp_path))
    return tmp_path


def external(*options: str) -> list[str]:
    return ["rollout.sampler=vllm", f"vllm.command={json.dumps([sys.executable, str(PROGRAM)])}", f"vllm.options={json.dumps(options)}"]


def weights(run):
    return [path.read_bytes() for path in sorted(run.rglob("checkpoints/step-*/model.safetensors"))]


def test_a_sampler_in_another_process_gives_the_same_run(caller, capfd):
    """Same tokens, same weights after every step, though it is killed once in the middle of a step; then a resume that starts it anew."""
    assert start("grpo", "run_dir=own", *WORDS) == 0
    assert start("grpo", "run_dir=other", *WORDS, *external("--die-after", "6", str(caller / "died")), "vllm.weights=memory") == 0
    assert (caller / "died").exists() and "connecting again" in capfd.readouterr().out
    assert weights(caller / "own") == weights(caller / "other") != []
    assert [path.name for path in (caller / "memory").glob("sampler-weights-*/*")] == ["step-000002"], "the present ones alone are kept"
    cut(caller / "other", caller / "cut", 1)
    assert start("grpo", "run_dir=cut", *WORDS, *external(), "--resume") == 0
    assert weights(caller / "other") == weights(caller / "cut")
    lines = [read_history(caller / run / "history.jsonl") for run in ("own", "other")]
    for name in ("reward", "loss", "grad_norm", "answer_tokens"):
        assert [line[name] for line in lines[0]] == [line[name] for line in lines[1]]
    assert max(line["mismatch"] for line in lines[1]) < 1e-5


@pytest.mark.slow
def test_two_ranks_ask_one_sampler(caller):
    words = [word for word in WORDS if not word.startswith("train.micro_batch")] + ["train.micro_batch=4", "launch.nproc=2"]
    for name, more in (("own", []), ("other", external("--die-after", "5", str(caller / "died")))):
        done = subprocess.run(
            [sys.executable, STAGES / "grpo.py", *words, f"run_dir={name}", *more], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
    assert weights(caller / "own") == weights(caller / "other") != []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["rollout.sampler=vllm"], "extras/vllm_rollout/README.md"),
        (["vllm.start_s=5"], "rollout.sampler is native"),
        (["rollout.sampler=vllm", "vllm.attempts=0", "vllm.address=unix:x"], "vllm.attempts is 0"),
        (["rollout.sampler=vllm", "vllm.address=unix:x", "vllm.options=['a']"], "leave out vllm.command"),
        (["rollout.sampler=sglang"], "rollout.sampler"),
    ],
)
def test_what_no_run_can_have_is_refused(caller, capsys, words, told):
    assert start("grpo", "run_dir=run", *GRPO, *words) == 2
    assert told in capsys.readouterr().err and not (caller / "run").exists()


def test_a_sampler_that_is_not_there_ends_the_run_with_its_reason(caller, capsys):
    absent = ["rollout.sampler=vllm", "vllm.address=unix:absent", "vllm.attempts=1"]
    assert start("grpo", "run_dir=run", *WORDS, *absent) == 2
    assert "nobody answers at unix:absent" in capsys.readouterr().err
    assert result(caller / "run")["status"] == "failed"
    quits = ["rollout.sampler=vllm", f"vllm.command={json.dumps([sys.executable, '-c', 'raise SystemExit(7)'])}", "vllm.attempts=1"]
    assert start("grpo", "run_dir=again", *WORDS, *quits) == 2
    assert "exit code 7 before it listened" in capsys.readouterr().err
    sleeps = [
        "rollout.sampler=vllm",
        f"vllm.command={json.dumps([sys.executable, '-c', 'import time; time.sleep(60)'])}",
        "vllm.attempts=1",
    ]
    assert start("grpo", "run_dir=slow", *WORDS, *sleeps, "vllm.start_s=0.3") == 2
    assert "within 0.3 s" in capsys.readouterr().err


def test_a_sampler_that_hangs_is_given_up(caller, capsys):
    assert start("grpo", "run_dir=run", *WORDS, *external("--hang"), "vllm.silence_s=0.5", "vllm.attempts=2") == 2
    printed = capsys.readouterr()
    assert "over 2 connections; the last: no whole message for 0.5 s" in printed.err and "connecting again" in printed.out


# vLLM's side: what it is asked, and what is made of its answers.


class FakeVllm:
    """An LLMEngine whose answer to a prompt is its last token + 1, + 2, … until max_tokens or a stop token."""

    def __init__(self):
        self.asked, self.waiting, self.aborted, self.called = {}, [], [], []

    def add_request(self, request_id, prompt, params):
        if prompt["prompt_token_ids"][0] == 13:
            raise LookupError("13 is unlucky")
        self.asked[request_id] = (prompt["prompt_token_ids"], params)
        self.waiting.append(request_id)

    def step(self):
        name = self.waiting.pop(0)
        ids, params = self.asked[name]
        outputs = []
        for index in reversed(range(params.n)):
            made = [ids[-1] + 1 + index + step for step in range(params.max_tokens)]
            stop = next((at for at, token in enumerate(made) if token in (params.stop_token_ids or [])), None)
            made = made if stop is None else made[: stop + 1]
            logprobs = [{token: SimpleNamespace(logprob=-token / 10)} for token in made]
            outputs.append(
                SimpleNamespace(index=index, token_ids=made, logprobs=logprobs, finish_reason="length" if stop is None else "stop")
            )
        told = None
        if params.prompt_logprobs is not None:
            told = [None, *({token: SimpleNamespace(logprob=-token / 100), 0: SimpleNamespace(logprob=-9.0)} for token in ids[1:])]
        return [SimpleNamespace(request_id=name, finished=True, outputs=outputs, prompt_logprobs=told)]

    def abort_request(self, names):
        self.aborted += names

    def collective_rpc(self, method, kwargs):
        self.called.append((method, kwargs))

    def reset_prefix_cache(self):
        self.called.append("reset")
        return True


class Params(SimpleNamespace):
    def __init__(self, *, n=1, stop_token_ids=None, prompt_logprobs=None, **more):
        super().__init__(n=n, stop_token_ids=stop_token_ids, prompt_logprobs=prompt_logprobs, **more)


def served(window=100):
    engine = FakeVllm()
    return engine, VllmEngine(engine, Params, "final", name="vllm 0", directory=str(STAGES / "assets/arithmetic_sft"), window=window)


def request(**more):
    asked = {
        "id": "1", "weights": "ab" * 32, "prompt": [5, 6], "n": 2, "max_new_tokens": 3, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
        "min_p": 0.0, "stop_ids": [9], "stop_strings": [], "seed": 2**63 - 1,
    }  # fmt: skip
    return Generate(**{**asked, **more})


def through(served_engine):
    done = []
    for _ in range(9):
        done += served_engine.step()
        if done:
            return done
    return done


def test_vllm_is_asked_for_what_the_protocol_says():
    engine, adapter = served()
    assert adapter.weights == weights_sha256(STAGES / "assets/arithmetic_sft") and len(adapter.tokenizer) == 64
    adapter.add("1:a", request())
    ids, params = engine.asked["1:a"]
    assert ids == [5, 6] and vars(params) == {
        "n": 2, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 2**62 - 1, "max_tokens": 3, "stop_token_ids": [9],
        "stop": [], "ignore_eos": True, "logprobs": 0, "detokenize": False, "skip_special_tokens": False, "output_kind": "final",
        "prompt_logprobs": None,
    }  # fmt: skip
    [(key, drawn)] = through(adapter)
    assert key == "1:a" and [one.ids for one in drawn] == [[7, 8, 9], [8, 9]]
    assert [one.finish_reason for one in drawn] == ["stop", "stop"] and drawn[0].logprobs == drawn[0].raw_logprobs == [-0.7, -0.8, -0.9]
    adapter.add("1:b", request(stop_ids=[], stop_strings=["x"]))
    assert engine.asked["1:b"][1].detokenize and [one.finish_reason for one in through(adapter)[0][1]] == ["length", "length"]


@pytest.mark.parametrize("filters", [{"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1}])
def test_filtered_answers_are_read_again_at_temperature_1(filters):
    engine, adapter = served()
    adapter.add("1:a", request(**filters))
    [(_, drawn)] = through(adapter)
    assert drawn[0].logprobs == [-0.7, -0.8, -0.9] and drawn[0].raw_logprobs == [-0.07, -0.08, -0.09]
    assert drawn[1].ids == [8, 9] and drawn[1].raw_logprobs == [-0.08, -0.09]
    again, params = engine.asked["1:a#1"]
    assert again == [5, 6, 8, 9] and (params.max_tokens, params.prompt_logprobs, params.temperature) == (1, 0, 0.0)


def test_greedy_is_certain_and_tells_the_model_s_own_log_probabilities():
    engine, adapter = served()
    adapter.add("1:a", request(temperature=0.0, top_p=0.5))
    assert engine.asked["1:a"][1].n == 1, "vLLM refuses more"
    [(_, [drawn, again])] = through(adapter)
    assert drawn == again and drawn.logprobs == [0.0] * 3 and drawn.raw_logprobs == [-0.7, -0.8, -0.9] and "1:a#0" not in engine.asked


def test_the_window_is_kept_and_aborts_and_weights_reach_vllm():
    engine, adapter = served(window=4)
    adapter.add("1:a", request())
    adapter.add("1:b", request(top_k=3))
    assert engine.asked["1:a"][1].max_tokens == 2 and engine.asked["1:b"][1].max_tokens == 1, "the second is read again with one more token"
    for prompt, told in (([1, 2, 3, 4], "max-model-len"), ([13], "unlucky")):
        with pytest.raises(ValueError, match=told):
            adapter.add("1:c", request(prompt=prompt))
    adapter.abort("1:a")
    adapter.abort("1:none")
    assert engine.aborted == ["1:a", "1:a#0", "1:a#1"]
    assert [key for key, _ in through(adapter)] == ["1:b"], "an aborted one that comes all the same is dropped"
    adapter.load("/new")
    assert engine.called == [("reload_weights", {"weights_path": "/new"}), "reset"]
    engine.reset_prefix_cache = lambda: False
    with pytest.raises(RuntimeError, match="prefix cache"):
        adapter.load("/new")
