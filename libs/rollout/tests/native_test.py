import doctest
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_cases import ARCHITECTURES, VOCAB, check_greedy, check_memory, full_logits, make_model, make_prompts

from align.rollout import NativeSampler, RolloutError
from align.rollout._stops import StopStrings
from align.tokenizer import Tokenizer

MODEL = make_model()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_is_the_argmax_of_full_forwards(name):
    check_greedy(name, 20)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_a_full_forward(name, temperature):  # R071, R093
    model = make_model(name)
    sampler = NativeSampler(model, eos_ids=[0, 1], max_batch=7)
    samples = sampler.generate(make_prompts(12), n=2, max_new_tokens=20, temperature=temperature, seeds=range(12))
    off_top = 0
    for sample in samples:
        logits, ids = full_logits(model, sample), torch.tensor(sample.ids)[:, None]
        raw = logits.log_softmax(-1).gather(1, ids)[:, 0]
        drawn = (logits / temperature).log_softmax(-1).gather(1, ids)[:, 0]
        assert float((torch.tensor(sample.raw_logprobs) - raw).abs().max()) < 1e-5
        assert float((torch.tensor(sample.logprobs) - drawn).abs().max()) < 1e-5
        off_top += int((logits.argmax(-1) != ids[:, 0]).sum())
    assert off_top > 20  # or the test would not tell the drawn token from the top one


def test_filters_and_their_log_probs_through_generate():
    samples = NativeSampler(MODEL, eos_ids=[0]).generate(
        make_prompts(10), max_new_tokens=20, temperature=1.5, top_k=5, top_p=0.9, seeds=range(10)
    )
    for sample in samples:
        for logits, token, logprob in zip(full_logits(MODEL, sample), sample.ids, sample.logprobs, strict=True):
            probs = (logits / 1.5).softmax(-1)
            five = probs.topk(5).values
            size = int((five.cumsum(0) - five < 0.9 * five.sum()).sum())
            assert probs[token] >= five[size - 1] * (1 - 1e-5)
            assert logprob == pytest.approx(math.log(probs[token] / five[:size].sum()), abs=1e-5)


def outcome(sample):
    return sample.ids, sample.finish_reason


REQUESTS = make_prompts(24, seed=5)
ALONE = [
    NativeSampler(MODEL, eos_ids=[0, 1, 2]).generate([prompt], n=3, max_new_tokens=18, temperature=0.9, seeds=[100 + index])
    for index, prompt in enumerate(REQUESTS)
]


@settings(max_examples=10)
@given(order=st.permutations(range(len(REQUESTS))), count=st.integers(1, len(REQUESTS)), max_batch=st.integers(1, 80), n=st.integers(1, 3))
def test_batching_order_and_max_batch_change_no_token(order, count, max_batch, n):
    order = order[:count]
    samples = NativeSampler(MODEL, eos_ids=[0, 1, 2], max_batch=max_batch).generate(
        [REQUESTS[index] for index in order], n=n, max_new_tokens=18, temperature=0.9, seeds=[100 + index for index in order]
    )
    assert len(samples) == count * n
    for place, index in enumerate(order):
        for j in range(n):
            got, wanted = samples[place * n + j], ALONE[index][j]
            assert outcome(got) == outcome(wanted) and got.prompt_ids == REQUESTS[index]
            assert got.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
            assert got.raw_logprobs == pytest.approx(wanted.raw_logprobs, abs=1e-5)


def test_a_sample_continues_the_same_after_a_stop_in_the_middle():
    sampler = NativeSampler(MODEL, eos_ids=[])
    [whole] = sampler.generate([REQUESTS[0]], max_new_tokens=20, seeds=[7])
    [rest] = sampler.generate([REQUESTS[0] + whole.ids[:8]], max_new_tokens=12, seeds=[7])
    assert rest.ids == whole.ids[8:]


def test_samples_of_a_group_are_drawn_apart_and_rightly():  # R092
    prompt, count = REQUESTS[3], 20_000
    samples = NativeSampler(MODEL, eos_ids=[], max_batch=4096).generate([prompt], n=count, max_new_tokens=2, seeds=[1])
    with torch.no_grad():
        first = MODEL.lm_head(MODEL(torch.tensor([prompt])))[0, -1].double().softmax(-1)
        after = MODEL.lm_head(MODEL(torch.tensor([[*prompt, token] for token in range(VOCAB)])))[:, -1].double().softmax(-1)
    for position, probs in ((0, first), (1, first @ after)):
        counts = torch.bincount(torch.tensor([sample.ids[position] for sample in samples]), minlength=VOCAB)
        chi = float(((counts - count * probs) ** 2 / (count * probs)).sum())
        assert abs(chi - (VOCAB - 1)) / math.sqrt(2 * (VOCAB - 1)) < 4


def test_seeds_choose_the_samples_and_none_follows_torchs_generator():
    sampler = NativeSampler(MODEL, eos_ids=[])

    def ids(**words):
        return [sample.ids for sample in sampler.generate(REQUESTS[:3], max_new_tokens=8, **words)]

    assert ids(seeds=[1, 2, 3]) == ids(seeds=[1, 2, 3])
    assert ids(seeds=[1, 2, 3]) != ids(seeds=[1, 2, 4])
    assert ids(seeds=[1, 2, 3])[:2] == ids(seeds=[1, 2, 4])[:2]
    torch.manual_seed(5)
    one, two = ids(), ids()
    torch.manual_seed(5)
    assert ids() == one != two


def test_stop_tokens_end_a_sample_and_belong_to_it():  # R080
    sampler = NativeSampler(MODEL, eos_ids=[4])
    samples = sampler.generate(REQUESTS, n=4, max_new_tokens=30, stop_ids=[9], seeds=range(24))
    reasons = set()
    for sample in samples:
        assert not {4, 9} & set(sample.ids[:-1])
        assert (sample.ids[-1] in (4, 9)) == (sample.finish_reason == "stop") == (not sample.truncated)
        assert sample.finish_reason == "stop" or len(sample.ids) == 30
        reasons.add((sample.finish_reason, sample.ids[-1] if not sample.truncated else None))
    assert reasons == {("stop", 4), ("stop", 9), ("length", None)}


def test_the_models_window_ends_a_sample():
    prompts = [[3] * 62, [3] * 63, [3] * 5]
    samples = NativeSampler(MODEL, eos_ids=[]).generate(prompts, max_new_tokens=10, seeds=[0, 1, 2])
    assert [len(sample.ids) for sample in samples] == [2, 1, 10]
    assert all(sample.truncated for sample in samples)
    for sample in samples:
        assert len(sample.prompt_ids) + len(sample.ids) <= 64


def letters():
    """A tokenizer whose tokens are single letters, with digits at the end; ids 0 .. 59."""
    characters = [chr(ord("a") + i) for i in range(26)] + [chr(ord("A") + i) for i in range(26)] + list("01234567")
    return Tokenizer.from_dict({
        "model": {"type": "BPE", "vocab": {c: i for i, c in enumerate(characters)}, "merges": []},
        "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": {"type": "Fuse"},
    })  # fmt: skip


def test_stop_strings_are_found_across_tokens_and_only_in_the_output():
    tokenizer, sampler = letters(), NativeSampler(MODEL, eos_ids=[], max_batch=10)
    free = sampler.generate(REQUESTS, max_new_tokens=30, seeds=range(24))
    texts = [tokenizer.decode(sample.ids) for sample in free]
    stops = [texts[0][10:13], texts[1][5], texts[2][0:2]]
    stopped = sampler.generate(REQUESTS, max_new_tokens=30, seeds=range(24), stop_strings=stops, tokenizer=tokenizer)
    cut = 0
    for sample, text in zip(stopped, texts, strict=True):
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        assert tokenizer.decode(sample.ids) == text[: min(ends, default=30)]
        assert (sample.finish_reason == "stop") == bool(ends)
        cut += bool(ends)
    assert 3 <= cut < 24
    # A stop string that the prompt ends with does not count, nor one that began there.
    prompt = REQUESTS[0] + free[0].ids[:3]
    stop = tokenizer.decode(prompt[-2:] + free[0].ids[3:4])
    [sample] = sampler.generate([prompt], max_new_tokens=20, seeds=[0], stop_strings=[stop], tokenizer=tokenizer)
    assert sample.ids[0] == free[0].ids[3] and len(sample.ids) > 1


@given(st.data())
def test_a_stop_string_is_found_wherever_it_stands(data):
    """By the text so far: also at its beginning, where less than the longest stop string has been said."""
    text = data.draw(st.text("ab", min_size=1, max_size=12))
    stops = data.draw(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
    tokenizer = letters()
    watch = StopStrings(stops, tokenizer, tokenizer.encode("z"))
    found = [watch.push(token) for token in tokenizer.encode(text)]
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert (found.index(True) + 1 if ends else any(found)) == min(ends, default=False)


def test_the_weights_in_place_and_their_version_are_recorded():
    model = make_model(seed=3)
    sampler = NativeSampler(model, eos_ids=[])
    [before] = sampler.generate([REQUESTS[0]], max_new_tokens=6, temperature=0)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.neg_()
        model.model.layers[1].self_attn.q_proj.weight.mul_(-2)
    sampler.weights_version = 12
    [after] = sampler.generate([REQUESTS[0]], max_new_tokens=6, temperature=0)
    assert (before.weights_version, after.weights_version) == (0, 12)
    assert after.ids == full_logits(model, after).argmax(-1).tolist() != before.ids


def test_generate_neither_trains_nor_leaves_inference_tensors_behind():
    model = make_model(seed=4)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    NativeSampler(model, eos_ids=[]).generate(REQUESTS[:4], max_new_tokens=4)
    assert all(torch.equal(parameter, before[name]) and parameter.grad is None for name, parameter in model.named_parameters())
    model(torch.tensor([[1, 2, 3]])).sum().backward()  # caches made under inference_mode would raise here
    assert model.output_weight.grad is not None


def test_bf16_gives_the_trainers_log_probs_to_rounding():
    model = make_model().to(torch.bfloat16)
    samples = NativeSampler(model, eos_ids=[]).generate(REQUESTS, max_new_tokens=16, seeds=range(24))
    gaps = []
    for sample in samples:
        logits, ids = full_logits(model, sample), torch.tensor(sample.ids)[:, None]
        gaps.append((logits.log_softmax(-1).gather(1, ids)[:, 0] - torch.tensor(sample.raw_logprobs)).abs())
    assert float(torch.cat(gaps).mean()) < 0.1  # logits of about ±10 are 2^-5 coarse in bf16


def test_memory_does_not_grow():
    check_memory(40)


def test_nothing_to_do():
    assert NativeSampler(MODEL, eos_ids=[]).generate([], max_new_tokens=3) == []


@pytest.mark.parametrize(
    ("prompts", "words", "message"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 60]], {}, "prompt 0 holds token id 60; the model's vocabulary is 60 tokens"),
        ([[1, -2]], {}, "token id -2"),
        ([[1] * 64], {}, "prompt 0 has 64 tokens; the model's window is 64"),
        ([[1]], {"n": 0}, "n 0 must be at least 1"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens 0"),
        ([[1]], {"temperature": math.inf}, "temperature inf"),
        ([[1]], {"stop_ids": [77]}, "stop_ids holds token id 77"),
        ([[1]], {"stop_strings": ["x"]}, "without a tokenizer"),
        ([[1]], {"stop_strings": ["x", ""], "tokenizer": letters()}, "empty string"),
        ([[1]], {"stop_strings": "END", "tokenizer": letters()}, "stop_strings is the text 'END', of which each letter"),
        ([[1], [2]], {"seeds": [1]}, "1 seeds for 2 prompts"),
        ([[1]], {"seeds": [1.5]}, "seed 0 has 1.5 where an integer must be"),
        ([[1], [2, 3.7]], {}, "prompt 1 has 3.7 where"),
        ([["1"]], {}, "prompt 0 has '1' where"),
        ([[1]], {"n": 2.5}, "n has 2.5 where"),
        ([[1]], {"max_new_tokens": math.nan}, "max_new_tokens has nan where"),
        ([[1]], {"top_k": 0.5}, "top_k has 0.5 where"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_by_name(prompts, words, message):
    with pytest.raises(RolloutError, match=message):
        NativeSampler(MODEL, eos_ids=[]).generate(prompts, **{"max_new_tokens": 2, **words})


@pytest.mark.parametrize("paged", [False, True])
def test_integers_of_numpy_and_torch_are_integers(paged):
    """Their 64-bit arithmetic made another seed of the same number, or ended in an overflow."""
    sampler = NativeSampler(MODEL, eos_ids=[], paged=paged)
    wanted = sampler.generate([[1, 2], [3, 4]], max_new_tokens=4, seeds=[1, 2**63 - 1])
    for kind in (torch.tensor, lambda values: torch.tensor(values).numpy()):
        assert sampler.generate(kind([[1, 2], [3, 4]]), max_new_tokens=kind(4), seeds=kind([1, 2**63 - 1])) == wanted


def test_weights_that_overflow_are_refused_and_the_sampler_is_checked():
    model = make_model(seed=6)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(math.nan)
    with pytest.raises(RolloutError, match="not finite in sample 0 of prompt 0"):
        NativeSampler(model, eos_ids=[]).generate([[1, 2]], max_new_tokens=3)
    with pytest.raises(RolloutError, match="max_batch 0"):
        NativeSampler(MODEL, eos_ids=[], max_batch=0)
    with pytest.raises(RolloutError, match="eos_ids holds token id 60"):
        NativeSampler(MODEL, eos_ids=[60])


def test_the_readme_runs():
    failed, tried = doctest.testfile(str(Path(__file__).parents[1] / "README.md"), module_relative=False)
    assert failed == 0 and tried > 5
