"""The Triton kernels under the interpreter against float64, and their compilation to sm_90 without a GPU.

The interpreter is chosen when triton is imported, so both run in processes of their own: as a script this file is one of them.
"""

import functools
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import kernels_cases
import pytest
import torch

QUICK = (("swiglu", "bfloat16"), ("loss", "bfloat16"), ("gemv", "float32"))
ALL = tuple((name, dtype) for name in kernels_cases.CASES for dtype in ("float32", "bfloat16"))


def interpret(cases: list[str]) -> None:
    torch.set_num_threads(1)
    for case in cases:
        name, dtype = case.split(":")
        try:
            kernels_cases.CASES[name]("cpu", getattr(torch, dtype), False)
            result = ""
        except Exception:
            result = traceback.format_exc()
        print(json.dumps([name, dtype, result]), flush=True)


def run(mode: str, interpreted: str, cache: Path, *arguments: str) -> str:
    environment = os.environ | {"TRITON_INTERPRET": interpreted, "TRITON_CACHE_DIR": str(cache), "HOME": str(cache)}
    command = [sys.executable, "-W", "ignore", __file__, mode, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@functools.cache
def results(cases: tuple[tuple[str, str], ...], cache: Path) -> dict[tuple[str, str], str]:
    rows = [json.loads(line) for line in run("interpret", "1", cache, *map(":".join, cases)).splitlines()]
    return {(name, dtype): result for name, dtype, result in rows}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("case", QUICK, ids="-".join)
def test_interpreter(case, cache):
    assert results(QUICK, cache)[case] == ""


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids="-".join)
def test_interpreter_at_length(case, cache):
    assert results(ALL, cache)[case] == ""


@pytest.mark.slow
def test_every_launch_compiles_to_sm_90_without_spilling(cache):
    """Registers, stack and vector widths of the launches at the shapes of the 1.44B and 7.25B models."""
    report = {name: rest for name, *rest in map(json.loads, run("compile", "0", cache).splitlines())}
    for name, (registers, stack, memory) in report.items():
        assert stack == 0 and registers <= 255, (name, registers, stack)
        widest = {load for load in memory if load.startswith(("LDG.E", "LDGSTS.E"))}
        assert any(".128" in load for load in widest), (name, memory)  # 16 bytes a load
    expected = {"rms_norm", "rms_norm_backward", "sum_rows", "rope", "swiglu", "swiglu_backward", "scale", "cross_entropy_rows", "sample"}
    expected |= {"rope_to_cache", "step_linear", "step_vector", "sum_rms_norm"}
    expected |= {"logprob_slope", "split", "combine", "gemv_one", "gemv_few", "linear", "attention"}
    assert {name.split()[0] for name in report} == expected
    strict = [memory for name, (_, _, memory) in report.items() if name.split()[0] in ("linear", "attention")]
    assert all("HGMMA.64" in memory and not any(o.startswith("HMMA") for o in memory) for memory in strict)  # one instruction for all tiles


def compile_all() -> None:
    import sm90_launches

    sm90_launches.report()


if __name__ == "__main__":
    mode, *rest = sys.argv[1:]
    interpret(rest) if mode == "interpret" else compile_all()
