"""The same server through huggingface_hub: what we read from it is what the hub's own client reads."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import requires

from align.data import Hub

pytestmark = pytest.mark.oracle

OFFICIAL = """
import hashlib, json, sys
from huggingface_hub import HfApi, hf_hub_download
url, cache = sys.argv[1:]
files = {}
for entry in HfApi(endpoint=url, token="hf_secret").list_repo_tree("org/name", repo_type="dataset", recursive=True):
    if hasattr(entry, "size"):
        path = hf_hub_download("org/name", entry.path, repo_type="dataset", endpoint=url, token="hf_secret", cache_dir=cache)
        files[entry.path] = [entry.size, entry.lfs.sha256 if entry.lfs else None, hashlib.sha256(open(path, "rb").read()).hexdigest()]
print(json.dumps(files))
"""


def test_both_clients_list_and_read_the_same(tmp_path):
    python = requires.oracle()
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("hub_server.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        url = server.stdout.readline().strip()
        settings = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": str(tmp_path / "home")}
        done = subprocess.run([python, "-c", OFFICIAL, url, tmp_path / "theirs"], capture_output=True, text=True, env=settings)
        assert done.returncode == 0, done.stderr
        hub = Hub(endpoint=url, cache=tmp_path / "ours")
        ours = {
            file.path: [file.size, file.sha256, hashlib.sha256(hub.download("org/name", file.path).read_bytes()).hexdigest()]
            for file in hub.files("org/name")
        }
        assert json.loads(done.stdout) == ours and len(ours) == 4
    finally:
        server.communicate("")
