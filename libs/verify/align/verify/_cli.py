r"""Command line: judge one pair, or a JSONL file.

bazel run //libs/verify:grade -- --gold '\frac{1}{2}' --pred 'so \boxed{0.5}'
bazel run //libs/verify:grade -- --jsonl outputs.jsonl --gold-field answer --pred-field output --out verdicts.jsonl
"""

import argparse
import json
import os
import sys
from pathlib import Path

from align.verify._budget import VerifyError
from align.verify._judge import equivalent, grade
from align.verify._report import explain, grade_batch, summary


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: judged; 2: bad input."""
    parser = argparse.ArgumentParser(prog="grade", description="Judge math answers against gold answers.")
    parser.add_argument("--gold", help="a gold answer")
    parser.add_argument("--pred", help="a model's output (with --bare: a bare answer)")
    parser.add_argument("--jsonl", help="a file with one JSON object per line")
    parser.add_argument("--gold-field", default="gold", help="field of the gold answer (default: gold)")
    parser.add_argument("--pred-field", default="pred", help="field of the model's output (default: pred)")
    parser.add_argument("--mode", default="final", choices=["final", "marked"], help="what counts as an answer (default: final)")
    parser.add_argument("--bare", action="store_true", help="the outputs are bare answers: nothing is extracted")
    parser.add_argument("--processes", type=int, help="worker processes (default: one per core for large files)")
    parser.add_argument("--out", help="write one verdict per line to this file")
    given = parser.parse_args(argv)
    try:
        if given.jsonl:
            return _file(given)
        if given.gold is None or given.pred is None:
            raise VerifyError("give --gold and --pred, or --jsonl FILE")
        verdict = equivalent(given.gold, given.pred) if given.bare else grade(given.gold, given.pred, mode=given.mode)
        print(explain(verdict))
    except VerifyError as error:
        print(f"grade: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _path(name: str) -> Path:
    return Path(os.environ.get("BUILD_WORKING_DIRECTORY", ""), name)


def _file(given: argparse.Namespace) -> int:
    golds, texts = [], []
    try:
        lines = _path(given.jsonl).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise VerifyError(f"{given.jsonl}: cannot be read as UTF-8 text ({error}); name a JSONL file") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            golds.append(row[given.gold_field])
            texts.append(row[given.pred_field])
        except (ValueError, KeyError, TypeError) as error:
            raise VerifyError(
                f"{given.jsonl}:{number}: {type(error).__name__} {error}; each line is an object with {given.gold_field!r} and "
                f"{given.pred_field!r} (--gold-field, --pred-field)"
            ) from None
        for field, value in ((given.gold_field, golds[-1]), (given.pred_field, texts[-1])):
            if not isinstance(value, str):
                raise VerifyError(f"{given.jsonl}:{number}: {field!r} is {value!r:.40}, not a string")
    verdicts = grade_batch(golds, texts, mode=given.mode, bare=given.bare, processes=given.processes)
    if given.out:
        with _path(given.out).open("w", encoding="utf-8") as file:
            for verdict in verdicts:
                file.write(json.dumps({"correct": verdict.correct, "reason": verdict.reason, "steps": verdict.steps}) + "\n")
    print(summary(verdicts))
    return 0
