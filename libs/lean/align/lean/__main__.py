"""Checks one file: bazel run //libs/lean:check -- file.lean --statement '∀ n : Nat, n + 0 = n' [--name t] [--header TEXT]"""

import argparse
import os
import sys
from pathlib import Path

from align.lean import LeanError, LeanPool, Limits, Policy, Verdict, check, find_toolchain, split_imports, statement_of

_GIB = 1 << 30


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: accepted; 1: not accepted; 2: the call or the set-up is at fault."""
    parser = argparse.ArgumentParser(prog="check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the submission; imports that it begins with become the header")
    parser.add_argument("--statement", required=True, help="the trusted proposition, or a whole `theorem NAME … : … :=`")
    parser.add_argument("--name", help="the declared name (default: that of a theorem given as --statement, else t)")
    parser.add_argument("--header", help="imports and opens under which statement and submission are read (default: the file's imports)")
    parser.add_argument("--prefix", help="where the toolchain is (default: $ALIGN_LEAN)")
    parser.add_argument("--seconds", type=float, default=Limits.seconds, help="wall clock for the proof (default: %(default)s)")
    parser.add_argument("--memory-gib", type=float, default=Limits.memory_bytes / _GIB, help="memory cap (default: %(default)s)")
    parser.add_argument("--allow", action="append", default=[], metavar="WORD", help="lift the refusal of a word, such as instance or @[")
    arguments = parser.parse_args(argv)
    try:
        verdict = _check(arguments)
    except LeanError as mistake:
        print(f"check: {mistake}", file=sys.stderr)
        return mistake.exit_code
    except (OSError, UnicodeDecodeError) as trouble:
        print(f"check: {arguments.file}: {trouble}", file=sys.stderr)
        return 2
    print(_readable(verdict))
    return 0 if verdict.accepted else 1


def _check(arguments: argparse.Namespace) -> Verdict:
    source = Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."), arguments.file).read_text(encoding="utf-8")
    imports, submission = split_imports(source)
    name, statement = arguments.name or "t", arguments.statement
    if statement.lstrip().startswith(("theorem ", "lemma ")):
        declared, statement = statement_of(statement)
        name = arguments.name or declared
    limits = Limits(seconds=arguments.seconds, memory_bytes=int(arguments.memory_gib * _GIB))
    with LeanPool(find_toolchain(arguments.prefix), workers=1, limits=limits) as pool:
        header = imports if arguments.header is None else arguments.header.replace("\\n", "\n")
        return check(statement, submission, name=name, header=header, pool=pool, policy=Policy(allow=frozenset(arguments.allow)))


def _readable(verdict: Verdict) -> str:
    lines = [f"{verdict.status.upper()}: {verdict.reason}", f"  {verdict.detail}" if verdict.detail else ""]
    if verdict.accepted:
        lines.append(f"  axioms: {', '.join(verdict.axioms) or 'none'}")
    lines.append(f"  {verdict.seconds:.2f} s, {verdict.rss_bytes / (1 << 20):.0f} MiB, asked Lean {verdict.attempts} time(s)")
    return "\n".join(line for line in lines if line)


if __name__ == "__main__":
    sys.exit(main())
