"""Runs the tests on a machine with a GPU and without Bazel: python3 tools/gpu_check.py [--out DIR] [pytest arguments]

Needs torch, triton, numpy, safetensors, pytest and hypothesis in the interpreter that runs it. First the tests tagged gpu, then the
default ones, each in a process of its own; the summary says with what hardware and versions. Exit code 0 when both are green.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).absolute().parents[1]


def environment() -> dict:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(), "gpus": gpus}


def pytest_run(name: str, arguments: list[str]) -> dict:
    started = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    )
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    code = process.wait()
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", "".join(lines[-3:]))}
    return {"run": name, "exit": code, "wall_s": round(time.monotonic() - started, 1), **counts}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for gpu_check.json")
    parser.add_argument("--gpu-only", action="store_true", help="only the tests tagged gpu")
    arguments, rest = parser.parse_known_args(argv)
    if not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device here", file=sys.stderr)
        return 2
    runs = [pytest_run("gpu", ["-m", "gpu", *rest])]
    if not arguments.gpu_only:
        runs.append(pytest_run("default", rest))
    summary = {**environment(), "runs": runs}
    print(json.dumps(summary, indent=2))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "gpu_check.json").write_text(json.dumps(summary, indent=2) + "\n")
    return 0 if all(run["exit"] in (0, 5) for run in runs) else 1  # 5: no test of that tag


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
