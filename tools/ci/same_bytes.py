"""Compares two builds by their --execution_log_json_file: python3 tools/ci/same_bytes.py FIRST SECOND

Every action of the second log must be in the first, with outputs of equal digests. Test logs aside: they hold times.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def spawns(text: str) -> Iterator[dict[str, Any]]:
    """The objects of a log, which stand one after the other with nothing between."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        spawn, at = decoder.raw_decode(text, at)
        yield spawn
        while at < len(text) and text[at].isspace():
            at += 1


def outputs(text: str) -> dict[str, str]:
    """Path to digest of all that the actions of a log made."""
    return {
        output["path"]: output.get("digest", {}).get("hash", "")
        for spawn in spawns(text)
        if spawn["mnemonic"] != "TestRunner"
        for output in spawn.get("actualOutputs", [])
    }


def compare(first: str, second: str) -> list[str]:
    """Complaints, one an output."""
    before, after = outputs(first), outputs(second)
    found = [f"{path} was made by the second build alone" for path in sorted(after.keys() - before.keys())]
    return found + [
        f"{path} differs between two builds of the same inputs" for path in sorted(after) if before.get(path, after[path]) != after[path]
    ]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="same_bytes.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", metavar="LOG", nargs=2, type=Path, help="of the first and the second build")
    logs = [path.read_text(encoding="utf-8") for path in parser.parse_args(words).logs]
    complaints, compared = compare(*logs), len(outputs(logs[1]))
    print(*complaints, f"{compared} outputs compared, {len(complaints)} differ", sep="\n")
    return int(bool(complaints) or not compared)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
