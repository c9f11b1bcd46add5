"""Configuration, schedules and optimizers, against formulas and torch's own AdamW."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from align.config import load
from align.optim8bit import AdamW8bit
from align.train import AdamW, OptimizerConfig, ScheduleConfig, TrainerConfig, TrainError, learning_rate, make_optimizer
from align.train._config import validate
from align.train._optimizers import apply_gradients

NAMES = ["constant", "linear", "cosine", "wsd"]


# Schedules.


def rates(steps, lr=1.0, **fields):
    return [learning_rate(ScheduleConfig(**fields), lr, step, steps) for step in range(steps)]


def test_constant():
    assert rates(3, lr=0.5, name="constant") == [0.5] * 3


def test_warmup_begins_above_zero_and_ends_at_the_peak():
    assert rates(6, name="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear():
    assert rates(5, name="linear", min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_is_half_a_period_with_a_floor():
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(5)]
    assert rates(5, name="cosine", min_lr_ratio=0.1) == pytest.approx(expected)


def test_wsd_phases_add_up_to_the_run():
    assert rates(8, name="wsd", warmup_steps=2, decay_steps=4, min_lr_ratio=0.2) == pytest.approx([0.5, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert rates(10, name="wsd", min_lr_ratio=0.0) == pytest.approx([1.0] * 8 + [0.5, 0.0])  # a fifth by default
    assert rates(3, name="wsd", decay_steps=0) == [1.0] * 3


@given(st.sampled_from(NAMES), st.integers(1, 60), st.integers(0, 60), st.floats(0, 1), st.none() | st.integers(0, 60))
def test_every_schedule(name, steps, warmup, ratio, decay):
    decay = decay if name == "wsd" else None
    warmup = min(warmup, steps - (decay or 0))
    if warmup < 0:
        return
    schedule = ScheduleConfig(name=name, warmup_steps=warmup, min_lr_ratio=ratio, decay_steps=decay)
    validate(TrainerConfig(schedule=schedule, train=dataclasses.replace(TrainerConfig().train, max_steps=steps)))
    values = [learning_rate(schedule, 1.0, step, steps) for step in range(steps + 3)]
    assert all(a < b for a, b in itertools.pairwise(values[:warmup]))
    assert all(a >= b for a, b in itertools.pairwise(values[warmup:]))
    assert values[0] > 0 or ratio == 0
    if warmup:
        assert values[warmup - 1] == 1.0
    assert all(ratio <= value <= 1 for value in values[warmup:])
    phases = steps - warmup if name in ("linear", "cosine") else decay if decay is not None else min(steps // 5, steps - warmup)
    if name != "constant" and phases > 1:
        assert values[steps - 1 :] == [ratio] * 4


# Configuration.


@pytest.mark.parametrize(
    "override, message",
    [
        ("train.max_steps=0", r"train\.max_steps is 0"),
        ("train.micro_batch=0", r"train\.micro_batch is 0"),
        ("train.max_hours=0.0", r"train\.max_hours is 0\.0"),
        ("checkpoint.keep=0", r"checkpoint\.keep is 0"),
        ("optimizer.lr=0.0", r"optimizer\.lr is 0\.0"),
        ("optimizer.lr=nan", r"optimizer\.lr is nan"),
        ("optimizer.max_grad_norm=0.0", r"optimizer\.max_grad_norm is 0\.0; it must be above 0, or none"),
        ("optimizer.betas=[0.9, 1.0]", r"optimizer\.betas is \(0\.9, 1\.0\)"),
        ("schedule.min_lr_ratio=1.5", r"schedule\.min_lr_ratio is 1\.5"),
        ("schedule.warmup_steps=101", r"warmup_steps 101 .* more than train\.max_steps 100"),
        ("schedule.decay_steps=5", r"only wsd has a decay phase; schedule\.name is cosine"),
        ("eval.every=-1", r"eval\.every is -1"),
    ],
)
def test_impossible_values_are_named(override, message):
    with pytest.raises(TrainError, match=message) as caught:
        validate(load(TrainerConfig, overrides=[override]))
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


def test_a_seed_beyond_64_bits_is_named():
    """align.config reads none; a caller from Python can make one."""
    with pytest.raises(TrainError, match="seed is 9223372036854775808; it must be an integer of 64 bits"):
        validate(TrainerConfig(seed=2**63))


def test_the_default_is_valid_and_every_field_has_a_docstring():
    validate(TrainerConfig())
    for section in dataclasses.fields(TrainerConfig):
        if section.name != "seed":
            for field in dataclasses.fields(type(getattr(TrainerConfig(), section.name))):
                assert field.type.__metadata__[0], field.name


# Optimizers.


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"matrix": (64, 64), "norm": (64,), "small": (3, 5)}
    return [(name, torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))) for name, shape in shapes.items()]


def give_gradients(named, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in named:
        parameter.grad = (scale * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)


def test_make_optimizer_makes_adamw8bit_by_default_and_decay_skips_vectors():
    named = parameters()
    named.append(("frozen", torch.nn.Parameter(torch.ones(2), requires_grad=False)))
    optimizer = make_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.5, betas=(0.8, 0.9), eps=1e-6, max_grad_norm=2.0), named, seed=3)
    assert isinstance(optimizer, AdamW8bit) and optimizer.max_grad_norm == 2.0 and optimizer.seed == 3
    assert [(group["param_names"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (["matrix", "small"], 0.5),
        (["norm"], 0.0),
    ]
    assert all((group["lr"], tuple(group["betas"]), group["eps"]) == (0.1, (0.8, 0.9), 1e-6) for group in optimizer.param_groups)
    assert isinstance(make_optimizer(OptimizerConfig(name="adamw"), named), AdamW)
    assert len(make_optimizer(OptimizerConfig(name="adamw"), named[1:2]).param_groups) == 1


@pytest.mark.parametrize("max_grad_norm", [None, 1.0, 1e9])
def test_adamw_in_fp32_is_that_of_torch(max_grad_norm):
    ours, theirs = parameters(), parameters()
    config = OptimizerConfig(name="adamw", lr=0.01, weight_decay=0.3, eps=1e-3, max_grad_norm=max_grad_norm)
    optimizer = make_optimizer(config, ours)
    reference = torch.optim.AdamW(
        [
            {"params": [theirs[0][1], theirs[2][1]], "weight_decay": 0.3},
            {"params": [theirs[1][1]], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
        eps=1e-3,
    )
    for step in range(5):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        norm, applied = apply_gradients(optimizer, max_grad_norm)
        expected = torch.nn.utils.clip_grad_norm_([parameter for _, parameter in theirs], max_grad_norm or math.inf)
        reference.step()
        assert applied and norm == pytest.approx(expected.item())
        for (_, a), (_, b) in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


def test_adamw_on_bf16_adds_up_what_bf16_would_lose():
    # 100 steps of 6e-4 at 1.0, where half an ulp of bf16 is 3.9e-3 upwards and 2e-3 downwards (case R045).
    weight = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    optimizer = make_optimizer(OptimizerConfig(name="adamw", lr=6e-4, weight_decay=0.0, eps=1e-12), [("weight", weight)])
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.dtype == torch.bfloat16
    torch.testing.assert_close(weight.float(), torch.full((8, 8), 0.94), rtol=0, atol=2e-3)
    state = optimizer.state_dict()["state"][0]
    assert {key: value.dtype for key, value in state.items()} == dict.fromkeys(("step", "exp_avg", "exp_avg_sq", "master"), torch.float32)
    torch.testing.assert_close(state["master"], torch.full((8, 8), 0.94), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", [0, 3])
def test_adamw_state_survives_bit_for_bit(dtype, before):
    whole, first, second = parameters(dtype), parameters(dtype), parameters(dtype, seed=9)
    make = lambda named: make_optimizer(OptimizerConfig(name="adamw", lr=0.01), named)  # noqa: E731
    uninterrupted, stopped, resumed = make(whole), make(first), make(second)
    for step in range(before):
        for named, optimizer in ((whole, uninterrupted), (first, stopped)):
            give_gradients(named, step)
            optimizer.step()
    with torch.no_grad():
        for (_, target), (_, source) in zip(second, first, strict=True):
            target.copy_(source)
    resumed.load_state_dict(stopped.state_dict())
    for step in range(before, before + 3):
        for named, optimizer in ((whole, uninterrupted), (second, resumed)):
            give_gradients(named, step)
            optimizer.step()
    for (_, a), (_, b) in zip(whole, second, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(uninterrupted.state_dict()["state"].values(), resumed.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_adamw_takes_the_rate_of_its_groups_and_no_closure():
    named = parameters()
    optimizer = make_optimizer(OptimizerConfig(name="adamw", lr=1.0, weight_decay=0.0), named)
    before = named[0][1].detach().clone()
    give_gradients(named, 0)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    optimizer.step()
    assert (named[0][1] - before).abs().max().item() == pytest.approx(1e-3, rel=1e-3)  # Adam's first step is lr · sign(g)
    with pytest.raises(ValueError, match="no closure"):
        optimizer.step(lambda: 0.0)


@pytest.mark.parametrize("name", ["adamw8bit", "adamw"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(name, poison):
    named = parameters()
    optimizer = make_optimizer(OptimizerConfig(name=name, lr=0.1, weight_decay=0.5), named)
    give_gradients(named, 0)
    assert apply_gradients(optimizer, 1.0)[1]
    before = [parameter.detach().clone() for _, parameter in named]
    give_gradients(named, 1)
    named[2][1].grad[0, 0] = poison
    norm, applied = apply_gradients(optimizer, 1.0)
    assert not applied and not math.isfinite(norm)
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, named, strict=True))


@pytest.mark.parametrize("name", ["adamw8bit", "adamw"])
def test_the_norm_is_that_before_clipping_and_clipping_bounds_the_step(name):
    def moved(max_grad_norm):
        named = parameters()
        optimizer = make_optimizer(OptimizerConfig(name=name, lr=0.1, weight_decay=0.0, eps=1.0, max_grad_norm=max_grad_norm), named)
        before = [parameter.detach().clone() for _, parameter in named]
        give_gradients(named, 0, scale=10.0)
        expected = torch.cat([parameter.grad.flatten() for _, parameter in named]).norm().item()
        norm, _ = apply_gradients(optimizer, max_grad_norm)
        assert norm == pytest.approx(expected, rel=1e-5)
        return max((a - b).abs().max().item() for a, (_, b) in zip(before, named, strict=True))

    # With eps 1 Adam's first step is lr · g / (|g| + 1): nearly lr for large gradients, small for clipped ones.
    assert moved(None) > 0.09 and moved(1.0) < 0.01
