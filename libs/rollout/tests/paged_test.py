"""The paged engine on the CPU: the operations' references, the same scheduling. What its kernels do on a GPU: rollout_gpu_test.py."""

import re
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_cases import ARCHITECTURES, check_greedy, make_model, make_prompts

from align.objectives import sequence_logprobs
from align.rollout import NativeSampler, RolloutError
from align.rollout import _engine as engine_module
from align.rollout import _paged_run as paged_module
from align.rollout import _pages as pages_module
from align.rollout._advance import FIELDS, FLAG, IDLE, LIMIT, NEXT, POSITION, STEP, TOKEN, advance
from align.rollout._engine import bucket, page_bytes
from align.rollout._paged_run import PagedRun
from align.rollout._pages import PAGE, Pages

MODEL = make_model()
LONG = make_model()
LONG.config = LONG.config.__class__.from_hf({**LONG.config.to_hf(), "max_position_embeddings": 4096})
REQUESTS = make_prompts(9, seed=5)
OPTIONS = {"n": 3, "max_new_tokens": 18, "temperature": 0.9, "seeds": range(100, 109)}
WANTED = NativeSampler(MODEL, eos_ids=[0, 1, 2]).generate(REQUESTS, **OPTIONS)


def same(got, wanted):
    assert [(s.ids, s.finish_reason, s.prompt_ids) for s in got] == [(s.ids, s.finish_reason, s.prompt_ids) for s in wanted]
    for a, b in zip(got, wanted, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=2e-5) and a.raw_logprobs == pytest.approx(b.raw_logprobs, abs=2e-5)


def all_free(sampler):
    engine = sampler._engine
    assert engine.pages.free == engine.page_count - 1 and bool((engine.state[FLAG] == IDLE).all()) and not engine.table.any()


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("strict", [False, True], ids=["default", "strict"])
def test_greedy_is_the_argmax_of_full_forwards(name, strict):
    check_greedy(name, 3, paged=True, strict=strict)


@pytest.mark.parametrize(("rows", "strict"), [(1, False), (2, True), (5, False), (80, False)])
def test_the_simple_engine_s_samples_whatever_the_rows(rows, strict):
    sampler = NativeSampler(MODEL, eos_ids=[0, 1, 2], max_batch=rows, paged=True, strict=strict)
    same(sampler.generate(REQUESTS, **OPTIONS), WANTED)
    all_free(sampler)


@pytest.mark.parametrize("temperature", [1e-45, 1e300])
def test_temperatures_beyond_fp32(temperature):
    options = {**OPTIONS, "temperature": temperature}
    sampler = NativeSampler(MODEL, eos_ids=[0, 1, 2], paged=True)
    same(sampler.generate(REQUESTS, **options), NativeSampler(MODEL, eos_ids=[0, 1, 2]).generate(REQUESTS, **options))


def test_samples_enter_a_few_at_once_while_rows_run(monkeypatch):
    """Of 48 rows three must be free; the last samples need not wait for as many."""
    admit, prompts, entered = PagedRun._admit, make_prompts(150, seed=8), []

    def watched(run):
        before = len(run._rows)
        admit(run)
        if before and len(run._rows) > before:
            entered.append((len(run._rows) - before, len(run._waiting) + len(run._read)))

    monkeypatch.setattr(PagedRun, "_admit", watched)
    options = {"max_new_tokens": 60, "temperature": 0.9, "seeds": range(150)}
    sampler = NativeSampler(MODEL, eos_ids=[0], max_batch=48, paged=True)
    same(sampler.generate(prompts, **options), NativeSampler(MODEL, eos_ids=[0]).generate(prompts, **options))
    assert len(entered) > 5 and all(new >= 3 or left == 0 for new, left in entered)
    all_free(sampler)


def test_one_page_more_than_a_sample_needs_is_enough_and_others_wait():
    """PAGE is 128; prompts of more and less, with samples that share full pages, through a cache for one sample."""
    prompts = [(prompt * 200)[:length] for prompt, length in zip(REQUESTS, (130, 127, 128, 300), strict=False)]
    options = {"n": 2, "max_new_tokens": 6, "temperature": 0.9, "seeds": range(4)}
    wanted = NativeSampler(LONG, eos_ids=[0]).generate(prompts, **options)
    budget = (pages_module.pages_for(306) + 2) * page_bytes(LONG) / 2**30
    sampler = NativeSampler(LONG, eos_ids=[0], max_batch=6, kv_budget_gb=budget)
    same(sampler.generate(prompts, **options), wanted)
    assert sampler._engine.page_count == pages_module.pages_for(306) + 2
    all_free(sampler)
    with pytest.raises(RolloutError, match=r"a sample of 306 positions needs .* GiB of cache, above the kv_budget_gb of"):
        NativeSampler(LONG, eos_ids=[0], kv_budget_gb=budget * 0.7).generate(prompts, **options)


def test_samples_of_a_prompt_hold_its_full_pages_once():
    prompt, taken = (REQUESTS[0] * 200)[: 2 * PAGE + 10], []
    sampler = NativeSampler(LONG, eos_ids=[], max_batch=8, paged=True)

    def look(sample, token):
        taken.append(sampler._engine.page_count - 1 - sampler._engine.pages.free)

    sampler.generate([prompt], n=8, max_new_tokens=4, seeds=[1], on_token=look)
    assert max(taken) == 2 + 8  # two full pages for all, and one for each to write to


@pytest.mark.parametrize("where", ["on_token", "on_step", "sample_key", "_retire"])
@pytest.mark.parametrize("calls", [1, 2, 3, 8])
def test_what_is_raised_anywhere_ends_the_call_and_frees_all(where, calls, monkeypatch):
    """By a caller's function, also while prompts are read, or amid the bookkeeping, as Ctrl-C is."""
    sampler, seen = NativeSampler(MODEL, eos_ids=[], max_batch=4, paged=True), []

    def stop(*_):
        seen.append(0)
        if len(seen) == calls:
            raise KeyboardInterrupt
        return 0

    options = {"n": 2, "max_new_tokens": 10, "seeds": range(9)}
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        if where == "sample_key":
            patched.setattr(paged_module, where, stop)
        if where == "_retire":
            patched.setattr(PagedRun, where, stop)
        sampler.generate(REQUESTS, **options, **({where: stop} if where.startswith("on_") else {}))
    all_free(sampler)
    same(sampler.generate(REQUESTS, **options), NativeSampler(MODEL, eos_ids=[]).generate(REQUESTS, **options))
    all_free(sampler)


def test_an_engine_that_cannot_be_made_leaves_none_behind(monkeypatch):
    """The one before has given up its cache for it by then."""
    sampler = NativeSampler(LONG, eos_ids=[], max_batch=2, paged=True)
    sampler.generate([[1]], max_new_tokens=2, seeds=[0])
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(engine_module, "Forward", Mock(side_effect=MemoryError))
        sampler.generate([[1] * 3000], max_new_tokens=2, seeds=[0])
    options = {"max_new_tokens": 2, "seeds": [0]}
    same(sampler.generate([[1] * 3000], **options), NativeSampler(LONG, eos_ids=[]).generate([[1] * 3000], **options))


def test_tokens_are_shown_in_order_and_the_engine_is_kept():
    sampler, shown = NativeSampler(MODEL, eos_ids=[0, 1, 2], max_batch=5, paged=True), {}
    samples = sampler.generate(REQUESTS, **OPTIONS, on_token=lambda sample, token: shown.setdefault(sample, []).append(token))
    assert [shown[i] for i in range(27)] == [s.ids for s in samples] == [s.ids for s in WANTED]
    engine, signs = sampler._engine, []
    sampler.generate(REQUESTS[:2], max_new_tokens=9, on_step=lambda: signs.append(1))
    assert len(signs) >= 2
    assert sampler._engine is engine
    sampler.release()
    assert sampler._engine is None
    same(sampler.generate(REQUESTS, **OPTIONS), WANTED)


def test_weights_are_parameters_still_and_a_step_on_them_is_sampled_from():
    model, plain = make_model("llama, biases"), make_model("llama, biases")
    sampler = NativeSampler(model, eos_ids=[], paged=True)
    options = {"max_new_tokens": 8, "temperature": 0}
    before = sampler.generate(REQUESTS, **options)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))
    attention = model.blocks[0].self_attn
    assert attention.k_proj.weight.data_ptr() == attention.q_proj.weight.data_ptr() + attention.q_proj.weight.nbytes
    for changed in (model, plain):
        changed.lm_head(changed(torch.tensor([[1, 2, 3, 4]])).tanh()).square().sum().backward()
        torch.optim.SGD(changed.parameters(), lr=0.02).step()
    after = sampler.generate(REQUESTS, **options)
    assert [s.ids for s in after] == [s.ids for s in NativeSampler(plain, eos_ids=[]).generate(REQUESTS, **options)]
    assert [s.ids for s in after] != [s.ids for s in before]


def test_stop_ids_and_limits():
    sampler = NativeSampler(MODEL, eos_ids=[], max_batch=3, paged=True)
    one = sampler.generate(REQUESTS, n=2, max_new_tokens=1, seeds=range(9))
    assert all(len(s.ids) == 1 and s.finish_reason == "length" for s in one)
    stop = WANTED[0].ids[0]
    again = NativeSampler(MODEL, eos_ids=[0, 1, 2], paged=True).generate(REQUESTS, **OPTIONS, stop_ids=[stop])
    for sample, whole in zip(again, WANTED, strict=True):
        end = whole.ids.index(stop) + 1 if stop in whole.ids else len(whole.ids)
        assert sample.ids == whole.ids[:end]


def test_strict_log_probs_are_those_of_the_forward_invariant():
    """On the CPU to rounding; on a GPU bit for bit."""
    samples = NativeSampler(MODEL, eos_ids=[0], strict=True).generate(REQUESTS, **OPTIONS)
    for sample in samples[::5]:
        ids = torch.tensor([sample.prompt_ids + sample.ids])
        with torch.no_grad():
            hidden = MODEL(ids[:, :-1], forward_impl="invariant")
            wanted = sequence_logprobs(hidden, MODEL.output_weight, ids[:, 1:], invariant=True)[0, len(sample.prompt_ids) - 1 :]
        assert sample.raw_logprobs == pytest.approx(wanted.tolist(), abs=1e-5)


def test_advance_moves_running_rows_alone():
    state = torch.zeros(FIELDS, 4, dtype=torch.int64)
    state[FLAG] = torch.tensor([0, IDLE, 0, 0])
    state[LIMIT], state[STEP], state[POSITION], state[NEXT] = 5, torch.tensor([0, 3, 4, 1]), 7, 8
    ids, logprobs, raws = torch.zeros(4, 6, dtype=torch.int64), torch.zeros(4, 6), torch.zeros(4, 6)
    stops = torch.tensor([False, True, False, False])
    advance(state, torch.tensor([3, 3, 2, 1]), torch.rand(4), torch.rand(4), ids, logprobs, raws, stops, torch.arange(4))
    assert state[STEP].tolist() == [1, 3, 5, 2] and state[TOKEN].tolist() == [3, 0, 2, 1]
    assert state[POSITION].tolist() == [8, 7, 8, 8] and state[NEXT].tolist() == [9, 8, 9, 9]
    assert state[FLAG].tolist() == [0, IDLE, 2, 1]  # running, as it was, at its limit, at a stop
    assert ids.nonzero().tolist() == [[0, 0], [2, 4], [3, 1]]


@given(st.lists(st.tuples(st.sampled_from(["take", "hold", "release"]), st.integers(0, 6)), max_size=60))
@settings(max_examples=60)
def test_pages_are_free_when_nobody_holds_them(actions):
    pages, held = Pages(9), []
    for action, number in actions:
        if action == "take" and number <= pages.free:
            held.append(pages.take(number))
        elif action == "hold" and held:
            pages.hold(held[number % len(held)])
            held.append(list(held[number % len(held)]))
        elif action == "release" and held:
            pages.release(held.pop(number % len(held)))
        everything = {page for group in held for page in group}
        assert pages.free == 8 - len(everything) and 0 not in everything
    with pytest.raises(ValueError, match=re.escape(f"9 pages of {pages.free} free ones")):
        pages.take(9)


@given(st.integers(1, 700), st.integers(1, 700))
def test_buckets_hold_their_rows_and_are_few(count, rows):
    if count <= rows:
        assert count <= bucket(count, rows) <= rows
        assert bucket(count, rows) <= max(8, 1.34 * count) + 8
    assert len({bucket(n, 512) for n in range(1, 513)}) <= 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_budget_gb": 0}, "kv_budget_gb 0 must be a finite number above 0"),
        ({"kv_budget_gb": float("inf")}, "kv_budget_gb inf must be a finite number"),
        ({"paged": False, "strict": True}, "strict and kv_budget_gb are of the paged engine"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(RolloutError, match=message):
        NativeSampler(MODEL, eos_ids=[], **options)
