"""The ops on a GPU: are they right, which configuration is best, how fast beside the bandwidth and beside others in the same run.

Run: [ALIGN_PEERS=<folder with liger-kernel and transformers>] python3 libs/kernels/benchmarks/gpu.py --out DIR [--minutes 7.5] [--only a,b]

Each section is a process of its own, so that a CUDA error ends that section alone. First, all at once and not timed: `check` (every case
of tests/kernels_cases.py at real shapes against float64) and the compilation of what the sweeps try. Then one after another: the sweeps,
whose best configurations go to DIR/tuning.json (--write: into the library's table), and the measurements, which use them.
DIR/kernels_gpu.json has every row. Peers (liger-kernel, transformers) run where ALIGN_PEERS has them; torch, cuDNN, cuBLAS always.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lean
import peers
import torch
import workloads
from workloads import MODELS, timed

from align import kernels
from align.kernels import _runtime

HERE = Path(__file__).parent
TABLE = HERE.parent / "align/kernels/tuning.json"
START = time.time()
SHARES = 13  # processes that compile at once


def emit(*row: Any) -> None:
    """One JSON line: section, what, then numbers and words."""
    print(json.dumps([round(x, 5) if isinstance(x, float) else x for x in row]), flush=True)


def check() -> None:
    import kernels_cases

    torch.backends.cuda.matmul.allow_tf32 = False
    for name, case in kernels_cases.CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            try:
                for op, errors in case("cuda", dtype, True).items():
                    emit("check", op, str(dtype)[6:], {k: float(f"{v:.2g}") for k, v in errors.items()})
            except Exception:
                emit("check", name, str(dtype)[6:], "FAILED " + traceback.format_exc().strip()[-500:])
            torch.cuda.empty_cache()


def compile_share(share: int) -> None:
    """Runs every share-th class of every sweep once, so that the sweeps find their kernels compiled."""
    for i, case in enumerate(case for group in workloads.TUNING.values() for case in group()):
        if i % SHARES == share:
            try:
                sweep(*case, compile_only=True)
            except Exception as e:
                emit("compile", *case[:2], str(e)[:200])


def tune(group: str) -> None:
    """Tries every configuration; prints the best, and how much it gains over the default."""
    for case in workloads.TUNING[group]():
        sweep(*case, compile_only=False)


def sweep(op: str, shape_class: str, configs: list[_runtime.Config], make: Callable[[], workloads.Functions], compile_only: bool) -> None:
    _runtime.trial.clear()
    try:
        functions = make()
    except Exception:
        emit("tune", op, shape_class, "FAILED " + traceback.format_exc().strip()[-300:])
        return
    found = []
    for config in [{}, *configs]:
        _runtime.trial.clear()
        _runtime.trial[op] = config
        try:
            if compile_only:
                functions[0]()
            else:
                found.append((timed(functions, 5, 1.0), config))
        except Exception as e:
            if "CUDA error" in str(e):
                raise
            found.append((float("inf"), config | {"error": str(e)[:80]}))
    torch.cuda.empty_cache()
    if not compile_only:
        plain = found[0][0]
        ms, best = min(found[1:], key=lambda f: f[0])
        failed = sum(f[0] == float("inf") for f in found)
        worst = max((f[0] for f in found if f[0] < 1e9), default=0.0)
        emit("tune", op, shape_class, best if ms < plain else {}, ms, plain, worst, failed)


def load_tuning(out: Path) -> None:
    """The sweeps' answers of this run over the library's table."""
    table = json.loads(TABLE.read_text())
    file = out / "tuning.json"
    if file.exists():
        for gpu, ops in json.loads(file.read_text()).items():
            for op, classes in ops.items():
                table.setdefault(gpu, {}).setdefault(op, {}).update(classes)
    _runtime.tuning_table = lambda: table  # type: ignore[assignment]


def memory() -> None:
    rate = workloads.copy_rate()
    emit("rate", "copy TB/s", rate / 1e12)
    for name, model, forward, backward in workloads.training_cases(workloads.ours()):
        shares = [workloads.counted_bytes(name, MODELS[model], back) / rate * 1e3 / ms for back, ms in ((False, forward), (True, backward))]
        emit("memory", name, model, forward, backward, *shares)


def loss() -> None:
    for model, tokens in (("1.44B", 16384), ("7.25B", 8192), ("7.25B", 16384)):
        m = MODELS[model]
        for name, options in {"ours": {}, "ours, fp32 weight grad": {"fp32_weight_grad": True}}.items():
            emit("loss", name, model, tokens, *workloads.loss_case(
                lambda h, w, t, o=options: kernels.linear_cross_entropy(h, w, t, **o) / t.numel(), m, tokens))  # fmt: skip
        emit("loss", "ours, log-prob", model, tokens, *workloads.loss_case(
            lambda h, w, t: kernels.linear_logprob(h, w, t).mean(), m, tokens))  # fmt: skip
        hidden, weight, _ = workloads.loss_inputs(m, tokens)
        hidden, weight = hidden.detach(), weight.detach()
        products = timed([lambda h=hidden, w=weight: ((g := h @ w.t()) @ w, g.t() @ h)], 5)
        emit("loss", "three products alone (cuBLAS)", model, tokens, products, 0.0)
        torch.cuda.empty_cache()


def decode() -> None:
    rate = workloads.copy_rate()
    emit("rate", "copy TB/s", rate / 1e12)
    for model, m in MODELS.items():
        for rows, room, low, high in ((1, 4096, 2048, 4096), (64, 1024, 256, 768), (256, 1024, 256, 768), (64, 4096, 4000, 4096)):
            for page in (0, 64, 16):
                functions, read = workloads.decode_case(rows, m.heads, m.kv_heads, room, low, high, page)
                ms = timed(functions)
                emit("decode", f"{model} batch {rows}, {low}-{high} keys, page {page}", ms, read / rate * 1e3 / ms)
                torch.cuda.empty_cache()
        rows, room = 64, 4096
        q, k, v = workloads.rand(rows, m.heads, 1, 128), *(workloads.rand(rows, m.kv_heads, room, 128) for _ in range(2))
        try:
            sdpa = timed([lambda q=q, k=k, v=v: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)])
            emit("decode", f"{model} torch SDPA, batch {rows}, {room} keys", sdpa, k.numel() * 4 / rate * 1e3 / sdpa)
        except RuntimeError as e:
            emit("decode", f"{model} torch SDPA", str(e)[:200])
    for rows, size in ((1, 32768), (64, 32768), (256, 32768), (64, 128256)):
        emit("sample", f"{rows} x {size}", *(timed([workloads.sampling_case(rows, size, f)]) for f in (False, True)))


def gemv() -> None:
    for outputs, size in workloads.matrices():
        row = []
        for batch in (1, 2, 4, 8, 16):
            read = outputs * size * 2
            ours, torchs = (
                timed(workloads.gemv_case(op, batch, outputs, size)) for op in (kernels.gemv, torch.nn.functional.linear)
            )  # fmt: skip
            row += [batch, round(read / ours / 1e9, 3), round(read / torchs / 1e9, 3)]
            torch.cuda.empty_cache()
        emit("gemv", f"{outputs}x{size}", "batch, TB/s, cuBLAS TB/s", *row)


def strict() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for outputs, size in workloads.matrices():
        row = []
        for rows in (1, 64, 256, 8192):
            sets = 2 if rows < 1000 else 1
            pairs = [(workloads.rand(rows, size), workloads.rand(outputs, size)) for _ in range(sets)]
            times = (
                timed([lambda x=x, w=w, op=op: op(x, w) for x, w in pairs])
                for op in (kernels.invariant_linear, torch.nn.functional.linear)
            )  # fmt: skip
            row += [rows, *(round(t, 4) for t in times)]
        emit("strict", f"linear {outputs}x{size}", "rows, ms, cuBLAS ms", *row)
        torch.cuda.empty_cache()
    for model, m in MODELS.items():
        flops = 4 * 4 * m.heads * 4096 * 4096 * 128 / 2
        emit("strict", f"attention {model}", "TFLOP/s", flops / timed([workloads.attention_case(m)]) / 1e9)
        for rows in (1, 64):
            q, lengths = workloads.rand(rows, m.heads, 128), torch.full((rows,), 1024, device="cuda", dtype=torch.int32)
            k, v = (workloads.rand(rows, 1024, m.kv_heads, 128) for _ in range(2))
            both = [timed([functools.partial(op, q, k, v, lengths)]) for op in (kernels.invariant_decode, kernels.decode_attention)]
            emit("strict", f"decode {model}, {rows} rows, 1024 keys", "ms, split ms", *both)
        q, k, v = (workloads.rand(4, 4096, n, 128).transpose(1, 2) for n in (m.heads, m.kv_heads, m.kv_heads))
        attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
        for name, backend in {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}.items():
            try:
                with sdpa_kernel(backend):
                    emit("strict", f"attention {model}, torch {name}", "TFLOP/s", flops / timed([attend]) / 1e9)
            except RuntimeError as e:
                emit("strict", f"attention {model}, torch {name}", str(e)[:200])


def model(steps: int = 25) -> None:
    """Forward + backward of the 1.44B model, 4 x 4096 tokens, random ids."""
    m = MODELS["1.44B"]
    net, tables = lean.Lean(m), workloads.tables()

    def step() -> torch.Tensor:
        ids = torch.randint(0, m.vocabulary, (workloads.BATCH, workloads.LENGTH + 1), device="cuda")
        with lean.cudnn():
            value = net.loss(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), tables)
            value.backward()
        net.zero_grad(set_to_none=True)
        return value.detach()

    for _ in range(3):
        step()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        value = step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    emit(
        "model", "lean on these ops + cuDNN", statistics.median(times), min(times), torch.cuda.max_memory_allocated() / 2**30, float(value)
    )


MEASURED = {"memory": memory, "loss": loss, "decode": decode, "gemv": gemv, "strict": strict, "model": model}
PEERS = {
    "memory": [peers.LIGER, "memory"], "loss": [peers.LIGER, "loss"], "model": [peers.HF_LIGER, "25"],
}  # fmt: skip


class Run:
    """The parent: starts sections, gathers their rows."""

    def __init__(self, out: Path, minutes: float) -> None:
        self.out, self.end, self.rows = out, START + minutes * 60, []  # type: ignore[var-annotated]

    def start(self, command: list[str], peer: bool = False) -> "subprocess.Popen[str]":
        paths = [str(HERE), str(HERE.parent), str(HERE.parent / "tests"), os.environ.get("PYTHONPATH", "")]
        paths += [os.environ["ALIGN_PEERS"]] if peer and "ALIGN_PEERS" in os.environ else []
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def gather(self, name: str, process: "subprocess.Popen[str]", seconds: float) -> None:
        try:
            out, error = process.communicate(timeout=max(5.0, min(seconds, self.end - time.time())))
        except subprocess.TimeoutExpired:
            process.kill()
            out, error = process.communicate()
            error += "\nstopped: out of time"
        self.rows += [json.loads(line) for line in out.splitlines() if line.startswith("[")]
        if name == "pytest":
            self.rows += [
                ["pytest", line[:300]] for line in out.splitlines() if line.startswith(("E  ", "FAILED", "ERROR")) or " in " in line[-30:]
            ]
        if process.returncode:
            self.rows.append([name, "NOT RUN TO ITS END", " | ".join(error.strip().splitlines()[-3:])[-400:]])
        (self.out / "kernels_gpu.json").write_text(json.dumps(self.rows, indent=0))
        print(f"{time.time() - START:5.0f} s  {name} ended, {process.returncode}", flush=True)

    def section(self, *arguments: str) -> list[str]:
        return [str(HERE / "gpu.py"), "--out", str(self.out), "--section", *arguments]

    def save_tuning(self) -> dict[str, Any]:
        ops: dict[str, dict[str, Any]] = {}
        for row in self.rows:
            if row[0] == "tune" and isinstance(row[3], dict) and row[3]:
                ops.setdefault(row[1], {})[row[2]] = row[3]
        table = {torch.cuda.get_device_name(): {op: dict(sorted(classes.items())) for op, classes in sorted(ops.items())}}
        (self.out / "tuning.json").write_text(json.dumps(table))
        return table


def write_table(table: dict[str, Any]) -> None:
    """Into the library: one line an op and shape class, so that a diff is read easily."""
    whole = json.loads(TABLE.read_text())
    for gpu, ops in table.items():
        for op, classes in ops.items():
            whole.setdefault(gpu, {}).setdefault(op, {}).update(classes)
    TABLE.write_text(compact(whole) + "\n")


def compact(table: dict[str, Any]) -> str:
    lines = []
    for gpu, ops in sorted(table.items()):
        rows = []
        for op, classes in sorted(ops.items()):
            inner = ",\n".join(f"   {json.dumps(c)}: {json.dumps(v, sort_keys=True)}" for c, v in sorted(classes.items()))
            rows.append(f"  {json.dumps(op)}: {{\n{inner}\n  }}")
        lines.append(f" {json.dumps(gpu)}: {{\n" + ",\n".join(rows) + "\n }")
    return "{\n" + ",\n".join(lines) + "\n}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--only", default="check,tune,measure", help="check, tune, measure, or names of sections, comma separated")
    parser.add_argument("--write", action="store_true", help="write the best configurations into the library's table")
    parser.add_argument("--section", nargs="*", help="for the script itself")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.section:
        name, *rest = options.section
        workloads.use_own_stream()
        if name == "tune":
            tune(rest[0])
        elif name == "compile":
            compile_share(int(rest[0]))
        elif name == "check":
            check()
        else:
            load_tuning(options.out)
            MEASURED[name]()
        return 0
    run, only = Run(options.out, options.minutes), options.only.split(",")
    groups = [g for g in workloads.TUNING if "tune" in only or f"tune-{g}" in only]
    together = [(f"compile {i}", run.start(run.section("compile", str(i)))) for i in range(SHARES if groups else 0)]
    if "check" in only:
        together.append(("check", run.start(run.section("check"))))
        together.append(
            ("pytest", run.start(["-m", "pytest", str(HERE.parent), "-m", "gpu", "-q", "-p", "no:cacheprovider", "--tb=short"]))
        )
    for name, process in together:
        run.gather(name, process, 200)
    for group in groups:
        run.gather(f"tune {group}", run.start(run.section("tune", group)), 100)
    table = run.save_tuning()
    if options.write:
        write_table(table)
    for name in MEASURED:
        if "measure" in only or name in only:
            run.gather(name, run.start(run.section(name)), 90)
            if name in PEERS:
                run.gather(f"{name}, peer", run.start(["-c", *PEERS[name]], peer=True), 90)
    for row in run.rows:
        print(*(json.dumps(x) if isinstance(x, dict) else x for x in row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
