#!/bin/sh
# Installs the other implementations that oracle tests ask, in a venv of their own: tools/oracle_setup.sh DIR
# Then: ALIGN_ORACLE_PYTHON=DIR/bin/python ./bazelw test --config=oracle //...
set -eu
[ $# = 1 ] || { echo "usage: tools/oracle_setup.sh DIR" >&2; exit 2; }
lock=$(cd "$(dirname "$0")/.." && pwd)/third_party/oracle/requirements.lock
python3 -m venv "$1"
"$1/bin/python" -m pip install --require-hashes --no-deps --only-binary=:all: -r "$lock"
echo "ALIGN_ORACLE_PYTHON=$(cd "$1" && pwd)/bin/python"
