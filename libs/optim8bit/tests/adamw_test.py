"""The torch backend against a float64 step, torch's AdamW and arithmetic; noise, clipping, skipping, state."""

import copy
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.optim8bit import AdamW8bit, NonFiniteGradient, OptimizerError, _noise, _torch_backend, block_for, merge_state_dicts, quant


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def parameter(*shape, seed=0, dtype=torch.float32, scale=0.02) -> torch.nn.Parameter:
    return torch.nn.Parameter((torch.randn(shape, generator=generator(seed)) * scale).to(dtype))


def gradient(p: torch.Tensor, seed: int, spread: float = 3.0) -> torch.Tensor:
    """Log-normal magnitudes, so that codes of all decades occur."""
    noise = torch.randn(2, *p.shape, generator=generator(seed))
    return (noise[0] * 1e-3 * torch.exp(noise[1] * spread)).to(p.dtype)


def nearest_codes(x: torch.Tensor, signed: bool) -> torch.Tensor:
    """Exact nearest code in float64 by magnitude, ties inward; written apart from the library."""
    table = quant.dynamic_map(signed).double()
    magnitudes = table[127:] if signed else table
    code = torch.searchsorted((magnitudes[1:] + magnitudes[:-1]) / 2, x.abs())
    if not signed:
        return code
    return torch.where(x < 0, 127 - code.clamp(max=127), 127 + code)


class Float64AdamW:
    """One 8-bit AdamW parameter in float64 with the exact map: the specification."""

    def __init__(self, p, block, lr, betas, eps, weight_decay):
        self.p, self.block, self.lr, self.betas, self.eps, self.wd = p.detach().double(), block, lr, betas, eps, weight_decay
        self.m = torch.zeros(p.numel() // block, block, dtype=torch.float64)
        self.v, self.t = self.m.clone(), 0

    def step(self, grad, round_to):
        (b1, b2), g = self.betas, grad.double().view(-1, self.block)
        self.t += 1
        m, v = b1 * self.m + (1 - b1) * g, b2 * self.v + (1 - b2) * g * g
        update = (m / (1 - b1**self.t)) / ((v / (1 - b2**self.t)).sqrt() + self.eps)
        self.p = (self.p * (1 - self.lr * self.wd) - self.lr * update.view(self.p.shape)).float().to(round_to).double()
        absmax_m, absmax_v = m.abs().amax(1, keepdim=True), v.amax(1, keepdim=True)
        self.m_codes, self.v_codes = nearest_codes(m / absmax_m, True), nearest_codes(v / absmax_v, False)
        self.m = quant.dynamic_map(True).double()[self.m_codes] * absmax_m
        self.v = quant.dynamic_map(False).double()[self.v_codes] * absmax_v


@pytest.mark.parametrize(("dtype", "block"), [(torch.float32, 2048), (torch.bfloat16, 256)])
def test_codes_equal_a_float64_step(dtype, block):
    """Of 2 x 2 x 98,304 codes a step at most 0.02 % differ, none by more than one."""
    hyper = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    p = parameter(48, 2048, dtype=dtype)
    optimizer = AdamW8bit([("w", p)], block_size=block, stochastic_rounding=False, **hyper)
    reference = Float64AdamW(p, block, **hyper)
    for step in range(4):
        p.grad = gradient(p, step)
        optimizer.step()
        reference.step(p.grad, dtype)
        state = optimizer.state_dict()["state"]["w"]
        for key, exact in (("m_codes", reference.m_codes), ("v_codes", reference.v_codes)):
            gap = (state[key].view(-1, block).long() - exact).abs()
            assert gap.max() <= 1 and (gap > 0).double().mean() <= 2e-4, (step, key)
        error = (p.detach().double() - reference.p).abs() / (1e-2 + reference.p.abs())
        assert (error > (1e-5 if dtype == torch.float32 else 0)).double().mean() <= 1e-3  # where a code differed a step ago


@pytest.mark.parametrize("eps", [1e-8, 1e-3])
def test_fp32_states_equal_torch_adamw(eps):
    """1-D and small parameters: torch's AdamW (its kernel, without the import of torch.optim.AdamW) to rounding over 20 steps."""
    shapes = [(7,), (33, 3), (), (4096,), (5, 0)]
    hyper = {"lr": 1e-2, "eps": eps, "weight_decay": 0.3}
    ours = [parameter(*s, seed=i) for i, s in enumerate(shapes)]
    theirs = [p.detach().clone() for p in ours]
    ms, vs = ([torch.zeros_like(p) for p in theirs] for _ in range(2))
    steps = [torch.zeros(()) for _ in theirs]
    optimizer = AdamW8bit(ours, betas=(0.8, 0.99), **hyper)
    for step in range(20):
        for i, p in enumerate(ours):
            p.grad = gradient(p, 100 * step + i, spread=1.0)
        optimizer.step()
        torch._foreach_add_(steps, 1)
        grads = [p.grad.clone() for p in ours]
        torch._fused_adamw_(theirs, grads, ms, vs, [], steps, beta1=0.8, beta2=0.99, amsgrad=False, maximize=False, **hyper)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, rtol=1e-6, atol=2e-7)


def test_groups_have_their_own_hyperparameters_and_may_change_them():
    def make():
        return [parameter(64, 64, seed=i) for i in range(3)]

    hypers = [{"lr": 1e-2, "weight_decay": 0.5}, {"lr": 1e-3, "betas": (0.5, 0.9)}, {"eps": 1e-4}]
    together, apart = make(), make()
    one = AdamW8bit([{"params": [(f"p{i}", p)], **h} for i, (p, h) in enumerate(zip(together, hypers, strict=True))], seed=3)
    many = [AdamW8bit([(f"p{i}", p)], seed=3, **h) for i, (p, h) in enumerate(zip(apart, hypers, strict=True))]
    for step in range(4):
        for i, (a, b) in enumerate(zip(together, apart, strict=True)):
            a.grad = gradient(a, 10 * step + i)
            b.grad = a.grad.clone()
        one.param_groups[1]["lr"] = many[1].param_groups[0]["lr"] = 1e-3 / (step + 1)
        one.step()
        for optimizer in many:
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


def test_zero_grad_and_no_gradients():
    p = parameter(64, 64)
    optimizer = AdamW8bit([p], weight_decay=0.5)
    p.grad = gradient(p, 0)
    optimizer.zero_grad()
    before = p.detach().clone()
    assert p.grad is None and optimizer.step() == 0.0 and torch.equal(p.detach(), before)
    p.grad = gradient(p, 0)
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(p.grad, torch.zeros_like(p))


def test_weight_decay_alone_is_decoupled():
    """Zero gradients: p shrinks by (1 - lr wd) a step, whatever the moments."""
    p = parameter(64, 64)
    expected = p.detach().clone()
    optimizer = AdamW8bit([p], lr=0.25, weight_decay=0.5)
    for _ in range(3):
        p.grad = torch.zeros_like(p)
        optimizer.step()
        assert torch.equal(p.detach(), expected.mul_(0.875))


def test_closure_and_reported_norm():
    p = torch.nn.Parameter(torch.tensor([3.0, -4.0]))
    optimizer = AdamW8bit([p])

    def closure():
        loss = (p * p).sum() / 2
        loss.backward()
        return loss

    assert optimizer.step(closure) == 5.0


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_inside_the_step_equals_clipping_before_it(max_norm):
    shapes = [(64, 128), (100,), (3, 70)]
    ours, theirs = ([parameter(*s, seed=i) for i, s in enumerate(shapes)] for _ in range(2))
    one, two = AdamW8bit(ours, max_grad_norm=max_norm), AdamW8bit(theirs)
    for step in range(3):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            a.grad = gradient(a, 10 * step + i)
            b.grad = a.grad.clone()
        norm = one.step()
        exact = math.sqrt(sum(b.grad.double().square().sum().item() for b in theirs))
        assert norm == pytest.approx(exact, rel=1e-12) and (norm > 0.1)
        if max_norm < 1:
            for b in theirs:
                b.grad.mul_(max_norm / (norm + 1e-6))
        two.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_non_finite_gradient_changes_nothing_and_is_counted(bad):
    ps = [parameter(64, 64, seed=1), parameter(7, seed=2)]
    optimizer = AdamW8bit([("w", ps[0]), ("b", ps[1])], weight_decay=0.1, max_grad_norm=1.0)
    for p in ps:
        p.grad = gradient(p, 0)
    optimizer.step()
    before, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in ps]
    ps[1].grad[3] = bad
    assert not optimizer.step() < 1e18
    assert optimizer.skipped == 1
    assert all(torch.equal(p, w) for p, w in zip(ps, weights, strict=True))
    after = optimizer.state_dict()
    assert_same_state(before, after, ignore_settings=True)
    optimizer.on_nonfinite = "raise"
    with pytest.raises(NonFiniteGradient, match="norm is"):
        optimizer.step()
    assert optimizer.skipped == 1


def test_the_raised_error_names_parameters():
    p = parameter(64, 64)
    p.grad = torch.full_like(p, float("nan"))
    with pytest.raises(NonFiniteGradient, match=r"on this rank: layers\.0\.w"):
        AdamW8bit([("layers.0.w", p)], on_nonfinite="raise").step()


def test_a_parameter_without_gradient_keeps_its_step_count():
    """Its bias correction starts when its own gradients do."""
    a, b, alone = parameter(64, 64, seed=1), parameter(64, 64, seed=2), parameter(64, 64, seed=2)
    both, single = AdamW8bit([("a", a), ("b", b)], lr=0.1), AdamW8bit([("b", alone)], lr=0.1)
    a.grad = gradient(a, 0)
    both.step()
    for step in range(1, 3):
        a.grad, b.grad = gradient(a, step), gradient(b, step + 10)
        alone.grad = b.grad.clone()
        both.step()
        single.step()
    assert torch.equal(b, alone)
    state = both.state_dict()["state"]
    assert (state["a"]["step"], state["b"]["step"]) == (3, 2)


def assert_same_state(one, two, ignore_settings=False):
    assert one["param_groups"] == two["param_groups"]
    assert ignore_settings or one["settings"] == two["settings"]
    assert one["state"].keys() == two["state"].keys()
    for name, entry in one["state"].items():
        for key, value in entry.items():
            same = torch.equal(value, two["state"][name][key]) if isinstance(value, torch.Tensor) else value == two["state"][name][key]
            assert same, (name, key)


SHAPES = {"wide": (8, 2048), "narrow": (100, 64), "odd": (70, 65), "cube": (4, 16, 96), "bias": (33,), "scalar": ()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_at_any_step_is_bit_exact(dtype):
    """State and parameters after 5 steps are the same bits with a stop after any of them; JSON carries all but the tensors."""

    def make():
        ps = {name: parameter(*shape, seed=i, dtype=dtype) for i, (name, shape) in enumerate(SHAPES.items())}
        return ps, AdamW8bit(ps.items(), lr=1e-2, weight_decay=0.1, max_grad_norm=1.0, seed=7)

    def advance(ps, optimizer, steps):
        for step in steps:
            for i, p in enumerate(ps.values()):
                p.grad = gradient(p, 100 * step + i, 1.0)
            optimizer.step()

    whole, reference = make()
    advance(whole, reference, range(5))
    for stop in range(5):
        first, optimizer = make()
        advance(first, optimizer, range(stop))
        saved = copy.deepcopy(optimizer.state_dict())
        entries = saved["state"]
        keys = [(n, k) for n, entry in entries.items() for k, v in entry.items() if isinstance(v, torch.Tensor)]
        tensors = {(n, k): entries[n].pop(k) for n, k in keys}
        saved = json.loads(json.dumps(saved))
        for (n, k), tensor in tensors.items():
            saved["state"][n][k] = tensor
        second, resumed = make()
        resumed.seed = 0  # the state's wins
        for a, b in zip(second.values(), first.values(), strict=True):
            a.data.copy_(b.data)
        resumed.load_state_dict(saved)
        advance(second, resumed, range(stop, 5))
        assert all(torch.equal(a, b) for a, b in zip(second.values(), whole.values(), strict=True))
        assert_same_state(resumed.state_dict(), reference.state_dict())


def test_state_of_rows_loads_where_rows_are_needed_and_merges():
    """Row ranges of a full state are states; merging them in any order, with replicas, gives it back."""
    ps = {name: parameter(*shape, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}
    optimizer = AdamW8bit(ps.items())
    for p in ps.values():
        p.grad = gradient(p, 0)
    optimizer.step()
    full = optimizer.state_dict()

    def rows(start, stop):  # like two ranks' files: 1-D and larger are cut, the scalar is replicated
        part = {**full, "state": {}}
        for name, entry in full["state"].items():
            n = entry["full_shape"][0] if entry["full_shape"] else 1
            a, b = (0, 1) if not entry["full_shape"] else (int(start * n), int(stop * n))
            cut = {k: v[a:b] if isinstance(v, torch.Tensor) and v.ndim else v for k, v in entry.items()}
            part["state"][name] = {**cut, "rows": [a, b]}
        return part

    assert_same_state(merge_state_dicts([rows(0.5, 1), rows(0, 0.25), rows(0.25, 0.5), rows(0, 0.25)]), full)
    assert_same_state(merge_state_dicts([full, rows(0, 0.5)]), full)
    with pytest.raises(OptimizerError, match=r"state of wide: rows 2:8 are in none of the 2 states"):
        merge_state_dicts([rows(0.5, 1), rows(0, 0.25)])
    with pytest.raises(OptimizerError, match=r"state of wide holds rows 4:8, rank needs 0:8"):
        optimizer.load_state_dict(rows(0.5, 1))


def test_states_that_do_not_fit_are_refused_by_name():
    def make(shape=(64, 256), dtype=torch.float32, name="w", **options):
        return AdamW8bit([(name, parameter(*shape, dtype=dtype))], **options)

    saved = make().state_dict()
    for other, message in (
        (make(block_size=128), "state of w has block size 256, this optimizer gives it 128"),
        (make(min_8bit_elems=10**6), r"block size 256, this optimizer gives it 0 \(0 is fp32\)"),
        (make(dtype=torch.bfloat16), "state of w belongs to a float32 parameter, this one is bfloat16"),
        (make(shape=(32, 256)), r"state of w is for shape \[64, 256\], the parameter has \[32, 256\]"),
        (make(name="x"), "lacks parameter x"),
        (AdamW8bit([("w", parameter(64, 256)), ("x", parameter(3))]), "lacks parameter x"),
    ):
        with pytest.raises(OptimizerError, match=message) as caught:
            other.load_state_dict(saved)
        assert caught.value.exit_code == 2
    with pytest.raises(OptimizerError, match="has parameter x, which is not"):
        make().load_state_dict(AdamW8bit([("w", parameter(64, 256)), ("x", parameter(3))]).state_dict())
    broken = copy.deepcopy(saved)
    broken["settings"]["map"] = "0123456789abcdef"
    with pytest.raises(OptimizerError, match="8-bit map 0123456789abcdef"):
        make().load_state_dict(broken)
    broken = copy.deepcopy(saved)
    broken["state"]["w"]["m_codes"] = broken["state"]["w"]["m_codes"].int()
    with pytest.raises(OptimizerError, match=r"m_codes is torch\.int32"):
        make().load_state_dict(broken)
    with pytest.raises(OptimizerError, match="another optimizer"):
        make().load_state_dict(torch.optim.AdamW([parameter(3)]).state_dict())


@pytest.mark.parametrize(
    ("shape", "block"),
    [((8, 4096), 2048), ((8, 14336), 2048), ((8, 7168), 1024), ((8, 11008), 256), ((100, 576), 64), ((100, 96), 0)]
    + [((1 << 20,), 0), ((8, 511), 0), ((63, 64), 0), ((64, 64), 64), ((1, 4096), 2048), ((4, 16, 96), 512), ((), 0), ((0, 64), 0)],
)
def test_block_depends_on_the_full_shape(shape, block):
    assert block_for(shape) == block


def test_bytes_of_state():
    """2 + 8 / block an element in 8 bits, 8 in fp32, nothing else."""
    p, q = parameter(16, 4096), parameter(100)
    optimizer = AdamW8bit([p, q])
    assert optimizer.state_bytes() == 16 * 4096 * (2 + 8 / 2048) + 100 * 8


def test_names():
    def names(params):
        return [n for g in AdamW8bit(params).param_groups for n in g["param_names"]]

    assert names([parameter(2), parameter(3)]) == ["0", "1"]
    assert names([("_orig_mod.layers.0._checkpoint_wrapped_module.w", parameter(2))]) == ["layers.0.w"]
    assert names([{"params": [("a", parameter(2))]}, {"params": parameter(2)}]) == ["a", "1"]
    p = parameter(2)
    for twice in ([("a", p), ("b", p)], [("a", p), ("a", parameter(3))], [{"params": [p]}, {"params": [p]}]):
        with pytest.raises(OptimizerError, match="given twice"):
            AdamW8bit(twice)


def test_bad_parameters_and_settings_are_named():
    for params, options, message in (
        ([("w", parameter(3, dtype=torch.float16))], {}, "w is torch.float16"),
        ([("w", torch.nn.Parameter(torch.zeros(4, 5).t()))], {}, "w is not contiguous"),
        ([("w", torch.nn.Parameter(torch.empty(3, device="meta")))], {}, "w is on the meta device"),
        ([("w", parameter(3) * 2)], {}, "w is not a leaf"),
        ([parameter(3)], {"lr": -1.0}, "lr -1.0"),
        ([parameter(3)], {"betas": (0.9, 1.0)}, r"betas \(0.9, 1.0\)"),
        ([parameter(3)], {"eps": 0.0}, "eps 0.0"),
        ([{"params": [parameter(3)], "weight_decay": -0.1}], {}, "weight_decay -0.1"),
        ([parameter(3)], {"block_size": 1000}, "block_size 1000"),
        ([parameter(3)], {"backend": "cuda"}, "backend 'cuda'"),
        ([parameter(3)], {"max_grad_norm": 0}, "max_grad_norm 0"),
        ([parameter(3)], {"on_nonfinite": "ignore"}, "on_nonfinite 'ignore'"),
    ):
        with pytest.raises(OptimizerError, match=message):
            AdamW8bit(params, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_how_parameters_are_cut_into_runs_does_not_matter(monkeypatch, dtype):
    def run():
        ps = {name: parameter(*shape, seed=i, dtype=dtype) for i, (name, shape) in enumerate(SHAPES.items())}
        optimizer = AdamW8bit(ps.items(), lr=1e-2)
        for step in range(2):
            for i, p in enumerate(ps.values()):
                p.grad = gradient(p, 100 * step + i)
            optimizer.step()
        return ps, optimizer.state_dict()

    whole, state = run()
    for size in (63, 1000, 5000):
        monkeypatch.setattr(_torch_backend, "RUN", size)
        cut, cut_state = run()
        assert all(torch.equal(a, b) for a, b in zip(whole.values(), cut.values(), strict=True))
        assert_same_state(state, cut_state)


# Noise


def mixed(pair: int, key0: int, key1: int) -> int:
    """The mixer in Python integers, apart from the library's."""
    mask = 0xFFFFFFFF
    x = (pair * 0x9E3779B1 + key0) & mask
    x = ((x ^ x >> 16) * 0x7FEB352D + key1) & mask
    x = ((x ^ x >> 15) * 0x846CA68B) & mask
    return x ^ x >> 16


@given(st.integers(0, 2**31 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
@settings(max_examples=50)
def test_mixer_is_the_written_function(pair, key0, key1):
    words = _noise.pair_words(torch.tensor([pair], dtype=torch.int32), _noise.as_int32(key0), _noise.as_int32(key1))
    assert words.item() & 0xFFFFFFFF == mixed(pair, key0, key1)
    assert _noise.noise(words).tolist() == [mixed(pair, key0, key1) & 0xFFFF, mixed(pair, key0, key1) >> 16]


def test_keys_are_frozen():
    """Saved runs resume with the same noise in later versions."""
    assert [hex(w) for w in _noise.name_words("layers.0.attention.wq.weight")] == ["0x8097599d", "0xb90cd636"]
    assert [hex(w) for w in _noise.step_words(1, 1000)] == ["0xf709e583", "0x6de083ed"]


def stream(name="w", seed=0, step=1, n=1 << 17) -> torch.Tensor:
    """n noise values as numbers in [-0.5, 0.5)."""
    keys = [_noise.as_int32(a ^ b) for a, b in zip(_noise.name_words(name), _noise.step_words(seed, step), strict=True)]
    bits = _noise.noise(_noise.pair_words(torch.arange(n // 2, dtype=torch.int32), *keys))
    return (bits.double() + 0.5) / 65536 - 0.5


def test_noise_is_uniform():
    """Mean, variance and each of the 16 bits within 4 sigma of uniform."""
    n = 1 << 17
    for step in range(1, 6):
        x = stream(step=step)
        assert abs(x.mean()) < 4 * (1 / 12 / n) ** 0.5
        assert abs(x.square().mean() - 1 / 12) < 4 * (1 / 180 / n) ** 0.5
        bits = ((x + 0.5) * 65536).long()
        for bit in range(16):
            assert abs(((bits >> bit) & 1).double().mean() - 0.5) < 4 * 0.5 / n**0.5


def test_noise_is_uncorrelated_between_neighbours_steps_parameters_and_seeds():
    n = 1 << 17
    bound = 4 / n**0.5  # of a correlation coefficient
    base = stream()
    pairs = [(base[:-lag], base[lag:]) for lag in (1, 2, 3, 4, 64, 2048)] + [(base[::2], base[1::2])]
    pairs += [(base, stream(step=s)) for s in (2, 3, 17)] + [(base, stream(name=name)) for name in ("v", "w2", "layers.1.w")]
    pairs += [(base, stream(seed=s)) for s in (1, 2)]
    for a, b in pairs:
        assert abs((a * b).mean() * 12) < bound * (n / len(a)) ** 0.5
        assert abs((a.square() - 1 / 12) @ (b.square() - 1 / 12) / len(a) * 180) < bound * (n / len(a)) ** 0.5


@pytest.mark.parametrize("shapes", [[(64, 64)], [(64, 64), (3,), (70, 64)]])
def test_noise_depends_on_name_seed_and_step(shapes):
    """Equal parameters and gradients are rounded alike only under the same name and seed, alone or among others."""

    def rounded(name, seed, steps=1):
        ps = [parameter(*shape, seed=i, dtype=torch.bfloat16) for i, shape in enumerate(shapes)]
        optimizer = AdamW8bit([(f"{name}{i}", p) for i, p in enumerate(ps)], lr=1e-4, seed=seed)
        for _ in range(steps):
            for i, p in enumerate(ps):
                p.data.copy_(parameter(*shapes[i], seed=i, dtype=torch.bfloat16))
                p.grad = gradient(p, i)
            optimizer.step()  # constant gradients: the same update, but for the codes' rounding
        return torch.cat([p.detach().float().flatten() for p in ps])

    base = rounded("w", 0)
    assert torch.equal(base, rounded("w", 0))
    for other in (rounded("v", 0), rounded("w", 1), rounded("w", 0, 2)):
        assert 0.01 < (other != base).double().mean() < 0.6


@given(st.floats(-(2.0**100), 2.0**100, width=32))
def test_rounding_goes_to_a_neighbour_with_the_right_probability(x):
    """Over all 65,536 values of the noise the mean of the results is x itself."""
    value = torch.tensor([x], dtype=torch.float32)
    rounded = _noise.stochastic_bf16(value.expand(65536).contiguous(), torch.arange(65536, dtype=torch.int32)).double()
    assert rounded.unique().numel() <= 2
    assert rounded.mean().item() == pytest.approx(x, rel=1e-9, abs=2.0**-140)


def test_small_updates_of_bf16_move_only_with_stochastic_rounding():
    """w = 1, Adam steps of 6e-4 (half an ulp is 2e-3): the mean moves as in fp32; to nearest it stalls."""
    moved = {}
    for stochastic in (True, False):
        p = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = AdamW8bit([("w", p)], lr=6e-4, stochastic_rounding=stochastic)
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.step()
        moved[stochastic] = 1 - p.detach().double().mean().item()
    assert moved[True] == pytest.approx(0.06, rel=0.05) and moved[False] == 0


def test_the_readmes_example_runs():
    (block,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parent.parent / "README.md").read_text(), re.S)
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=300)
    assert re.fullmatch(r"loss 0\.\d\d, norm 0\.\d+, \d+ bytes of state\n", done.stdout), done.stdout + done.stderr
