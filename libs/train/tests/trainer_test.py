"""The loop: one gradient however the step is cut, nothing applied that should not be, and what a run leaves behind."""

import dataclasses
import doctest
import itertools
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from train_cases import MODEL, documents, made, resumed, run_to_the_end, state_of, terminate

from align.checkpoint import CheckpointWarning, latest
from align.data import Loader
from align.model import init
from align.model import load as load_model
from align.tracking import read_history
from align.train import SftModule, TrainError
from align.train import _trainer as trainer_module

# One gradient.


def gradients(accumulation, packing, tmp_path):
    # Eight documents are one epoch and one step: eight padded rows, or four packed rows of 16 that are full.
    rows = 4 if packing else 8
    trainer, _, module = made(
        tmp_path / f"{accumulation}{packing}", module=SftModule, dtype=torch.float32, packing=packing, train__global_batch=rows,
        train__micro_batch=rows // accumulation,
    )  # fmt: skip
    step = trainer._loader.next_step()
    assert len(step.micro_batches) == accumulation and sorted(step.documents) == list(range(8))
    loss, _ = trainer._sum_up(step, trainer._gradient(step))
    return loss, torch.cat([parameter.grad.flatten() for parameter in module.model.parameters()]), step


def test_one_gradient_for_every_accumulation_padded_and_packed(tmp_path):
    reference_loss, reference, step = gradients(1, False, tmp_path)
    model = init(MODEL, seed=1)
    total = sum(  # plain torch, one document at a time
        F.cross_entropy(model.lm_head(model(ids[None, :-1]))[0], ids[1:].masked_fill(~mask[1:], -100), ignore_index=-100, reduction="sum")
        for ids, mask in ((torch.from_numpy(e.ids).long(), torch.from_numpy(e.mask)) for e in documents().examples)
    )
    (total / step.trained_tokens).backward()
    plain = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert reference_loss == pytest.approx(total.item() / step.trained_tokens, rel=1e-5)
    assert (reference - plain).norm() <= 1e-5 * plain.norm()
    for accumulation, packing in itertools.product((1, 2, 4), (False, True)):
        loss, gradient, _ = gradients(accumulation, packing, tmp_path / "more")
        assert loss == pytest.approx(reference_loss, rel=1e-5)
        assert (gradient - reference).norm() <= 1e-5 * reference.norm(), (accumulation, packing)


def test_a_run_is_the_plain_loop_of_torch(tmp_path):
    settings = {"module": SftModule, "dtype": torch.float32, "packing": False}
    trainer, _, module = made(tmp_path, optimizer__name="adamw", optimizer__max_grad_norm=0.5, **settings)
    trainer.fit()
    model = init(MODEL, seed=1)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95), weight_decay=0.1)
    loader = Loader(documents(), global_batch=4, micro_batch=4, max_length=16, packing=False, seed=0)
    for lr in (5e-3, 1e-2, 1e-2, 5.5e-3, 1e-3):  # two steps of warm-up, then half a cosine to a tenth
        (batch,) = loader.next_step().micro_batches
        logits = model.lm_head(model(torch.from_numpy(batch.input_ids)))
        targets = torch.from_numpy(batch.targets).masked_fill(~torch.from_numpy(batch.loss_mask), -100)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    for (name, ours), theirs in zip(module.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)


def test_a_loss_that_counts_other_tokens_than_the_loader_is_refused(tmp_path):
    class Miscounts(SftModule):
        def loss(self, batch):
            loss, weight, metrics = super().loss(batch)
            return loss, weight + 1, metrics

    with pytest.raises(TrainError, match=r"the loss of step 1 weighs .* units and the loader counted"):
        run_to_the_end(tmp_path, module=Miscounts)


# What is applied and what is logged.


@pytest.fixture
def applied_rates(monkeypatch):
    rates = []
    apply = trainer_module.apply_gradients

    def wrapped(optimizer, max_grad_norm, ranks):
        rates.append({group["lr"] for group in optimizer.param_groups})
        return apply(optimizer, max_grad_norm, ranks)

    monkeypatch.setattr(trainer_module, "apply_gradients", wrapped)
    return rates


@pytest.mark.parametrize("name", ["adamw8bit", "adamw"])
def test_a_skipped_step_changes_nothing_and_the_logged_rate_is_the_applied_one(tmp_path, applied_rates, name):
    weights = []

    def snapshot(loss):
        weights.append(torch.cat([parameter.detach().flatten() for parameter in module.model.parameters()]))
        return loss

    at = {3: lambda loss: snapshot(loss) * float("nan"), 5: snapshot, 8: terminate}
    trainer, run, module = made(tmp_path, at=at, optimizer__name=name)
    trainer.fit()
    _, run = resumed(tmp_path, optimizer__name=name)
    lines = read_history(run.path / "history.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [{line["lr"]} for line in lines] == applied_rates
    # Warm-up 5e-3, 1e-2; step 2 is skipped, so step 3 takes its rate again.
    assert [line["lr"] for line in lines] == pytest.approx([5e-3, 1e-2, 1e-2, 1e-2, 5.5e-3])
    assert [line["skipped"] for line in lines] == [0, 1, 1, 1, 1]
    assert lines[1]["loss"] != lines[1]["loss"] and lines[1]["grad_norm"] != lines[1]["grad_norm"]
    assert torch.equal(weights[0], weights[1])


class Muted:
    """A loader one of whose steps trains nothing."""

    def __init__(self, loader, step):
        self._loader, self._left = loader, step
        self.digest = loader.digest

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def next_step(self):
        self._left -= 1
        step = self._loader.next_step()
        return step if self._left else dataclasses.replace(step, trained_tokens=0)


def test_a_step_without_trained_tokens_changes_nothing(tmp_path, applied_rates):
    trainer, run, module = made(tmp_path)
    trainer._loader = Muted(trainer._loader, 2)
    trainer._step()
    before = {name: tensor.clone() for name, tensor in module.model.state_dict().items()}
    optimizer = [entry["step"] for entry in trainer._optimizer.state_dict()["state"].values()]
    trainer._step()
    assert all(torch.equal(before[name], tensor) for name, tensor in module.model.state_dict().items())
    assert optimizer == [entry["step"] for entry in trainer._optimizer.state_dict()["state"].values()]
    assert module.calls == 2  # no forward
    trainer._step()
    first, second, third = read_history(run.path / "history.jsonl")
    assert (second["loss"], second["grad_norm"], second["trained_tokens"], second["skipped"]) == (None, None, 0, 0)
    assert third["lr"] == pytest.approx(1e-2) and applied_rates == [{first["lr"]}, {third["lr"]}]


def test_history_counts_tokens(tmp_path):
    _, run = run_to_the_end(tmp_path, packing=False, train__max_steps=2)
    one, two = read_history(run.path / "history.jsonl")
    data = documents()
    assert one["tokens"] + two["tokens"] == two["total_tokens"] == data.tokens  # an epoch of eight rows
    assert one["trained_tokens"] + two["trained_tokens"] == two["total_trained_tokens"] == data.trained_tokens
    assert two["epoch"] == 1.0 and one["tokens_per_s"] > 0
    assert one["seen"] > 0  # a metric of the module, divided by the trained tokens


def test_the_loss_falls(tmp_path):
    result, run = run_to_the_end(tmp_path, module=SftModule, dtype=torch.float32, train__max_steps=40)
    losses = [line["loss"] for line in read_history(run.path / "history.jsonl")]
    assert losses[0] == pytest.approx(4.28, abs=0.3)  # ln 72
    assert result.last_loss == losses[-1] < 0.5 * losses[0]


# Ends, evaluations, checkpoints.


def test_max_hours_stops_with_a_checkpoint(tmp_path):
    result, run = run_to_the_end(tmp_path, train__max_hours=1e-9)
    assert (result.status, result.exit_code, result.steps, result.reason) == ("stopped", 5, 1, "train.max_hours")
    assert latest(run.checkpoints) == result.checkpoint


def test_signals_do_what_they_did_before_and_after(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    run_to_the_end(tmp_path)
    assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_two_signals(tmp_path, number):
    def twice(loss):
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        return loss

    trainer, _, _ = made(tmp_path, at={1: twice})
    if number == signal.SIGINT:  # the second Ctrl-C means it
        with pytest.raises(KeyboardInterrupt):
            trainer.fit()
    else:
        assert trainer.fit().reason == number.name


def test_evaluation_leaves_no_trace_in_the_training(tmp_path):
    whole, _ = run_to_the_end(tmp_path / "whole")
    modes = []

    def evaluate(step):
        modes.append((step, module.model.training, torch.is_grad_enabled()))
        torch.rand(7)
        random.random()
        return {"accuracy": step / 10}

    trainer, run, module = made(tmp_path / "evaluated", evaluate=evaluate, eval__every=2)
    result = trainer.fit()
    assert {**state_of(result), "trainer.json": ""} == {**state_of(whole), "trainer.json": ""}
    assert modes == [(2, False, False), (4, False, False)]
    assert result.evals == {2: {"accuracy": 0.2}, 4: {"accuracy": 0.4}}
    assert [(line["step"], line["accuracy"]) for line in read_history(run.path / "eval.jsonl")] == [(2, 0.2), (4, 0.4)]
    off, _ = run_to_the_end(tmp_path / "off", evaluate=evaluate, eval__every=2, eval__enabled=False)
    assert off.evals == {}


@pytest.mark.parametrize("mode, best", [("max", 1), ("min", 3)])
def test_the_best_checkpoint_stays(tmp_path, mode, best):
    scores = {1: 0.9, 2: 0.5, 3: 0.1, 4: 0.5, 5: 0.6}
    _, run = run_to_the_end(
        tmp_path, evaluate=lambda step: {"score": scores[step]}, eval__every=1, checkpoint__every=1, checkpoint__keep=1,
        checkpoint__keep_best="score", checkpoint__keep_best_mode=mode,
    )  # fmt: skip
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == [f"step-{best:06d}", "step-000005"]


def test_a_checkpoint_is_a_model_directory(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    result, _ = run_to_the_end(tmp_path / "run", tokenizer=tmp_path, train__per_rank_optimizer_state=False)
    assert {"config.json", "model.safetensors", "tokenizer.json", "optimizer.safetensors"} <= set(state_of(result))
    model = load_model(result.checkpoint)
    assert model.output_weight.dtype == torch.bfloat16 and model.config.vocab_size == 72


def test_tokenizer_files_that_vanish_during_a_run(tmp_path):
    for name in ("own", "vendored"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(name)

    def vanish(loss):
        (tmp_path / "own" / "tokenizer.json").unlink()
        return loss

    trainer, _, _ = made(tmp_path / "run", at={1: vanish}, tokenizer=tmp_path / "own", fallback_tokenizer=tmp_path / "vendored")
    with pytest.warns(CheckpointWarning, match="has those of"):
        result = trainer.fit()
    assert (result.checkpoint / "tokenizer.json").read_text() == "vendored"


def test_progress_lines_and_threads(tmp_path, capsys, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    run_to_the_end(tmp_path, progress=None, train__log_every=2, train__threads=1)
    steps = [line.split()[1] for line in capsys.readouterr().err.splitlines() if line.startswith("step")]
    assert steps == ["1/5", "2/5", "4/5", "5/5"]
    assert chosen == [1]


def test_overhead_of_a_step_is_below_a_millisecond(tmp_path, monkeypatch):
    class Free(SftModule):
        def loss(self, batch):
            return self.model.model.norm.weight.sum() * 0.0, batch["loss_mask"].sum(), {}

    trainer, _, _ = made(tmp_path, module=Free, train__max_steps=10**6)
    step = trainer._loader.next_step()
    monkeypatch.setattr(trainer._loader, "next_step", lambda: step)
    monkeypatch.setattr(trainer_module, "apply_gradients", lambda optimizer, max_grad_norm, ranks: (1.0, True))
    costs = []
    for _ in range(60):
        start = time.process_time()
        trainer._step()
        trainer._evaluate_and_save()
        costs.append(time.process_time() - start)
    median = sorted(costs)[len(costs) // 4]  # the machine may be busy
    print(f"overhead of a step, two trivial backwards included: {1e6 * median:.0f} us")
    assert median < 1e-3


def test_readme():
    assert doctest.testfile(str(Path(__file__).parents[1] / "README.md"), module_relative=False).failed == 0
