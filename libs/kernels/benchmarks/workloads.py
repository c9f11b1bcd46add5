"""What gpu.py measures: inputs of two real models, the timer, the configurations that a sweep tries, and a lean model on these ops.

Peers run the same cases: `training_cases` takes any object with the ops' names (gpu.py has Liger's as such an object).
"""

import contextlib
import functools
import io
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from align import kernels

Functions = list[Callable[[], Any]]

MODELS = {
    "1.44B": SimpleNamespace(size=2048, layers=24, heads=16, kv_heads=4, inner=7168, vocabulary=32768),
    "7.25B": SimpleNamespace(size=4096, layers=32, heads=32, kv_heads=8, inner=14336, vocabulary=32768),
}
BATCH, LENGTH, DIM = 4, 4096, 128  # 16,384 tokens, as the training step has
TOKENS = BATCH * LENGTH


def rand(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda", dtype=torch.float32) * scale).bfloat16()


def rehearse(whole: Callable[[], None]) -> None:
    """Compiles what a measurement needs, beside other processes; then waits for its turn: a line on the standard input."""
    global rehearsing
    rehearsing = True
    with contextlib.redirect_stdout(io.StringIO()):
        whole()
    rehearsing = False
    torch.cuda.empty_cache()
    sys.stdin.readline()


def use_own_stream() -> None:
    """Call before anything: a backward runs on the stream of its forward, and the default stream can't be captured."""
    torch.cuda.set_stream(torch.cuda.Stream())


rehearsing = False  # while set, nothing is measured: every function is called once, so that its kernels are compiled


def timed(functions: Functions, repeats: int = 15, target_ms: float = 3.0) -> float:
    """Milliseconds a call: a CUDA graph of the functions in turn (their inputs differ, so that the cache is cold), median of replays."""
    for f in functions[:1] if rehearsing else functions:
        f()
    if rehearsing:
        return 1.0
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for f in functions:
        f()
    torch.cuda.synchronize()
    guess = (time.perf_counter() - begin) * 1e3 / len(functions)
    rounds = max(1, min(40, int(target_ms / max(guess, 1e-3) / len(functions))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(rounds):
            for f in functions:
                f()
    times = []
    for _ in range(repeats + 2):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / rounds / len(functions))
    del graph
    return statistics.median(times[2:])


def timed_eagerly(function: Callable[[], Any], repeats: int = 7) -> float:
    if rehearsing:
        function()
        return 1.0
    times = []
    for _ in range(repeats + 2):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        function()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times[2:])


def copy_rate() -> float:
    """Bytes a second, read and written, of a device copy of 4 GiB."""
    x = torch.randn(1 << 31 if not rehearsing else 1, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    return 2 * x.numel() * 2 / timed_eagerly(lambda: y.copy_(x)) * 1e3  # in a graph a copy is another, slower thing


def steps(step: Callable[[], Tensor], number: int) -> tuple[float, float, float, float]:
    """(median ms of a training step, least, peak GiB, last loss); the host's clock around a synchronised step."""
    for _ in range(3):
        step()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(number):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times), min(times), torch.cuda.max_memory_allocated() / 2**30, float(loss)


def inputs(name: str, m: SimpleNamespace) -> list[Tensor]:
    """One set of an op's arguments."""
    head = lambda n: rand(BATCH, LENGTH, n, DIM)  # noqa: E731
    return {
        "rms_norm": lambda: [rand(TOKENS, m.size), rand(m.size)],
        "add_rms_norm": lambda: [rand(TOKENS, m.size), rand(TOKENS, m.size), rand(m.size)],
        "rope": lambda: [head(m.heads), head(m.kv_heads)],
        "rope_qkv": lambda: [rand(BATCH, LENGTH, (m.heads + 2 * m.kv_heads) * DIM)],
        "swiglu": lambda: [rand(TOKENS, m.inner), rand(TOKENS, m.inner)],
        "swiglu_packed": lambda: [rand(TOKENS, 2 * m.inner)],
    }[name]()


def tables() -> tuple[Tensor, Tensor, Tensor]:
    frequencies = 1e6 ** (-torch.arange(0, DIM, 2, device="cuda") / DIM)
    angle = torch.arange(LENGTH, device="cuda")[:, None] * frequencies
    return angle.cos(), angle.sin(), torch.arange(LENGTH, device="cuda").expand(BATCH, LENGTH).contiguous()


def counted_bytes(name: str, m: SimpleNamespace, back: bool) -> int:
    """Of all tensors that the op must read and write once, in bf16; tables and row statistics too."""
    qkv = (m.heads + 2 * m.kv_heads) * DIM
    table = DIM // 2 * 4 * 2 + 8
    row = {
        "rms_norm": (2 * m.size * 2 + 4, 3 * m.size * 2 + 4),
        "add_rms_norm": (4 * m.size * 2 + 4, 4 * m.size * 2 + 4),
        "rope": (2 * 2 * (m.heads + m.kv_heads) * DIM + table,) * 2,
        "rope_qkv": (2 * 2 * qkv + table,) * 2,
        "swiglu": (3 * 2 * m.inner, 5 * 2 * m.inner),
        "swiglu_packed": (3 * 2 * m.inner, 5 * 2 * m.inner),
    }[name]
    return TOKENS * row[back]


def ours() -> SimpleNamespace:
    cos, sin, position_ids = tables()
    return SimpleNamespace(
        is_ours=True,
        rms_norm=kernels.rms_norm,
        add_rms_norm=kernels.add_rms_norm,
        rope=lambda q, k: kernels.rope(q, k, cos, sin, position_ids),
        swiglu=kernels.swiglu,
        swiglu_packed=kernels.swiglu_packed,
    )


def ours_qkv(m: SimpleNamespace) -> Callable[[Tensor], Any]:
    cos, sin, position_ids = tables()
    return lambda qkv: kernels.rope_qkv(qkv, cos, sin, position_ids, heads=m.heads, kv_heads=m.kv_heads)


def forwards(op: Callable[..., Any], name: str, m: SimpleNamespace, sets: int = 2) -> Functions:
    def call(arguments: list[Tensor]) -> None:
        with torch.no_grad():
            op(*arguments)

    return [functools.partial(call, inputs(name, m)) for _ in range(sets)]


def backwards(op: Callable[..., Any], name: str, m: SimpleNamespace, sets: int = 2) -> Functions:
    found: Functions = []
    for _ in range(sets):
        leaves = [t.requires_grad_() for t in inputs(name, m)]
        out = op(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        upstream = [torch.randn_like(o) for o in out]
        found.append(functools.partial(torch.autograd.grad, out, leaves, upstream, retain_graph=True))
    return found


def training_cases(ops: Any) -> Iterator[tuple[str, str, float, float]]:
    """(op, model, forward ms, backward ms) of the ops that the object has."""
    for model, m in MODELS.items():
        for name in ("rms_norm", "add_rms_norm", "rope", "rope_qkv", "swiglu", "swiglu_packed"):
            op = ours_qkv(m) if name == "rope_qkv" and hasattr(ops, "is_ours") else getattr(ops, name, None)
            if op is not None:
                yield name, model, timed(forwards(op, name, m)), timed(backwards(op, name, m))
                torch.cuda.empty_cache()


def alternating_cases(ops: Any, others: Any, rounds: int = 5) -> Iterator[tuple[str, str, str, float, float]]:
    """(op, model, direction, ms of `ops`, ms of `others`): medians of turns in one process, since a GPU's clock and temperature drift."""
    for model, m in MODELS.items():
        for name in vars(others):
            for direction, make in {"forward": forwards, "backward": backwards}.items():
                both = [make(getattr(side, name), name, m) for side in (ops, others)]
                turns = [[timed(functions, 9) for functions in both] for _ in range(1 if rehearsing else rounds)]
                yield name, model, direction, *(statistics.median(times) for times in zip(*turns, strict=True))
                torch.cuda.empty_cache()


def loss_inputs(m: SimpleNamespace, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = rand(tokens, m.size).requires_grad_(), rand(m.vocabulary, m.size, scale=0.02).requires_grad_()
    return hidden, weight, torch.randint(0, m.vocabulary, (tokens,), device="cuda")


def loss_case(op: Callable[..., Tensor], m: SimpleNamespace, tokens: int) -> tuple[float, float]:
    """(forward + backward ms, peak GB above the inputs) of a summed or mean loss op(hidden, weight, targets)."""
    hidden, weight, targets = loss_inputs(m, tokens)

    def step() -> None:
        op(hidden, weight, targets).backward()
        hidden.grad = weight.grad = None

    ms = timed_eagerly(step)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return ms, (torch.cuda.max_memory_allocated() - before) / 1e9


# The sweep


def grid(**choices: tuple[int, ...]) -> list[dict[str, int]]:
    found: list[dict[str, int]] = [{}]
    for name, values in choices.items():
        found = [{**c, name: v} for c in found for v in values]
    return found


def listed(names: str, *rows: tuple[int, ...]) -> list[dict[str, int]]:
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


def norm_tuning() -> Iterator[tuple[str, str, list[dict[str, int]], Callable[[], Functions]]]:
    back = grid(rows=(1,), warps=(4, 8, 16), programs=(132, 264, 528, 1056), stages=(1,))
    back += grid(rows=(1,), warps=(4, 8), programs=(264, 396, 528, 792), stages=(2, 3, 4)) + grid(
        rows=(2, 4), warps=(4, 8, 16), programs=(132, 264, 528), stages=(1, 2)
    )
    for m in MODELS.values():
        forward = grid(rows=(1, 2, 4), warps=(2, 4, 8)) + grid(rows=(1,), warps=(16,))
        for name in ("rms_norm", "add_rms_norm"):
            yield name, str(m.size), forward, functools.partial(forwards, getattr(kernels, name), name, m)
        yield "rms_norm_backward", str(m.size), back, functools.partial(backwards, kernels.add_rms_norm, "add_rms_norm", m)


def row_tuning() -> Iterator[tuple[str, str, list[dict[str, int]], Callable[[], Functions]]]:
    for m in MODELS.values():
        key = f"{m.heads}/{m.kv_heads}/{DIM}"
        yield "rope", key, grid(tokens=(1, 2, 4), warps=(2, 4, 8)), lambda m=m: forwards(ours_qkv(m), "rope_qkv", m)
        sizes = grid(block=(512, 1024, 2048, 4096), warps=(4, 8))
        yield "swiglu", str(m.inner), sizes, functools.partial(forwards, kernels.swiglu_packed, "swiglu_packed", m)
        yield "swiglu_backward", str(m.inner), sizes, functools.partial(backwards, kernels.swiglu_packed, "swiglu_packed", m)


def vocabulary_tuning() -> Iterator[tuple[str, str, list[dict[str, int]], Callable[[], Functions]]]:
    from align.kernels import _linear_loss

    def rows(size: int, slope: bool) -> Functions:
        n = _linear_loss.chunk_rows(size, 2, 0)
        logits, ids = rand(n, size), torch.randint(0, size, (n,), device="cuda")
        floats = torch.ones(n, device="cuda")
        if slope:
            return [lambda: _linear_loss._launch_slope(logits, ids, None, floats, floats)]
        return [lambda: _linear_loss._launch_rows(logits, ids, None, 0.0, 0.0, True)]

    pairs = ((32768, 32), (32768, 16), (16384, 16), (8192, 16), (8192, 8), (4096, 8), (4096, 4), (2048, 4))
    for size in (32768, 128256):
        key = str(1 << (size - 1).bit_length())
        fits = [p for p in pairs if p[0] <= 16384 or size <= 32768]
        yield "cross_entropy_rows", key, listed("block warps", *fits), functools.partial(rows, size, False)
        yield "logprob_slope", key, grid(block=(2048, 4096, 8192), warps=(4, 8)), functools.partial(rows, size, True)
        shapes = grid(block=(2048, 4096, 8192), warps=(8, 16, 32), share=(4096, 8192, 16384))
        yield "sample", key, shapes, lambda size=size: [sampling_case(64, size, False, True)]
        rows_alone = grid(block=(2048, 4096, 8192), warps=(8, 16, 32))
        yield "sample_row", key, rows_alone, lambda size=size: [sampling_case(64, size, True, False)]


def sampling_case(rows: int, size: int, filtered: bool, counted: bool) -> Callable[[], Any]:
    logits = rand(rows, size, scale=3.0)
    full = lambda value, dtype: torch.full((rows,), value, device="cuda", dtype=dtype)  # noqa: E731
    keys, positions = torch.arange(rows, device="cuda"), torch.arange(rows, device="cuda")
    k, p = (50, 0.9) if filtered else (0, 1.0)
    options = full(1.0, torch.float32), full(k, torch.int32), full(p, torch.float32), full(0.0, torch.float32)
    counters = torch.zeros(rows, device="cuda", dtype=torch.int32) if counted else None
    return functools.partial(kernels.sample, logits, keys, positions, *options, counters=counters)


def decode_case(rows: int, heads: int, kv_heads: int, room: int, low: int, high: int, page: int, sets: int = 3) -> tuple[Functions, float]:
    """(functions, mean bytes of keys and values that a call must read), lengths uniform in low..high. With pages as the sampler has them: a
    page's keys of one head in one piece, and begun while the kernel before still runs. page 0: a row of the cache each."""
    functions: Functions = []
    total = 0
    for i in range(sets):
        lengths = random.Random(i).choices(range(low, high + 1), k=rows)
        total += sum(lengths) * kv_heads * DIM * 2 * 2
        pages = max(1, room // page) if page else 1
        shape = (rows * pages, kv_heads, page, DIM) if page else (rows, kv_heads, room, DIM)
        k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
        table = torch.randperm(rows * pages, device="cuda").view(rows, pages).int() if page else None
        q, ends = rand(rows, heads, DIM), torch.tensor(lengths, dtype=torch.int32, device="cuda")
        counters = torch.zeros(rows * kv_heads, device="cuda", dtype=torch.int32)
        functions.append(functools.partial(kernels.decode_attention, q, k, v, ends, table, counters=counters, early=page > 0))
    return functions, total / sets


def decode_tuning() -> Iterator[tuple[str, str, list[dict[str, int]], Callable[[], Functions]]]:
    shapes = ((64, 4, 2), (64, 4, 3), (128, 4, 2), (32, 2, 4), (64, 2, 3), (128, 4, 3))
    cuts = [{"chunk": 0, "programs": p} for p in (1, 264, 528, 1056)] + [{"chunk": c} for c in (128, 256, 512)]
    configs = [{**c, **cut} for c in listed("keys warps stages", *shapes) for cut in cuts]
    for size in (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048):
        rows, kv_heads = (size // 4, 4) if size in (4, 256, 1024) else (size // 8, 8)
        key = f"{DIM}/4/{size}"
        room = 4096 if size < 64 else 1024
        make = lambda r=rows, n=kv_heads, room=room: decode_case(r, 4 * n, n, room, room // 4, room * 3 // 4, 64)[0]  # noqa: E731
        yield "decode_attention", key, configs, make


def matrices() -> list[tuple[int, int]]:
    """(outputs, inputs) of every matrix of both models, the joint ones joined."""
    found = []
    for m in MODELS.values():
        found += [((m.heads + 2 * m.kv_heads) * DIM, m.size), (m.size, m.size), (2 * m.inner, m.size), (m.size, m.inner)]
        found.append((m.vocabulary, m.size))
    return found


def gemv_case(op: Callable[..., Any], batch: int, outputs: int, size: int) -> Functions:
    sets = max(2, min(12, (200 << 20) // (outputs * size * 2) + 1))
    return [functools.partial(op, rand(batch, size), rand(outputs, size, scale=0.02)) for _ in range(sets)]


def gemv_tuning() -> Iterator[tuple[str, str, list[dict[str, int]], Callable[[], Functions]]]:
    one = grid(rows=(1, 2, 4), block=(1024, 2048), warps=(4, 8), stages=(1,)) + grid(
        rows=(2, 4, 8), block=(512,), warps=(2, 4), stages=(1,)
    )
    one += grid(rows=(4, 8), block=(512, 1024), warps=(4,), stages=(3, 4)) + grid(rows=(16,), block=(256, 512), warps=(4, 8), stages=(1, 3))
    shapes = ((16, 256, 4, 4), (16, 512, 4, 3), (16, 512, 4, 4), (16, 256, 2, 5), (32, 128, 4, 5), (32, 256, 4, 3), (32, 256, 4, 4))
    shapes += ((64, 128, 4, 4), (64, 256, 4, 3), (64, 128, 4, 6), (32, 512, 8, 3), (16, 1024, 8, 3), (32, 256, 8, 4), (128, 128, 4, 4))
    for outputs, size in matrices():
        key = f"{outputs}x{size}"
        yield "gemv_one", key, one, functools.partial(gemv_case, kernels.gemv, 1, outputs, size)
        yield "gemv_few", key, listed("rows block warps stages", *shapes), functools.partial(gemv_case, kernels.gemv, 16, outputs, size)


def strict_tuning() -> Iterator[tuple[str, str, list[dict[str, int]], Callable[[], Functions]]]:
    few = ((64, 16, 128, 4, 4), (64, 16, 256, 4, 3), (64, 32, 64, 4, 5), (64, 32, 128, 4, 4), (64, 32, 128, 4, 3), (64, 64, 64, 4, 6))
    few += ((64, 64, 128, 4, 4), (64, 64, 128, 4, 3), (64, 128, 64, 4, 5), (64, 128, 128, 4, 3))
    many = (
        (128, 128, 64, 8, 3),
        (128, 256, 64, 8, 3),
        (128, 256, 64, 8, 4),
        (128, 128, 64, 4, 4),
        (128, 128, 64, 4, 3),
        (128, 128, 128, 8, 3),
    )
    for outputs, size in matrices():
        names, key = "m n k warps stages", f"{outputs}x{size}"
        configs = [{**c, "group": 1} for c in listed(names, *few)]
        yield "invariant_linear_few", key, configs, functools.partial(gemv_case, kernels.invariant_linear, 64, outputs, size)
        configs = [{**c, "group": 8} for c in listed(names, *many)]
        yield "invariant_linear", key, configs, functools.partial(many_rows, outputs, size)
    configs = listed("queries keys warps stages", (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2))
    yield "invariant_attention", str(DIM), configs, lambda: [attention_case(MODELS["7.25B"])]


def some_tuning(outputs: int, size: int) -> Iterator[tuple[str, str, list[dict[str, int]], Callable[[], Functions]]]:
    """Strict products of a decoding step of 256 rows."""
    shapes = ((64, 128, 64, 4, 4), (64, 128, 128, 4, 3), (64, 256, 64, 8, 4), (128, 64, 64, 4, 5), (128, 64, 128, 8, 4))
    shapes += ((128, 128, 64, 8, 4), (128, 128, 128, 8, 3), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (64, 64, 128, 4, 4))
    shapes += ((128, 32, 128, 4, 4), (256, 64, 64, 8, 4), (256, 128, 64, 8, 3), (128, 64, 64, 8, 5))
    configs = [{**c, "group": 4} for c in listed("m n k warps stages", *shapes)]
    make = functools.partial(gemv_case, kernels.invariant_linear, 256, outputs, size)
    yield "invariant_linear_some", f"{outputs}x{size}", configs, make


def many_rows(outputs: int, size: int) -> Functions:
    x, weight = rand(8192, size), rand(outputs, size)
    return [lambda: kernels.invariant_linear(x, weight)]


def attention_case(m: SimpleNamespace) -> Callable[[], Any]:
    q, k, v = (rand(TOKENS, n, DIM) for n in (m.heads, m.kv_heads, m.kv_heads))
    cu_seqlens = torch.arange(0, TOKENS + 1, LENGTH, device="cuda", dtype=torch.int32)
    return functools.partial(kernels.invariant_attention, q, k, v, cu_seqlens, LENGTH)


TUNING = {
    "norm": norm_tuning, "row": row_tuning, "vocabulary": vocabulary_tuning, "decode": decode_tuning, "gemv": gemv_tuning,
    "strict": strict_tuning,
}  # fmt: skip
TUNING |= {f"some-{outputs}x{size}": functools.partial(some_tuning, outputs, size) for outputs, size in matrices()}
