"""What the fields of the configuration change: recomputation, compilation, adapters, offloading, steps in the backward, profile, MFU."""

import dataclasses
import itertools
import json
import math
import threading
import time

import pytest
import torch
from safetensors.torch import load_file
from train_cases import MODEL, STEPS, documents, logged, made, resumed, run_to_the_end, state_of, terminate

from align.checkpoint import load
from align.model import init
from align.model import load as load_model
from align.tracking import read_history
from align.train import (
    LaunchConfig,
    LoraConfig,
    LoraLinear,
    OffloadAdamW,
    OptimizerConfig,
    Ranks,
    SftModule,
    TrainerConfig,
    TrainError,
    add_lora,
    load_adapter,
    make_optimizer,
    merge_lora,
    validate,
    whole,
)
from align.train import _prepare as prepare_module
from align.train._meter import is_spike, peak_flops, step_flops
from align.train._profile import parse_range
from align.train._watchdog import Watchdog

DEEP = dataclasses.replace(MODEL, num_hidden_layers=4)


# Recomputation and compilation: the same bits, another cost.


def test_recomputation_keeps_the_bits_and_saves_memory(tmp_path, monkeypatch):
    kept, digests = {}, {}
    for mode in ("none", "selective", "full"):
        trainer, _, module = made(tmp_path / mode, model=DEEP, module=SftModule, train__checkpointing=mode, dtype=torch.float32)
        seen: list[int] = []
        step = trainer._loader.next_step()
        batch = {name: torch.as_tensor(value) for name, value in vars(step.micro_batches[0]).items() if value is not None}
        with torch.autograd.graph.saved_tensors_hooks(lambda x, seen=seen: seen.append(x.numel() * x.element_size()) or x, lambda x: x):
            module.loss(batch)
        kept[mode] = sum(seen)
        digests[mode] = state_of(trainer.fit())["model.safetensors"]
        assert [module.model._recomputes(n) for n in range(4)] == {
            "none": [False] * 4, "selective": [True, False, True, False], "full": [True] * 4,
        }[mode]  # fmt: skip
    assert digests["none"] == digests["selective"] == digests["full"]
    assert kept["full"] < kept["selective"] < kept["none"]
    assert kept["selective"] == pytest.approx((kept["full"] + kept["none"]) / 2, rel=0.1)


def test_compiled_blocks_compute_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "COMPILER", "eager")  # traced, not translated: no C++ compiler is needed
    plain, _ = run_to_the_end(tmp_path / "plain", packing=False, train__max_steps=2)
    trainer, _, module = made(tmp_path / "compiled", packing=False, train__max_steps=2, train__compile=True)
    assert all(hasattr(block.forward, "_torchdynamo_orig_callable") for block in module.model.blocks)
    assert state_of(trainer.fit())["model.safetensors"] == state_of(plain)["model.safetensors"]


def test_kernels_can_be_turned_off(tmp_path):
    """They run on a GPU only; what the blocks compute with them is fused_test.py's in libs/model."""
    assert [made(tmp_path / str(on), train__kernels=on)[2].model.fused for on in (True, False)] == [True, False]


# Adapters.


def lora_model(targets=("q_proj", "down_proj"), rank=4, alpha=16.0, seed=1, dtype=torch.float32, trained=True):
    model = init(DEEP, seed=seed, dtype=dtype)
    add_lora(model, LoraConfig(rank=rank, alpha=alpha, targets=list(targets)), seed=0)
    if trained:
        generator = torch.Generator().manual_seed(5)
        for layer in (module for module in model.modules() if isinstance(module, LoraLinear)):
            layer.lora_B.data.normal_(std=0.1, generator=generator)
    return model


def test_an_adapter_begins_as_the_base_and_merges_into_it():
    ids = torch.arange(12)[None]
    base, fresh, trained = init(DEEP, seed=1), lora_model(trained=False), lora_model()
    assert torch.equal(base.lm_head(base(ids)), fresh.lm_head(fresh(ids)))
    logits = trained.lm_head(trained(ids))
    assert not torch.equal(logits, base.lm_head(base(ids)))
    copy = whole(trained)
    torch.testing.assert_close(copy.lm_head(copy(ids)), logits, rtol=1e-5, atol=1e-5)
    merge_lora(trained)
    assert not [module for module in trained.modules() if isinstance(module, LoraLinear)]
    assert trained.state_dict().keys() == base.state_dict().keys()
    torch.testing.assert_close(trained.lm_head(trained(ids)), logits, rtol=1e-5, atol=1e-5)


def test_only_the_adapter_is_trained_saved_and_resumed(tmp_path):
    lora = LoraConfig(rank=4, alpha=8.0, targets=["q_proj", "v_proj"], base_name="the/base")
    settings = {"model": DEEP, "lora": lora, "optimizer__lr": 0.05, "dtype": torch.float32}
    result, run = run_to_the_end(tmp_path / "whole", **settings)
    made(tmp_path / "again", at={6: terminate}, **settings)[0].fit()
    again, run_again = resumed(tmp_path / "again", **settings)
    assert state_of(again) == state_of(result) and logged(run) == logged(run_again)
    path = result.checkpoint
    config = json.loads((path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"], config["base_model_name_or_path"]) == (
        4, 8.0, ["q_proj", "v_proj"], "the/base",
    )  # fmt: skip
    adapter = load_file(path / "adapter_model.safetensors")
    assert set(adapter) == {
        f"base_model.model.model.layers.{n}.self_attn.{p}.lora_{k}.weight" for n in range(4) for p in ("q_proj", "v_proj") for k in "AB"
    }
    assert adapter["base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"].shape == (4, 64)
    # The weights beside it are merged ones, and the optimizer knows the adapter alone.
    model, ids = init(DEEP, seed=1), torch.arange(12)[None]
    add_lora(model, lora, seed=9)
    load_adapter(model, adapter)
    saved = load_model(path)
    torch.testing.assert_close(saved.lm_head(saved(ids)), model.lm_head(model(ids)), rtol=1e-5, atol=1e-5)
    document = json.loads((path / "optimizer-00000-of-00001.json").read_text())
    assert all(name.endswith(("lora_A", "lora_B")) for name in document["parameters"])


class OtherBase(SftModule):
    """On other weights than `made` gives."""

    def __init__(self, model):
        with torch.no_grad():
            model.model.norm.weight.mul_(1.5)
        super().__init__(model)


def test_an_adapter_alone_and_what_does_not_fit(tmp_path):
    lora = LoraConfig(rank=4, targets=["q_proj"], save_merged=False)
    result, _ = run_to_the_end(tmp_path / "run", lora=lora, train__max_steps=2)
    assert not list(result.checkpoint.glob("model*.safetensors"))
    assert load(result.checkpoint).adapter
    assert resumed(tmp_path / "run", lora=lora, train__max_steps=3, allow_change=["schedule"])[0].steps == 3
    with pytest.raises(TrainError, match=r"lora\.targets names w1, which is no linear layer of the model; it has down_proj, gate_proj"):
        add_lora(init(MODEL, seed=1), LoraConfig(rank=1, targets=["w1"]), seed=0)
    with pytest.raises(TrainError, match=r"step-000003 is of another run: model\.base was"):  # the checkpoint does not hold them
        resumed(tmp_path / "run", lora=lora, train__max_steps=4, allow_change=["schedule"], module=OtherBase)
    adapter = load(result.checkpoint).adapter
    with pytest.raises(TrainError, match=r"lora\.rank"):
        model = init(MODEL, seed=1)
        add_lora(model, LoraConfig(rank=2, targets=["q_proj"]), seed=0)
        load_adapter(model, adapter)


# Offloading.


def parameters(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"matrix": (64, 64), "norm": (64,), "odd": (3, 5)}
    return [(name, torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))) for name, shape in shapes.items()]


def give_gradients(named, seed):
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in named:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.mark.parametrize("gigabytes", [1e-6, 2e-5, 1.0])
def test_offload_adamw_is_torch_adamw_within_its_staging(gigabytes):
    """The smallest holds 32 elements of a parameter of 4096."""
    ours, theirs = parameters(), parameters()
    config = OptimizerConfig(name="offload_adamw", lr=0.01, weight_decay=0.3, eps=1e-3, pinned_staging_gb=gigabytes)
    optimizer = make_optimizer(config, ours)
    assert isinstance(optimizer, OffloadAdamW) and 0 < optimizer.staging_bytes <= gigabytes * 2**30
    matrices = [p for _, p in theirs if p.ndim > 1]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": [theirs[1][1]], "weight_decay": 0.0}], lr=0.01, betas=(0.9, 0.95), eps=1e-3
    )
    for step in range(10):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step()
        reference.step()
        for (_, a), (_, b) in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_offload_adamw_keeps_a_master_of_bf16_and_resumes_bit_for_bit(tmp_path):
    named = parameters(dtype=torch.bfloat16)
    optimizer = make_optimizer(OptimizerConfig(name="offload_adamw", lr=1e-5), named)
    for _ in range(50):
        give_gradients(named, 0)
        optimizer.step()
    moved = optimizer.state_dict()["state"][0]["master"] - parameters()[0][1].detach().bfloat16().float()
    assert moved.abs().max() == pytest.approx(50e-5, rel=0.05)  # half an ulp of bf16 at 1 is 2e-3
    settings = {"optimizer__name": "offload_adamw"}
    done, run = run_to_the_end(tmp_path / "whole", **settings)
    for first in (1, 3):
        made(tmp_path / f"{first}", at={2 * first: terminate}, **settings)[0].fit()
        again, run_again = resumed(tmp_path / f"{first}", **settings)
        assert state_of(again) == state_of(done) and logged(run) == logged(run_again)
    with pytest.raises(TrainError, match="pinned_staging_gb is 1e-09"):
        make_optimizer(OptimizerConfig(name="offload_adamw", pinned_staging_gb=1e-9), parameters())


# Steps in the backward.

IN_BACKWARD = {"optimizer__in_backward": True, "optimizer__max_grad_norm": None, "train__micro_batch": 4, "model": DEEP}


@pytest.mark.parametrize("name", ["adamw8bit", "adamw"])
def test_a_step_in_the_backward_is_a_step_after_it(tmp_path, name):
    plain, plain_run = run_to_the_end(tmp_path / "plain", **{**IN_BACKWARD, "optimizer__in_backward": False}, optimizer__name=name)
    stepped, run = run_to_the_end(tmp_path / "in backward", **IN_BACKWARD, optimizer__name=name)
    ours, theirs = state_of(stepped), state_of(plain)
    for file in ("model.safetensors", "optimizer-00000-of-00001.safetensors"):
        assert ours[file] == theirs[file]
    norms = [[line["grad_norm"] for line in read_history(each.path / "history.jsonl")] for each in (run, plain_run)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    made(tmp_path / "again", at={2: terminate}, optimizer__name=name, **IN_BACKWARD)[0].fit()
    again, _ = resumed(tmp_path / "again", optimizer__name=name, **IN_BACKWARD)
    assert state_of(again) == ours


def test_no_gradient_outlives_its_block(tmp_path):
    alive = []

    class Looks(SftModule):
        def loss(self, batch):
            result = super().loss(batch)
            for block in self.model.blocks:
                block.register_full_backward_pre_hook(
                    lambda *_: alive.append(sum(parameter.grad is not None for parameter in self.model.parameters()))
                )
            return result

    trainer, _, _ = made(tmp_path, module=Looks, train__max_steps=2, **IN_BACKWARD)
    trainer.fit()
    assert alive == [0] * 4  # the hooks of the first step see the second; the tied head's comes with the embedding's


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"optimizer__max_grad_norm": 1.0}, r"can't clip to optimizer\.max_grad_norm 1.*set optimizer\.max_grad_norm=none"),
        ({"train__micro_batch": 2}, r"can't accumulate: train\.global_batch is 4, train\.micro_batch 2 on 1 rank; set .*=2"),
        ({"optimizer__name": "offload_adamw"}, r"in_backward is for adamw8bit and adamw"),
        ({"lora": LoraConfig(rank=2), "launch": LaunchConfig(nproc=2)}, r"before its gradients are summed over 2 ranks"),
    ],
)
def test_what_a_step_in_the_backward_cannot_do_is_refused(tmp_path, changes, message):
    with pytest.raises(TrainError, match=message):
        made(tmp_path, **{**IN_BACKWARD, **changes})


@pytest.mark.parametrize(
    ("section", "field", "most"),
    [
        ("train", "global_batch", 2**20),
        ("train", "micro_batch", 2**20),
        ("train", "threads", 1024),
        ("lora", "rank", 2**16),
        ("launch", "nproc", 1024),
        ("launch", "nnodes", 2**16),
    ],
)
def test_what_would_be_made_at_once_without_end_is_refused(section, field, most):
    config = TrainerConfig()

    def of(value):
        return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{field: value})})

    validate(of(most))
    with pytest.raises(TrainError, match=rf"^{section}\.{field} is {most + 1}; it must be at most {most}$"):
        validate(of(most + 1))


def test_a_gradient_that_is_not_finite_stops_a_step_in_the_backward(tmp_path):
    with pytest.raises(TrainError, match=r"not finite, and optimizer\.in_backward has stepped other blocks"):
        made(tmp_path, at={2: lambda loss: loss * math.nan}, **IN_BACKWARD)[0].fit()


# What is measured.


def test_mfu_counts_weights_once_a_token_and_attention_by_document(tmp_path):
    settings = {"module": SftModule, "model": DEEP, "train__peak_tflops": 1e-3, "train__max_steps": 2, "train__micro_batch": 4}
    trainer, _, module = made(tmp_path, **settings)
    assert peak_flops(torch.device("cpu"), 1e-3) == 1e9 and peak_flops(torch.device("cpu"), None) is None
    kv = 32
    matrices = 4 * (64 * 64 * 2 + 64 * kv * 2 + 3 * 64 * 64) + MODEL.vocab_size * 64
    step = trainer._loader.next_step()
    (batch,) = step.micro_batches
    squares = sum(length**2 for length in (12, 4) * 4)
    flops = 6 * matrices * 64 + 6 * 4 * 64 * squares  # layers × heads × head_dim = 4 × 64
    as_tensors = {name: torch.as_tensor(value) for name, value in vars(batch).items() if value is not None}  # of a rollout
    assert step_flops(module.model, [batch]) == step_flops(module.model, [as_tensors]) == flops
    padded = {"input_ids": torch.zeros(3, 12, dtype=torch.int64), "lengths": torch.tensor([12, 4, 5])}  # of pairs, or answers
    assert step_flops(module.model, [padded]) == 6 * matrices * 21 + 6 * 4 * 64 * (144 + 16 + 25)
    trainer, run, _ = made(tmp_path / "run", **settings)
    trainer.fit()
    line, _ = read_history(run.path / "history.jsonl")
    assert line["mfu"] == pytest.approx(flops / line["step_s"] / 1e9, rel=1e-3)
    assert line["memory_gb"] > 0.01 and line["tokens_per_s"] == pytest.approx(64 / line["step_s"], rel=0.05)


def test_losses_that_jump_are_marked(tmp_path, capsys):
    assert is_spike([2.0] * 16, 2.21) and not is_spike([2.0] * 16, 2.19) and not is_spike([2.0] * 15, 9.0)
    assert is_spike([], math.nan) and not is_spike([1.0, 3.0] * 8, 7.9) and is_spike([1.0, 3.0] * 8, 8.1)
    trainer, run, _ = made(tmp_path, at={37: lambda loss: loss * 3}, progress=None, train__max_steps=20, optimizer__lr=1e-4)
    trainer.fit()
    assert [line["step"] for line in read_history(run.path / "history.jsonl") if "spike" in line] == [19]
    assert "loss spike at step 19" in capsys.readouterr().err


def test_a_profile_of_the_chosen_steps(tmp_path):
    trainer, run, _ = made(tmp_path, train__profile="2:3")
    trainer.fit()
    trace = json.loads((run.path / "profile-000002.json").read_text())
    steps = [event for event in trace["traceEvents"] if event.get("name") == "aten::embedding"]
    assert len(steps) == 4  # two steps of two micro-batches
    assert parse_range("7") == (7, 7)
    for text in ("0:3", "4:3", "a"):
        with pytest.raises(TrainError, match=r"train\.profile is"):
            made(tmp_path / text.replace(":", ""), train__profile=text)


def test_deterministic_mode_is_on_for_the_process_and_said(tmp_path):
    try:
        result, _ = run_to_the_end(tmp_path, train__deterministic=True, train__max_steps=2)
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_cudnn_sdp(True)
    assert result.deterministic  # as on every CPU; on a GPU only with the field


@pytest.mark.parametrize("mode", ["snapshot", "stream"])
def test_saves_of_both_modes_are_the_same_and_their_stall_is_logged(tmp_path, mode):
    result, run = run_to_the_end(tmp_path / "run", checkpoint__every=2, checkpoint__mode=mode)
    plain, _ = run_to_the_end(tmp_path / "plain")
    assert {**state_of(result), "trainer.json": 0} == {**state_of(plain), "trainer.json": 0}
    stalls = {line["step"]: line["save_stall_s"] for line in read_history(run.path / "history.jsonl") if "save_stall_s" in line}
    assert list(stalls) == [3, 5] and result.save_stall_s >= max(stalls.values()) - 1e-4 and max(stalls.values()) > 0  # logged to 0.1 ms


# The watchdog.


class Board:
    """A store that two watchdogs of one process share."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)


def watched(monkeypatch, timeout, silent, act):
    """The messages of two ranks' watchdogs while `act(rank 0's, rank 1's)` goes on."""
    monkeypatch.setattr("align.train._watchdog.BEAT_S", 0.02)
    board, messages, ended = Board(), [], threading.Event()

    def end(message):
        messages.append(message)
        ended.set()

    dogs = [Watchdog(Ranks(rank, 2), timeout, store=board, silent=silent, end=end) for rank in range(2)]
    with dogs[0], dogs[1]:
        act(*dogs)
        ended.wait(5)
    return messages


def test_the_watchdog_names_the_rank_that_is_silent(monkeypatch):
    def act(first, second):
        for step in range(3):
            first.progress(f"step {step + 1}")
            second.progress(f"step {step + 1}")
            time.sleep(0.05)
        second._stop.set()  # as a stopped process: its thread says nothing more

    (message, *_) = watched(monkeypatch, 60.0, 0.3, act)
    assert message.startswith("rank 1 has not been heard of for") and "it was at step 3, rank 0 is at step 3" in message


def test_the_watchdog_names_the_rank_that_stopped_as_it_began(monkeypatch):
    monkeypatch.setattr("align.train._watchdog.BEAT_S", 0.02)
    board, messages, ended = Board(), [], threading.Event()
    first = Watchdog(Ranks(0, 2), 60.0, store=board, silent=0.3, end=lambda message: messages.append(message) or ended.set())
    second = Watchdog(Ranks(1, 2), 60.0, store=board)
    second._watch = lambda: None  # its thread never speaks
    with second, first:
        first.progress("step 1")
        assert ended.wait(5)
    assert messages[0].startswith("rank 1 has not been heard of for") and "it was at the start, rank 0 is at step 1" in messages[0]


def test_the_watchdog_names_the_rank_that_is_behind(monkeypatch):
    def act(first, second):
        for step in range(3):
            first.progress(f"step {step + 1}")
        second.progress("step 1")

    (message, *_) = watched(monkeypatch, 0.3, 60.0, act)
    assert "no rank made progress" in message and "train.hang_timeout 0.3" in message and "the others wait for rank 1 at step 1" in message


def test_the_watchdog_is_content_while_something_moves(monkeypatch):
    monkeypatch.setattr("align.train._watchdog.BEAT_S", 0.02)
    signs, messages = itertools.count(), []
    with Watchdog(Ranks(), 0.3, end=messages.append, signs=lambda: next(signs)):
        time.sleep(0.8)  # nothing is told, but a file is touched
    assert messages == []
    with Watchdog(Ranks(), None, end=messages.append) as dog:
        assert dog._thread is None


def test_a_run_that_stands_still_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("align.train._watchdog.BEAT_S", 0.02)
    messages = []
    monkeypatch.setattr("align.train._watchdog._end", messages.append)
    made(tmp_path, at={3: lambda loss: time.sleep(1.0) or loss}, train__hang_timeout=0.4)[0].fit()
    assert (messages and "micro-batch 2 of step 1" in messages[0]) or "step 1" in messages[0]
    assert len(documents().examples) == 8 and STEPS == 5
