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

EXAMPLES = r"""
examples:
  grade --gold '\frac12' --pred 'so \boxed{0.5}'
  grade --jsonl outputs.jsonl --gold-field answer --pred-field output --mode marked --out verdicts.jsonl

exit code 0: judged (right or wrong); 2: bad input, named with file, line and field
"""


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: judged; 2: bad input."""
    parser = argparse.ArgumentParser(
        prog="grade",
        description="Judge math answers against gold answers: one pair, or a JSONL file with a table of reasons.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gold", help="a gold answer, bare or a solution with its own marker")
    parser.add_argument("--pred", help="a model's output (with --bare: a bare answer)")
    parser.add_argument("--jsonl", metavar="FILE", help="a file with one JSON object per line")
    parser.add_argument("--gold-field", default="gold", metavar="NAME", help="field of the gold answer (default: gold)")
    parser.add_argument("--pred-field", default="pred", metavar="NAME", help="field of the model's output (default: pred)")
    parser.add_argument(
        "--mode",
        default="final",
        choices=["final", "marked"],
        help="marked: explicit markers only, as for RL; final: also the last formula or number of an output without one (default: final)",
    )
    parser.add_argument("--bare", action="store_true", help="the outputs are bare answers: nothing is extracted")
    parser.add_argument("--processes", type=int, metavar="N", help="worker processes (default: one per core for large files)")
    parser.add_argument("--out", metavar="FILE", help="write one verdict per line to this file")
    given = parser.parse_args(argv)
    try:
        if given.jsonl and (given.gold is not None or given.pred is not None):
            raise VerifyError("--jsonl and --gold/--pred exclude each other: give a file or a pair")
        if given.jsonl:
            return _file(given)
        if given.gold is None or given.pred is None:
            raise VerifyError("give --gold and --pred, or --jsonl FILE (--help shows examples)")
        verdict = equivalent(given.gold, given.pred) if given.bare else grade(given.gold, given.pred, mode=given.mode)
        print(explain(verdict))
    except VerifyError as error:
        print(f"grade: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _path(name: str) -> Path:
    return Path(os.environ.get("BUILD_WORKING_DIRECTORY", ""), name)


def _pairs(given: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Golds and outputs of the file. Raises: VerifyError with file, line and field."""
    golds: list[str] = []
    texts: list[str] = []
    try:
        lines = _path(given.jsonl).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise VerifyError(f"{given.jsonl}: cannot be read as UTF-8 text ({error}); name a JSONL file") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise VerifyError(f"{given.jsonl}:{number}: {error}; each line is one JSON object") from None
        if not isinstance(row, dict):
            raise VerifyError(f"{given.jsonl}:{number}: {line.strip()!r:.40} is no JSON object; give one with the fields of the pair")
        for field, option, found in ((given.gold_field, "--gold-field", golds), (given.pred_field, "--pred-field", texts)):
            if field not in row:
                has = ", ".join(map(repr, list(row)[:8])) or "nothing"
                raise VerifyError(f"{given.jsonl}:{number}: no field {field!r} ({option}); the line has {has}")
            if not isinstance(row[field], str):
                raise VerifyError(f"{given.jsonl}:{number}: {field!r} is {row[field]!r:.40}, not a string")
            found.append(row[field])
    if not golds:
        raise VerifyError(f"{given.jsonl}: no rows; give one JSON object per line")
    return golds, texts


def _file(given: argparse.Namespace) -> int:
    golds, texts = _pairs(given)
    try:
        out = _path(given.out).open("w", encoding="utf-8") if given.out else None  # before the work, so that none is lost
    except OSError as error:
        raise VerifyError(f"{given.out}: cannot be written ({error}); give --out a file in a folder that exists") from None
    verdicts = grade_batch(golds, texts, mode=given.mode, bare=given.bare, processes=given.processes)
    if out:
        with out:
            for verdict in verdicts:
                kinds = [value.kind if value else None for value in (verdict.gold_value, verdict.value)]
                row = {
                    "correct": verdict.correct,
                    "reason": verdict.reason,
                    "gold_kind": kinds[0],
                    "kind": kinds[1],
                    "steps": verdict.steps,
                }
                out.write(json.dumps(row) + "\n")
    print(summary(verdicts))
    return 0
