"""Random strings, ours against the reference: ids, special text as text, offsets, decodes, streams.

    ALIGN_ORACLE_PYTHON=<oracle venv>/bin/python python benchmarks/random_strings.py COUNT SEED TOKENIZER_DIR [TOKENIZER_DIR …]

The reference runs in a process of its own and writes one line per string. Prints the number of strings and of differences for each
tokenizer, and the first differences; ends with 1 where there are any.
"""

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from align.tokenizer import Decoder, Tokenizer

# argv: tokenizer.json, seed, count. Prints [text, ids, ids of special text as text, offsets, decoded, decoded without special tokens].
ORACLE = r"""
import json, random, sys
import tokenizers
source = open(sys.argv[1], encoding="utf-8").read()
plain, as_text = tokenizers.Tokenizer.from_str(source), tokenizers.Tokenizer.from_str(source)
as_text.encode_special_tokens = True
draw = random.Random(int(sys.argv[2]))
added = [t["content"] for t in json.loads(source)["added_tokens"]] or ["<s>"]
words = ("the of and to in is that for it as was with by on not his but at are this have from or had an they which one you were all "
         "there would their we him been has when who will no more if out so what time up about than into could state only new year "
         "come these know see use get like then first any work now may such give over think most even find day also after way many "
         "question equation theorem integer Therefore However return import function self None True False print range").split()
pools = [
    " \t\n\r\x0b\x0c", "  \n", "\u00a0\u2003\u3000\u2028\u0085\u1680", "0123456789", "\u0660\u0661\u0662\u096a\u216f\u00bd\u00b2",
    "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", ".,;:!?-_()[]{}<>/\\|@#$%^&*+=~`\"'", "'sStTlLvVeErRdDmM\u017f",
    "\u00e9\u00e8\u00fc\u00df\u00f8\u00f1\u00e7\u00e0\u0153", "\u0430\u0431\u0432\u0433\u0434\u0435\u0436\u0437\u0438\u0439",
    "\u4e2d\u6587\u5b57\u7b26\u6d4b\u8bd5\u65e5\u672c\u8a9e\u304b\u306a\u30ab\u30ca\ud55c\uad6d\uc5b4",
    "\u0300\u0301\u0327\u0328\u0345\u05b0\u0651\u093c\u0f71\u1dc0\u07f3\u07fd\u0898",
    "\U0001f44d\U0001f3fd\u200d\U0001f468\U0001fae8\u2764\ufe0f",
    "\u1100\u1161\u11a8\uac00\uac01", "\x00\x01\x1b\x1c\x1d\x1e\x1f\x7f\x80\x9f", "\u2581\u0120\u010a\u200b\u200d\ufeff\ufffd",
    "\U0001d49c\U00010400\U00011938\U00012000\U0001f130", "\u0958\u2126\u212b\ufb1d\uf900\u0344\u1e9b\u0323",
]
joins = ["\n\n", "\n    ", " \n", "\r\n", ".\n", "/\n/", "\n/", "  x", "\t\t", "';", "'S", "'re", " '", "'ll", "))\n\n", "...", "://",
         "__init__", "1234567", "3.14", "0x1F", "fooBar", "don't", "I'M"]

def piece():
    kind = draw.random()
    if kind < 0.25:
        return (" " if draw.random() < 0.7 else "") + draw.choice(words)
    if kind < 0.6:
        return "".join(draw.choices(draw.choice(pools), k=draw.choice((1, 1, 2, 3, 5, 8))))
    if kind < 0.68:
        return draw.choice(added)
    if kind < 0.72:
        return draw.choice(added)[: draw.randrange(1, 6)]
    if kind < 0.76:
        return draw.choice(draw.choice(pools)) * draw.choice((2, 3, 4, 7, 17, 50, 130))
    if kind < 0.84:
        code = draw.randrange(0x110000 - 0x800)
        return chr(code if code < 0xD800 else code + 0x800)
    if kind < 0.92:
        return chr(draw.randrange(0x250))
    return draw.choice(joins)

for _ in range(int(sys.argv[3])):
    text = "".join(piece() for _ in range(draw.choice((1, 2, 3, 4, 6, 10, 16))))
    whole = plain.encode(text, add_special_tokens=False)
    print(json.dumps([
        text, whole.ids, as_text.encode(text, add_special_tokens=False).ids, whole.offsets,
        plain.decode(whole.ids, skip_special_tokens=False), plain.decode(whole.ids, skip_special_tokens=True),
    ]))
"""


def read(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def answers(python: str, source: bytes, seed: int, count: int):
    """The reference's lines, as it writes them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokenizer.json")
        path.write_bytes(source)
        command = [python, "-c", ORACLE, str(path), str(seed), str(count)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "RAYON_NUM_THREADS": "1"}) as process:
            yield from map(json.loads, process.stdout or ())
        if process.returncode:
            sys.exit(f"the reference ended with {process.returncode}")


def differences(tokenizer: Tokenizer, text: str, ids: list, as_text: list, offsets: list, decoded: str, skipped: str) -> list[str]:
    encoding = tokenizer.encode_with_offsets(text)
    decoder = Decoder(tokenizer)
    found = {
        "ids": (tokenizer.encode(text), ids),
        "ids of encode_with_offsets": (encoding.ids, ids),
        "offsets": ([list(pair) for pair in encoding.offsets], offsets),
        "special as text": (tokenizer.encode(text, special="text"), as_text),
        "decode": (tokenizer.decode(ids), decoded),
        "decode, skip_special": (tokenizer.decode(ids, skip_special=True), skipped),
        "stream": ("".join(map(decoder.push, ids)) + decoder.finish(), decoded),
    }
    return [kind for kind, (ours, theirs) in found.items() if ours != theirs]


def main(count: int, seed: int, directories: list[Path]) -> int:
    python = os.environ.get("ALIGN_ORACLE_PYTHON")
    if not python:
        sys.exit("set ALIGN_ORACLE_PYTHON to the python of the oracle venv")
    total = 0
    for directory in directories:
        tokenizer = Tokenizer.load(directory)
        wrong: Counter[str] = Counter()
        tried = 0
        for row in answers(python, read(tokenizer.files[0]), seed, count):
            tried += 1
            for kind in differences(tokenizer, *row):
                wrong[kind] += 1
                if wrong[kind] <= 3:
                    print(f"{directory.name}: {kind}: {row[0]!a}")
        total += sum(wrong.values()) + (tried != count)
        print(f"{directory.name}: {tried} strings of seed {seed}, {sum(wrong.values())} differences {dict(wrong)}", flush=True)
    return 1 if total else 0


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), list(map(Path, sys.argv[3:]))))
