"""Tokens a second of NativeSampler at the default run's size: 16 prompts of 20 to 31 tokens, 8 samples each, 56 new tokens, one thread.

Beside it, in turn, as many tokens by what one would write first: `Decoder.forward` on a cache, softmax, torch.multinomial.

`bazel run //libs/rollout:decode`, or `python libs/rollout/benchmarks/decode.py` with the libraries on PYTHONPATH. CPU time of this process,
which keeps freed memory as the stages do; the best of the rounds, since on a busy machine the caches are shared.
"""

import ctypes
import sys
import time

import torch
from torch import Tensor

from align.model import Decoder, ModelConfig, init
from align.rollout import NativeSampler

SIZE = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
PROMPTS, SAMPLES, NEW_TOKENS = 16, 8, 56


@torch.inference_mode()
def plain(model: Decoder, prompts: Tensor) -> Tensor:
    """prompts (B, T) of equal length -> (B, NEW_TOKENS) sampled at temperature 1."""
    cache = model.new_cache(prompts.shape[0], prompts.shape[1] + NEW_TOKENS)
    hidden, out = model(prompts, cache=cache), []
    for _ in range(NEW_TOKENS):
        probs = torch.softmax(model.lm_head(hidden[:, -1]), -1)
        out.append(torch.multinomial(probs, 1))
        if len(out) < NEW_TOKENS:
            hidden = model(out[-1], cache=cache)
    return torch.cat(out, 1)


def keep_freed_memory() -> None:
    """What every stage does at its start: large tensors' pages are not given back to the system and faulted in again at the next call."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt:
        mallopt(-3, 32 << 20), mallopt(-1, (1 << 31) - 1)  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    model, generator = init(ModelConfig(**SIZE), 0), torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 32, (PROMPTS,), generator=generator).tolist()
    ragged = [torch.randint(3, 100, (length,), generator=generator).tolist() for length in lengths]
    even = torch.randint(3, 100, (PROMPTS * SAMPLES, 26), generator=generator)
    sampler, tokens = NativeSampler(model, eos_ids=[]), PROMPTS * SAMPLES * NEW_TOKENS
    ways = {
        "NativeSampler": lambda: sampler.generate(ragged, n=SAMPLES, max_new_tokens=NEW_TOKENS, seeds=range(PROMPTS)),
        "greedy": lambda: sampler.generate(ragged, n=SAMPLES, max_new_tokens=NEW_TOKENS, temperature=0),
        "forward + multinomial": lambda: plain(model, even),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.process_time()
            way()
            best[name] = min(best[name], time.process_time() - start)
    for name, seconds in best.items():
        print(f"{name:24}{tokens / seconds:10,.0f} tok/s {1000 * seconds:8.1f} ms")
    print(f"ratio {best['forward + multinomial'] / best['NativeSampler']:.2f}")


if __name__ == "__main__":
    main()
