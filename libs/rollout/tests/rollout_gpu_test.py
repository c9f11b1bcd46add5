"""The paged engine on a GPU: captured steps, kernels, and what strict mode promises, bit by bit."""

import gc

import pytest
import requires
import torch
from rollout_cases import ARCHITECTURES, check_greedy, make_prompts

from align.model import Decoder, ModelConfig
from align.objectives import sequence_logprobs
from align.rollout import NativeSampler

pytestmark = pytest.mark.gpu
SIZES = {
    "head 128": {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 2},
    "head 64, q/k norms": {
        "model_type": "qwen3", "head_dim": 64, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 14,
        "num_key_value_heads": 2, "sliding_window": 100, "use_sliding_window": True,
        "layer_types": ("sliding_attention", "full_attention", "sliding_attention"),
    },
    "biases": {
        "model_type": "qwen2", "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def device():
    requires.gpu(torch.cuda.is_available())
    torch.cuda.empty_cache()


def make(name):
    config = ModelConfig(vocab_size=4000, num_hidden_layers=3, max_position_embeddings=4096, **SIZES[name])
    model, generator = Decoder(config, torch.bfloat16).cuda(), torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0 if parameter.dim() == 2 else 1.0, 0.05, generator=generator)
    return model


def prompts_for(count, low, high, seed=0):
    return [[(31 * token + 7 * i) % 4000 for i, token in enumerate(ids)] for ids in make_prompts(count, seed=seed, low=low, high=high)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_is_the_argmax_of_full_forwards_in_fp32(name):
    torch.backends.cuda.matmul.allow_tf32 = False
    check_greedy(name, 100, device="cuda", paged=True)


@pytest.mark.parametrize("name", SIZES)
def test_strict_log_probs_are_the_trainer_s_bit_for_bit(name):
    """Against packed rows of all samples, whatever batch they were drawn in; and the same samples in any batch."""
    model, prompts = make(name), prompts_for(24, 1, 300)
    drawn = {
        rows: NativeSampler(model, eos_ids=[], max_batch=rows, strict=True).generate(prompts, n=2, max_new_tokens=70, seeds=range(24))
        for rows in (1, 7, 48)
    }
    assert drawn[1] == drawn[7] == drawn[48]
    joined = [sample.prompt_ids + sample.ids for sample in drawn[48]]
    ends = torch.tensor([0, *(len(ids) for ids in joined)]).cumsum(0).int().cuda()
    ids = torch.tensor([token for ids in joined for token in ids], device="cuda")[None]
    with torch.no_grad():
        hidden = model(ids, cu_seqlens=ends, forward_impl="invariant")
        logprobs = sequence_logprobs(hidden[:, :-1], model.output_weight, ids[:, 1:], invariant=True)[0].tolist()
    for sample, end in zip(drawn[48], ends[1:].tolist(), strict=True):
        assert sample.raw_logprobs == logprobs[end - 1 - len(sample.ids) : end - 1]


@pytest.mark.parametrize("name", SIZES)
def test_default_log_probs_are_the_trainer_s_to_the_rounding_of_bf16(name):
    model = make(name)
    samples = NativeSampler(model, eos_ids=[], max_batch=70).generate(prompts_for(20, 1, 300), n=4, max_new_tokens=40, seeds=range(20))
    for sample in samples[::7]:
        ids = torch.tensor([sample.prompt_ids + sample.ids], device="cuda")
        with torch.no_grad():
            wanted = sequence_logprobs(model(ids[:, :-1]), model.output_weight, ids[:, 1:])[0, len(sample.prompt_ids) - 1 :]
        assert float((torch.tensor(sample.raw_logprobs) - wanted.cpu()).abs().max()) < 0.15


def test_memory_does_not_grow_over_1000_calls_and_a_cancelled_one_frees_its_pages():
    sampler, prompts = NativeSampler(make("head 128"), eos_ids=[0, 1], max_batch=16), prompts_for(12, 1, 200)

    def stop(sample, token):
        raise KeyboardInterrupt

    def go(calls):
        for call in range(calls):
            chosen = prompts[: 4 + call % 8]
            if call % 10 == 9:
                with pytest.raises(KeyboardInterrupt):
                    sampler.generate(chosen, n=3, max_new_tokens=8, on_token=stop)
            else:
                sampler.generate(chosen, n=3, max_new_tokens=4 + call % 5, seeds=range(len(chosen)))
            assert sampler._engine.pages.free == sampler._engine.page_count - 1
        gc.collect()
        return torch.cuda.memory_allocated()

    before = go(20)
    assert go(1000) == before
