"""Two processes on gloo: the same gradient, the same norm, the same bits after a resume, on any number of ranks.

A spawn of two ranks takes seconds, so the default test makes one, and asks everything of it.
"""

import dataclasses
import itertools
import json
import math
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_cases import DEVICE, MODEL, STEPS, documents, logged, made, on_ranks, resumed, run_to_the_end, state_of, terminate

from align.checkpoint import load
from align.model import _fused
from align.model import load as load_model
from align.tracking import read_history
from align.train import LoraConfig, Ranks, SftModule, find_latest, join, leave, whole
from align.train._gradients import global_norm

KINDS = {
    "adamw8bit": {"train__checkpointing": "full"},
    "adamw": {"optimizer__name": "adamw", "packing": False, "dtype": torch.float32, "checkpoint__mode": "stream"},
    "offload": {"optimizer__name": "offload_adamw", "train__reshard_after_forward": False},
    "gathered": {"train__per_rank_optimizer_state": False, "train__reduce_dtype": "float32"},
    "lora": {"lora": LoraConfig(rank=4), "optimizer__lr": 1e-1},
}
KINDS_OF_FILES = ("adamw8bit", "adamw")
DOCUMENTS = (12, 4) * 8  # an epoch and a step: 16 padded rows, or 8 packed ones of 16 that are full


ALL = list(itertools.product((1, 2, 4), (False, True), ("none", "full")))
SOME = [(1, False, "none"), (4, False, "full"), (2, True, "none"), (1, True, "full")]


def gradients(path, ranks, ways):
    """{case: (loss, whole gradient, norm)} of one step, cut and computed in these ways."""
    found = {}
    for accumulation, packing, checkpointing in ways:
        rows = 8 if packing else 16
        trainer, _, module = made(
            path / f"{accumulation}{packing}{checkpointing}{ranks.world}", module=SftModule, dtype=torch.float32, packing=packing,
            train__global_batch=rows, train__micro_batch=rows // ranks.world // accumulation, train__checkpointing=checkpointing,
            ranks=ranks, optimizer__name="adamw", model=dataclasses.replace(MODEL, num_hidden_layers=3), data=documents(DOCUMENTS),
        )  # fmt: skip
        step = trainer._loader.next_step()
        assert len(step.micro_batches) == accumulation and len(step.documents) == 16
        loss, _ = trainer._sum_up(step, trainer._gradient(step))
        parameters = list(module.model.parameters())
        assert all(hasattr(parameter, "full_tensor") == (ranks.world > 1) for parameter in parameters)
        flat = torch.cat([(p.grad.full_tensor() if ranks.world > 1 else p.grad).flatten() for p in parameters])
        norm = global_norm(parameters, ranks)
        assert ranks.gather(norm) == [norm] * ranks.world
        found[f"{accumulation} {packing} {checkpointing}"] = torch.cat([torch.tensor([loss, norm]), flat])
    return found


class NanOnRank1(SftModule):
    """A gradient that is not finite, on one rank only, in step 2."""

    def loss(self, batch):
        self.calls = getattr(self, "calls", 0) + 1
        loss, weight, metrics = super().loss(batch)
        poisoned = torch.distributed.get_rank() == 1 and self.calls == 2
        return loss * (math.nan if poisoned else 1.0), weight, metrics


def skips_alike(path, ranks):
    for name in ("adamw8bit", "adamw"):
        trainer, run, module = made(path / name, module=NanOnRank1, ranks=ranks, optimizer__name=name, train__max_steps=3)
        trainer._step()
        before = whole(module.model).state_dict()
        trainer._step()
        assert all(torch.equal(a, b) for a, b in zip(before.values(), whole(module.model).state_dict().values(), strict=True))
        trainer._step()
        assert ranks.gather((trainer._now.applied, trainer._now.skipped)) == [(2, 1)] * 2
        if ranks.main:
            lines = read_history(run.path / "history.jsonl")
            assert [line["skipped"] for line in lines] == [0, 1, 1] and math.isnan(lines[1]["grad_norm"])


def shards_as_configured(path, ranks):
    """Fields that change no number on two ranks change how FSDP2 works."""
    for reshard, reduce in ((True, "parameters"), (False, "float32")):
        _, _, module = made(
            path / reduce, ranks=ranks, train__reshard_after_forward=reshard, train__reduce_dtype=reduce, module=SftModule
        )  # fmt: skip
        block = module.model.blocks[0]
        with torch.no_grad():
            module.model(torch.arange(4)[None])
        assert all(hasattr(parameter, "full_tensor") == reshard for parameter in block.parameters())
        precision = block._get_fsdp_state()._mp_policy
        assert precision.reduce_dtype == (torch.float32 if reduce == "float32" else None)


def evaluates(path, ranks):
    """A sharded model is whole in a copy, and its own forward in an evaluation leaves no trace."""
    seen = []

    def evaluate(step):
        copy, ids = whole(module.model), torch.arange(8)[None]
        module.model.eval()
        seen.append((copy(ids) - module.model(ids)).abs().max().item())
        return {"rank": float(ranks.rank)}

    plain, _ = run_to_the_end(path / "plain", ranks=ranks)
    trainer, run, module = made(path / "looked at", ranks=ranks, evaluate=evaluate, eval__every=1)
    assert state_of(trainer.fit()) | {"trainer.json": 0} == state_of(plain) | {"trainer.json": 0}
    assert seen == [0.0] * STEPS
    if ranks.main:
        assert [line["rank"] for line in read_history(run.path / "eval.jsonl")] == [0.0] * STEPS


def legs(path, ranks, kind, first):
    """Stopped by a signal to rank 1 after step `first`, resumed, stopped again, resumed: as a run in one go."""
    settings = {"ranks": ranks, "model": dataclasses.replace(MODEL, num_hidden_layers=2), "train__micro_batch": 1, **KINDS[kind]}
    uninterrupted, whole_run = run_to_the_end(path / "whole", **settings)
    ours = path / f"{first}"
    at = {2 * first: terminate} if ranks.rank == 1 else None
    stopped = made(ours, at=at, **settings)[0].fit()
    assert (stopped.status, stopped.steps, stopped.reason) == ("stopped", first, "SIGTERM")
    second = (first + STEPS) // 2
    if first < second < STEPS:
        at = {2 * (second - first) - 1: terminate} if ranks.main else None
        again, _ = resumed(ours, at=at, **settings)
        assert (again.status, again.steps) == ("stopped", second)
    last, run = resumed(ours, **settings)
    assert state_of(last) == state_of(uninterrupted)
    if ranks.main:
        assert logged(run) == logged(whole_run)
    return uninterrupted


def resumes_on_other_ranks(path, ranks, kinds):
    """What one rank saved is loaded by two and saved again: the same bits."""
    settings = {"ranks": ranks, "model": dataclasses.replace(MODEL, num_hidden_layers=2), "train__micro_batch": 1}
    for kind in kinds:
        last, _ = resumed(path / f"one-{kind}", train__max_steps=STEPS, checkpoint__every=1, **settings, **without(KINDS[kind]))
        assert last.steps == STEPS  # nothing was left to do but to load
        trainer, _, _ = made(path / f"again-{kind}", resume=STEPS, **settings, **KINDS[kind])
        trainer._restore(load(last.checkpoint), ())
        trainer._save(None)
        trainer._saver.wait()
        if ranks.main:
            (path / f"again-{kind}" / "path").write_text(str(trainer._saved))


def without(kind):
    return {name: value for name, value in kind.items() if name != "checkpoint__mode"}


def optimizer_bits(checkpoint):
    """Every state tensor of a checkpoint, rows joined."""
    parts = [load_file(path) for path in sorted(checkpoint.glob("optimizer*.safetensors"))]
    names = dict.fromkeys(name for part in parts for name in part)
    held = {name: [part[name] for part in parts if name in part] for name in names}
    return {name: torch.cat(tensors) if tensors[0].ndim else tensors[0] for name, tensors in held.items()}


def saves_alone(path, kinds):
    """What one rank saves, for `resumes_on_other_ranks`."""
    for kind in kinds:
        settings = {"model": dataclasses.replace(MODEL, num_hidden_layers=2), "train__micro_batch": 1, **KINDS[kind]}
        run_to_the_end(path / f"one-{kind}", **settings)


def loads_on_one(path, kinds):
    """The files of two ranks hold what those of one hold, and one rank reads them."""
    for kind in kinds:
        one, two = path / f"one-{kind}" / "checkpoints" / f"step-{STEPS:06d}", Path((path / f"again-{kind}" / "path").read_text())
        assert len(list(two.glob("optimizer-0000?-of-00002.safetensors"))) == 2
        a, b = optimizer_bits(one), optimizer_bits(two)
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
        settings = {"model": dataclasses.replace(MODEL, num_hidden_layers=2), "train__micro_batch": 1, **KINDS[kind]}
        trainer, _, _ = made(path / f"back-{kind}", resume=STEPS, **settings)
        trainer._restore(load(two), ())
        trainer._save(None)
        trainer._saver.wait()
        back = optimizer_bits(trainer._saved)
        assert all(torch.equal(a[name], back[name]) for name in a)


def test_two_ranks(tmp_path):
    saves_alone(tmp_path, KINDS_OF_FILES)
    on_ranks(2, __file__, "default", tmp_path)
    compare_gradients(tmp_path, SOME)
    loads_on_one(tmp_path, KINDS_OF_FILES)
    # The checkpoint of a sharded run is a model that anyone loads.
    model = load_model(tmp_path / "legs-adamw8bit" / "whole" / "checkpoints" / f"step-{STEPS:06d}")
    assert torch.isfinite(model(torch.arange(8)[None])).all()
    manifest = json.loads((tmp_path / "legs-adamw8bit" / "whole" / "checkpoints" / f"step-{STEPS:06d}" / "manifest.json").read_text())
    assert {name for name in manifest["files"] if name.startswith("optimizer")} == {
        f"optimizer-0000{rank}-of-00002.{kind}" for rank in (0, 1) for kind in ("json", "safetensors")
    }


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 5])
def test_one_of_two_ranks_is_killed_and_the_run_resumed(tmp_path, step):
    """The other rank fails with it; nothing is lost but the steps after the last whole checkpoint."""
    on_ranks(2, __file__, "killed", tmp_path, step, codes=[1, -signal.SIGKILL])
    on_ranks(2, __file__, "goes on", tmp_path)


def killed(path, ranks, step):
    def kill(loss):
        os.kill(os.getpid(), signal.SIGKILL)

    at = {2 * int(step): kill} if ranks.rank == 1 else None
    made(path / "killed", at=at, ranks=ranks, train__micro_batch=1, checkpoint__every=2)[0].fit()


def goes_on(path, ranks):
    settings = {"ranks": ranks, "train__micro_batch": 1, "checkpoint__every": 2}
    uninterrupted, whole_run = run_to_the_end(path / "whole", **settings)
    found = find_latest(path / "killed" / "checkpoints", ranks)
    trainer, run, _ = made(path / "killed", resume=load(found).step if found else 0, **settings)
    assert state_of(trainer.fit(resume=True)) == state_of(uninterrupted)
    if ranks.main:
        assert logged(run) == logged(whole_run)


def compare_gradients(folder, ways):
    alone = gradients(folder / "alone", Ranks(), ways)
    shared = load_file(folder / "gradients.safetensors")
    reference = alone["1 False none"]
    for case, found in [*alone.items(), *shared.items()]:
        assert found[:2].tolist() == pytest.approx(reference[:2].tolist(), rel=1e-5), case
        assert (found[2:] - reference[2:]).norm() <= 1e-5 * reference[2:].norm(), case


@pytest.mark.slow
def test_one_gradient_for_every_way_to_cut_a_step(tmp_path):
    on_ranks(2, __file__, "gradients", tmp_path)
    compare_gradients(tmp_path, ALL)


@pytest.mark.slow
def test_one_gradient_with_the_blocks_of_a_gpu(tmp_path):
    """Sharded as FSDP2 does it, through the references of align.kernels; alone it is torch's operations."""
    on_ranks(2, __file__, "fused", tmp_path)
    compare_gradients(tmp_path, SOME)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_stopped_at_every_step_and_resumed_three_legs(tmp_path, kind):
    on_ranks(2, __file__, "legs", tmp_path, kind)


def share_gradients(folder, ranks, ways):
    found = gradients(folder / "shared", ranks, ways)
    if ranks.main:
        save_file(found, folder / "gradients.safetensors")


def main(action, folder, *words):
    folder, ranks = Path(folder), join(DEVICE)
    torch.set_num_threads(1)
    if action == "default":
        share_gradients(folder, ranks, SOME)
        skips_alike(folder / "nan", ranks)
        shards_as_configured(folder / "fields", ranks)
        evaluates(folder / "eval", ranks)
        resumes_on_other_ranks(folder, ranks, KINDS_OF_FILES)
        legs(folder / "legs-adamw8bit", ranks, "adamw8bit", 2)
    elif action == "gradients":
        share_gradients(folder, ranks, ALL)
    elif action == "fused":
        _fused.wanted = lambda *_: True
        share_gradients(folder, ranks, SOME)
    elif action == "skips alike":
        skips_alike(folder, ranks)
    elif action == "resharded":
        resumes_on_other_ranks(folder, ranks, words)
    elif action == "alone":
        saves_alone(folder, words)
    elif action == "loads on one":
        loads_on_one(folder, words)
    elif action == "killed":
        killed(folder, ranks, *words)
    elif action == "goes on":
        goes_on(folder, ranks)
    elif action == "legs":
        for first in range(1, STEPS):
            legs(folder / f"from-{first}", ranks, words[0], first)
    leave(ranks)


if __name__ == "__main__":
    main(*sys.argv[1:])
