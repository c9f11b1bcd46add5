"""Every op on a CUDA device: against float64 at the shapes of real models, and what strict mode promises, bit by bit."""

import kernels_cases
import pytest
import requires
import torch

from align import kernels

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def device():
    requires.gpu(torch.cuda.is_available())
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", kernels_cases.CASES)
def test_against_float64(name, dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    kernels_cases.CASES[name]("cuda", dtype, True)


def draw(generator, low, high):
    return int(torch.randint(low, high + 1, (), generator=generator))


def test_strict_linear_is_the_same_bits_in_1000_random_batches():
    generator = torch.Generator().manual_seed(1)
    for outputs, size in ((6144, 4096), (4096, 14336), (3072, 2048)):
        weight = kernels_cases.rand(outputs, size, seed=2, device="cuda", dtype=torch.bfloat16, scale=size**-0.5)
        x = kernels_cases.rand(8192, size, seed=3, device="cuda", dtype=torch.bfloat16)
        whole = kernels.invariant_linear(x, weight)
        for case in range(334):
            rows = draw(generator, 1, 8192) if case % 4 == 0 else draw(generator, 1, 300)
            start = draw(generator, 0, 8192 - rows)
            assert torch.equal(kernels.invariant_linear(x[start : start + rows], weight), whole[start : start + rows]), (rows, start)


def test_strict_attention_is_the_same_bits_in_1000_random_cases():
    """A token of a packed row, the same document alone, and the token against a cache, paged or not."""
    generator = torch.Generator().manual_seed(1)
    for case in range(250):
        heads, kv_heads, dim = ((32, 8, 128), (14, 2, 64))[case % 2]
        window = (None, None, 100)[case % 3]
        lengths = [draw(generator, 1, 700) for _ in range(draw(generator, 1, 5))]
        total, ends = sum(lengths), [0]
        for length in lengths:
            ends.append(ends[-1] + length)
        cu_seqlens = torch.tensor(ends, dtype=torch.int32, device="cuda")
        q, k, v = (
            kernels_cases.rand(total, n, dim, seed=case * 3 + i, device="cuda", dtype=torch.bfloat16)
            for i, n in enumerate((heads, kv_heads, kv_heads))
        )
        packed = kernels.invariant_attention(q, k, v, cu_seqlens, max(lengths), window=window)
        for _ in range(4):
            a, b = ends[(one := draw(generator, 0, len(lengths) - 1))], ends[one + 1]
            position = draw(generator, 0, b - a - 1)
            alone = kernels.invariant_attention(
                q[a : a + position + 1], k[a : a + position + 1], v[a : a + position + 1], cu_seqlens.new_tensor([0, position + 1]),
                position + 1, window=window,
            )  # fmt: skip
            assert torch.equal(alone, packed[a : a + position + 1]), (case, a, position)
            rows = draw(generator, 1, 64)
            length = cu_seqlens.new_full((rows,), position + 1)
            row = draw(generator, 0, rows - 1)
            queries = torch.randn(rows, heads, dim, device="cuda").bfloat16()
            queries[row] = q[a + position]
            table = torch.zeros(rows, 1, dtype=torch.int32, device="cuda")
            cached = kernels.invariant_decode(queries, k[None, a:b], v[None, a:b], length, table, window=window)
            assert torch.equal(cached[row], packed[a + position]), (case, a, position, rows)


def test_weight_gradients_are_the_same_bits_every_time():
    x, residual = (kernels_cases.rand(5000, 2048, seed=i, device="cuda", dtype=torch.bfloat16) for i in (1, 2))
    weight = kernels_cases.rand(2048, seed=3, device="cuda", dtype=torch.bfloat16)
    head, targets = kernels_cases.rand(32768, 2048, seed=4, device="cuda", dtype=torch.bfloat16), torch.arange(5000, device="cuda")

    def gradients():
        leaves = [t.detach().requires_grad_() for t in (x, residual, weight, head)]
        loss = kernels.linear_cross_entropy(kernels.add_rms_norm(*leaves[:3])[0], leaves[3], targets)
        return torch.autograd.grad(loss, leaves)

    first = gradients()
    assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(gradients(), first, strict=True))


def test_a_decoding_step_can_be_captured():
    q = kernels_cases.rand(4, 8, 64, seed=1, device="cuda", dtype=torch.bfloat16)
    k, v = (kernels_cases.rand(4, 256, 2, 64, seed=i, device="cuda", dtype=torch.bfloat16) for i in (2, 3))
    lengths, weight = torch.tensor([256, 100, 3, 0], dtype=torch.int32, device="cuda"), torch.randn(1000, 512, device="cuda").bfloat16()
    rows = lambda value, dtype=torch.float32: torch.full((4,), value, dtype=dtype, device="cuda")  # noqa: E731
    keys, positions = torch.arange(4, device="cuda"), torch.arange(4, device="cuda")

    def step():
        hidden = kernels.decode_attention(q, k, v, lengths).flatten(1)
        return kernels.sample(kernels.gemv(hidden, weight), keys, positions, rows(1.0), rows(50, torch.int32), rows(0.9), rows(0.0))[0]

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    lengths.copy_(torch.tensor([200, 7, 256, 1]))
    graph.replay()
    assert torch.equal(captured, step())
    lengths.copy_(torch.tensor([256, 100, 3, 0]))
    graph.replay()
    assert torch.equal(captured, expected)
