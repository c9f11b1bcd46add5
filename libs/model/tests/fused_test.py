"""The blocks that a GPU runs, on the CPU through the references of align.kernels, and under Triton's interpreter: the plain blocks' values.

As a script this file is the process with the interpreter, which is chosen when triton is imported.
"""

import os
import subprocess
import sys

import pytest
import torch
from model_cases import CASES, build, input_ids

from align.model import _fused
from align.model._fused import lay_side_by_side, neighbours, projections

WAYS = {
    "plain rows": {},
    "given positions": {"position_ids": torch.arange(3, 43)[None]},
    "packed": {"cu_seqlens": torch.tensor([0, 13, 14, 52, 80], dtype=torch.int32)},
}


@pytest.fixture
def forced(monkeypatch):
    monkeypatch.setattr(_fused, "wanted", lambda model, *_: model.fused)


def results(model, ids, **way):
    """(hidden states, {parameter: gradient}) of a loss that weighs every hidden state differently."""
    for parameter in model.parameters():
        parameter.grad = None
    hidden = model(ids, **way)
    (hidden * torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view(hidden.shape)).sum().backward()
    return hidden.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(one, two, tolerance):
    assert one[1].keys() == two[1].keys()
    for name, a, b in (("hidden", one[0], two[0]), *((name, one[1][name], two[1][name]) for name in one[1])):
        assert (a - b).abs().max() <= tolerance * b.abs().max(), name


def both(name, way, joint, checkpointing="none", tolerance=2e-5):
    model = build(name)
    model.fused = False
    plain = results(model, input_ids(name), **way)
    plain = plain[0], {name: grad.clone() for name, grad in plain[1].items()}
    model.fused, model.checkpointing = True, checkpointing
    if joint:
        lay_side_by_side(model)
    assert_equal(results(model, input_ids(name), **way), plain, tolerance)
    return model


@pytest.mark.parametrize("name", CASES)
def test_every_family_has_the_plain_blocks_values_and_gradients(forced, name):
    model = both(name, {}, joint=True)
    qkv, gate_up = ([neighbours(linears) is not None for linears in group] for group in zip(*map(projections, model.blocks), strict=True))
    assert set(qkv) == {not model.config.qkv_bias} and set(gate_up) == {not model.config.mlp_has_bias}


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_rows(forced, way, joint):
    both("mistral_window", WAYS[way], joint)


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_recomputed_blocks(forced, checkpointing):
    both("mistral", {}, True, checkpointing)


@pytest.mark.slow
def test_a_whole_graph_under_compile(forced):
    """The parts that are compiled, with what a compiler sees of the kernels; the backend is the one that needs no C++."""
    model = build("mistral")
    lay_side_by_side(model)
    plain = results(model, input_ids("mistral"))
    plain = plain[0], {name: grad.clone() for name, grad in plain[1].items()}
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    assert_equal(results(model, input_ids("mistral")), plain, 1e-6)


def test_weights_side_by_side_are_parameters_of_their_own_whose_gradients_are_made_together(forced):
    model = build("mistral")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lay_side_by_side(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    _, grads = results(model, input_ids("mistral"))
    for kind in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        memory = {grads[f"model.layers.1.{name}.weight"].untyped_storage().data_ptr() for name in kind}
        assert len(memory) == 1, "a gradient was copied"
    places = [parameter.data_ptr() for parameter in model.parameters()]
    lay_side_by_side(model)
    assert places == [parameter.data_ptr() for parameter in model.parameters()]
    with torch.no_grad():  # what is written to a parameter is what the joint product reads
        model.blocks[0].self_attn.k_proj.weight.mul_(2)
    changed = model(input_ids("mistral"))
    model.fused = False
    assert (changed - model(input_ids("mistral"))).abs().max() <= 1e-5


def test_weights_that_moved_apart_or_lie_near_by_chance_are_not_joint():
    linears = projections(build("mistral").blocks[0])[0]
    assert neighbours(linears) is None
    for linear, weight in zip(linears, torch.zeros(3, 96, 64).unbind(), strict=True):
        linear.weight = torch.nn.Parameter(weight)
    assert neighbours(linears).shape == (288, 64)
    assert neighbours(linears[::-1]) is None and neighbours(linears[::2]) is None
    linears[1].bias = torch.nn.Parameter(torch.zeros(96))
    assert neighbours(linears) is None


def test_frozen_weights_and_frozen_inputs(forced):
    model = build("mistral")
    lay_side_by_side(model)
    _, whole = results(model, input_ids("mistral"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    _, some = results(model, input_ids("mistral"))
    assert some.keys() == {name for name in whole if "norm" in name}
    assert all(torch.allclose(some[name], whole[name], rtol=1e-5) for name in some)


@pytest.mark.slow
def test_the_kernels_under_the_interpreter(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-W", "ignore", __file__], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    torch.set_num_threads(1)
    _fused.wanted = lambda model, *_: model.fused
    both("mistral_window", WAYS["packed"], joint=True)
    both("qwen3", {}, joint=False)
