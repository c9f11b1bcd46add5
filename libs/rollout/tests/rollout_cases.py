"""What the tests of this library share: small models of every architecture, distributions by definition, checks at two sizes."""

import gc
import math
from pathlib import Path

import torch

from align.model import ModelConfig, init
from align.rollout import NativeSampler
from align.rollout._noise import Noise, sample_key, token_keys
from align.rollout._sampling import SamplingParams, draw

CPU = torch.device("cpu")
VOCAB = 60
BASE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
ARCHITECTURES = {
    "mistral": {"tie_word_embeddings": True},
    "mistral, window": {"sliding_window": 6},
    "llama, llama3 rope": {
        "model_type": "llama",
        "num_key_value_heads": 4,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        },
    },
    "llama, biases": {"model_type": "llama", "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3, window in one layer": {
        "model_type": "qwen3", "head_dim": 12, "sliding_window": 5, "use_sliding_window": True,
        "layer_types": ("sliding_attention", "full_attention"),
    },
}  # fmt: skip


def make_model(architecture="mistral", seed=0):
    """Random weights, large enough that tokens differ clearly in likelihood."""
    model = init(ModelConfig(**{**BASE, **ARCHITECTURES[architecture]}), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if "lm_head" in name else 0.2
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def make_prompts(count, seed=0, low=1, high=20):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def full_logits(model, sample):
    """Logits of every sampled token from one forward without a cache: what a trainer computes. (N, V) float64."""
    ids = torch.tensor([sample.prompt_ids + sample.ids], device=model.output_weight.device)
    return model.lm_head(model(ids))[0, len(sample.prompt_ids) - 1 : -1].double().cpu()


def check_greedy(name, count, device="cpu", **options):
    """Tokens are the forward's; log-probabilities are within 1e-5 of the forward in float64, from which that in fp32 is as far away."""
    model = make_model(name).to(device)
    samples = NativeSampler(model, eos_ids=[0], max_batch=16, **options).generate(make_prompts(count), max_new_tokens=24, temperature=0)
    exact = make_model(name).double()
    for sample in samples:
        assert sample.ids == full_logits(model, sample).argmax(-1).tolist()
        assert (sample.ids[-1] == 0) == (sample.finish_reason == "stop") and 0 not in sample.ids[:-1]
        assert sample.logprobs == [0.0] * len(sample.ids)
        wanted = full_logits(exact, sample).log_softmax(-1).amax(-1)
        assert float((torch.tensor(sample.raw_logprobs, dtype=torch.float64) - wanted).abs().max()) < 1e-5


def rss_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def check_memory(calls):
    prompts, sampler = make_prompts(12, seed=5), NativeSampler(make_model(), eos_ids=[0, 1], max_batch=16)

    def go(count):
        for call in range(count):
            sampler.generate(prompts[: 4 + call % 8], n=3, max_new_tokens=4 + call % 5, seeds=range(4 + call % 8))
        gc.collect()
        return rss_bytes()

    before = go(10)
    assert go(calls) - before < 4 << 20  # one leaked cache a call would be 120 kB times the calls


def exact(logits, temperature, top_p, top_k, min_p):
    """The distribution by definition, in Python floats, one token at a time. No ties in these tests."""
    top = max(logits)
    weights = [math.exp((x - top) / temperature) for x in logits]
    total = sum(weights)
    probs = [w / total for w in weights]
    ranked = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept = ranked[:top_k] if top_k else ranked
    share, mass, nucleus = 0.0, sum(probs[i] for i in kept), []
    for i in kept:
        if share >= top_p * mass and top_p < 1:
            break
        nucleus.append(i)
        share += probs[i]
    nucleus = [i for i in nucleus if probs[i] >= min_p * probs[ranked[0]]]
    mass = sum(probs[i] for i in nucleus)
    return [probs[i] / mass if i in nucleus else 0.0 for i in range(len(probs))]


CASES = {
    "plain": (1.0, 1.0, 0, 0.0),
    "temperature": (0.7, 1.0, 0, 0.0),
    "top_k": (1.0, 1.0, 20, 0.0),
    "top_p": (1.0, 0.8, 0, 0.0),
    "min_p": (1.3, 1.0, 0, 0.1),
    "all": (1.1, 0.9, 30, 0.02),
}


def chi_square_z(logits, case, draws, *expectations):
    """Standardised chi-square of `draws` drawn tokens against each list of probabilities; about N(0, 1) if they are right."""
    temperature, top_p, top_k, min_p = CASES[case]
    params, rows, vocab = SamplingParams(temperature, top_p, top_k, min_p), 2000, logits.shape[0]
    noise, counts = Noise(rows, vocab, CPU), torch.zeros(vocab, dtype=torch.float64)
    key = torch.full((rows,), sample_key(2026, 0))
    for start in range(0, draws, rows):
        tokens, _, _ = draw(logits.expand(rows, -1), params, noise.negative_exponential(token_keys(key, torch.arange(start, start + rows))))
        counts += torch.bincount(tokens, minlength=vocab)
    out = []
    for probs in expectations:
        expected = torch.tensor(probs, dtype=torch.float64) * draws
        assert bool((counts[expected == 0] == 0).all())
        keep = expected > 0
        freedom = int(keep.sum()) - 1
        out.append((float(((counts - expected)[keep] ** 2 / expected[keep]).sum()) - freedom) / math.sqrt(2 * freedom))
    return out


def some_logits(vocab):
    return torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 1.5


def biased(probs):
    """Every other kept token 2 % likelier, the others 2 % less."""
    kept = sorted((p, i) for i, p in enumerate(probs) if p)
    out = list(probs)
    for rank, (p, i) in enumerate(kept):
        out[i] = p * (1.02 if rank % 2 else 0.98)
    total = sum(out)
    return [p / total for p in out]
