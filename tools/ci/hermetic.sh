#!/bin/bash
# Two checkouts at two paths, two output bases, one disk cache. By hand: tools/ci/hermetic.sh [targets]   (default //...)
# 1. What the first built and tested, the second takes from the cache, every action of it.
# 2. Built again without the cache, every output of the second has the digest of the first's.
# 3. With nothing changed a test run does nothing.
# 4. With one library changed ($TOUCH, default config) it runs that library's dependents and no other test.
# The two output bases keep what pip installed and nothing else between runs; FRESH=1 installs anew, at two times and two paths.
# CACHE=<a disk cache> takes that one in place of an empty one: what a third checkout has tested need not be tested again.
set -euo pipefail
cd "$(dirname "$0")/../.."
targets=("${@:-//...}")
touched=${TOUCH:-config}
base=${XDG_CACHE_HOME:-$HOME/.cache}/align-hermetic
made=("$base"/{cache,one,two})
cache=${CACHE:-$base/cache}
limit=(--test_timeout=900)  # the machine may be busy, and nothing is measured
[ -z "${CACHE:-}" ] || limit=()  # the limit is part of what a result is known by
[ -z "${FRESH:-}" ] || rm -rf "$base"
rm -rf "${made[@]}"
mkdir -p "$base"
trap 'for n in one two; do "$base/$n/bazelw" --output_base="$base/base-$n" shutdown >/dev/null 2>&1 || true; done; rm -rf "${made[@]}"' EXIT

# bazel_in one test …: its words go to one.log; the counts are shown.
bazel_in() {
    local n=$1 verb=$2
    shift 2
    (cd "$base/$n" && ./bazelw --output_base="$base/base-$n" "$verb" --config=ci "${limit[@]}" "$@") > "$base/$n.log" 2>&1 ||
        { grep -vE '^(Loading|Analyzing)' "$base/$n.log" | tail -n 60; echo "hermetic: bazel $verb in checkout $n failed"; exit 1; }
    grep -E '^INFO: (Elapsed|[0-9]+ process)|^Executed' "$base/$n.log" || true
}
# "INFO: 45 processes: 41 remote cache hit, 4 internal." A process that ran has its strategy's name here.
processes() { grep -E '^INFO: [0-9]+ process' "$base/two.log" | tail -n 1; }
ran() { processes | tr ',.' '\n' | grep -E 'sandbox|local|worker|cache hit' || true; }

mkdir "$base/one"
git ls-files -z --cached --others --exclude-standard | xargs -0 tar c --ignore-failed-read 2>/dev/null | tar x -C "$base/one"
cp -a "$base/one" "$base/two"  # one look at the tree: someone may be at work in it
for n in one two; do
    bazel_in "$n" clean
    bazel_in "$n" test --disk_cache="$cache" --execution_log_json_file="$base/$n.json" "${targets[@]}"
done
[ -z "$(ran | grep -v 'cache hit')" ] || { echo "hermetic: the second checkout ran something itself ($(processes))"; exit 1; }
hits=$(processes | grep -oE '[0-9]+ (remote|disk) cache hit' | cut -d' ' -f1)
echo "hermetic: $hits of $hits actions of the second checkout came from the cache"

bazel_in two clean
bazel_in two build --execution_log_json_file="$base/again.json" "${targets[@]}"
echo "hermetic: $(python3 tools/ci/same_bytes.py "$base/one.json" "$base/again.json")"

bazel_in two test --disk_cache="$cache" "${targets[@]}"
bazel_in two test --disk_cache="$cache" "${targets[@]}"
[ -z "$(ran)" ] || { echo "hermetic: nothing changed, and $(processes)"; exit 1; }
grep -q '^Executed 0 out of' "$base/two.log" || { echo "hermetic: nothing changed, and tests ran"; exit 1; }
echo "hermetic: nothing changed, 0 actions"

echo "# touched $(date +%s)" >> "$base/two/libs/$touched/align/$touched/__init__.py"
bazel_in two test --disk_cache="$cache" "${targets[@]}"
grep -E '^//.* PASSED' "$base/two.log" | awk '{print $1}' | sort > "$base/all"
grep -E '^//.* PASSED' "$base/two.log" | grep -v '(cached)' | awk '{print $1}' | sort > "$base/ran"
reach() {  # the tests that one of these can reach
    (cd "$base/two" && ./bazelw --output_base="$base/base-two" query --noshow_progress --noimplicit_deps \
        "tests(rdeps(set(${targets[*]}), $1))") 2> "$base/query.log" | sort || { tail -n 20 "$base/query.log" >&2; exit 1; }
}
reach "//libs/$touched:align/$touched/__init__.py" | comm -12 "$base/all" - > "$base/dependents"
reach "kind(genquery, set(${targets[*]}))" > "$base/graph"  # these see the graph, not what is in a file
needless=$(comm -13 "$base/dependents" "$base/ran")
missed=$(comm -23 "$base/dependents" "$base/ran" | comm -23 - "$base/graph")
[ -z "$needless$missed" ] || { echo "hermetic: libs/$touched changed; ran without need: $needless; did not run: $missed"; exit 1; }
echo "hermetic: libs/$touched changed, $(wc -l < "$base/ran") of $(wc -l < "$base/all") tests ran, its dependents and no other"
