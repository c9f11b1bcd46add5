"""Stopped or killed at any step and resumed: the same bits, or a refusal that names what changed."""

import dataclasses
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from train_cases import MODEL, STEPS, Noisy, documents, logged, made, resumed, run_to_the_end, state_of, terminate

from align.checkpoint import latest, load
from align.data import DataError
from align.train import ResumeWarning, SftModule, TrainerConfig, TrainError, identity, refuse_changes

KINDS = [
    {},
    {"optimizer__name": "adamw", "packing": False},
    pytest.param({"dtype": torch.float32}, marks=pytest.mark.slow),
    pytest.param({"optimizer__name": "adamw", "dtype": torch.float32, "train__per_rank_optimizer_state": False}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_by_sigterm_at_every_step_and_resumed_three_legs(tmp_path, kind):
    whole, whole_run = run_to_the_end(tmp_path / "whole", **kind)
    assert (whole.status, whole.exit_code, whole.steps) == ("done", 0, STEPS)
    for first in range(1, STEPS):
        path = tmp_path / f"{first}"
        trainer, run, _ = made(path, at={2 * first: terminate}, **kind)  # two micro-batches a step
        stopped = trainer.fit()
        assert (stopped.status, stopped.exit_code, stopped.steps, stopped.reason) == ("stopped", 5, first, "SIGTERM")
        assert stopped.checkpoint == run.checkpoints / f"step-{first:06d}"
        second = (first + STEPS) // 2
        if first < second < STEPS:
            again, _ = resumed(path, at={2 * (second - first) - 1: terminate}, **kind)
            assert (again.status, again.steps) == ("stopped", second)
        last, run = resumed(path, **kind)
        assert (last.status, last.steps) == ("done", STEPS)
        assert state_of(last) == state_of(whole)
        assert logged(run) == logged(whole_run)
        assert last.last_loss == whole.last_loss


@pytest.mark.parametrize("every", [1, 2])
def test_checkpoints_on_the_way_do_not_change_the_run(tmp_path, every):
    whole, _ = run_to_the_end(tmp_path / "whole")
    saved, run = run_to_the_end(tmp_path / "saved", checkpoint__every=every, checkpoint__keep=9)
    steps = sorted({*range(every, STEPS, every), STEPS})
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == [f"step-{step:06d}" for step in steps]
    # The configuration is in trainer.json, all else is equal.
    assert {**state_of(saved), "trainer.json": ""} == {**state_of(whole), "trainer.json": ""}


def child(path, kill_at_call):
    # A snapshot is durable some time after the step; a streamed save is when the step goes on, so that there is one to resume.
    kill = {int(kill_at_call): lambda loss: os.kill(os.getpid(), signal.SIGKILL)}
    trainer, _, _ = made(Path(path), checkpoint__every=2, checkpoint__mode="stream", at=kill)
    trainer.fit()


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 4, 5])
def test_killed_after_a_checkpoint_and_resumed(tmp_path, step):
    whole, whole_run = run_to_the_end(tmp_path / "whole", checkpoint__every=2)
    path = tmp_path / "killed"
    process = subprocess.run([sys.executable, __file__, str(path), str(2 * step)], check=False)
    assert process.returncode == -signal.SIGKILL
    last, run = resumed(path, checkpoint__every=2)
    assert state_of(last) == state_of(whole)
    assert logged(run) == logged(whole_run)


def test_keep_n_counts_the_checkpoint_that_a_run_came_from_once(tmp_path):
    run_to_the_end(tmp_path, train__max_steps=2, checkpoint__every=1)
    result, run = resumed(tmp_path, train__max_steps=3, checkpoint__every=1, allow_change=["schedule"])
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == ["step-000002", "step-000003"]
    again, run = resumed(tmp_path, train__max_steps=3, checkpoint__every=1)  # nothing left to do: nothing is written
    assert again.checkpoint == result.checkpoint and again.status == "done"
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == ["step-000002", "step-000003"]


def test_resume_where_there_is_nothing_starts_and_says_so(tmp_path, capsys):
    trainer, run, _ = made(tmp_path, progress=None)
    assert trainer.fit(resume=True).steps == STEPS
    assert f"no checkpoint under {run.checkpoints}; starting at step 0" in capsys.readouterr().err
    trainer, _, _ = made(tmp_path, progress=None, resume=STEPS)
    assert trainer.fit(resume=True).steps == STEPS
    assert f"resumed from {run.checkpoints / 'step-000005'} after step 5" in capsys.readouterr().err


@pytest.fixture
def tokenizers(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(name)
    return tmp_path / "one", tmp_path / "two"


CHANGES = {
    "data": {"data": documents(seed=5)},
    "tokenizer": {},
    "model.config": {"model": dataclasses.replace(MODEL, rope_theta=5e5)},
    "train.global_batch": {"train__global_batch": 2},
    "optimizer.lr": {"optimizer__lr": 2e-2},
    "optimizer.betas": {"optimizer__betas": (0.8, 0.95)},
    "schedule.warmup_steps": {"schedule__warmup_steps": 0},
    "train.micro_batch": {"train__micro_batch": 1},
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_change_is_refused_by_name_unless_it_is_allowed(tmp_path, tokenizers, field):
    one, two = tokenizers
    path = tmp_path / "run"
    made(path, at={4: terminate}, tokenizer=one)[0].fit()
    changes = {"tokenizer": two if field == "tokenizer" else one, **CHANGES[field]}
    with pytest.raises(TrainError, match=f"{field} was .* --allow-change {field}$") as caught:
        resumed(path, **changes)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    assert resumed(path, allow_change=[field], **changes)[0].steps == STEPS


def test_every_changed_field_is_named_at_once(tmp_path):
    made(tmp_path, at={4: terminate})[0].fit()
    with pytest.raises(TrainError, match=r"seed was 0 and is 1, .*optimizer\.lr .*--allow-change seed --allow-change optimizer\.lr"):
        resumed(tmp_path, seed=1, optimizer__lr=1.0)


def test_an_allowed_change_of_the_optimizer_takes_effect(tmp_path):
    made(tmp_path, at={4: terminate})[0].fit()
    checkpoint = load(latest(tmp_path / "checkpoints"))
    trainer, _, _ = made(tmp_path, resume=2, optimizer__weight_decay=0.5, optimizer__eps=1e-3)
    trainer.fit(resume=checkpoint, allow_change=["optimizer"])
    assert [(group["weight_decay"], group["eps"]) for group in trainer._optimizer.param_groups] == [(0.5, 1e-3), (0.0, 1e-3)]


def test_what_may_change_and_what_a_stage_adds_to_it(tmp_path):
    made(tmp_path, at={4: terminate})[0].fit()
    free = {"train__max_hours": 9.0, "checkpoint__keep": 5, "checkpoint__every": 1, "eval__every": 3, "train__log_every": 7}
    free |= {"train__hang_timeout": 99.0, "train__peak_tflops": 1.0, "train__profile": "4", "checkpoint__mode": "stream"}
    assert resumed(tmp_path, may_change=["seed"], **free)[0].steps == STEPS


def test_missing_optimizer_state_is_refused(tmp_path):
    made(tmp_path, at={4: terminate})[0].fit()
    for file in (tmp_path / "checkpoints" / "step-000002").glob("optimizer*"):
        file.unlink()
    with pytest.raises(TrainError, match=r"no optimizer\.state.*--allow-change optimizer\.state"):
        resumed(tmp_path)
    assert resumed(tmp_path, allow_change=["optimizer.state"])[0].steps == STEPS


def test_a_stage_can_refuse_before_it_touches_the_run_directory(tmp_path):
    trainer, _, module = made(tmp_path, at={4: terminate})
    trainer.fit()
    now = identity(TrainerConfig(), module, documents().digest, None)
    with pytest.raises(TrainError, match=r"optimizer\.lr"):
        refuse_changes(load(tmp_path / "checkpoints" / "step-000002"), now)
    with pytest.raises(TrainError, match=r"tokenizer\.json can't be read"):
        identity(TrainerConfig(), module, "", tmp_path)


def test_another_thread_count_warns(tmp_path, monkeypatch):
    made(tmp_path, at={4: terminate})[0].fit()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    with pytest.warns(ResumeWarning, match=r"threads was \d+ and is 77: the continuation need not be bit-equal"):
        resumed(tmp_path)


def test_another_forward_warns(tmp_path):
    class Elsewhere(Noisy):
        def loss(self, batch):
            result = super().loss(batch)
            self.forward_impl = "invariant"
            return result

    made(tmp_path, at={4: terminate})[0].fit()
    with pytest.warns(ResumeWarning, match="forward_impl was 'cpu_per_document' and is 'invariant'"):
        resumed(tmp_path, module=Elsewhere)


def test_state_that_a_module_does_not_take_is_refused(tmp_path):
    made(tmp_path, at={4: terminate})[0].fit()
    with pytest.raises(TrainError, match=r"extra state \['seen', 'sum'\]"):
        resumed(tmp_path, module=SftModule)


def test_the_loader_refuses_what_it_must(tmp_path):
    # The digest is admitted by nobody here, and the loader would notice even if the trainer did not.
    made(tmp_path, at={4: terminate})[0].fit()
    trainer, _, _ = made(tmp_path, resume=2, packing=False)
    with pytest.raises(DataError, match="packing"):
        trainer.fit(resume=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    child(*sys.argv[1:])
