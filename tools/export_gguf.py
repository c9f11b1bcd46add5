"""Writes a model directory (or a run's newest checkpoint) as one GGUF file.

./bazelw run //tools:export_gguf -- models/x x.gguf --weights q8_0
"""

import argparse
import os
import sys
from pathlib import Path

from align.checkpoint import CheckpointError, newest
from align.model import ModelError, export_gguf


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="export_gguf", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory in HF layout, or a run directory")
    parser.add_argument("file", type=Path, help="the GGUF file that is written")
    parser.add_argument("--weights", choices=("f16", "q8_0"), default="f16", help="of the matrices (default: f16)")
    options = parser.parse_args(argv)
    here = Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    model, file = here / options.model, here / options.file
    try:
        if file.exists():
            raise ModelError(f"{file} exists; name another file or remove it")
        export_gguf(newest(model / "checkpoints", setting="model") or model, file, weights=options.weights)
    except (CheckpointError, ModelError) as error:
        print(f"export_gguf: {error}", file=sys.stderr)
        return 2
    print(f"{file}   {file.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
