#!/bin/bash
# Builds and tests in two checkouts at two paths with two output bases and one disk cache: the second must answer every action from it.
# By hand: tools/ci/hermetic.sh [targets]   (default //...)
set -euo pipefail
cd "$(dirname "$0")/../.."
targets=("${@:-//...}")
base=${XDG_CACHE_HOME:-$HOME/.cache}/align-hermetic
rm -rf "$base"
mkdir -p "$base"
trap 'for n in one two; do "$base/$n/bazelw" --output_base="$base/base-$n" shutdown >/dev/null 2>&1 || true; done; rm -rf "$base"' EXIT
for n in one two; do
    mkdir "$base/$n"
    git ls-files -z --cached --others --exclude-standard | xargs -0 tar c --ignore-failed-read 2>/dev/null | tar x -C "$base/$n"
    (cd "$base/$n" && ./bazelw --output_base="$base/base-$n" test --config=ci --disk_cache="$base/cache" "${targets[@]}") > "$base/$n.log" 2>&1 ||
        { grep -vE '^(Loading|Analyzing)' "$base/$n.log" | tail -n 60; echo "hermetic: checkout $n failed"; exit 1; }
    grep -E '^INFO: (Elapsed|[0-9]+ process)|^Executed' "$base/$n.log"
done
# "INFO: 45 processes: 41 remote cache hit, 4 internal." A process that ran has its strategy's name here.
line=$(grep -E '^INFO: [0-9]+ process' "$base/two.log" | tail -n 1)
ran=$(echo "$line" | tr ',.' '\n' | grep -E 'sandbox|local|worker' || true)
hits=$(echo "$line" | grep -oE '[0-9]+ (remote|disk) cache hit' | cut -d' ' -f1)
[ -z "$ran" ] || { echo "hermetic: the second checkout ran$ran itself ($line)"; exit 1; }
echo "hermetic: $hits of $hits actions of the second checkout came from the cache"
