"""Every gpu test and every benchmark on a machine without Bazel: python3 tools/gpu_check.py [--list] [--gpu-only] [pytest arguments]

Needs torch, triton, numpy, safetensors, pytest and hypothesis in the interpreter that runs it. First the tests tagged gpu, then the default
ones, then the benchmarks (benchmarks/, libs/*/benchmarks, stages/benchmarks), each in a process of its own and under a time limit. Prints
one table and writes it, with hardware, versions and what the benchmarks said, to benchmarks/<date>-gpu-check-<gpu>.md. Exit code 0: tests
green.
"""

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).absolute().parents[1]
# Arguments of those that want some. None: needs what a GPU box has not, and why.
ARGUMENTS: dict[str, list[str] | None] = {
    "benchmarks/four_gpu.py": ["--ranks", "2", "--model", "tiny", "--device", "cuda", "--steps", "6"],
    "benchmarks/four_gpu_rank.py": None,  # a part of four_gpu
    "libs/rollout/benchmarks/tune.py": ["--cases", "1.44B:64", "--ops", "decode_attention", "--seconds", "60"],
    "libs/tokenizer/benchmarks/random_strings.py": None,  # the oracle
    "libs/tokenizer/benchmarks/speed.py": None,  # a corpus
    "libs/tracking/benchmarks/report.py": ["100000"],
    "libs/verify/benchmarks/compare.py": None,  # the oracles
    "stages/benchmarks/optimizers_sft.py": None,  # weights
    "stages/benchmarks/sft_gsm8k.py": None,  # weights
    "stages/benchmarks/rl_gpu.py": ["--only", "grpo-1.44B,dpo-1.44B"],
}
SAID_LINES = 60  # of a benchmark's words, the last ones


def environment() -> dict[str, Any]:
    """Hardware and versions."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(), "gpus": gpus}


def process(name: str, command: list[str], limit_s: float) -> dict[str, Any]:
    """Runs it and shows what it says; exit code 124 when the limit ended it."""
    print(f"== {name}: {' '.join(command)}", flush=True)
    started, timed_out = time.monotonic(), False
    paths = os.pathsep.join(
        map(str, [*sorted(ROOT.glob("libs/*")), *sorted(ROOT.glob("libs/*/tests")), ROOT / "stages", ROOT / "tools/py"])
    )
    paths = os.pathsep.join([paths, os.environ.get("PYTHONPATH", "")])
    more = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": paths}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
            env=os.environ | more,
        )
        code, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, said, timed_out = 124, (late.stdout or b"").decode(errors="replace"), True
    print(said, flush=True)
    return {"run": name, "command": " ".join(command[1:]), "exit": code, "wall_s": round(time.monotonic() - started, 1), "said": said} | (
        {"timed_out": True} if timed_out else {}
    )


def tests(name: str, arguments: list[str], limit_s: float) -> dict[str, Any]:
    """A pytest run with its counts."""
    row = process(name, [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments], limit_s)
    last = "".join(row["said"].splitlines()[-3:])
    row |= {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    return row | {"exit": 0 if row["exit"] == 5 else row["exit"]}  # 5: no test of that tag


def benchmarks() -> list[tuple[str, list[str] | None]]:
    """(script, its arguments), None where this machine lacks what it needs."""
    found = sorted(path for folder in ("benchmarks", "libs/*/benchmarks", "stages/benchmarks") for path in ROOT.glob(f"{folder}/*.py"))
    scripts = [str(path.relative_to(ROOT)) for path in found if '__name__ == "__main__"' in path.read_text(encoding="utf-8")]
    return [(script, ARGUMENTS.get(script, [])) for script in scripts]


def table(rows: list[dict[str, Any]]) -> str:
    """One line a run."""
    lines = ["| run | result | wall time | command |", "|---|---|---|---|"]
    for row in rows:
        counts = ", ".join(f"{row[word]} {word}" for word in ("passed", "failed", "skipped", "error") if word in row)
        result = "time limit" if row.get("timed_out") else f"exit {row['exit']}" if row["exit"] else "ok"
        lines.append(f"| {row['run']} | {result}{f' ({counts})' if counts else ''} | {row['wall_s']} s | `python3 {row['command']}` |")
    return "\n".join(lines)


def document(environment: dict[str, Any], rows: list[dict[str, Any]], skipped: list[str], day: str) -> str:
    """benchmarks/<day>-gpu-check-<gpu>.md."""
    parts = [f"# GPU check, {day}", "", f"{len(environment['gpus'])} × {environment['gpus'][0]}, torch {environment['torch']}, CUDA "]
    parts[-1] += f"{environment['cuda']}, Python {environment['python']}. All by `python3 tools/gpu_check.py`."
    parts += ["", table(rows)]
    parts += ["", f"Not run here, for want of what they need: {', '.join(f'`{name}`' for name in skipped)}."] if skipped else []
    for row in rows:
        if row["run"].endswith(".py"):
            said = "\n".join(row["said"].replace("```", "'''").splitlines()[-SAID_LINES:])
            parts += ["", f"## {row['run']}", "", "```", said, "```"]
    return "\n".join([*parts, ""])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks", help="folder for the .md and gpu_check.json; default: benchmarks")
    parser.add_argument("--list", action="store_true", help="only tell the gpu tests and the benchmarks that would run; needs no GPU")
    parser.add_argument("--gpu-only", action="store_true", help="only the tests tagged gpu")
    parser.add_argument("--no-benchmarks", action="store_true", help="only the tests")
    parser.add_argument("--limit-s", type=float, default=600, help="seconds for each test run and each benchmark")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.list:
        tests("gpu tests", ["-m", "gpu", "--collect-only", *rest], arguments.limit_s)
        for script, more in benchmarks():
            print(f"{script}: not run, for want of what it needs" if more is None else f"python3 {' '.join([script, *more])}")
        return 0
    import torch

    if not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device here", file=sys.stderr)
        return 2
    rows = [tests("gpu tests", ["-m", "gpu", *rest], arguments.limit_s)]
    skipped: list[str] = []
    if not arguments.gpu_only:
        rows.append(tests("default tests", rest, arguments.limit_s))
    if not (arguments.gpu_only or arguments.no_benchmarks):
        for script, more in benchmarks():
            if more is None:
                skipped.append(script)
            else:
                rows.append(process(script, [sys.executable, script, *more], arguments.limit_s))
    known = environment()
    print(table(rows))
    arguments.out.mkdir(parents=True, exist_ok=True)
    day = datetime.date.today().isoformat()
    gpu = re.sub(r"\W+", "-", known["gpus"][0].lower().replace("nvidia", "")).strip("-")
    (arguments.out / f"{day}-gpu-check-{gpu}.md").write_text(document(known, rows, skipped, day), encoding="utf-8")
    kept = [{key: value for key, value in row.items() if key != "said"} for row in rows]
    (arguments.out / "gpu_check.json").write_text(json.dumps({**known, "runs": kept}, indent=2) + "\n", encoding="utf-8")
    return 1 if any(row["exit"] for row in rows if row["run"].endswith("tests")) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
