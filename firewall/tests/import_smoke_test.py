"""Each public module imports alone, in a fresh interpreter, without a GPU; layer 0 and data with torch absent."""

import os
import pkgutil
import subprocess
import sys

import pytest

import align.config  # one of the libraries: the namespace then shows all that the build put in reach

LIBRARIES = sorted(module.name for module in pkgutil.iter_modules(sys.modules["align"].__path__))
WITHOUT_TORCH = ["config", "data", "evals", "guard", "ingest", "lean", "tokenizer", "tracking", "verify"]
STANDARD_LIBRARY_ONLY = ["config", "evals", "guard", "lean", "tokenizer", "tracking", "verify"]


def run(program: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)


def test_the_lists_are_of_libraries_that_exist():
    assert set(WITHOUT_TORCH) < set(LIBRARIES)
    assert align.config.__name__ == "align.config"


@pytest.mark.parametrize("library", LIBRARIES)
def test_imports_alone(library: str):
    done = run(f"import align.{library} as module\nfor name in module.__all__: getattr(module, name)")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("library", WITHOUT_TORCH)
def test_imports_with_torch_absent(library: str):
    absent = ["torch", "triton", "safetensors", "pyarrow"] + (["numpy"] if library in STANDARD_LIBRARY_ONLY else [])
    done = run(f"import sys\nfor name in {absent}: sys.modules[name] = None\nimport align.{library}")
    assert done.returncode == 0, done.stderr
