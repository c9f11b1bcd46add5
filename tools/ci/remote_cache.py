"""Shows --config=remote-cache against a small HTTP cache on this machine: python3 tools/ci/remote_cache.py [targets]

The protocol is Bazel's simple one (bazel.build/remote/caching#http-caching): GET and PUT of /ac/<sha256> and /cas/<sha256>. A build that
may write fills the cache; a clean one that may only read takes every action from it and writes nothing; without the cache it still builds.
Bazel inside Bazel, so no test of //...: .ci/run calls it.
"""

import argparse
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).resolve().parents[2]
BASE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "align-remote")  # kept: the next run installs nothing
LOADED = "--test_timeout=900"  # nothing is measured here, and the machine may be busy
TARGETS = ["//libs/config/...", "//libs/guard/...", "//tools/wheel:config", "//tools/wheel:guard"]


class Cache(BaseHTTPRequestHandler):
    """Keeps blobs in memory; counts what is written."""

    protocol_version = "HTTP/1.1"
    blobs: ClassVar[dict[str, bytes]] = {}
    written = 0

    def do_GET(self) -> None:
        blob = self.blobs.get(self.path)
        self.send_response(200 if blob is not None else 404)
        self.send_header("Content-Length", str(len(blob or b"")))
        self.end_headers()
        self.wfile.write(blob or b"")

    def do_PUT(self) -> None:
        self.blobs[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        Cache.written += 1
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def bazel(*words: str) -> str:
    command = [ROOT / "bazelw", f"--output_base={BASE}", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        print(done.stdout[-6000:])
        sys.exit(f"remote cache: bazel {' '.join(words)} failed")
    return done.stdout


def processes(output: str) -> str:
    return re.findall(r"^INFO: (\d+ process.*)$", output, re.MULTILINE)[-1]


def main(targets: list[str]) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Cache)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    where = f"--remote_cache=http://127.0.0.1:{server.server_port}"
    try:
        bazel("clean")
        first = processes(bazel("test", "--config=ci", LOADED, "--config=remote-cache-write", where, *targets))
        filled = Cache.written
        bazel("clean")
        second = processes(bazel("test", "--config=ci", LOADED, "--config=remote-cache", where, *targets))
        if not filled or Cache.written != filled or re.search("sandbox|local|worker", second):
            sys.exit(f"remote cache: first {first}, {filled} blobs; then {second}, {Cache.written} blobs")
        print(f"remote cache: filled by {first.rstrip('.')}; then, read only, {second}")
        server.shutdown()
        server.server_close()
        bazel("clean")
        print(f"remote cache: away, {processes(bazel('build', '--config=ci', '--config=remote-cache', where, *targets))}")
        bazel("build", "--config=ci", "--config=remote", "--nobuild", *targets)
        print("remote execution: its flags are known to this Bazel; no farm was asked")
    finally:
        bazel("shutdown")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="remote_cache.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help=f"what is built and tested (default: {' '.join(TARGETS)})")
    main(parser.parse_args().targets or TARGETS)
