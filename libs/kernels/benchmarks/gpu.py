"""The ops on a GPU: are they right, which configuration is best, how fast beside the bandwidth and beside others in the same run.

Run: [ALIGN_PEERS=<folder with liger-kernel and transformers>] python3 libs/kernels/benchmarks/gpu.py --out DIR [--minutes M] [--only a,b]

Parts, all unless --only names some: `pytest` (the tests marked gpu), `check` (the cases of tests/kernels_cases.py, with their errors),
`tune` (the sweeps: the best configurations go to DIR/tuning.json; --write: into the library's table), and the measurements, which use
them. Every part is a process of its own, so that a CUDA error ends that part alone. First all of them start at once, import, and compile
what they will need, while the tests run; then each measures alone. DIR/kernels_gpu.json has every row.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lean
import peers
import step_workloads
import torch
import tuning_file
import workloads
from workloads import MODELS, timed

from align import kernels
from align.kernels import _runtime
from align.kernels._runtime import Config

TUNING = workloads.TUNING | step_workloads.TUNING
HERE = Path(__file__).parent
START = time.time()


def emit(*row: Any) -> None:
    """One JSON line: section, what, then numbers and words."""
    print(json.dumps([round(x, 5) if isinstance(x, float) else x for x in row]), flush=True)


def check(large: bool = True) -> None:
    import kernels_cases

    torch.backends.cuda.matmul.allow_tf32 = False
    for name, case in kernels_cases.CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            try:
                for op, errors in case("cuda", dtype, large).items():
                    emit("check", op, str(dtype)[6:], {k: float(f"{v:.2g}") for k, v in errors.items()})
            except Exception:
                emit("check", name, str(dtype)[6:], "FAILED " + traceback.format_exc().strip()[-500:])
            torch.cuda.empty_cache()


def tune(group: str) -> None:
    """Tries every configuration; prints the best, and how much it gains over the default."""
    for op, shape_class, configs, make in TUNING[group]():
        sweep("tune", op, shape_class, configs, make)
    if group in step_workloads.TUNING:
        emit("step", group, "what it replaces, ms", timed(step_workloads.REPLACED[group]()))


def sweep(section: str, op: str, shape_class: str, configs: list[_runtime.Config], make: Callable[[], workloads.Functions]) -> Config:
    """Returns and prints the best configuration ({}: what the table or the code says now), its ms, that of {}, of the worst, and how many
    failed."""
    functions, found = make(), []
    for config in [{}, *configs]:
        _runtime.trial.clear()
        if config:
            _runtime.trial[op] = config
        try:
            found.append((timed(functions, 5, 1.0), config))
        except Exception as e:
            if "CUDA error" in str(e):
                raise
            found.append((float("inf"), config | {"error": str(e)[:80]}))
    _runtime.trial.clear()
    torch.cuda.empty_cache()
    (plain, _), (ms, best) = found[0], min(found, key=lambda f: f[0])
    failed = sum(f[0] == float("inf") for f in found)
    emit(section, op, shape_class, best, ms, plain, max((f[0] for f in found if f[0] < 1e9), default=0.0), failed)
    return best


def load_tuning(out: Path) -> None:
    """The sweeps' answers of this run over the library's table."""
    table = json.loads(tuning_file.TABLE.read_text())
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
        options: dict[str, Any]
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


def loss_only() -> None:
    for model, tokens in (("1.44B", 16384), ("7.25B", 8192), ("7.25B", 16384)):
        op = lambda h, w, t: kernels.linear_cross_entropy(h, w, t) / t.numel()  # noqa: E731
        emit("loss", "ours", model, tokens, *workloads.loss_case(op, MODELS[model], tokens))


def decode() -> None:
    rate = workloads.copy_rate()
    emit("rate", "copy TB/s", rate / 1e12)
    shapes = ((64, 1024, 256, 768), (256, 1024, 256, 768), (64, 1024, 512, 512), (256, 1024, 512, 512), (64, 4096, 4000, 4096))
    for model, m in MODELS.items():
        for rows, room, low, high in shapes:
            row = []
            for page in (64, 0):
                functions, read = workloads.decode_case(rows, m.heads, m.kv_heads, room, low, high, page)
                ms = timed(functions)
                row += [f"page {page}", ms, round(read / rate * 1e3 / ms, 3)]
            emit("decode", f"{model} batch {rows}, {low}-{high} keys", *row)
            torch.cuda.empty_cache()
        q, k, v = workloads.rand(64, m.heads, 1, 128), *(workloads.rand(64, m.kv_heads, 4096, 128) for _ in range(2))
        try:
            sdpa = timed([lambda q=q, k=k, v=v: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)])
            emit("decode", f"{model} torch SDPA, batch 64, 4096 keys", sdpa, k.numel() * 4 / rate * 1e3 / sdpa)
        except RuntimeError as e:
            emit("decode", f"{model} torch SDPA", str(e)[:200])
    for rows, size in ((1, 32768), (64, 32768), (256, 32768), (64, 128256)):
        cases = ((False, False), (False, True), (True, False))
        times = (timed([workloads.sampling_case(rows, size, filtered, counted)]) for filtered, counted in cases)
        emit("sample", f"{rows} x {size}, a program a row; in parts; filtered, ms", *times)


def gemv() -> None:
    for outputs, size in workloads.matrices():
        row = []
        for batch in (1, 4, 16):
            read = outputs * size * 2
            ours, torchs = (timed(workloads.gemv_case(op, batch, outputs, size)) for op in (kernels.gemv, torch.nn.functional.linear))
            row += [batch, round(read / ours / 1e9, 3), round(read / torchs / 1e9, 3)]
            torch.cuda.empty_cache()
        emit("gemv", f"{outputs}x{size}", "batch, TB/s, cuBLAS TB/s", *row)


def strict() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for outputs, size in workloads.matrices()[-5:]:
        row: list[Any] = []
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


def model(steps: int) -> None:
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

    workloads.rehearse(lambda: step() and None)
    emit("model", "lean on these ops + cuDNN", *workloads.steps(step, steps))


def section(name: str, rest: list[str], out: Path) -> None:
    workloads.use_own_stream()
    if name == "check":
        check()
    elif name == "check-small":  # for compute-sanitizer, which makes a kernel a hundred times as slow
        check(large=False)
    elif name == "tune":
        workloads.rehearse(lambda: tune(rest[0]))
        tune(rest[0])
    elif name == "model":
        load_tuning(out)
        model(25)
    else:
        load_tuning(out)
        workloads.rehearse(MEASURED[name])
        load_tuning(out)  # of the sweeps, which had their turn meanwhile
        _runtime._tuned.cache_clear()
        MEASURED[name]()


MEASURED: dict[str, Callable[[], None]] = {"memory": memory, "loss": loss, "decode": decode, "gemv": gemv, "strict": strict}
MEASURED["loss-only"] = loss_only


class Run:
    """The parent: starts the parts, gives each its turn, gathers their rows."""

    def __init__(self, out: Path, minutes: float) -> None:
        self.out, self.end = out, START + minutes * 60
        self.rows: list[list[Any]] = []

    def start(self, command: list[str], peer: bool = False) -> "subprocess.Popen[str]":
        paths = [str(HERE), str(HERE.parent), str(HERE.parent / "tests"), os.environ.get("PYTHONPATH", "")]
        paths += [os.environ["ALIGN_PEERS"]] if peer and "ALIGN_PEERS" in os.environ else []
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, *command], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)

    def own(self, *arguments: str) -> "subprocess.Popen[str]":
        return self.start([str(HERE / "gpu.py"), "--out", str(self.out), "--section", *arguments])

    def gather(self, name: str, process: "subprocess.Popen[str]", seconds: float) -> None:
        try:
            out, error = process.communicate("go\n", timeout=max(1.0, min(seconds, self.end - time.time())))
        except subprocess.TimeoutExpired:
            process.kill()
            out, error = process.communicate()
            error += "\nstopped: out of time"
        lines = out.splitlines()
        self.rows += [json.loads(line) for line in lines if line.startswith('["')]
        if name.startswith("pytest"):
            lines += ["cut: out of time"] if process.returncode < 0 else []
            self.rows += [[name, line[:250]] for line in lines if line.startswith(("E  ", "FAILED", "ERROR"))] + [[name, *lines[-2:]]]
        elif process.returncode:
            self.rows.append([name, "NOT RUN TO ITS END", " | ".join(error.strip().splitlines()[-3:])[-400:]])
        (self.out / "kernels_gpu.json").write_text(json.dumps(self.rows, indent=0))
        print(f"{time.time() - START:5.0f} s  {name} ended, {process.returncode}", flush=True)

    def save_tuning(self) -> dict[str, Any]:
        ops: dict[str, dict[str, Any]] = {}
        for row in self.rows:
            if row[0] == "tune" and isinstance(row[3], dict) and row[3]:
                ops.setdefault(row[1], {})[row[2]] = row[3]
        table = {torch.cuda.get_device_name(): {op: dict(sorted(classes.items())) for op, classes in sorted(ops.items())}}
        (self.out / "tuning.json").write_text(json.dumps(table))
        return table


# Groups of tests that take about as long, each a process.
TESTS = (
    "loss and dtype0", "loss and dtype1", "decod and not dtype1", "decode and dtype1", "strict_attention_is", "strict_attention and dtype",
    "strict_linear_is", "linear and dtype", "not (loss or decod or strict)",
)  # fmt: skip
PEERS = {
    "peer": [peers.LIGER, "memory", "loss"], "peer-loss": [peers.LIGER, "loss"], "beside": [peers.LIGER, "beside"],
    "peer-model": [peers.HF_LIGER, "25"],
}  # fmt: skip
MEASURES = ("memory", "loss", "loss-only", "peer-loss", "model", "peer-model", "peer", "beside", "decode", "gemv", "strict")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", default="pytest,check,tune,memory,loss,model,peer-model,peer,beside,decode,gemv,strict", help="parts")
    parser.add_argument("--tests-share", type=float, default=0.5, help="share of the minutes that the tests may take")
    parser.add_argument("--groups", help=f"sweeps of tune whose names begin so, of {', '.join(TUNING)}")
    parser.add_argument("--write", action="store_true", help="write the best configurations into the library's table")
    parser.add_argument("--section", nargs="*", help="for the script itself")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.section:
        section(options.section[0], options.section[1:], options.out)
        return 0
    run, only, groups = Run(options.out, options.minutes), options.only.split(","), []
    first = []
    if "pytest" in only:
        command = ["-m", "pytest", str(HERE.parent), "-m", "gpu", "-q", "-p", "no:cacheprovider", "--tb=short"]
        first += [(f"pytest {k}", run.start([*command, "-k", k])) for k in TESTS]
    if "check" in only:
        first.append(("check", run.own("check")))
    if "tune" in only:
        chosen = [group for group in TUNING if options.groups is None or group.startswith(tuple(options.groups.split(",")))]
        groups = [(f"tune {group}", run.own("tune", group)) for group in chosen]
    after = [(name, run.start(["-c", *PEERS[name]], True) if name in PEERS else run.own(name)) for name in MEASURES if name in only]
    share = START + options.minutes * 60 * options.tests_share
    for name, process in first:
        run.gather(name, process, share - time.time())
    for name, process in groups:
        run.gather(name, process, 400)
    if groups:
        table = run.save_tuning()
        if options.write:
            tuning_file.write(table)
    for name, process in after:
        run.gather(name, process, 120)
    for row in run.rows:
        print(*(json.dumps(x) if isinstance(x, dict) else x for x in row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
