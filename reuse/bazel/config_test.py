"""A dataclass is filled from words, checked, and written so that it loads equal."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from align.config import ConfigError, dumps, load


@dataclass(frozen=True)
class Run:
    seed: int = 0
    lr: float = 1e-3


run = load(Run, overrides=["lr=3e-4"])
assert run == Run(0, 3e-4)
file = Path(tempfile.mkdtemp(), "run.toml")
file.write_text(dumps(run))
assert load(Run, file) == run
try:
    load(Run, overrides=["sead=1"])
except ConfigError as error:
    assert "sead" in str(error) and "seed" in str(error)
else:
    raise AssertionError("an unknown field was taken")
