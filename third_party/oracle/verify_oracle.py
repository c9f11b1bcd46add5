"""Answers of Math-Verify for align.verify's tests and benchmark. Run by the oracle venv's python, never imported.

verify_oracle.py < PAIRS > ANSWERS    PAIRS: a JSON list of [gold, text]; the gold is put in \\boxed{}, the text stands as it is.
                                      ANSWERS: {"answers": [bool], "seconds": [CPU time of each pair], "version": ...}
"""

import json
import sys
import time
from importlib.metadata import version

from math_verify import parse, verify


def judged(gold: str, text: str) -> bool:
    return bool(verify(parse("\\boxed{" + gold + "}"), parse(text)))


def main() -> int:
    judged("1", "\\boxed{1}")  # the first call builds the parser
    answers, seconds = [], []
    for gold, text in json.load(sys.stdin):
        start = time.process_time()
        answers.append(judged(gold, text))
        seconds.append(time.process_time() - start)
    json.dump({"answers": answers, "seconds": seconds, "version": version("math-verify")}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
