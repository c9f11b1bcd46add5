"""Dead, killed or out of disk at every file operation of a save: there is always something whole."""

import errno
import os
import signal
import time

import pytest
from checkpoint_cases import assert_loads, names, tokenizer_in, write

from align.checkpoint import CheckpointError, _files, latest, load


@pytest.fixture
def tokenizer(tmp_path):
    return tokenizer_in(tmp_path / "tokenizer")


SCENARIOS = {
    # name: (what was there before, the step that is saved, what must load when the save did not get through)
    "first": ((), 20, None),
    "keep one": ((10,), 20, 10),
    "same step again": ((20,), 20, 20),
}


def prepare(directory, scenario, tokenizer):
    before, step, _ = SCENARIOS[scenario]
    for older in before:
        write(directory, older, seed=older, tokenizer_files=tokenizer)
    return lambda: write(directory, step, seed=21, keep=1, tokenizer_files=tokenizer)


def operations(monkeypatch, action):
    seen = []
    monkeypatch.setattr(_files, "before", lambda operation, path: seen.append((operation, path)))
    action()
    monkeypatch.setattr(_files, "before", None)
    return seen


def at(number, act):
    """A hook that acts before the operation with this number."""
    count = iter(range(10**9))

    def hook(operation, path):
        if next(count) == number:
            act()

    return hook


@pytest.fixture
def no_waiting(monkeypatch):
    """A dead process leaves what it wrote, synced or not; hundreds of syncs would take a minute."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def assert_something_loads(directory, scenario):
    path = latest(directory)
    older = SCENARIOS[scenario][2]
    if path is None:
        assert older is None
    else:
        assert_loads(path, load(path).trainer_state["seed"])
    return path


class Dead(BaseException):
    """What a process is after a SIGKILL: nothing it would still do reaches the disk."""


def death(number):
    """A hook that dies before the operation with this number, and stays dead whatever is tried afterwards."""
    count = iter(range(10**9))

    def hook(operation, path):
        if next(count) >= number:
            raise Dead

    return hook


def assert_goes_on(directory, scenario):
    """Something whole is there, and the next save works and clears away what the dead one left. Returns the seed that was found."""
    path = assert_something_loads(directory, scenario)
    seed = path and load(path).trainer_state["seed"]
    write(directory, 30, seed=30, keep=1)
    assert names(directory) == ["step-000030"]
    return seed


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_dead_at_every_file_operation(tmp_path, monkeypatch, no_waiting, tokenizer, scenario):
    total = len(operations(monkeypatch, prepare(tmp_path / "count", scenario, tokenizer)))
    assert total > 30
    outcomes = []
    for number in range(total):
        action = prepare(tmp_path / f"{number}", scenario, tokenizer)
        monkeypatch.setattr(_files, "before", death(number))
        with pytest.raises(Dead):
            action()
        monkeypatch.setattr(_files, "before", None)
        outcomes.append(assert_goes_on(tmp_path / f"{number}", scenario))
    older = SCENARIOS[scenario][2]
    turn = outcomes.index(21)  # the rename
    assert outcomes == [older] * turn + [21] * (total - turn)


def killed(directory, action, number):
    child = os.fork()
    if child == 0:
        _files.before = at(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
        action()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_file_operations(tmp_path, monkeypatch, no_waiting, tokenizer, scenario, every):
    total = len(operations(monkeypatch, prepare(tmp_path / "count", scenario, tokenizer)))
    for number in range(0, total, every):
        directory = tmp_path / f"kill{number}"
        killed(directory, prepare(directory, scenario, tokenizer), number)
        assert_goes_on(directory, scenario)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.filterwarnings("ignore::align.checkpoint.CheckpointWarning")  # old files that could not be removed
def test_a_disk_error_at_every_file_operation(tmp_path, monkeypatch, no_waiting, tokenizer, scenario):
    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "here")

    total = len(operations(monkeypatch, prepare(tmp_path / "count", scenario, tokenizer)))
    failed = 0
    for number in range(total):
        directory = tmp_path / f"full{number}"
        action = prepare(directory, scenario, tokenizer)
        monkeypatch.setattr(_files, "before", at(number, full))
        try:
            action()
        except CheckpointError as error:
            failed += 1
            assert "No space left on device" in str(error) and "\n" not in str(error)
        monkeypatch.setattr(_files, "before", None)
        assert not directory.exists() or not [name for name in names(directory) if name.endswith("partial")]
        assert_goes_on(directory, scenario)
    assert failed > 30


def test_the_manifest_is_last_and_everything_is_durable_before_the_rename(tmp_path, monkeypatch, tokenizer):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    seen = operations(monkeypatch, lambda: write(tmp_path / "c", 5, tokenizer_files=tokenizer))
    created = [path for operation, path in seen if operation == "create"]
    synced = [path for operation, path in seen if operation == "sync"]
    partial = tmp_path / "c" / ".step-000005.partial"
    assert flushed == [*map(str, synced), str(partial), str(tmp_path / "c")]
    assert created == synced and created[-1].name == "manifest.json"
    assert [operation for operation, _ in seen][-4:] == ["sync", "syncdir", "rename", "syncdir"]
    assert all(path.parent == partial for path in created)


@pytest.mark.slow
def test_killed_at_twenty_times(tmp_path):
    write(tmp_path, 0, seed=0)
    for number in range(20):
        child = os.fork()
        if child == 0:
            for step in range(1, 10**6):
                write(tmp_path, step, seed=step, keep=2)
        time.sleep(0.02 + 0.013 * number)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        path = latest(tmp_path)
        assert_loads(path, load(path).step)
