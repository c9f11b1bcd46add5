"""Speed of encoding, beside other implementations: MB of UTF-8 per CPU second, one thread, whole documents, all in one run.

    python benchmarks/speed.py CORPUS TOKENIZER_DIR [TOKENIZER_DIR …]

CORPUS: a JSON list of texts (.json or .json.gz). With ALIGN_ORACLE_PYTHON set to the python of the oracle venv, the same texts go
through Hugging Face tokenizers (and tiktoken for "gpt2", sentencepiece where the directory has a tokenizer.model), and every
document's ids are compared. "cold" is the first pass over the corpus after loading, "warm" the second; "new text" is the second half of
the documents after the first half; "pairs" makes a list of all (start, end) as well.
"""

import gzip
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from align.tokenizer import Tokenizer

# Runs in the oracle venv: reads {"texts", "tokenizer", "model", "ranks"}, prints MB/s by name and a digest of each document's ids.
ORACLE = """
import hashlib, json, sys, time
job = json.load(open(sys.argv[1]))
texts, size = job["texts"], sum(len(t.encode()) for t in job["texts"]) / 1e6
def timed(encode):
    start = time.process_time()
    ids = [encode(t) for t in texts]
    return size / (time.process_time() - start), ids
out = {}
import tokenizers
t = tokenizers.Tokenizer.from_str(job["tokenizer"])
out["tokenizers " + tokenizers.__version__], ids = timed(lambda x: t.encode(x, add_special_tokens=False).ids)
digests = [hashlib.sha256(json.dumps(i).encode()).hexdigest() for i in ids]
if job["model"]:
    import sentencepiece
    s = sentencepiece.SentencePieceProcessor(model_file=job["model"])
    out["sentencepiece " + sentencepiece.__version__], _ = timed(s.encode)
if job["ranks"]:
    import base64, tiktoken
    ranks = {base64.b64decode(k): v for k, v in job["ranks"]["ranks"].items()}
    e = tiktoken.Encoding("gpt2", pat_str=job["ranks"]["pattern"], special_tokens={}, mergeable_ranks=ranks)
    out["tiktoken " + tiktoken.__version__], _ = timed(lambda x: e.encode(x, disallowed_special=()))
print(json.dumps([out, digests]))
"""
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def read(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def seconds(encode, texts: list[str]) -> float:
    """CPU seconds of one pass; the results are kept to its end, as a caller would."""
    start = time.process_time()
    results = [encode(text) for text in texts]
    taken = time.process_time() - start
    del results
    return taken


def oracle(directory: Path, tokenizer: Tokenizer, texts: list[str]) -> tuple[dict, list | None]:
    python = os.environ.get("ALIGN_ORACLE_PYTHON")
    if not python:
        return {}, None
    import base64

    model = directory / "tokenizer.model"
    ranks = None
    if directory.name == "gpt2":  # of one split a token, so that ids are ranks
        vocab = {t: i for t, i in tokenizer._bpe.vocab.items() if t not in tokenizer.added_tokens}
        ranks = {"pattern": GPT2, "ranks": {base64.b64encode(tokenizer.decode_bytes([i])).decode(): i for i in vocab.values()}}
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.json")
        source = read(tokenizer.files[0]).decode()
        job.write_text(json.dumps({"texts": texts, "tokenizer": source, "model": str(model) if model.is_file() else None, "ranks": ranks}))
        environment = {**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run([python, "-c", ORACLE, str(job)], capture_output=True, text=True, env=environment, check=True)
    return json.loads(done.stdout)


def size_of(texts: list[str]) -> float:
    return sum(len(text.encode()) for text in texts) / 1e6


def main(corpus: Path, directories: list[Path]):
    texts = json.loads(read(corpus))
    # Every other document, so that both halves are of all kinds.
    halves = texts[::2], texts[1::2]
    busy = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"{len(texts)} documents, {size_of(texts):.2f} MB; {busy}; Python {sys.version.split()[0]}\n")
    print("| tokenizer | load s | cold | new text | warm | offsets, cold | offsets, warm | pairs | others | documents with other ids |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for directory in directories:
        start = time.process_time()
        tokenizer = Tokenizer.load(directory)
        load = time.process_time() - start
        taken = [seconds(tokenizer.encode, texts), seconds(tokenizer.encode, texts)]
        mine = [hashlib.sha256(json.dumps(tokenizer.encode(text)).encode()).hexdigest() for text in texts]
        tokenizer = Tokenizer.load(directory)
        taken += [seconds(tokenizer.encode_with_offsets, texts), seconds(tokenizer.encode_with_offsets, texts)]
        taken.append(seconds(lambda text, encode=tokenizer.encode_with_offsets: list(encode(text).offsets), texts))
        tokenizer = Tokenizer.load(directory)
        seconds(tokenizer.encode, halves[0])
        half = seconds(tokenizer.encode, halves[1])
        cold, warm, offsets, offsets_warm, pairs = (f"{size_of(texts) / s:.2f}" for s in taken)
        others, digests = oracle(directory, tokenizer, texts)
        wrong = "–" if digests is None else sum(a != b for a, b in zip(mine, digests, strict=True))
        named = ", ".join(f"{name} {speed:.2f}" for name, speed in others.items()) or "–"
        new = f"{size_of(halves[1]) / half:.2f}"
        row = (directory.name, f"{load:.2f}", cold, new, warm, offsets, offsets_warm, pairs, named, wrong)
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
