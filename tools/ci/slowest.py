"""The slowest tests of Bazel's words on standard input, and how many of all came from a cache: … | python3 tools/ci/slowest.py [10]"""

import re
import sys


def slowest(text: str, count: int) -> list[str]:
    """Lines, the slowest first; tests that were not run anew have no time of this run and stand in the last line."""
    ran = re.findall(r"^(//\S+) +(?:PASSED|FAILED|TIMEOUT) in ([\d.]+)s", text, re.MULTILINE)
    cached = len(re.findall(r"^//\S+ +\(cached\) PASSED", text, re.MULTILINE))
    lines = [f"{float(seconds):7.1f} s  {name}" for name, seconds in sorted(ran, key=lambda pair: -float(pair[1]))[:count]]
    return [*lines, f"{len(ran)} tests ran, {cached} came from the cache"]


if __name__ == "__main__":
    print(*slowest(sys.stdin.read(), int(sys.argv[1]) if len(sys.argv) > 1 else 10), sep="\n")
