"""Rates of align.data on one core, as a table. Run: python3 libs/data/benchmarks/data_bench.py [directory for 1 GB of scratch files]

CPU seconds of one process, one run; the streaming rate is told as a share of that of `cat file | python json.loads` over the same lines.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np

from align.data import Cursor, Encoded, Example, Loader, Shards, bundled, efficiency, gsm8k_rows, open_shards, pack
from align.data._shards import CHUNK, write_manifest, write_shard

LENGTHS = np.load(Path(__file__).parent.parent / "tests" / "data" / "gsm8k_chat_lengths.npy")


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as scratch:
        print("| what | figure |\n|---|---|")
        folders = [Path(scratch, name) for name in ("rows", "sparse", "shards")]
        for folder in folders:
            folder.mkdir()
        loaders = (loading(packed, folder) for packed in (True, False) for folder in (None, folders[2]))
        for what, figure in chain([streaming(folders[0]), opening(folders[1]), packing()], loaders):
            print(f"| {what} | {figure} |")


def streaming(scratch: Path) -> tuple[str, str]:
    """Each in a process of its own: its CPU seconds and, of ours, the most memory that it held."""
    path = scratch / "rows.jsonl"
    lines = "".join(json.dumps({"prompt": r["prompt"], "completion": r["completion"]}) + "\n" for r in gsm8k_rows(bundled("gsm8k_train")))
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(10**9 // len(lines) + 1):
            file.write(lines)
    with subprocess.Popen(["cat", path], stdout=subprocess.PIPE) as cat:
        plain, _ = spent("import json, sys\nfor line in sys.stdin.buffer: json.loads(line)", stdin=cat.stdout)
    ours, held = spent(f"from align.data import stream_rows\nfor _ in stream_rows({str(path)!r}): pass")
    size = path.stat().st_size / 1e6
    path.unlink()
    figure = f"{size / ours:.0f} MB/s, {plain / ours:.0%} of the rate of `cat` into json.loads; {held} MiB"
    return f"`stream_rows`, {size:.0f} MB of JSON Lines", figure


def spent(program: str, *, stdin: IO[bytes] | None = None) -> tuple[float, int]:
    """CPU seconds and peak memory in MiB of a Python program."""
    process = subprocess.Popen([sys.executable, "-c", program], stdin=stdin)
    _, code, usage = os.wait4(process.pid, 0)
    if code:
        raise SystemExit(f"a measured program ended with {code}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss >> 10


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


def loading(packed: bool, scratch: Path | None = None) -> tuple[str, str]:
    """From memory, or from shards on disk (their digests are then checked while they are read)."""
    examples = [Example(np.zeros(length, np.int32), np.ones(length, np.bool_)) for length in LENGTHS]
    tokens = int(LENGTHS.sum())
    source: Encoded | Shards = Encoded(examples, len(examples), Counter(), 0, tokens, tokens - len(examples), "gsm8k")
    if scratch is not None:
        entries = [write_shard(scratch, index, examples[index * 1024 : index * 1024 + 1024], {}) for index in range(8)]
        write_manifest(scratch, {}, {}, entries)
        source = open_shards(scratch)
    loader = Loader(source, global_batch=16, micro_batch=4, max_length=2048, packing=packed, seed=0)
    began = time.process_time()
    tokens = sum(loader.next_step().tokens for _ in range(100 if packed else 400))
    figure = f"{tokens / (time.process_time() - began) / 1e6:.1f}e6 tokens/s"
    return f"`Loader`, packing={packed}, global_batch 16, from {'memory' if scratch is None else 'shards'}", figure


if __name__ == "__main__":
    main()
