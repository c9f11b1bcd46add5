"""Training over N ranks, from the steps to the restart, in one command and one table; the seed's own topology is --ranks 4 --model 7.25B.

python3 benchmarks/four_gpu.py [--ranks 4] [--model 7.25B] [--device cuda] [--only PART,...] [--out FILE.md]

Needs torch, triton, numpy and safetensors; finds the libraries by itself. Parts: `one` the same steps on one rank; `sft` steps, memory of
each rank beside align.guard, a save with a file a rank, its stall, the restart; `gather` a save through rank 0; `exact` stop and resume at
every step, bit for bit (a tiny model, deterministic mode); `reshard` saved on N ranks, loaded on 2 and on 1; `dpo` and `grpo` steps of the
stages. With fewer GPUs than ranks the ranks share them over sockets, which rehearses and measures nothing; `--device cpu` takes gloo.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).absolute().parents[1]
PATHS = [*sorted(map(str, ROOT.glob("libs/*"))), *(str(ROOT / name) for name in ("libs/train/benchmarks", "stages", "tools/py"))]
try:
    import gpu_ranks
    import torch
    from safetensors.torch import load_file
except ModuleNotFoundError as missing:
    if missing.name != "gpu_ranks" or "FOUR_GPU_AGAIN" in os.environ:
        raise
    again = {"FOUR_GPU_AGAIN": "1", "PYTHONPATH": os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])}
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **again})

PARTS = ("one", "sft", "gather", "exact", "reshard", "dpo", "grpo")
EXACT_STEPS = 4
# The seed's "Projection for 7.25B / 4 ranks" (seed/DEPENDENCY_POLICY.txt), GiB: what is measured is put beside it.
SEED = {
    "state a rank": 3.38, "base": 22.0, "save, a file a rank": 13.5, "save, gathered": 40.6, "peak, a file a rank": 35.5,
    "peak, gathered": 62.6,
}  # fmt: skip
REWARD = '''import zlib


def reward(prompt, completion, row):
    """Random weights answer nothing; a reward that differs between answers all the same."""
    return zlib.crc32(completion.encode()) % 2
'''


class Failed(Exception):
    """Ranks that did not end in order; the message is the end of what they said."""


class Bench:
    """Starts ranks and collects rows of (what, value, beside it)."""

    def __init__(self, asked: argparse.Namespace, folder: Path) -> None:
        self.asked, self.folder = asked, folder
        self.devices = torch.cuda.device_count() if asked.device == "cuda" else 0
        self.rows: list[tuple[str, str, str]] = []
        self.log: dict[str, Any] = {}

    def ranks(self, world: int, program: str, *words: object) -> dict[str, Any]:
        """Runs `program words` on `world` ranks; returns what rank 0 left in told.json."""
        port, told = gpu_ranks.free_port(), self.folder / "told.json"
        told.unlink(missing_ok=True)
        threads = str(max(1, (os.cpu_count() or 1) // world))
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        environment["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
        if not self.devices:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        logs = [open(self.folder / f"rank-{rank}.log", "w+", encoding="utf-8") for rank in range(world)]  # noqa: SIM115
        processes = [
            subprocess.Popen(
                [sys.executable, str(ROOT / program), *map(str, words)], stdout=logs[rank], stderr=subprocess.STDOUT,
                env={**environment, **gpu_ranks.environment(rank, world, port, self.devices)}, start_new_session=True,
            )
            for rank in range(world)
        ]  # fmt: skip
        end = time.monotonic() + self.asked.limit
        try:
            while any(process.poll() is None for process in processes) and time.monotonic() < end:
                if any(process.poll() for process in processes):
                    time.sleep(5)  # the others notice, or are ended
                    break
                time.sleep(0.1)
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        said = []
        for log in logs:
            log.seek(0)
            said.append(log.read())
            log.close()
        if any(codes):
            raise Failed(f"exit codes {codes}: {said[next(i for i, code in enumerate(codes) if code != 0)][-1500:]}")
        return json.loads(told.read_text(encoding="utf-8")) if told.exists() else {}

    def act(self, world: int, action: str, *words: object, size: str | None = None) -> dict[str, Any]:
        return self.ranks(world, "benchmarks/four_gpu_rank.py", action, size or self.asked.model, self.folder, *words)

    def row(self, what: str, value: str, beside: str = "") -> None:
        self.rows.append((what, value, beside))
        print(f"{what}: {value}" + (f"   ({beside})" if beside else ""), flush=True)

    # Parts.

    def one(self) -> None:
        told = self.log["one"] = self.act(1, "sft", self.asked.steps, "none")
        self.row("one rank, tokens/s", f"{told['tok_s_gpu']:,.0f}", _mfu(told))

    def sft(self) -> None:
        told = self.log["sft"] = self.act(self.asked.ranks, "sft", self.asked.steps, "files")
        alone = self.log.get("one", {}).get("tok_s_gpu")
        share = f"{told['tok_s_gpu'] / alone:.1%} of one rank's" if alone else ""
        self.row("tokens/s a rank", f"{told['tok_s_gpu']:,.0f}", ", ".join(filter(None, (share, _mfu(told)))))
        self.row("loss, first and last step", f"{told['loss'][0]:.4f}, {told['loss'][1]:.4f}")
        guard = told["guard"]
        memory = [each["rank_gib"] for each in told["each"]]
        over = guard["rank_gib"] / max(memory) - 1
        self.row("memory of each rank at most", _list(memory), f"guard {_gib(guard['rank_gib'])}, {over:+.1%}")
        state = [size / 2**30 for name, size in told["files"].items() if name.startswith("optimizer-") and name.endswith("safetensors")]
        self.row("optimizer files", _list(state), f"guard {_gib(guard['state_gib'])}; {_seed('state a rank')}")
        self._host("a file a rank", told)
        self.row("save stall, s", f"{told['stall_s']:.2f}")
        again = self.log["restart"] = self.act(self.asked.ranks, "restart", self.asked.steps, time.time())
        self.row("restart to the end of the first step, digests compared, s", f"{again['restart_s']:.1f}", f"loss {again['loss']:.4f}")
        shutil.rmtree(self.folder / "files")

    def gather(self) -> None:
        told = self.log["gather"] = self.act(self.asked.ranks, "sft", min(self.asked.steps, 4), "gather")
        self._host("gathered", told)
        self.row("save stall, gathered, s", f"{told['stall_s']:.2f}", ", ".join(n for n in told["files"] if n.startswith("optimizer")))
        shutil.rmtree(self.folder / "gather")

    def _host(self, kind: str, told: dict[str, Any]) -> None:
        steady, more = (sum(each[name] for each in told["each"]) for name in ("steady_gib", "save_gib"))
        base, save = told["guard"]["host_gib"], told["guard"]["save_gib"]
        if kind == "a file a rank":
            self.row("host, steady, all ranks", _gib(steady), f"guard {_gib(base)}; {_seed('base')}")
        self.row(f"host, more while saving, {kind}", _gib(more), f"guard {_gib(save)}; {_seed('save, ' + kind)}")
        self.row(f"host, peak, {kind}", _gib(steady + more), f"guard {_gib(base + save)}; {_seed('peak, ' + kind)}")

    def exact(self) -> None:
        self.act(self.asked.ranks, "exact", "whole", EXACT_STEPS, "fresh", size="tiny")
        whole = self.folder / "whole" / "checkpoints"
        for step in range(1, EXACT_STEPS):
            part = self.folder / f"from-{step}"
            shutil.copytree(self.folder / "whole", part)
            for later in range(step + 1, EXACT_STEPS + 1):
                shutil.rmtree(part / "checkpoints" / f"step-{later:06d}")
            self.act(self.asked.ranks, "exact", part.name, EXACT_STEPS, "resume", size="tiny")
            last = f"step-{EXACT_STEPS:06d}"
            different = _differing(whole / last, part / "checkpoints" / last)
            self.row(f"resumed after step {step} of {EXACT_STEPS}: files that differ at the end", str(len(different)), ", ".join(different))

    def reshard(self) -> None:
        if not (self.folder / "whole").exists():
            self.act(self.asked.ranks, "exact", "whole", EXACT_STEPS, "fresh", size="tiny")
        source = self.folder / "whole" / "checkpoints" / f"step-{EXACT_STEPS:06d}"
        expected = _tensors(source)
        for world in dict.fromkeys((2, 1)):
            told = self.act(world, "reload", source, f"on-{world}", self.asked.ranks, size="tiny")
            found = _tensors(Path(told["path"]))
            different = [name for name in expected.keys() | found.keys() if not _equal(expected.get(name), found.get(name))]
            self.row(
                f"saved on {self.asked.ranks}, loaded on {world}, saved again: tensors that differ", f"{len(different)} of {len(expected)}",
                ", ".join(different[:3]),
            )  # fmt: skip

    def dpo(self) -> None:
        pairs = self.folder / "pairs.jsonl"
        lines = [{"prompt": f"What is {a} + {a}?", "chosen": f" {2 * a}", "rejected": f" {2 * a + 1 + a % 3}"} for a in range(96)]
        pairs.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        self._stage("dpo", f"data.source={pairs}")

    def grpo(self) -> None:
        reward = self.folder / "reward.py"
        reward.write_text(REWARD, encoding="utf-8")
        self._stage("grpo", f"reward={reward}:reward", "rollout.max_new_tokens=24", "rollout.group=4")

    def _stage(self, stage: str, *more: str) -> None:
        """Three steps of a stage on all ranks; its run's own numbers, and an optimizer file of each rank."""
        ranks, model = self.asked.ranks, self.folder / "model"
        settings = [
            f"model.device={self.asked.device}",
            f"train.micro_batch={4}",
            f"train.global_batch={4 * ranks}",
            "train.max_steps=3",
            "schedule.warmup_steps=0",
        ]
        if self.asked.model != "tiny":  # whose own start is the bundled checkpoint
            if not model.exists():
                self.act(1, "write_model")
            settings += [f"model.path={model}", "model.tokenizer=mistral-7b-v0.3", "model.dtype=bfloat16", "optimizer.lr=1e-6"]
            settings += ["train.checkpointing=full"]
        run = self.folder / stage
        ignore = 'guard.ignore=["load"]'
        self.ranks(ranks, f"stages/{stage}.py", f"run_dir={run}", "eval.enabled=false", "checkpoint.every=0", ignore, *settings, *more)
        lines = [json.loads(line) for line in (run / "history.jsonl").read_text(encoding="utf-8").splitlines()]
        files = sorted(path.name for path in (run / "checkpoints" / "step-000003").glob("optimizer-*.safetensors"))
        self.log[stage] = lines
        told = ", ".join(f"{line['loss']:.4f}" if line["loss"] is not None else "–" for line in lines)
        last = lines[-1]
        self.row(f"{stage}: losses of 3 steps, s of the last", f"{told}; {last['step_s']:.2f}", f"rank 0 {last['memory_gb']:.2f} GiB")
        self.row(f"{stage}: optimizer files", f"{len(files)} of {ranks} ranks", ", ".join(files[:1]))
        shutil.rmtree(run)


def _gib(value: float) -> str:
    return f"{value:.2f} GiB" if value >= 0.1 else f"{value * 1024:.2f} MiB"


def _list(values: list[float]) -> str:
    return ", ".join(map(_gib, values))


def _mfu(told: dict[str, Any]) -> str:
    return f"MFU {told['mfu']:.1%}" if told["mfu"] else ""


def _seed(name: str) -> str:
    return f"the seed for 7.25B on 4 ranks {SEED[name]} GiB"


def _differing(one: Path, two: Path) -> list[str]:
    """Files of two checkpoints whose sha256 differ, or that only one has."""
    files = [json.loads((path / "manifest.json").read_text(encoding="utf-8"))["files"] for path in (one, two)]
    a, b = ({name: file["sha256"] for name, file in each.items()} for each in files)
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def _tensors(checkpoint: Path) -> dict[str, Any]:
    """Weights, and every state tensor of the optimizer with the ranks' rows joined."""
    found = {f"weight {name}": tensor for path in checkpoint.glob("model*.safetensors") for name, tensor in load_file(path).items()}
    parts = [load_file(path) for path in sorted(checkpoint.glob("optimizer*.safetensors"))]
    for name in dict.fromkeys(name for part in parts for name in part):
        held = [part[name] for part in parts if name in part]
        found[name] = torch.cat(held) if held[0].ndim else held[0]
    return found


def _equal(one: Any, two: Any) -> bool:
    return one is not None and two is not None and torch.equal(one, two)


def document(bench: Bench, failed: dict[str, str]) -> str:
    """The table as it is committed: hardware, versions, command."""
    asked = bench.asked
    where = torch.cuda.get_device_name() if bench.devices else f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    how = gpu_ranks.described(asked.ranks, bench.devices)
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    lines = [f"# Training over {asked.ranks} ranks, {asked.model}, {datetime.date.today()}", "", f"{how}; {where}; {versions}."]
    if not bench.devices or bench.devices < asked.ranks:
        lines.append("Ranks share what they run on: rates say nothing of a machine with a GPU a rank, all else is what it is.")
    if asked.device == "cpu":
        lines.append("On the CPU the model computes in fp32, rows are 64 tokens, and the memory of a rank is its process's.")
    lines += ["", f"    python3 benchmarks/four_gpu.py {' '.join(sys.argv[1:])}", "", "| | measured | beside it |", "|---|---|---|"]
    lines += [f"| {what} | {value} | {beside} |" for what, value, beside in bench.rows]
    lines += [f"| {part} | **failed** | {' '.join(why.split())[:200]} |" for part, why in failed.items()]
    return "\n".join([*lines, ""])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="four_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--model", choices=("tiny", "1.44B", "7.25B"), default="7.25B")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--steps", type=int, default=12, help="of one and sft")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds a start of the ranks may take")
    parser.add_argument("--out", type=Path, help="the table as markdown; beside it the same name with .json")
    parser.add_argument("--folder", type=Path, help="for checkpoints; default: a temporary one")
    asked = parser.parse_args(argv)
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("four_gpu: torch sees no CUDA device here; take --device cpu", file=sys.stderr)
        return 2
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="four-gpu-", dir=asked.folder) as folder:
        bench = Bench(asked, Path(folder))
        for part in asked.only.split(","):
            started = time.monotonic()
            try:
                getattr(bench, part)()
            except Failed as error:
                failed[part] = str(error)
                print(f"{part}: failed: {error}", file=sys.stderr, flush=True)
            print(f"({part}: {time.monotonic() - started:.0f} s)", flush=True)
    if asked.out:
        asked.out.write_text(document(bench, failed), encoding="utf-8")
        asked.out.with_suffix(".json").write_text(json.dumps({"rows": bench.rows, "log": bench.log, "failed": failed}), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
