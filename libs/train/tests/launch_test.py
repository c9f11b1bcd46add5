"""Signals on their way from the launcher to the ranks; what the ranks do with them is the stages' tests'."""

import os
import signal

import pytest

from align.train import started
from align.train._launch import FOLDER, FORWARDED, _forwarding


@pytest.fixture
def got():
    """The signals that this process was handed."""
    taken = []
    before = {number: signal.signal(number, lambda number, frame: taken.append(number)) for number in FORWARDED}
    yield taken
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", FORWARDED)
def test_a_signal_that_comes_before_a_rank_has_started_waits_for_it(tmp_path, monkeypatch, got, number):
    """It was handed to nobody, and the run went on."""
    with _forwarding(tmp_path):
        os.kill(os.getpid(), number)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert got == []
    started()
    assert got == [], "a process that is no rank of the launcher's"
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        started()
    assert got == [number, number]
    assert [(tmp_path / f"pid-{rank}").read_text() for rank in (0, 1)] == [str(os.getpid())] * 2


def test_without_a_signal_a_rank_starts_in_peace(tmp_path, monkeypatch, got):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    with _forwarding(tmp_path):
        pass
    started()
    assert got == [] and [path.name for path in tmp_path.iterdir()] == ["pid-0"]
