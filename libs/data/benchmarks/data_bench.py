"""Rates of align.data on one core, as a table. Run: python3 libs/data/benchmarks/data_bench.py [directory for 1 GB of scratch files]

CPU seconds of this process, one run; the streaming rate is told as a share of `json.loads` over the same lines in the same run.
"""

import json
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from align.data import Cursor, Encoded, Example, Loader, bundled, efficiency, gsm8k_rows, open_shards, pack, stream_rows
from align.data._shards import CHUNK, write_manifest

LENGTHS = np.load(Path(__file__).parent.parent / "tests" / "data" / "gsm8k_chat_lengths.npy")


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as scratch:
        print("| what | figure |\n|---|---|")
        for what, figure in (streaming(Path(scratch)), opening(Path(scratch)), packing(), loading(True), loading(False)):
            print(f"| {what} | {figure} |")


def streaming(scratch: Path) -> tuple[str, str]:
    path = scratch / "rows.jsonl"
    lines = "".join(json.dumps({"prompt": r["prompt"], "completion": r["completion"]}) + "\n" for r in gsm8k_rows(bundled("gsm8k_train")))
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(10**9 // len(lines) + 1):
            file.write(lines)
    began = time.process_time()
    with open(path, "rb") as file:
        for line in file:
            json.loads(line)
    plain, began = time.process_time() - began, time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in stream_rows(path):
        pass
    ours = time.process_time() - began
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    size = path.stat().st_size / 1e6
    path.unlink()
    figure = f"{size / ours:.0f} MB/s, {plain / ours:.0%} of json.loads; {grown:.0f} MiB more memory"
    return f"`stream_rows`, {size:.0f} MB of JSON Lines", figure


def opening(scratch: Path) -> tuple[str, str]:
    """A manifest of 1e9 tokens over sparse files of the right sizes: opening looks at nothing else."""
    tokens, entries = 10**7, []
    size = 64 + 2 * tokens + tokens // 8 + 2 * 4 * (tokens // 500)
    for index in range(100):
        entry = {"name": f"shard-{index:05d}.bin", "size": size, "sha256": "0" * 64, "chunks": ["0" * 64] * -(-size // CHUNK)}
        entries.append(entry | {"documents": tokens // 500, "tokens": tokens, "trained_tokens": tokens})
        with open(scratch / entry["name"], "wb") as file:
            file.truncate(size)
    write_manifest(scratch, {}, {}, entries)
    began = time.process_time()
    shards = open_shards(scratch)
    return f"`open_shards`, {shards.tokens:,} tokens in {len(entries)} files", f"{1000 * (time.process_time() - began):.1f} ms"


def packing() -> tuple[str, str]:
    order = Cursor(len(LENGTHS), seed=0, digest="gsm8k").take(len(LENGTHS))
    lengths = LENGTHS[order].tolist()
    began = time.process_time()
    rows = pack(lengths, 2048)
    spent = time.process_time() - began
    figure = f"{efficiency(lengths, rows, 2048):.1%} filled, {len(lengths) / spent:,.0f} documents/s"
    return "`pack`, GSM8K chat rows into rows of 2048", figure


def loading(packed: bool) -> tuple[str, str]:
    examples = [Example(np.zeros(length, np.int32), np.ones(length, np.bool_)) for length in LENGTHS]
    encoded = Encoded(examples, len(examples), Counter(), 0, int(LENGTHS.sum()), int(LENGTHS.sum()) - len(examples), "gsm8k")
    loader = Loader(encoded, global_batch=16, micro_batch=4, max_length=2048, packing=packed, seed=0)
    began = time.process_time()
    tokens = sum(loader.next_step().tokens for _ in range(100 if packed else 400))
    return f"`Loader`, packing={packed}, global_batch 16", f"{tokens / (time.process_time() - began) / 1e6:.1f}e6 tokens/s"


if __name__ == "__main__":
    main()
