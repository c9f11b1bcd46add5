"""AdamW8bit on a GPU: is it right, how fast, how much memory, does it learn; other 8-bit optimizers in the same run where installed.

Run: PYTHONPATH=libs/optim8bit python3 libs/optim8bit/benchmarks/gpu.py [--out DIR] [--minutes 6] [--only bits,fast,...]

Prints one row a measurement as it is made and writes them all to DIR/optim8bit_gpu.json. A section that fails prints its traceback
and the rest goes on; the last lines list the failed sections and every row whose figure misses its limit. Times are medians of CUDA
events; the floor is 10 bytes an element (read p, g, two codes; write p, two codes) at the copy bandwidth of the same run. Without a
GPU it runs tiny sizes under Triton's interpreter (TRITON_INTERPRET=1), for trying the script itself: its times then mean nothing.
"""

import argparse
import copy
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from align.optim8bit import AdamW8bit, quant

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = DEVICE == "cpu"
START = time.time()
ROWS: list[dict[str, Any]] = []
SPEED = {"lr": 1e-5, "betas": (0.9, 0.95), "weight_decay": 0.1}


def row(section: str, what: str, value: Any, unit: str = "", limit: float | None = None, note: str = "") -> None:
    """One line now; `limit` is the largest value that passes."""
    entry = {"section": section, "what": what, "value": value, "unit": unit, "limit": limit, "note": note}
    entry["ok"] = None if limit is None else bool(value <= limit)
    ROWS.append(entry)
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    verdict = "" if limit is None else f"  [limit {limit:g}: {'ok' if entry['ok'] else 'MISSED'}]"
    print(f"{time.time() - START:6.1f}s  {section:<9} {what:<62} {shown} {unit}{verdict}  {note}", flush=True)


def sync() -> None:
    if not TINY:
        torch.cuda.synchronize()


def milliseconds(function: Callable[[], Any], repeats: int = 7, inner: int = 4) -> float:
    """Median over repeats of the time of a call, `inner` calls between two CUDA events: the host's work overlaps the device's."""
    times = []
    for i in range(2 if TINY else repeats + 1):
        begin = time.perf_counter()
        if TINY:
            function()
            times.append((time.perf_counter() - begin) * 1e3)
            continue
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(inner):
            function()
        last.record()
        torch.cuda.synchronize()
        if i:  # the first compiles and warms
            times.append(first.elapsed_time(last) / inner)
    return statistics.median(times)


def shapes(ranks: int) -> list[tuple[int, int]]:
    """The two-dimensional tensors of Mistral-7.25B, dim-0 shards of one of `ranks` ranks: 226 tensors, 1.812e9 elements at 4."""
    if TINY:
        return [(4, 2048), (2, 4096), (64, 64)]
    layer = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    return [(rows // ranks, columns) for rows, columns in [(32768, 4096), *layer * 32, (32768, 4096)]]


def parameters(ranks: int = 4) -> list[tuple[str, torch.nn.Parameter]]:
    named = []
    for i, shape in enumerate(shapes(ranks)):
        p = torch.nn.Parameter(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * 0.02)
        p.grad = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * 1e-3
        named.append((f"p{i}", p))
    return named


def count(named: list[tuple[str, torch.nn.Parameter]]) -> int:
    return sum(p.numel() for _, p in named)


def copy_rate() -> float:
    """Bytes a second read and written by a device copy of 4 GiB."""
    x = torch.randn((1 << 31) if not TINY else 1 << 16, device=DEVICE, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    return 2 * x.numel() * 2 / milliseconds(lambda: y.copy_(x)) * 1e3


def environment() -> None:
    import triton

    row("env", "device", torch.cuda.get_device_name() if not TINY else "cpu, interpreter")
    row("env", "torch / triton", f"{torch.__version__} / {triton.__version__}")
    row("env", "copy bandwidth, read + write", copy_rate() / 1e12, "TB/s")


# Is it right


CHECK_SHAPES = {
    "whole": (64, 2048),
    "ragged": (257, 64),
    "mixed": (33, 6144),
    "cube": (3, 40, 512),
    "odd": (50, 90),
    "bias": (4097,),
    "one": (),
}
CHECK_SHAPES |= {} if not TINY else {"whole": (2, 2048), "mixed": (1, 6144), "cube": (3, 4, 512)}


def gradient(shape: tuple[int, ...], seed: int, dtype: torch.dtype, spread: float = 2.0) -> torch.Tensor:
    """Normal times log-normal, so that all decades of codes occur; from the CPU, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(torch.randn(shape, generator=generator) * spread)
    return (x * 1e-3).to(dtype).to(DEVICE)


def check_pair(dtype: torch.dtype, ours: dict[str, Any], theirs: dict[str, Any], steps: int) -> Iterator[tuple[dict, dict, Any, Any]]:
    """Two optimizers over equal parameters with equal gradients; yields (parameters, parameters, state, state) after every step."""
    made = []
    for options in (ours, theirs):
        params = {n: torch.nn.Parameter(gradient(s, i, dtype, 0.0) * 20) for i, (n, s) in enumerate(CHECK_SHAPES.items())}
        made.append((params, AdamW8bit(params.items(), lr=1e-3, weight_decay=0.1, max_grad_norm=1.0, seed=7, **options)))
    for step in range(steps):
        for params, optimizer in made:
            for i, p in enumerate(params.values()):
                p.grad = gradient(tuple(p.shape), 100 * step + i, dtype)
            optimizer.step()
        (a, one), (b, two) = made
        yield a, b, one.state_dict()["state"], two.state_dict()["state"]


def bits() -> None:
    """Triton with ieee=True is the torch backend bit for bit: parameters, codes, absmax, fp32 states."""
    for dtype in (torch.bfloat16, torch.float32):
        for step, (a, b, one, two) in enumerate(check_pair(dtype, {"backend": "torch"}, {"backend": "triton", "ieee": True}, 3)):
            wrong = [n for n in a if not torch.equal(a[n], b[n])]
            wrong += [f"{n}.{k}" for n in one for k, v in one[n].items() if isinstance(v, torch.Tensor) and not torch.equal(v, two[n][k])]
            row("bits", f"{dtype}, step {step + 1}: tensors that differ from torch's", len(wrong), "", 0, ", ".join(wrong[:6]))


def code_gap(one: torch.Tensor, two: torch.Tensor) -> tuple[float, int]:
    gap = (one.int() - two.int()).abs()
    return (gap > 0).double().mean().item(), int(gap.max())


def fast() -> None:
    """One step of the fast kernel, of the torch backend and of float64 with the exact map, each from the torch backend's last state."""
    rows, steps = (4096 if not TINY else 2), 4
    start = gradient((rows, 4096), 1, torch.bfloat16, 0.0) * 20
    worst: dict[str, float] = {}
    made = []
    for backend in ("torch", "triton"):
        p = torch.nn.Parameter(start.clone())
        made.append((p, AdamW8bit([("w", p)], lr=1e-3, weight_decay=0.1, stochastic_rounding=False, backend=backend)))
    exact = Float64(2048)
    for step in range(steps):
        g = gradient((rows, 4096), 50 + step, torch.bfloat16)
        exact.step(made[0][1].state_dict()["state"]["w"], g)
        for p, optimizer in made:
            p.grad = g.clone()
            optimizer.step()
        reference, state = (o.state_dict()["state"]["w"] for _, o in made)
        for key, codes in (("m_codes", exact.m_codes), ("v_codes", exact.v_codes)):
            for name, other in (("torch", reference[key]), ("float64", codes.view(rows, 4096))):
                share, gap = code_gap(state[key], other)
                worst[f"share {name}"] = max(worst.get(f"share {name}", 0.0), share)
                worst[f"gap {name}"] = max(worst.get(f"gap {name}", 0), gap)
        differ = (made[0][0] != made[1][0]).double().mean().item()
        worst["parameters"] = max(worst.get("parameters", 0.0), differ)
        made[1][1].load_state_dict(copy.deepcopy(made[0][1].state_dict()))
        made[1][0].data.copy_(made[0][0].data)
    row("fast", "share of codes that differ from the torch backend, worst step", worst["share torch"], "", 1e-4)
    row("fast", "largest difference of a code from the torch backend", worst["gap torch"], "", 1)
    row("fast", "share of codes that differ from a float64 step, worst step", worst["share float64"], "", 2e-4)
    row("fast", "largest difference of a code from a float64 step", worst["gap float64"], "", 1)
    row("fast", "share of bf16 parameters that differ from the torch backend", worst["parameters"], "", None, "rounded to nearest")


class Float64:
    """The moments of AdamW with 8-bit states, one step in float64 with the exact map."""

    def __init__(self, block: int):
        self.block = block
        self.signed, self.unsigned = (quant.dynamic_map(s).double().to(DEVICE) for s in (True, False))

    def step(self, state: dict[str, torch.Tensor], grad: torch.Tensor) -> None:
        g = grad.double().view(-1, self.block)
        m = self.signed[state["m_codes"].long()].view_as(g) * state["m_absmax"].double().view(-1, 1)
        v = self.unsigned[state["v_codes"].long()].view_as(g) * state["v_absmax"].double().view(-1, 1)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        positive = self.signed[127:]
        code = torch.searchsorted((positive[1:] + positive[:-1]) / 2, (m / m.abs().amax(1, keepdim=True)).abs())
        self.m_codes = torch.where(m < 0, 127 - code.clamp(max=127), 127 + code)
        self.v_codes = torch.searchsorted((self.unsigned[1:] + self.unsigned[:-1]) / 2, v / v.amax(1, keepdim=True))


def resume() -> None:
    """A stop after any of four steps, state through host memory, changes no bit; nor does the backend's default (fast) kernel vary."""

    def advance(params: dict, optimizer: AdamW8bit, steps: range) -> None:
        for step in steps:
            for i, p in enumerate(params.values()):
                p.grad = gradient(tuple(p.shape), 100 * step + i, p.dtype)
            optimizer.step()

    def make() -> tuple[dict[str, torch.nn.Parameter], AdamW8bit]:
        params = {n: torch.nn.Parameter(gradient(s, i, torch.bfloat16, 0.0) * 20) for i, (n, s) in enumerate(CHECK_SHAPES.items())}
        return params, AdamW8bit(params.items(), lr=1e-3, weight_decay=0.1, max_grad_norm=1.0, seed=3, backend="triton")

    whole, reference = make()
    advance(whole, reference, range(4))
    wrong = 0
    for stop in range(4):
        first, optimizer = make()
        advance(first, optimizer, range(stop))
        saved = copy.deepcopy(optimizer.state_dict())
        for entry in saved["state"].values():
            entry.update({k: v.cpu() for k, v in entry.items() if isinstance(v, torch.Tensor)})
        second, resumed = make()
        for a, b in zip(second.values(), first.values(), strict=True):
            a.data.copy_(b.data)
        resumed.load_state_dict(saved)
        advance(second, resumed, range(stop, 4))
        one, two = reference.state_dict()["state"], resumed.state_dict()["state"]
        wrong += sum(not torch.equal(whole[n], second[n]) for n in whole)
        wrong += sum(not torch.equal(v, two[n][k]) for n in one for k, v in one[n].items() if isinstance(v, torch.Tensor))
    row("resume", "tensors that differ after a stop at step 0, 1, 2 or 3", wrong, "", 0)
    params, optimizer = make()
    advance(params, optimizer, range(1))
    before = {n: p.detach().clone() for n, p in params.items()}
    params["ragged"].grad[3, 3] = float("nan")
    norm = optimizer.step()
    same = all(torch.equal(before[n], p) for n, p in params.items())
    row("resume", "NaN gradient: norm, skipped steps, parameters unchanged", f"{norm}, {optimizer.skipped}, {same}")


# How fast, how much memory


def speed() -> None:
    """The fused step, the norm and the whole step, on the shard shapes; each launch variant against the floor."""
    from align.optim8bit import _triton_backend
    from align.optim8bit._triton_backend import Tuning

    rate, named = copy_rate(), parameters()
    n = count(named)
    floor = n * 10 / rate * 1e3
    row("speed", "elements, tensors", f"{n:.4g}, {len(named)}")
    row("speed", "floor: 10 bytes an element at this run's copy bandwidth", floor, "ms")
    default = _triton_backend.TUNING
    variants = [
        ("default", default, {}),
        ("4 warps", Tuning(2048, 4), {}),
        ("8 warps", Tuning(2048, 8), {}),
        ("default, round to nearest", default, {"stochastic_rounding": False}),
        ("default, block 256", default, {"block_size": 256}),
        ("default, ieee", default, {"ieee": True}),
    ]
    for i, (name, tuning, options) in enumerate(variants):
        try:
            _triton_backend.TUNING = tuning
            optimizer = AdamW8bit(named, **SPEED, backend="triton", **options)
            kernel = milliseconds(lambda optimizer=optimizer: fused(optimizer))
            row(
                "speed",
                f"fused step, {name}",
                kernel,
                "ms",
                None if i else 1.25 * floor,
                f"{kernel / floor:.3f} x floor, {floor / kernel:.1%} of it",
            )
            if not i:
                sustained(optimizer, n)
                whole_step(optimizer, n, rate)
        except Exception:
            row("speed", f"fused step, {name}", "failed", note=traceback.format_exc().strip().splitlines()[-1])
        finally:
            _triton_backend.TUNING = default
        optimizer = None
    grads = [p.grad for _, p in named]
    row("speed", "torch's get_total_norm over the same gradients", milliseconds(lambda: torch.nn.utils.get_total_norm(grads)), "ms")


def sustained(optimizer: AdamW8bit, n: int) -> None:
    """Two seconds without a pause: the device reaches its power limit and lowers its clock."""
    begin, rounds = time.time(), []
    while time.time() - begin < 2 and not TINY:
        rounds.append(milliseconds(lambda: fused(optimizer), 1, 20))
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,power.limit", "--format=csv,noheader"]
    answer = "" if TINY else subprocess.run(query, capture_output=True, text=True).stdout.strip()
    if rounds:
        floor = n * 10 / copy_rate() * 1e3
        ms = rounds[-1]
        row(
            "speed",
            "fused step, after two seconds without a pause",
            ms,
            "ms",
            None,
            f"{ms / floor:.3f} x floor; SM clock, power, limit: {answer}",
        )


def prepared(optimizer: AdamW8bit) -> list[Any]:
    return [(b, b.members, b.backend.prepare(b, b.members, [m.param.grad for m in b.members])) for b in optimizer._buckets]


def fused(optimizer: AdamW8bit) -> None:
    """The update alone, without norm and synchronisation."""
    for bucket, members, ready in prepared(optimizer):
        bucket.backend.update(bucket, ready, optimizer._hyper(optimizer.param_groups[0], members[0].step + 1, 1.0))


def whole_step(optimizer: AdamW8bit, n: int, rate: float) -> None:
    def norm() -> None:
        for bucket, _, ready in prepared(optimizer):
            bucket.backend.square_sum(bucket, ready)

    floor = n * 2 / rate * 1e3
    ms = milliseconds(norm)
    row("speed", "norm pass", ms, "ms", 1.1 if not TINY else None, f"floor {floor:.3f}, {floor / ms:.1%} of it")
    optimizer.max_grad_norm = 1.0
    row("speed", "whole step(): norm, host synchronisation, clip, update", milliseconds(optimizer.step), "ms")
    sync()
    begin = time.perf_counter()
    for _ in range(5):
        fused(optimizer)
    row("speed", "host time to queue the update", (time.perf_counter() - begin) / 5 * 1e3, "ms")
    sync()


def memory() -> None:
    """State at 7.25B parameters by the allocator, and what a step allocates on top."""
    named = parameters(1)
    if not TINY:
        named += [(f"norm{i}", torch.nn.Parameter(torch.ones(4096, device=DEVICE, dtype=torch.bfloat16))) for i in range(65)]
    for _, p in named:
        p.grad = torch.ones_like(p) if p.grad is None else p.grad
    n, before = count(named), allocated()
    optimizer = AdamW8bit(named, **SPEED, max_grad_norm=1.0, backend="triton")
    after = allocated()
    row(
        "memory",
        f"state, {n:.5g} parameters: bytes a parameter",
        optimizer.state_bytes() / n,
        "B",
        2.0045 if not TINY else None,
    )
    row("memory", "the same by the allocator", (after - before) / n, "B", 2.0045 if not TINY else None)
    optimizer.step()
    row("memory", "with the launch tables after the first step", (allocated() - before) / n, "B", 2.006 if not TINY else None)
    if not TINY:
        torch.cuda.reset_peak_memory_stats()
        resting = allocated()
        optimizer.step()
        extra = torch.cuda.max_memory_allocated() - resting
        row("memory", "largest allocation of a step, share of the state", extra / optimizer.state_bytes(), "", 0.01)
    row("memory", "step on the whole model", milliseconds(optimizer.step, 3, 2), "ms")


def allocated() -> int:
    return torch.cuda.memory_allocated() if not TINY else 0


# Others, each in a process of its own; their sources are no imports of this repository

PEERS = {
    "bitsandbytes": "import bitsandbytes as b, gpu, learning; gpu.peer('bitsandbytes ' + b.__version__, b.optim.AdamW8bit, learning.train)",
    "torchao": "import torchao as a, gpu; from torchao.optim import AdamW8bit as O; from functools import partial\n"
    "gpu.peer('torchao ' + a.__version__, partial(O, bf16_stochastic_round=True))",
    "torch": "import torch, gpu, learning; gpu.peer('torch AdamW, states as parameters', torch.optim.AdamW, learning.train)",
}


def peer(name: str, optimizer_class: Callable[..., Any], train: Callable[..., list[float]] | None = None) -> None:
    """Time and peak memory on the shard shapes, and the training of learning.py; rows as JSON lines for `relay`."""
    named = parameters()
    before = allocated()
    if not TINY:
        torch.cuda.reset_peak_memory_stats()
    optimizer = optimizer_class([p for _, p in named], **SPEED)
    ms = milliseconds(optimizer.step, 4, 2)
    peak = (torch.cuda.max_memory_allocated() - before) / count(named) if not TINY else 0.0
    print(json.dumps(["peers", f"{name}: step on the shard shapes", ms, "ms"]), flush=True)
    print(json.dumps(["peers", f"{name}: state and temporaries at the peak", peak, "B a parameter"]), flush=True)
    optimizer = named = None
    for dtype in (torch.float32, torch.bfloat16) if train and not TINY else ():

        def make(net: list[tuple[str, torch.nn.Parameter]]) -> Any:
            return optimizer_class([p for _, p in net], betas=(0.9, 0.95), weight_decay=0.1)

        mean = statistics.mean(train(make, dtype, seed, 1e-3, 400)[-1] for seed in range(3))
        print(json.dumps(["peers", f"{name}: held-out loss, {dtype}, 3 seeds", mean, ""]), flush=True)


def relay(name: str, command: list[str], seconds: float) -> None:
    """Run a command that prints rows as JSON lines; make them rows here, and say why it ended early."""
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    try:
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=seconds)
        out, error = done.stdout, done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except subprocess.TimeoutExpired as stopped:
        out, error = (stopped.stdout or b"").decode(), [f"stopped after {seconds:g} s"]
    for line in out.splitlines():
        if line.startswith("["):
            row(*json.loads(line))
    if error:
        row(name, name, "not run to its end", note=error[0][:200])


def learning() -> None:
    relay("learning", [sys.executable, str(Path(__file__).parent / "learning.py")], 150)


def peers() -> None:
    for name, source in PEERS.items():
        row("peers", f"{name}, in a process of its own", "started")
        relay("peers", [sys.executable, "-c", source], 120)


def ranks() -> None:
    """The scenarios of tests/sharded_test.py on two devices over NCCL: bits, save on 2 and load on 1 and back, skipping, FSDP2."""
    if not TINY and torch.cuda.device_count() < 2:
        row("ranks", "two ranks over NCCL", "not run: one device")
        return
    script, store = Path(__file__).parent.parent / "tests/sharded_test.py", Path(tempfile.mkdtemp()) / "store"
    environment = {**os.environ, "OPTIM8BIT_TEST_DEVICE": DEVICE}
    command = [sys.executable, str(script), "both", str(store)]
    with tempfile.TemporaryFile("w+") as log:
        started = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        try:
            out = started.communicate(timeout=180)[0]
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)  # the ranks are its children
            out = started.communicate()[0]
        log.seek(0)
        errors = log.read().strip()
    results = dict(json.loads(line) for line in out.splitlines())
    for name, trouble in results.items():
        row("ranks", name, int(bool(trouble)), "failures", 0, trouble.strip().splitlines()[-1][:300] if trouble else "")
    row("ranks", "scenarios that were not reached", 8 - len(results), "", 0, errors[-300:] if len(results) < 8 else "")


SECTIONS = {f.__name__: f for f in (environment, bits, fast, resume, speed, memory, learning, ranks, peers)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for optim8bit_gpu.json")
    parser.add_argument("--minutes", type=float, default=6.0, help="no section starts after this")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, comma separated")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in options.only.split(","):
        if time.time() - START > options.minutes * 60:
            row(name, "section", "skipped: out of time")
            continue
        try:
            SECTIONS[name]()
        except Exception:
            failed.append(name)
            print(traceback.format_exc(), flush=True)
            row(name, "section", "failed", note=traceback.format_exc().strip().splitlines()[-1][:300])
        if not TINY:
            torch.cuda.empty_cache()
        (options.out / "optim8bit_gpu.json").write_text(json.dumps(ROWS, indent=1))
    missed = [r for r in ROWS if r["ok"] is False]
    print(f"\n{len(ROWS)} rows, sections failed: {', '.join(failed) or 'none'}, limits missed: {len(missed)}")
    for r in missed:
        print(f"  MISSED {r['section']}: {r['what']} = {r['value']} {r['unit']}, limit {r['limit']:g} {r['note']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
