"""Channels, addresses, digests, and samplers that are processes: killed, not started, not listening."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rollout_protocol_cases import answers, write_weights

import align.rollout_protocol
from align.rollout_protocol import (
    FROM_SAMPLER,
    Cancel,
    Channel,
    ChannelClosed,
    ChannelTimeout,
    Client,
    Generate,
    Launched,
    Patience,
    RemoteSampler,
    RolloutProtocolError,
    Weights,
    dial,
    listen,
    tokenizer_sha256,
    weights_sha256,
)

PROGRAM = Path(__file__).parent / "fake_sampler.py"
LIBRARY = Path(align.rollout_protocol.__file__).parents[2]


@pytest.mark.parametrize(("end", "how"), [("die", "pipes"), ("die", "unix"), ("hang", "unix")])
def test_a_process_that_dies_or_hangs_in_the_middle_is_started_again(tmp_path, end, how, capfd):
    """SIGKILL, or nothing more, after 4 of 9 answers; the rest comes from a new process."""
    weights, told = write_weights(tmp_path / "w"), []
    address = f"unix:{tmp_path}/s" if how == "unix" else None
    command = [sys.executable, str(PROGRAM), str(tmp_path / "w"), f"--{end}-after", "4", str(tmp_path / "died")]
    launched = Launched(
        command + (["--listen", address] if address else []), address=address, start_s=30,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (LIBRARY, PROGRAM.parent)))},
    )  # fmt: skip
    held = Weights(sha256=weights, version=5, path=str(tmp_path / "w"))
    client = Client(launched, weights=held, patience=Patience(pause_s=0, silence_s=1.0), tell=told.append)
    prompts = [[number] for number in range(9)]
    try:
        samples = RemoteSampler(client, eos_ids=[]).generate(prompts, n=2, max_new_tokens=6, seeds=list(range(9)))
        asked = [Generate("", weights, [number], 2, 6, 1.0, 1.0, 0, 0.0, [], [], number) for number in range(9)]
        assert [one.ids for one in samples] == [drawn.ids for request in asked for drawn in answers(weights, request)]
        assert (tmp_path / "died").exists() and 1 <= len(told) <= 2 and {one.weights_version for one in samples} == {5}
    finally:
        client.close()
        launched.end()
    assert how == "unix" or "this does not disturb the protocol" in capfd.readouterr().err


def test_a_sampler_ends_with_its_trainer(tmp_path):
    """The trainer is killed and can say nothing; its end of the sampler's standard input is closed by that alone."""
    write_weights(tmp_path / "w")
    command = [sys.executable, str(PROGRAM), str(tmp_path / "w"), "--listen", f"unix:{tmp_path}/s", "--lifeline"]
    trainer = (
        f"import time; from align.rollout_protocol import Launched; launched = Launched({command!r}, address='unix:{tmp_path}/s')\n"
        "launched(); print(launched.pid, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (LIBRARY, PROGRAM.parent)))}
    process = subprocess.Popen([sys.executable, "-c", trainer], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    sampler = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    end = time.monotonic() + 10
    while Path(f"/proc/{sampler}/cmdline").exists() and Path(f"/proc/{sampler}/cmdline").read_bytes():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_process_that_does_not_start_says_so(tmp_path):
    with pytest.raises(RolloutProtocolError, match="does not start"):
        Launched([str(tmp_path / "absent")])()
    with pytest.raises(ChannelClosed, match="exit code 3 before it listened"):
        Launched([sys.executable, "-c", "raise SystemExit(3)"], address=f"unix:{tmp_path}/s", start_s=20)()
    with pytest.raises(ChannelClosed, match="did not listen at"):
        Launched([sys.executable, "-c", "import time; time.sleep(30)"], address=f"unix:{tmp_path}/s", start_s=0.1)()


def test_addresses(tmp_path):
    listener = listen("tcp:127.0.0.1:0")
    channel = dial(f"tcp:127.0.0.1:{listener.getsockname()[1]}")
    with pytest.raises(ChannelTimeout):
        channel.receive(FROM_SAMPLER, timeout_s=0.01)
    listener.close()
    for address, told in (
        (f"unix:{tmp_path}/absent", "nobody answers"),
        ("here", "is no address"),
        (f"unix:{'x' * 101}", "100 bytes"),
        ("tcp:a", "no address"),
        ("tcp:a\0:80", "no address"),
        ("unix:a\0", "no address"),
    ):
        with pytest.raises(RolloutProtocolError, match=told):
            dial(address)
    with pytest.raises(RolloutProtocolError, match="nothing can listen"):
        listen(f"unix:{tmp_path}/absent/s")


def test_to_listen_removes_the_socket_of_who_is_gone_and_nothing_else(tmp_path):
    file, place = tmp_path / "notes", f"unix:{tmp_path}/s"
    file.write_text("mine")
    (tmp_path / "folder").mkdir()
    for taken in (file, tmp_path / "folder"):
        with pytest.raises(RolloutProtocolError, match=r"nothing can listen at .*in use"):
            listen(f"unix:{taken}")
    assert file.read_text() == "mine" and (tmp_path / "folder").is_dir()
    with listen(place) as first:
        with pytest.raises(RolloutProtocolError, match=r"nothing can listen at .*in use"):
            listen(place)
        dial(place).close()
        assert first.accept()
    with listen(place):  # the first one is closed, its file still there
        dial(place).close()


def test_a_channel_that_nobody_reads_does_not_wait_for_ever():
    ours, theirs = socket.socketpair()
    channel = Channel.of_socket(ours)
    with pytest.raises(ChannelTimeout, match="nobody took a cancel"):
        for _ in range(100_000):
            channel.send(Cancel("x" * 100), timeout_s=0.05)
    with pytest.raises(ChannelClosed):
        channel.send(Cancel("x"), timeout_s=1)
    theirs.close()


def test_digests(tmp_path):
    one = write_weights(tmp_path / "a")
    assert one == write_weights(tmp_path / "b") != write_weights(tmp_path / "c", b"\0" * 12)
    assert tokenizer_sha256(tmp_path) == ""
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_sha256(tmp_path) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    (tmp_path / "a/model.safetensors").write_bytes(b"no")
    with pytest.raises(RolloutProtocolError, match="no safetensors file"):
        weights_sha256(tmp_path / "a")


@pytest.mark.parametrize(
    "header",
    [
        "[1]", "null", '{"w": 1}', '{"w": {}}', '{"w": {"dtype": "F32", "shape": [1], "data_offsets": [4]}}', "[" * 100_000,
        '{"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}', '{"w": {"dtype": 1, "shape": [1], "data_offsets": [0, 4]}}',
        '{"w": {"dtype": "F32", "data_offsets": [0, 4]}}',
    ],
)  # fmt: skip
def test_a_header_that_is_none_is_told_as_such(header, tmp_path):
    """Another error would end the server that was told to load such a file."""
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + b"\0" * 4)
    with pytest.raises(RolloutProtocolError, match=r"model.safetensors is no safetensors file"):
        weights_sha256(tmp_path)
