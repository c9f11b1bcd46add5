"""align took the stranger's numpy, pyarrow, safetensors, torch and triton, and none of its own."""

import os
from pathlib import Path

import own_numpy  # noqa: F401
import own_pyarrow  # noqa: F401
import own_safetensors  # noqa: F401
import own_torch  # noqa: F401
import own_triton  # noqa: F401
import torch

assert "stranger_torch" in torch.__file__, torch.__file__
assert not list(Path(os.environ["TEST_SRCDIR"]).glob("align_pip_*/site"))
