"""python -m align.verify, and the program of //libs/verify:grade."""

import sys

from align.verify._cli import main

if __name__ == "__main__":
    sys.exit(main())
