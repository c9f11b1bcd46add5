"""What a test can reach: not the host's packages, not a banned one, not the network."""

import socket
import subprocess
import sys
import warnings

import pytest
import requires


def test_host_packages_are_out_of_reach():
    requires.bazel()
    assert subprocess.run([sys.executable, "-c", "import pip"], capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize("name", ["transformers", "bitsandbytes", "wandb"])
def test_a_banned_package_is_poisoned(name: str):
    done = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"{name} is banned in align" in done.stderr


def test_loopback_works():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), 2).close()


def test_there_is_no_other_interface():
    requires.bazel()
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    if others:  # processwrapper-sandbox, where linux-sandbox cannot run
        warnings.warn(f"this machine's sandbox does not wall off the network: {others}", stacklevel=1)
    else:
        with pytest.raises(OSError):
            socket.create_connection(("192.0.2.1", 9), 2)  # TEST-NET-1, RFC 5737: no route
