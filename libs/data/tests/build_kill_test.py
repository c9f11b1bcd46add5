"""A build that is killed at any time and run again leaves the same files. This file is also the process that is killed."""

import os
import signal
import subprocess
import sys
import time

import pytest

from align.data import arithmetic_demonstrations, arithmetic_tokenizer_config, arithmetic_tokenizer_json, build_shards
from align.tokenizer import Tokenizer

pytestmark = pytest.mark.slow


def test_fifty_kills_and_a_rerun_give_the_same_files(tmp_path):
    def files(directory):
        return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.startswith(".")}

    def start(directory):
        process = subprocess.Popen([sys.executable, __file__, directory], stdout=subprocess.PIPE)
        process.stdout.readline()
        return process, time.monotonic()

    process, began = start(tmp_path / "whole")
    process.communicate()
    duration, whole = time.monotonic() - began, files(tmp_path / "whole")
    for kill in range(50):
        directory = tmp_path / str(kill)
        process, began = start(directory)
        time.sleep(duration * kill / 50)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        build(directory)
        assert files(directory) == whole


def build(directory):
    tokenizer = Tokenizer.from_dict(arithmetic_tokenizer_json(), arithmetic_tokenizer_config())
    rows = arithmetic_demonstrations(600, seed=0)
    print("ready", flush=True)
    build_shards(rows, tokenizer, directory, kind="completion", max_length=50, rows_per_shard=50)


if __name__ == "__main__":
    build(sys.argv[1])
