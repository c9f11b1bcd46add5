r"""Fuzzed pairs, as many as wanted: the longest CPU time of one, and its input. A pair over the bound, or one that fails, ends the run.

bazel run //libs/verify:fuzz -- --seeds 1000:1016 --pairs 62500
"""

import argparse
import time

from verify_limits import run_fuzz


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1000:1016", metavar="FIRST:END", help="seeds of the generator (default: 1000:1016)")
    parser.add_argument("--pairs", type=int, default=62_500, metavar="N", help="pairs for each seed (default: 62500)")
    given = parser.parse_args()
    first, _, end = given.seeds.partition(":")
    began, cpu, longest = time.monotonic(), time.process_time(), (0.0, "")
    for seed in range(int(first), int(end)):
        worst = run_fuzz(given.pairs, seed)
        longest = max(longest, worst)
        print(f"seed {seed}: longest {worst[0] * 1e3:.1f} ms", flush=True)
    print(f"{time.monotonic() - began:.0f} s, {time.process_time() - cpu:.0f} s of CPU; longest {longest[0] * 1e3:.1f} ms: {longest[1]}")


if __name__ == "__main__":
    main()
