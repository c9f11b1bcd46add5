"""The one place where a test may skip: something outside the repository is absent. Each skip names the command that brings it."""

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


def bazel() -> None:
    """Skips where the test was not started by Bazel, whose walls it looks at."""
    if "TEST_SRCDIR" not in os.environ:
        pytest.skip("needs Bazel's sandbox: ./bazelw test //...")
