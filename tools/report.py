"""Writes a run's report.html anew, or one page that compares runs.

./bazelw run //tools:report -- RUN              report.html in the run's directory, also while the run goes on or after it was killed
./bazelw run //tools:report -- RUN RUN … [--out comparison.html]
./bazelw run //tools:report -- RUN --tensorboard an event file beside it, RUN/tensorboard/, for `tensorboard --logdir RUN`
./bazelw run //tools:report -- RUN --watch 10   again whenever the run wrote something, looking every 10 seconds, until the run has ended

Paths are relative to where you are.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from align.tracking import RunDirError, write_comparison, write_report, write_tensorboard


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory; several are compared")
    parser.add_argument("--out", type=Path, help="file of the comparison (default: comparison.html where you are)")
    parser.add_argument("--watch", nargs="?", type=float, const=10.0, metavar="SECONDS", help="write it again while the runs go on")
    parser.add_argument("--tensorboard", action="store_true", help="write a TensorBoard event file for each run too")
    options = parser.parse_args(argv)
    here = Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    runs = [here / run for run in options.runs]
    if len(runs) == 1 and options.out:
        parser.error("--out is for comparisons; the report of one run is report.html in its directory")
    if options.watch is not None and not options.watch > 0:
        parser.error(f"--watch {options.watch:g}: give seconds above 0")
    try:
        target = here / (options.out or "comparison.html")
        print(write(runs, target), flush=True)
        for run in runs if options.tensorboard else ():
            print(write_tensorboard(run), flush=True)
        if options.watch is not None:
            watch(runs, target, options.watch, tensorboard=options.tensorboard)
    except RunDirError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


def write(runs: list[Path], target: Path) -> Path:
    return write_report(runs[0]) if len(runs) == 1 else write_comparison(runs, target)


def watch(runs: list[Path], target: Path, seconds: float, *, tensorboard: bool) -> None:
    """Until every run has its stage_result.json; the last page is written after that."""
    seen = stamps(runs)
    while True:
        ended = all((run / "stage_result.json").is_file() for run in runs)
        now = stamps(runs)
        if now != seen or ended:
            seen = now
            print(f"{time.strftime('%H:%M:%S')} {write(runs, target)}", flush=True)
            for run in runs if tensorboard else ():
                write_tensorboard(run)
        if ended:
            return
        time.sleep(seconds)


def stamps(runs: list[Path]) -> list[int]:
    files = [run / name for run in runs for name in ("history.jsonl", "eval.jsonl", "samples.jsonl", "stage_result.json")]
    return [file.stat().st_mtime_ns if file.exists() else 0 for file in files]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
