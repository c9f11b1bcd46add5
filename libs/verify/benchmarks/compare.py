r"""Speed beside Math-Verify, both in one run on the same pairs.

    ALIGN_ORACLE_PYTHON=DIR/bin/python bazel run //libs/verify:compare [-- --rows FILE.jsonl]

Without --rows: 300 Qwen outputs, 300 GSM8K outputs, 250 MATH-500 solutions, 400 + 400 synthetic pairs of tests/data, the same every time.
With it: a JSONL file whose rows have `gold`, `text` and `part`. Times are CPU times of the process that judges.
"""
# ruff: noqa: E501 (literals that are long)

import argparse
import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from align.verify import grade

DATA = Path(__file__).parents[1] / "tests" / "data"
ORACLE = Path(__file__).absolute().parents[3] / "third_party" / "oracle" / "verify_oracle.py"


def rows() -> list[dict]:
    """The default mix."""
    chosen = []
    for part, name, count, text in (
        ("qwen_outputs", "qwen_labelled", 300, "text"), ("gsm8k_outputs", "gpt3_labelled", 300, "text"), ("math500_solutions", "math500", 250, "solution"),
        ("synth_pos", "synth_pos", 400, "pred"), ("synth_neg", "synth_neg", 400, "pred"),
    ):  # fmt: skip
        with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            found = [json.loads(line) for line in file]
        step = len(found) / count
        chosen += [{"part": part, "gold": row["gold"], "text": row[text]} for row in (found[int(k * step)] for k in range(count))]
    return chosen


def ours(pairs: list[dict]) -> tuple[list[float], list[bool]]:
    """CPU seconds and verdicts, after one warm-up call."""
    grade("1", "\\boxed{\\sqrt{1}}")
    times, answers = [], []
    for pair in pairs:
        start = time.process_time()
        verdict = grade(pair["gold"], pair["text"])
        times.append(time.process_time() - start)
        answers.append(verdict.correct is True)
    return times, answers


def row(name: str, times: list[float]) -> str:
    ordered = sorted(times)
    p50, p99 = ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))]
    return f"{name:<24}{len(times) / sum(times):>10.0f}{p50 * 1e3:>9.3f}{p99 * 1e3:>9.2f}{ordered[-1] * 1e3:>9.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="JSONL file with gold, text, part")
    given = parser.parse_args()
    pairs = rows()
    if given.rows:
        file = Path(os.environ.get("BUILD_WORKING_DIRECTORY", ""), given.rows)
        pairs = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    python = os.environ.get("ALIGN_ORACLE_PYTHON")
    if not python:
        print("set ALIGN_ORACLE_PYTHON to the python of a venv with math-verify 0.9", file=sys.stderr)
        return 2
    mine, verdicts = ours(pairs)
    asked = json.dumps([[pair["gold"], pair["text"]] for pair in pairs])
    answer = json.loads(subprocess.run([python, "-I", ORACLE], input=asked, capture_output=True, text=True, check=True).stdout)
    theirs, oracle = answer["seconds"], answer["answers"]
    print(f"{'':<24}{'pairs/s':>10}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}")
    print(row("align.verify", mine))
    print(row("Math-Verify", theirs))
    for part in dict.fromkeys(pair["part"] for pair in pairs):
        at = [k for k, pair in enumerate(pairs) if pair["part"] == part]
        print(f"{part:<24}{sum(theirs[k] for k in at) / sum(mine[k] for k in at):>9.0f}x")
    print(
        f"{'all':<24}{sum(theirs) / sum(mine):>9.0f}x   agreement {sum(a == b for a, b in zip(verdicts, oracle, strict=True)) / len(pairs):.4f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
