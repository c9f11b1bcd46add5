#!/bin/bash
# Installs the pinned Lean, Mathlib and repl for align.lean below one prefix: tools/lean_setup.sh [--dry-run] PREFIX
# Then: ALIGN_LEAN=PREFIX. The pins and why they are these: libs/lean/align/lean/PINS.json, docs/LEAN_VERIFIER.md.
#
# Run it again after any failure: a finished step is looked at and kept, a broken one is made anew. Nothing is written outside PREFIX. Every
# step that uses the network or builds has a time limit; LEAN_SETUP_SECONDS replaces them all.
set -euo pipefail

dry=
[ "${1-}" = --dry-run ] && { dry=yes; shift; }
[ $# = 1 ] && [ -n "$1" ] && [ "${1#-}" = "$1" ] || { echo "usage: tools/lean_setup.sh [--dry-run] PREFIX" >&2; exit 2; }
case $1 in /*) prefix=$1 ;; *) prefix=$PWD/$1 ;; esac
here=$(cd "$(dirname "$0")/.." && pwd)
pins_file=$here/libs/lean/align/lean/PINS.json
need_gib=8
step=preflight

say() { echo "lean_setup: $*"; }
refuse() { echo "lean_setup: $2" >&2; exit "$1"; }
failed() {
    code=$?
    [ $code = 0 ] || echo "lean_setup: step '$step' failed ($code); what is done is kept, run the same command again" >&2
}
trap failed EXIT

# Preflight: tools, pins, room.
for tool in python3 curl git tar timeout sha256sum df flock find chmod; do
    command -v "$tool" > /dev/null || { trap - EXIT; refuse 2 "$tool is not installed; it is needed here"; }
done
{ read -r toolchain; read -r version; read -r elan_url; read -r mathlib_url; read -r mathlib_commit; read -r repl_url; read -r repl_commit; } < <(
    python3 -c 'import json, sys
pins = json.load(open(sys.argv[1], encoding="utf-8"))
keys = "lean toolchain", "lean version", "elan url", "mathlib url", "mathlib commit", "repl url", "repl commit"
print(*[pins[key.split()[0]][key.split()[1]] for key in keys], sep="\n")' "$pins_file"
)
[ -n "${repl_commit-}" ] || { trap - EXIT; refuse 2 "$pins_file cannot be read"; }
sysroot_path=elan/toolchains/$(echo "$toolchain" | sed 's,/,--,; s,:,---,')
sysroot=$prefix/$sysroot_path

if [ -n "$dry" ]; then
    trap - EXIT
    cat << EOF
would install below $prefix (about 5.8 GB; $need_gib GiB must be free):
  elan       $elan_url
  Lean       $toolchain
  Mathlib    $mathlib_commit of $mathlib_url, its prebuilt cache
  repl       $repl_commit of $repl_url, built here
  PINS.json  with the sha256 of each program, written last
EOF
    exit 0
fi

existing=$prefix
while [ ! -d "$existing" ]; do existing=$(dirname "$existing"); done
if [ ! -f "$prefix/PINS.json" ]; then
    free_kib=$(df -Pk "$existing" | awk 'NR == 2 { print $4 }')
    [ "$free_kib" -ge $((need_gib * 1024 * 1024)) ] || {
        trap - EXIT
        refuse 3 "$existing has $((free_kib / 1024)) MiB free, the installation needs $need_gib GiB; choose another PREFIX or make room"
    }
fi
mkdir -p "$prefix" 2> /dev/null && [ -w "$prefix" ] || { trap - EXIT; refuse 2 "$prefix cannot be written; choose another PREFIX"; }
exec 9> "$prefix/.lock"
flock -n 9 || { trap - EXIT; refuse 2 "another lean_setup.sh is at work in $prefix; wait for it"; }

# All state below the prefix.
mkdir -p "$prefix"/{home,cache/xdg,cache/mathlib,tmp,downloads}
export HOME=$prefix/home ELAN_HOME=$prefix/elan MATHLIB_CACHE_DIR=$prefix/cache/mathlib XDG_CACHE_HOME=$prefix/cache/xdg TMPDIR=$prefix/tmp
export GIT_TERMINAL_PROMPT=0 GIT_CONFIG_NOSYSTEM=1
unset ELAN_TOOLCHAIN LEAN_PATH LEAN_SYSROOT
limited() { # SECONDS COMMAND…
    seconds=${LEAN_SETUP_SECONDS:-$1}
    shift
    timeout -k 10 "$seconds" "$@" || {
        code=$?
        [ $code != 124 ] || echo "lean_setup: '$1' was stopped after $seconds s" >&2
        return $code
    }
}
thaw() { [ ! -d "$1" ] || chmod -R u+w "$1"; } # what an earlier run protected
digest() { sha256sum "$1" | cut -d' ' -f1; }

step="elan"
archive=$prefix/downloads/elan.tar.gz
if ! [ -x "$ELAN_HOME/bin/elan" ]; then
    say "elan: $elan_url"
    limited 600 curl --fail --silent --show-error --location --retry 3 --connect-timeout 30 --output "$archive.part" "$elan_url"
    if [ -f "$archive.sha256" ] && [ "$(cat "$archive.sha256")" != "$(digest "$archive.part")" ]; then
        echo "lean_setup: $elan_url is not the file that it was (recorded in $archive.sha256)" >&2
        exit 1
    fi
    tar -xzf "$archive.part" -C "$prefix/downloads"
    limited 300 "$prefix/downloads/elan-init" -y --no-modify-path --default-toolchain none
    [ -x "$ELAN_HOME/bin/elan" ]
    digest "$archive.part" > "$archive.sha256"
    mv "$archive.part" "$archive"
fi

step="Lean $version"
lean_is_right() { [ -x "$sysroot/bin/lean" ] && limited 60 "$sysroot/bin/lean" --version | grep -qF "version $version"; }
if ! lean_is_right; then
    say "Lean: $toolchain"
    thaw "$sysroot"
    rm -rf "$sysroot"
    limited 3600 "$ELAN_HOME/bin/elan" toolchain install "$toolchain"
    lean_is_right || { echo "lean_setup: $sysroot/bin/lean is not version $version" >&2; exit 1; }
fi
export PATH=$sysroot/bin:$PATH

checkout() { # NAME URL COMMIT
    step="$1: source"
    if ! [ -d "$prefix/$1/.git" ] || ! git -C "$prefix/$1" rev-parse HEAD 2> /dev/null | grep -q "^$3"; then
        say "$1: $3 of $2"
        thaw "$prefix/$1"
        rm -rf "$prefix/$1" "$prefix/$1.part"
        limited 3600 git clone --quiet "$2" "$prefix/$1.part"
        limited 600 git -C "$prefix/$1.part" -c advice.detachedHead=false checkout --quiet "$3"
        git -C "$prefix/$1.part" rev-parse HEAD | grep -q "^$3" || { echo "lean_setup: $1 is not at commit $3" >&2; exit 1; }
        mv "$prefix/$1.part" "$prefix/$1"
    fi
}

checkout mathlib "$mathlib_url" "$mathlib_commit"
step="Mathlib's cache"
if ! [ -f "$prefix/mathlib/.lake/build/lib/Mathlib.olean" ]; then
    say "Mathlib: its prebuilt files"
    thaw "$prefix/mathlib"
    (cd "$prefix/mathlib" && limited 7200 lake exe cache get)
    [ -f "$prefix/mathlib/.lake/build/lib/Mathlib.olean" ] || { echo "lean_setup: the cache has no Mathlib.olean" >&2; exit 1; }
fi

checkout repl "$repl_url" "$repl_commit"
step="repl: build"
repl=$prefix/repl/.lake/build/bin/repl
if ! [ -x "$repl" ]; then
    say "repl: build"
    thaw "$prefix/repl"
    (cd "$prefix/repl" && limited 1800 lake build)
    [ -x "$repl" ] || { echo "lean_setup: the build made no repl" >&2; exit 1; }
fi

step="a first proof"
lean_path=$(cd "$prefix" && find mathlib/.lake/build/lib mathlib/.lake/packages/*/.lake/build/lib -maxdepth 0 -type d 2> /dev/null | sort | paste -sd: -)
absolute=$(echo "$lean_path" | tr : '\n' | sed "s,^,$prefix/," | paste -sd: -)
answer=$(printf '{"cmd": "import Mathlib\\ntheorem align_first : (2 : ℝ) + 2 = 4 := by norm_num\\n#print axioms align_first"}\n\n' |
    limited 1200 env -i PATH="$sysroot/bin" LEAN_PATH="$absolute" LD_LIBRARY_PATH="$sysroot/lib/lean:$sysroot/lib" LEAN_SYSROOT="$sysroot" "$repl")
echo "$answer" | grep -q "align_first' depends on axioms" && ! echo "$answer" | grep -q '"error"' || {
    echo "lean_setup: the installed repl does not prove 2 + 2 = 4: $(echo "$answer" | head -c 500)" >&2
    exit 1
}

step="PINS.json"
LEAN_PATH_FOUND=$lean_path python3 - "$pins_file" "$prefix" "$sysroot_path" << 'EOF'
import hashlib, json, os, subprocess, sys
from pathlib import Path

source, prefix, sysroot = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
pins = json.loads(Path(source).read_text(encoding="utf-8"))
for name in ("mathlib", "repl"):
    pins[name]["commit"] = subprocess.run(["git", "-C", prefix / name, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
pins["elan"]["sha256"] = (prefix / "downloads/elan.tar.gz.sha256").read_text().strip()
pins["sysroot"] = sysroot
pins["lean_path"] = os.environ["LEAN_PATH_FOUND"].split(":")
files = {"lean": f"{sysroot}/bin/lean", "repl": "repl/.lake/build/bin/repl", "mathlib": "mathlib/.lake/build/lib/Mathlib.olean"}
pins["files"] = {name: {"path": path, "sha256": hashlib.sha256((prefix / path).read_bytes()).hexdigest()} for name, path in files.items()}
new = json.dumps(pins, indent=2, ensure_ascii=False) + "\n"
target = prefix / "PINS.json"
if not target.exists() or target.read_text(encoding="utf-8") != new:
    (prefix / "PINS.json.part").write_text(new, encoding="utf-8")
    os.replace(prefix / "PINS.json.part", target)
EOF

step="write protection"
for part in "$sysroot" "$prefix/mathlib/.lake" "$prefix/repl/.lake"; do chmod -R a-w "$part"; done # a proof may not change what later ones import
rm -rf "$prefix/tmp" && mkdir -p "$prefix/tmp"
say "done: ALIGN_LEAN=$prefix"
