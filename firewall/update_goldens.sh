#!/bin/sh
# Writes the closures as they are now into firewall/goldens/, and the library graph into docs/architecture.md. Look at the diff before you commit it.
set -eu
cd "$(dirname "$0")/.."
mkdir -p firewall/goldens
./bazelw build "$@" //firewall:closure_test //firewall:libraries.graph
bin=$(./bazelw info bazel-bin)
rm -f firewall/goldens/*.txt
for closure in "$bin"/firewall/*.closure; do
    sort "$closure" > "firewall/goldens/$(basename "$closure" .closure).txt"
done
python3 firewall/layers.py "$bin/firewall/libraries.graph"
git diff --stat -- firewall/goldens docs/architecture.md
