"""The slowest tests of Bazel's words on standard input, and how many of all came from a cache: … | python3 tools/ci/slowest.py [10]"""

import argparse
import re
import sys


def slowest(text: str, count: int) -> list[str]:
    """Lines, the slowest first; tests that were not run anew have no time of this run and stand in the last line."""
    ran = re.findall(r"^(//\S+) +(?:PASSED|FAILED|TIMEOUT) in ([\d.]+)s", text, re.MULTILINE)
    cached = len(re.findall(r"^//\S+ +\(cached\) PASSED", text, re.MULTILINE))
    lines = [f"{float(seconds):7.1f} s  {name}" for name, seconds in sorted(ran, key=lambda pair: -float(pair[1]))[:count]]
    return [*lines, f"{len(ran)} tests ran, {cached} came from the cache"]


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="slowest.py", description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=10, help="how many (default: 10)")
    count = parser.parse_args(words).count
    print(*slowest(sys.stdin.read(), count), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
