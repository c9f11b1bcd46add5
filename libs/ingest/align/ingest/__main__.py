"""`python -m align.ingest` and `bazel run //libs/ingest:to_jsonl`."""

import sys

from align.ingest import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
