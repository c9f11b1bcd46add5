"""Speed of the default size on one thread: a training step, the same formulas written plainly, its matrix products alone, and decoding.

Prints the best of several rounds in milliseconds of process CPU time; compare the figures of one run with each other.
"""

import ctypes
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from align.model import Decoder, ModelConfig, Stepper, init

BATCH, LENGTH, ROWS = 48, 70, 128


def best(*functions: Callable[[], object], rounds: int = 12, calls: int = 4) -> list[float]:
    """Milliseconds a call, the best round of each; the functions take turns, so that a busy machine is busy for all."""
    found = [float("inf")] * len(functions)
    for function in functions:
        function()
    for _ in range(rounds):
        for index, function in enumerate(functions):
            start = time.process_time()
            for _ in range(calls):
                function()
            found[index] = min(found[index], (time.process_time() - start) / calls * 1e3)
    return found


def plain(model: Decoder, ids: Tensor) -> Tensor:
    """The textbook forward over the same parameters."""
    config, length = model.config, ids.shape[1]
    angle = torch.arange(length).float()[:, None] * model._frequencies
    cos, sin = (torch.cat((table, table), -1) for table in (angle.cos(), angle.sin()))

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps))

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    hidden = model.model.embed_tokens(ids)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        x = norm(hidden, layer.input_layernorm.weight)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (project(x).unflatten(-1, (-1, config.head_dim)).transpose(1, 2) for project in projections)
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        x = norm(hidden, layer.post_attention_layernorm.weight)
        hidden = hidden + mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    return norm(hidden, model.model.norm.weight)


def step(model: Decoder, forward: Callable[[Tensor], Tensor], ids: Tensor) -> None:
    logits = model.lm_head(forward(ids[:, :-1]))
    F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    model.zero_grad()


def products(model: Decoder) -> None:
    rows = BATCH * (LENGTH - 1)
    for weight in (p for p in model.parameters() if p.dim() == 2):
        x, grad = torch.zeros(rows, weight.shape[1]), torch.zeros(rows, weight.shape[0])
        F.linear(x, weight.detach()), grad @ weight.detach(), grad.T @ x


def decode(model: Decoder, ids: Tensor) -> None:
    cache = model.new_cache(ROWS, LENGTH)
    with torch.inference_mode():
        model(ids[:, :30], cache=cache)
        for at in range(30, LENGTH):
            model.lm_head(model(ids[:, at : at + 1], cache=cache))


def stepped(model: Decoder, ids: Tensor) -> None:
    cache = model.new_cache(ROWS, 30)
    with torch.inference_mode():
        model(ids[:, :30], cache=cache)
        stepper = Stepper(model, ROWS, LENGTH)
        stepper.enter(0, cache, torch.arange(ROWS), [30] * ROWS)
        for at in range(30, LENGTH):
            stepper(ids[:, at], torch.full((ROWS,), at), at + 1)


def keep_memory() -> None:
    """Tells glibc to keep what was freed: by default a large tensor's pages go back to the system and are faulted in again at each step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt:
        mallopt(-3, 32 << 20), mallopt(-1, (1 << 31) - 1)  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD


def main() -> None:
    torch.set_num_threads(1)
    config = ModelConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model, generator = init(config, 0), torch.Generator().manual_seed(0)
    ids = torch.randint(100, (ROWS, LENGTH), generator=generator)
    batch = ids[:BATCH]
    for setting in ("as it is", "keeping memory"):
        ours, text, matrix = best(
            lambda: step(model, model, batch), lambda: step(model, lambda x: plain(model, x), batch), lambda: products(model)
        )
        print(f"forward and backward, {BATCH} x {LENGTH}, {setting}: {ours:.1f} ms; plainly {text:.1f}; products alone {matrix:.1f}")
        keep_memory()
    cached, steps = best(lambda: decode(model, ids), lambda: stepped(model, ids), calls=1)
    tokens = ROWS * (LENGTH - 30)
    print(f"{tokens} tokens after a prompt of 30, batch {ROWS}: forward {tokens / cached:.1f} k tokens/s, Stepper {tokens / steps:.1f}")


if __name__ == "__main__":
    main()
