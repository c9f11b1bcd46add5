"""The sampler on one GPU: decoding rates at the sizes of the 1.44B and 7.25B configurations, beside transformers' generate in the same run.

    PYTHONPATH=libs/rollout:libs/model:libs/kernels:libs/tokenizer:libs/config python3 libs/rollout/benchmarks/gpu.py --out DIR

Weights are random, so no sample stops by itself. "decode" is the rate of steps alone, from the difference of a long and a short call;
"whole" is that of the call with the prompts read. `changes` tells how many requests get other tokens in other batches. Every case is a
process of its own. `--peers DIR` has transformers for `hf` cases.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from align.model import Decoder, ModelConfig
from align.rollout import NativeSampler, SamplingParams
from align.rollout._engine import engine_for  # `mixed` gives each request a limit of its own
from align.rollout._paged_run import PagedRun
from align.rollout._run import Request

SIZES = {
    "1.44B": {
        "hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4,
    },
    "7.25B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip
VOCABULARY = 32768
COPY, MATMUL = 4.26e12, 770e12  # bytes and operations a second of the roofline: an H200 as measured


def build(size: str, device: str) -> Decoder:
    config = ModelConfig(vocab_size=VOCABULARY, max_position_embeddings=32768, rope_theta=1e6, **SIZES[size])
    with torch.device("meta"):
        model = Decoder(config, torch.bfloat16 if device == "cuda" else torch.float32)
    model = model.to_empty(device=device).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, 0.02, generator=generator)
        else:
            parameter.fill_(1.0)
    return model


def roofline(size: str, batch: int, mean_length: float) -> float:
    """Seconds of a step at best: the weights read once or their products, whichever is longer, and the cache read once."""
    c = SIZES[size]
    dim = 128 if size != "tiny" else 16
    matrices = (
        c["hidden_size"] * (c["num_attention_heads"] + c["num_key_value_heads"]) * dim * 2 + 3 * c["hidden_size"] * c["intermediate_size"]
    )
    weights = c["num_hidden_layers"] * matrices + VOCABULARY * c["hidden_size"]
    cache = c["num_hidden_layers"] * 2 * c["num_key_value_heads"] * dim * 2 * batch * mean_length
    return max(2 * weights / COPY, 2 * weights * batch / MATMUL) + cache / COPY


def prompts_of(batch: int, lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (lengths[i % len(lengths)],), generator=generator).tolist() for i in range(batch)]


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def ours(size: str, batch: int, prompt: int, new: int, device: str, strict: bool) -> dict[str, float]:
    model = build(size, device)
    sampler = NativeSampler(model, eos_ids=[], max_batch=batch, strict=strict, paged=True)
    prompts = prompts_of(batch, [prompt])
    seeds = list(range(batch))

    def call(tokens: int) -> float:
        wait(device)
        start = time.perf_counter()
        sampler.generate(prompts, max_new_tokens=tokens, seeds=seeds)
        wait(device)
        return time.perf_counter() - start

    first = call(new)  # captures, and allocates for the longest
    short, long = min(call(1) for _ in range(2)), min(call(new) for _ in range(2))
    step = (long - short) / (new - 1)
    row = {
        "ms a step": step * 1e3,
        "decode tok/s": batch / step,
        "whole tok/s": batch * new / long,
        "of roofline": roofline(size, batch, prompt + new / 2) / step,
        "prefill s": short,
        "first call s": first,
    }
    if device == "cuda":
        row["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def mixed(size: str, batch: int, prompt: int, new: int, device: str, strict: bool) -> dict[str, float]:
    """Six times as many samples as rows, of 64 to 1024 new tokens: rows become free at all times."""
    model = build(size, device)
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(64, 1025, (6 * batch,), generator=generator).tolist() if device == "cuda" else [2, 9] * 3 * batch
    prompts = prompts_of(6 * batch, [prompt])
    requests = [Request(ids, i, limit) for i, (ids, limit) in enumerate(zip(prompts, lengths, strict=True))]
    best = float("inf")
    engine = None
    for _ in range(2):
        wait(device)
        start = time.perf_counter()
        with torch.inference_mode():
            engine = engine_for(
                model, engine, rows=batch, longest=prompt + max(lengths), samples=6 * batch, kv_budget_gb=None, strict=strict
            )
            PagedRun(engine, requests, 1, SamplingParams(), batch, [], None).samples(0)
        wait(device)
        best = min(best, time.perf_counter() - start)
    return {"whole tok/s": sum(lengths) / best, "samples": 6 * batch, "seconds": best}


def changes(size: str, batch: int, prompt: int, new: int, device: str, strict: bool) -> dict[str, float]:
    """The same requests in other batches: the share whose tokens change, and where the first change stands, on average."""
    model = build(size, device)
    prompts, row = prompts_of(batch, [prompt]), {}

    def tokens(rows: int, order: list[int]) -> dict[int, list[int]]:
        sampler = NativeSampler(model, eos_ids=[], max_batch=rows, strict=strict, paged=True)
        samples = sampler.generate([prompts[i] for i in order], max_new_tokens=new, seeds=order)
        sampler.release()
        return {i: sample.ids for i, sample in zip(order, samples, strict=True)}

    whole = tokens(batch, list(range(batch)))
    for name, rows, order in (("a quarter", max(1, batch // 4), range(batch)), ("7 rows, backwards", 7, range(min(batch, 28) - 1, -1, -1))):
        others = tokens(rows, list(order))
        firsts = [next((at for at in range(new) if whole[i][at] != ids[at]), new) for i, ids in others.items()]
        changed = [at for at in firsts if at < new]
        row[f"changed, {name}"] = len(changed) / len(firsts)
        row[f"first change, {name}"] = sum(changed) / max(1, len(changed))
    return row


# A program for a process that has transformers: its generate with a static cache, compiled or not. Arguments as JSON: see `peer`.
PEER = """
import json, sys, time, torch
from transformers import MistralConfig, MistralForCausalLM
a = json.loads(sys.argv[1])
more = {"max_position_embeddings": 32768, "rope_theta": 1e6, "sliding_window": None, "head_dim": 128, "tie_word_embeddings": False}
config = MistralConfig(**more, **a["model"])
config._attn_implementation = "sdpa"
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = MistralForCausalLM(config).eval()
model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
ids = torch.randint(3, a["model"]["vocab_size"], (a["batch"], a["prompt"]), device="cuda")
def call(tokens):
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.no_grad():
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, cache_implementation="static", disable_compile=not a["compiled"])
    torch.cuda.synchronize()
    assert out.shape[1] == a["prompt"] + tokens
    return time.perf_counter() - start
first = call(3)
if a["compiled"]:
    call(a["new"]), call(3)
short, long = call(3), call(a["new"])
print("RESULT " + json.dumps({"first call s": first, "step": (long - short) / (a["new"] - 3)}))
"""


def peer(size: str, batch: int, prompt: int, new: int, compiled: bool) -> list[str]:
    """The command of a peer's case."""
    shape = {"model": {"vocab_size": VOCABULARY, **SIZES[size]}, "batch": batch, "prompt": prompt, "new": new, "compiled": compiled}
    return ["-c", PEER, json.dumps(shape)]


def one(case: str, arguments: argparse.Namespace) -> dict[str, float]:
    kind, size, batch = case.split(":")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    common = (size, int(batch), arguments.prompt, arguments.new, device)
    run = {"mixed": mixed, "changes": changes, "ours": ours}[kind.removesuffix("-strict")]
    return run(*common, kind.endswith("-strict"))


DEFAULT = ",".join(f"ours:{size}:{batch}" for size in ("1.44B", "7.25B") for batch in (1, 64, 256))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for rollout.json")
    parser.add_argument(
        "--cases", default=DEFAULT, help="kind:size:batch, …; kinds ours, mixed and changes, each also -strict; hf, hf-compiled"
    )
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--hf-new", type=int, default=64, help="new tokens of hf cases, whose steps are slow")
    parser.add_argument("--peers", help="folder with transformers")
    parser.add_argument("--one", help="run this case in this process")
    arguments = parser.parse_args()
    if arguments.one:
        print("RESULT " + json.dumps(one(arguments.one, arguments)), flush=True)
        return
    rows = []
    environment = dict(os.environ)
    if arguments.peers:
        environment["PYTHONPATH"] = environment.get("PYTHONPATH", "") + os.pathsep + arguments.peers
    for case in arguments.cases.split(","):
        kind, size, batch = case.split(":")
        command = [__file__, "--one", case, "--prompt", str(arguments.prompt), "--new", str(arguments.new)]
        if kind.startswith("hf"):
            command = peer(size, int(batch), arguments.prompt, arguments.hf_new, kind == "hf-compiled")
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
        found = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        row = {"case": case} | (json.loads(found[0]) if found else {"failed": done.stderr[-1500:]})
        if found and kind.startswith("hf"):
            row["decode tok/s"] = int(batch) / row["step"]
            row["of roofline"] = roofline(size, int(batch), arguments.prompt + arguments.hf_new / 2) / row["step"]
        rows.append(row)
        print(" ".join(f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()), flush=True)
        (arguments.out / "rollout.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
