"""Saves in the background, and saves by several ranks, which are threads here: one error is everybody's, and nothing half-written stays."""

import errno
import itertools
import os
import threading

import pytest
import torch
from checkpoint_cases import assert_loads, names, trained, trained_once, write
from safetensors.torch import load_file

from align.checkpoint import Adapter, CheckpointError, Saver, _files, _save, latest, load, save


def arguments(seed=0, keep=9, **changes):
    model, optimizer = trained_once(seed)
    return {
        "model": model, "optimizer": optimizer, "tokenizer_files": None, "trainer_state": {"seed": seed},
        "tensors": {"rng": torch.zeros(1)}, "keep": keep, **changes,
    }  # fmt: skip


# In the background.


def test_a_snapshot_is_of_the_moment_and_is_written_beside_the_run(tmp_path, monkeypatch):
    model, optimizer = trained(seed=3)
    hold, write_tensors = threading.Event(), _save.write_tensors
    monkeypatch.setattr(_save, "write_tensors", lambda *words: hold.wait(10) and write_tensors(*words))
    saver = Saver(mode="snapshot")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = saver.save(tmp_path, 1, **arguments(model=model, optimizer=optimizer))
    assert not path.exists() and latest(tmp_path) is None and saver.last_stall_s < 5
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)  # the run goes on
    optimizer.step()
    hold.set()
    saver.wait()
    saved = load_file(path / "model.safetensors")
    assert latest(tmp_path) == path and all(torch.equal(saved[name], before[name]) for name in before)
    kept = dict(saver._host)
    saver.save(tmp_path, 2, **arguments(model=model, optimizer=optimizer))  # the next one takes the same memory
    saver.wait()
    assert all(saver._host[key] is kept[key] for key in kept) and names(tmp_path) == ["step-000001", "step-000002"]


def test_reserved_memory_is_what_the_snapshot_takes(tmp_path):
    saver, (model, optimizer) = Saver(), trained_once()
    saver.reserve(model=model, optimizer=optimizer)
    saver.wait()
    reserved = dict(saver._host)
    saver.save(tmp_path, 1, **arguments())
    saver.wait()
    assert len(reserved) == 3 + 3 * 3  # weights; step and two moments of each
    assert all(saver._host[key] is tensor for key, tensor in reserved.items())
    assert_loads(tmp_path / "step-000001", 0)
    Saver(mode="stream").reserve(model=model, optimizer=optimizer)


def test_both_modes_write_the_same_bytes(tmp_path):
    for mode in ("snapshot", "stream"):
        saver = Saver(mode=mode)
        saver.save(tmp_path / mode, 1, **arguments())
        saver.wait()
        assert saver._host == {} or mode == "snapshot"
    for name in names(tmp_path / "stream/step-000001"):
        assert (tmp_path / "snapshot/step-000001" / name).read_bytes() == (tmp_path / "stream/step-000001" / name).read_bytes()


def test_each_tensor_copied_and_written_is_a_sign_of_life(tmp_path):
    for mode in ("snapshot", "stream"):
        signs = []
        saver = Saver(mode=mode, alive=lambda signs=signs: signs.append(threading.current_thread().name))
        saver.save(tmp_path / mode, 1, **arguments())
        saver.wait()
        tensors = sum(len(load_file(file)) for file in (tmp_path / mode / "step-000001").glob("*.safetensors"))
        assert len(signs) == tensors * (2 if mode == "snapshot" else 1)
        assert signs.count("save step 1") == (tensors if mode == "snapshot" else 0)


def test_an_error_in_the_background_is_raised_by_wait_or_the_next_save(tmp_path, monkeypatch):
    write(tmp_path, 1)
    saver = Saver()

    def full(operation, path):
        if operation == "write" and path.name == "model.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    for raised in (saver.wait, lambda: saver.save(tmp_path, 3, **arguments())):
        monkeypatch.setattr(_files, "before", full)
        saver.save(tmp_path, 2, **arguments())
        with pytest.raises(CheckpointError, match="step 2 was not saved: No space left on device"):
            raised()
        monkeypatch.setattr(_files, "before", None)
        assert names(tmp_path) == ["step-000001"]
    saver.wait()  # told once


def test_an_adapter_stands_for_the_weights_or_beside_merged_ones(tmp_path):
    model, _ = trained_once()
    merged = {name: (lambda tensor=tensor: tensor + 1) for name, tensor in model.state_dict().items()}
    adapter = {"a": torch.arange(3.0)}
    path = save(tmp_path, 1, **arguments(adapter=Adapter({"r": 1}, adapter, merged)))
    saved = load_file(path / "model.safetensors")
    assert all(torch.equal(saved[name], tensor + 1) for name, tensor in model.state_dict().items())
    assert torch.equal(load(path).adapter["a"], adapter["a"])
    alone = save(tmp_path, 2, **arguments(adapter=Adapter({"r": 1}, adapter, None)))
    assert not list(alone.glob("model*")) and load(alone).adapter and load(write(tmp_path, 3)).adapter is None


# By several ranks.


class Threads:
    """Ranks that are threads of this process."""

    class Rank:
        def __init__(self, rank, shared):
            self.rank, self.world, self._shared = rank, shared.world, shared

        def gather(self, value):
            return self._shared.gather(self.rank, value)

    def __init__(self, world):
        self.world, self._barrier, self._values = world, threading.Barrier(world), [None] * world

    def gather(self, rank, value):
        self._values[rank] = value
        self._barrier.wait(20)
        values = list(self._values)
        self._barrier.wait(20)
        return values

    def run(self, action):
        """The result or the exception of each rank."""
        results = [None] * self.world

        def body(rank):
            try:
                results[rank] = action(self.Rank(rank, self))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return results


@pytest.fixture
def small_files(monkeypatch):
    """The weights in two files, which the ranks write in turn."""
    monkeypatch.setattr(_save, "SHARD_BYTES", 60)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the order of operations is crash_test's


@pytest.mark.parametrize("per_rank", [True, False])
def test_each_rank_writes_its_files(tmp_path, small_files, per_rank):
    writers = {}
    seen = threading.local()

    def note(operation, path):
        if operation == "create":
            writers[path.name] = seen.rank

    def action(ranks):
        seen.rank = ranks.rank
        return save(tmp_path, 1, **arguments(ranks=ranks, per_rank_optimizer_state=per_rank))

    _files.before = note
    try:
        paths = Threads(2).run(action)
    finally:
        _files.before = None
    assert paths == [tmp_path / "step-000001"] * 2
    assert writers["model-00001-of-00002.safetensors"] == 0 and writers["model-00002-of-00002.safetensors"] == 1
    assert writers["manifest.json"] == writers["trainer.json"] == 0
    optimizers = {name: rank for name, rank in writers.items() if name.startswith("optimizer")}
    if per_rank:
        assert optimizers == {f"optimizer-0000{rank}-of-00002.{kind}": rank for rank in (0, 1) for kind in ("json", "safetensors")}
    else:
        assert optimizers == {"optimizer.json": 0, "optimizer.safetensors": 0}
    assert_loads(paths[0], 0)
    if per_rank:
        (paths[0] / "optimizer-00001-of-00002.json").unlink()
        assert not load(paths[0], verify=False).has_optimizer_state


def test_a_disk_error_of_any_rank_at_every_file_operation_is_everybodys(tmp_path, small_files):
    def operations(directory, fails_at):
        count = itertools.count()

        def before(operation, path):
            if next(count) == fails_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        _files.before = before
        try:
            results = Threads(2).run(lambda ranks: save(directory, 2, **arguments(seed=2, ranks=ranks)))
        finally:
            _files.before = None
        return results, next(count)

    write(tmp_path / "count", 1, seed=1)
    _, total = operations(tmp_path / "count", None)
    assert total > 40
    failed = 0
    for number in range(total):
        directory = tmp_path / f"{number}"
        write(directory, 1, seed=1)
        results, _ = operations(directory, number)
        errors = [isinstance(result, CheckpointError) for result in results]
        assert errors in ([True, True], [False, False]), results
        failed += all(errors)
        assert not [name for name in names(directory) if name.endswith("partial")]
        newest = latest(directory)
        assert_loads(newest, load(newest).trainer_state["seed"])
        assert load(newest).trainer_state["seed"] == 2 or all(errors)
    assert failed > 30
