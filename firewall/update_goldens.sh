#!/bin/sh
# Writes the closures as they are now into firewall/goldens/. Look at the diff before you commit it.
set -eu
cd "$(dirname "$0")/.."
mkdir -p firewall/goldens
./bazelw build "$@" //firewall:closure_test
bin=$(./bazelw info bazel-bin)
rm -f firewall/goldens/*.txt
for closure in "$bin"/firewall/*.closure; do
    sort "$closure" > "firewall/goldens/$(basename "$closure" .closure).txt"
done
git diff --stat -- firewall/goldens
