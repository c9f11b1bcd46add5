"""The torch references against torch and numerical gradients, the ops' errors, and whole graphs under torch.compile, all on the CPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from align import kernels
from align.kernels import KernelError


def leaf(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def test_rms_norm_is_torch_s_and_its_gradient_the_numerical_one():
    x, residual, weight = leaf(3, 5, 8), leaf(3, 5, 8, seed=1), leaf(8, seed=2)
    assert torch.allclose(kernels.rms_norm(x, weight, 1e-3), F.rms_norm(x, (8,), weight, 1e-3), rtol=1e-12)
    normed, total = kernels.add_rms_norm(x, residual, weight)
    assert torch.equal(total, x + residual) and torch.equal(normed, kernels.rms_norm(total, weight))
    assert gradcheck(kernels.rms_norm, (x, weight)) and gradcheck(kernels.add_rms_norm, (x, residual, weight))
    (only,) = torch.autograd.grad(kernels.add_rms_norm(x, residual, weight)[1].sum(), x)
    assert torch.equal(only, torch.ones_like(x))


def test_residual_is_rounded_before_it_is_normed():
    x, residual = torch.full((1, 4), 1.0).bfloat16(), torch.full((1, 4), 2.0**-10).bfloat16()
    _, total = kernels.add_rms_norm(x, residual, torch.ones(4).bfloat16())
    assert torch.equal(total, x)


def test_rope_turns_by_the_angle_of_the_position():
    q, k = leaf(2, 3, 4, 6), leaf(2, 3, 2, 6, seed=1)
    angle = torch.arange(10.0, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1, 0.01])
    position_ids = torch.tensor([[0, 1, 2], [0, 9, 4]])
    tables = angle.cos(), angle.sin()
    turned, _ = kernels.rope(q, k, *tables, position_ids)
    as_complex = lambda x: torch.complex(*x.chunk(2, -1))  # noqa: E731
    expected = as_complex(q) * torch.polar(torch.ones_like(angle), angle)[position_ids][:, :, None]
    assert torch.allclose(as_complex(turned), expected, rtol=1e-12)
    assert torch.equal(turned[:, 0], q[:, 0])  # position 0 is not turned
    assert gradcheck(lambda a, b: kernels.rope(a, b, *tables, position_ids), (q, k))


def test_rope_qkv_cuts_and_turns():
    qkv = leaf(2, 3, 8 * 6)
    tables = torch.randn(10, 3).double(), torch.randn(10, 3).double(), torch.tensor([[0, 1, 2], [0, 9, 4]])
    q, k, v = kernels.rope_qkv(qkv, *tables, heads=4, kv_heads=2)
    parts = qkv.view(2, 3, 8, 6).split((4, 2, 2), 2)
    assert torch.equal(torch.cat((q, k), 2), torch.cat(kernels.rope(*parts[:2], *tables), 2)) and torch.equal(v, parts[2])
    assert gradcheck(lambda x: kernels.rope_qkv(x, *tables, heads=4, kv_heads=2), (qkv,))


def test_swiglu_is_torch_s():
    gate, up = leaf(3, 5, 8), leaf(3, 5, 8, seed=1)
    assert torch.allclose(kernels.swiglu(gate, up), F.silu(gate) * up, rtol=1e-12)
    packed = kernels.swiglu_packed(torch.cat((gate, up), -1))
    assert torch.allclose(packed, kernels.swiglu(gate, up), rtol=1e-14)  # strided halves: some CPUs round them otherwise
    assert gradcheck(kernels.swiglu, (gate, up)) and gradcheck(kernels.swiglu_packed, (torch.cat((gate, up), -1),))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("chunk", [None, 3])
def test_linear_cross_entropy_is_torch_s(smoothing, z_loss, chunk):
    hidden, weight, targets = leaf(2, 5, 8), leaf(11, 8, seed=1), torch.randint(0, 11, (2, 5))
    mask = torch.tensor([[True, False, True, True, False], [False] * 3 + [True] * 2])
    ours = kernels.linear_cross_entropy(
        hidden, weight, torch.where(mask, targets, -100), mask, label_smoothing=smoothing, z_loss=z_loss, chunk=chunk
    )
    logits = (hidden @ weight.t())[mask]
    truth = (
        F.cross_entropy(logits, targets[mask], reduction="sum", label_smoothing=smoothing) + z_loss * logits.logsumexp(-1).square().sum()
    )
    assert torch.allclose(ours, truth, rtol=1e-12)
    for a, b in zip(torch.autograd.grad(ours * 3, (hidden, weight)), torch.autograd.grad(truth * 3, (hidden, weight)), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_linear_logprob_is_log_softmax_and_its_gradient_the_numerical_one():
    hidden, weight, targets, mask = leaf(7, 8), leaf(11, 8, seed=1), torch.randint(0, 11, (7,)), torch.arange(7) % 3 > 0
    ours = kernels.linear_logprob(hidden, weight, targets, mask, chunk=3)
    truth = (hidden @ weight.t()).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    assert torch.allclose(ours, torch.where(mask, truth, 0.0), rtol=1e-12)
    assert gradcheck(lambda h, w: kernels.linear_logprob(h, w, targets, mask, chunk=3), (hidden, weight))
    assert torch.allclose(kernels.linear_logprob(hidden, weight, targets, mask, invariant=True), ours, rtol=1e-12)
    assert torch.allclose(kernels.logprob((hidden @ weight.t()).detach(), targets), truth, rtol=1e-12)


def test_one_gradient_where_one_is_wanted_and_a_second_backward_is_refused():
    hidden, weight, targets = leaf(5, 8), leaf(11, 8, seed=1), torch.randint(0, 11, (5,))
    for wanted, other in ((hidden, weight), (weight, hidden)):
        frozen = other.detach()
        pair = (hidden, frozen) if wanted is hidden else (frozen, weight)
        for op in (kernels.linear_cross_entropy, kernels.linear_logprob):
            both = torch.autograd.grad(op(hidden, weight, targets).sum(), wanted)
            assert torch.equal(torch.autograd.grad(op(*pair, targets).sum(), wanted)[0], both[0])
    loss = kernels.linear_cross_entropy(hidden, weight, targets)
    (loss * 2).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="gave its gradients away"):
        loss.backward()


def test_an_empty_batch_and_a_mask_of_nothing():
    weight = leaf(11, 8)
    for hidden, mask in ((leaf(0, 8), None), (leaf(4, 8), torch.zeros(4, dtype=torch.bool))):
        loss = kernels.linear_cross_entropy(hidden, weight, torch.zeros(len(hidden), dtype=torch.int64), mask)
        loss.backward()
        assert loss == 0 and not weight.grad.any() and not hidden.grad.any()
    assert kernels.rms_norm(leaf(0, 8), leaf(8)).shape == (0, 8)


def test_decode_attention_is_torch_s():
    q, cache, lengths = leaf(3, 6, 4), leaf(2, 3, 10, 2, 4, seed=1), torch.tensor([10, 4, 0])
    with torch.no_grad():
        out = kernels.decode_attention(q, *cache, lengths, window=5)
        for row, length in ((0, 10), (1, 4)):
            keys, values = (c[row, max(0, length - 5) : length].transpose(0, 1)[None] for c in cache)
            assert torch.allclose(out[row], F.scaled_dot_product_attention(q[row, None, :, None], keys, values, enable_gqa=True)[0, :, 0])
        assert not out[2].any()
        table = torch.tensor([[4, 0], [1, 2], [3, 5]], dtype=torch.int32)
        pages = torch.empty(2, 6, 5, 2, 4, dtype=torch.float64)
        pages[:, table.long()] = cache.unflatten(2, (2, 5))
        assert torch.equal(kernels.decode_attention(q, *pages, lengths, table, window=5), out)


def test_invariant_attention_is_torch_s_and_its_gradient_the_numerical_one():
    cu_seqlens = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    q, k, v = leaf(7, 4, 3), leaf(7, 2, 3, seed=1), leaf(7, 2, 3, seed=2)
    out = kernels.invariant_attention(q, k, v, cu_seqlens, 4)
    for a, b in ((0, 3), (3, 7)):
        per_head = [x[None, a:b].transpose(1, 2) for x in (q, k, v)]
        assert torch.allclose(out[a:b], F.scaled_dot_product_attention(*per_head, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    assert gradcheck(lambda *x: kernels.invariant_attention(*x, cu_seqlens, 4, window=2), (q, k, v))
    assert gradcheck(kernels.invariant_linear, (leaf(2, 3, 4), leaf(5, 4, seed=1), leaf(5, seed=2)))


def test_sampled_frequencies_are_the_distribution():
    """Chi-square with 7 degrees of freedom over 20,000 draws; the 99.9th percentile is 24.3."""
    probabilities = torch.tensor([0.4, 0.2, 0.15, 0.1, 0.06, 0.05, 0.03, 0.01])
    count = 20000
    rows = lambda value, dtype: torch.full((count,), value, dtype=dtype)  # noqa: E731
    tokens, own, plain = kernels.sample(
        probabilities.log().expand(count, -1), rows(5, torch.int64), torch.arange(count), rows(1.0, torch.float32),
        rows(0, torch.int32), rows(1.0, torch.float32), rows(0.0, torch.float32),
    )  # fmt: skip
    seen = tokens.bincount(minlength=8).double()
    assert ((seen - count * probabilities).square() / (count * probabilities)).sum() < 24.3
    assert torch.allclose(own, probabilities.log()[tokens], atol=1e-6) and torch.allclose(plain, own)
    order = torch.randperm(count)
    again = kernels.sample(
        probabilities.log().expand(3, -1), rows(5, torch.int64)[:3], order[:3], rows(1.0, torch.float32)[:3],
        rows(0, torch.int32)[:3], rows(1.0, torch.float32)[:3], rows(0.0, torch.float32)[:3],
    )[0]  # fmt: skip
    assert torch.equal(again, tokens[order[:3]])  # whatever it is batched with


def test_filters():
    logits = torch.tensor([[0.5, 0.2, 0.2, 0.06, 0.04]]).log().repeat(400, 1)
    rows = lambda value, dtype=torch.float32: torch.full((400,), value, dtype=dtype)  # noqa: E731

    def kept(top_k=0, top_p=1.0, min_p=0.0, temperature=1.0):
        options = rows(temperature), rows(top_k, torch.int32), rows(top_p), rows(min_p)
        tokens, own, _ = kernels.sample(logits, rows(1, torch.int64), torch.arange(400), *options)
        return sorted(set(tokens.tolist())), own[tokens == 0][0].exp().item()

    assert kept()[0] == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == ([0, 1, 2], pytest.approx(5 / 9))  # equals of the second stay
    assert kept(top_p=0.51) == ([0, 1, 2], pytest.approx(5 / 9))
    assert kept(top_p=0.5) == ([0], pytest.approx(1.0))
    assert kept(min_p=0.11)[0] == [0, 1, 2, 3] and kept(min_p=1.0)[0] == [0]
    assert kept(temperature=0.0) == ([0], 1.0)


def test_gemv_adds_in_fp32():
    x, weight = torch.ones(1, 512).bfloat16(), torch.full((1, 512), 1 + 2.0**-7).bfloat16()
    assert kernels.gemv(x, weight).item() == 516.0  # in bf16 the sum would stop at 256
    assert kernels.gemv(x, weight, torch.full((1, 1), -516.0).bfloat16()).item() == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: kernels.rms_norm(t(2, 3), t(4)), r"x \(2, 3\), weight \(4,\)"),
        (lambda t: kernels.add_rms_norm(t(2, 3), t(2, 3).double(), t(3)), "must be alike"),
        (lambda t: kernels.rope(t(2, 4, 6), t(2, 2, 6), t(2, 3), t(2, 4)), r"expected \(S, Dh / 2\)"),
        (lambda t: kernels.rope(t(2, 4, 6), t(2, 2, 6), t(5, 3), t(5, 3)), "give position_ids"),
        (lambda t: kernels.rope_qkv(t(2, 50), t(2, 3), t(2, 3), heads=4, kv_heads=2), "with 4 heads"),
        (lambda t: kernels.swiglu_packed(t(2, 3)), "must be even"),
        (lambda t: kernels.linear_cross_entropy(t(2, 3), t(5, 3), torch.zeros(2)), "torch.int64"),
        (lambda t: kernels.linear_cross_entropy(t(2, 3), t(5, 3), torch.zeros(2).long(), label_smoothing=1.0), r"in \[0, 1\)"),
        (lambda t: kernels.linear_logprob(t(2, 3), t(5, 3), torch.zeros(2).long(), chunk=0), "at least 1"),
        (lambda t: kernels.gemv(t(17, 3), t(5, 3)), "17 rows; from 1 to 16"),
        (lambda t: kernels.decode_attention(t(2, 3, 4), t(2, 9, 2, 4), t(2, 9, 2, 4), torch.ones(2)), "a multiple of Hkv"),
        (lambda t: kernels.split_linear(t(2, 3), t(4, 5)), r"expected \(B, K\) and contiguous \(N, K\)"),
        (lambda t: kernels.gated_linear(t(2, 3), t(5, 3)), "an even number of rows, gate and up"),
        (lambda t: kernels.sum_rms_norm(t(2, 3, 4), t(3, 5), t(4), 1e-5), r"expected \(parts, B, D\)"),
        (lambda t: kernels.normed_vector(t(2, 3), t(3), t(4, 3), 1e-5), "one row"),
        (lambda t: kernels.residual_vector(t(1, 3), t(4, 3), t(1, 5)), r"expected one row, and \(1, 4\)"),
        (
            lambda t: kernels.rope_to_cache(t(2, 20), t(4, 2), t(4, 2), torch.ones(2), t(3, 2, 1, 4), t(3, 2, 1, 4), t(2, 1), heads=2),
            r"expected contiguous \(N, 16\) for 2 \+ 2 \* 1 heads",
        ),
        (lambda t: kernels.decode_attention(t(2, 4, 4), t(2, 9, 2, 4), t(2, 9, 2, 4), torch.ones(2), window=0), "at least 1"),
        (
            lambda t: kernels.rope_decode_attention(t(2, 16), t(4, 3), t(4, 3), torch.ones(2), *[t(3, 2, 1, 4)] * 2, t(2, 1), heads=2),
            r"expected twice \(positions, 2\)",
        ),
        (lambda t: kernels.invariant_linear(t(2, 3), t(5, 4)), "one dtype"),
        (lambda t: kernels.sample(t(2, 3), *[torch.zeros(2)] * 6), "keys is torch.float32"),
    ],
)
def test_errors_name_the_value_and_what_fits(call, message):
    with pytest.raises(KernelError, match=message) as caught:
        call(torch.zeros)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


def test_chunks_are_powers_of_two_within_the_bound():
    from align.kernels import _linear_loss

    assert [_linear_loss.chunk_rows(size, 2, 0) for size in (32768, 49152, 128256, 100)] == [2048, 1024, 1024, 524288]
    assert _linear_loss.chunk_rows(32768, 2, 7) == 7


@pytest.mark.slow
def test_compiles_to_a_whole_graph_forward_and_backward():
    def block(x, residual, weight, up, tables, targets, head):
        normed, residual = kernels.add_rms_norm(x, residual, weight)
        q, k, v = kernels.rope_qkv(normed @ up, *tables, heads=2, kv_heads=1)
        out = kernels.swiglu_packed(torch.cat((q.flatten(-2), k.flatten(-2), v.flatten(-2)), -1)) + residual
        return kernels.linear_cross_entropy(out, head, targets, targets > 2) + kernels.linear_logprob(out, head, targets).sum()

    x, residual, weight, up, head = leaf(6, 8), leaf(6, 8, seed=1), leaf(8, seed=2), leaf(8, 16, seed=3), leaf(11, 8, seed=4)
    tables, targets = (torch.randn(6, 2).double(), torch.randn(6, 2).double(), None), torch.arange(6)
    plain = block(x, residual, weight, up, tables, targets, head)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)(x, residual, weight, up, tables, targets, head)
    assert torch.allclose(plain, compiled)
    wanted = (x, residual, weight, up, head)
    for a, b in zip(torch.autograd.grad(plain, wanted), torch.autograd.grad(compiled, wanted), strict=True):
        assert torch.allclose(a, b)


@pytest.mark.slow
def test_triton_is_not_imported_before_the_gpu_is_used():
    source = (
        "import sys, torch; before = 'triton' in sys.modules; from align import kernels; "
        "kernels.rms_norm(torch.ones(2, 4), torch.ones(4)); "
        "print(before or 'triton' not in sys.modules, any('kernels._' in m and m.endswith('_kernels') for m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.slow
def test_the_readme_s_example_runs():
    (block,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parent.parent / "README.md").read_text(), re.S)
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=300)
    assert done.stdout == "torch.Size([12, 4, 16]) torch.Size([12, 2, 16]) torch.Size([100, 64]) True\n", done.stdout + done.stderr


@pytest.mark.slow
def test_opcheck():
    """torch's own checks of schema, fake implementation and autograd registration, of every op."""
    tensors = {"x": torch.randn(3, 8), "w": torch.randn(8), "h": torch.randn(4, 8), "head": torch.randn(11, 8), "ids": torch.arange(4)}
    for name in ("x", "w", "h", "head"):
        tensors[name].requires_grad_()
    x, w, h, head, ids = tensors.values()
    ops, tables = torch.ops.align, (torch.randn(3, 2), torch.randn(3, 2), None)
    q, k, cu = torch.randn(3, 2, 4, requires_grad=True), torch.randn(3, 1, 4, requires_grad=True), torch.tensor([0, 3], dtype=torch.int32)
    cases = {
        ops.rms_norm: (x, w, 1e-5),
        ops.add_rms_norm: (x, x.detach() + 1, w, 1e-5),
        ops.rope: (q, k, *tables, False),
        ops.rope_qkv: (torch.randn(3, 16, requires_grad=True), *tables, 2, 1),
        ops.swiglu: (x, x.detach() + 1),
        ops.swiglu_packed: (x,),
        ops.linear_logprob: (h, head, ids, None, 0, False),
        ops.logprob: (h.detach(), ids),
        ops.decode_attention: (
            q.detach(),
            torch.randn(3, 5, 1, 4),
            torch.randn(3, 5, 1, 4),
            cu.new_tensor([5, 1, 0]),
            None,
            0.5,
            0,
            None,
            False,
        ),
        ops.rope_decode_attention: (
            torch.randn(3, 16),
            *tables[:2],
            cu.new_tensor([3, 1, 2]),
            torch.randn(3, 5, 1, 4),
            torch.randn(3, 5, 1, 4),
            cu.new_tensor([[0], [1], [2]]),
            2,
            None,
            0.5,
            0,
            None,
            False,
        ),
        ops.gemv: (h.detach(), head.detach(), None),
        ops.gated_linear: (h.detach(), torch.randn(6, 8)),
        ops.sum_rms_norm: (torch.randn(2, 4, 8), h.detach(), w.detach(), 1e-5, None, False),
        ops.normed_vector: (h.detach()[:1], w.detach(), torch.randn(6, 8), 1e-5, None, True),
        ops.residual_vector: (torch.randn(1, 5), torch.randn(8, 5), h.detach()[:1], None),
        ops.invariant_linear: (h, head, None),
        ops.invariant_attention: (q, k, k.detach() + 1, cu, 3, 0.5, 0),
    }
    for op, arguments in cases.items():
        torch.library.opcheck(op.default, arguments)
    scaled = torch.ones(3)
    torch.library.opcheck(ops.scale_.default, (scaled, torch.tensor(2.0)))
