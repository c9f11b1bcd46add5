"""Against plain float64 cross-entropy, finite differences, and what masking must not do."""

import doctest
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from align.objectives import chunked_cross_entropy, normalise, sequence_logprobs, sft_loss


def problem(rows=(2, 5), width=6, vocabulary=11, *, dtype=torch.float64, seed=0, trained=0.6):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*rows, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, rows, generator=generator)
    mask = torch.rand(rows, generator=generator) < trained
    return hidden, weight, targets, mask


def plain(hidden, weight, targets, mask):
    """Whole logits, torch's own cross-entropy, float64: (loss, d hidden, d weight)."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    losses = F.cross_entropy((hidden @ weight.t()).flatten(0, -2), targets.flatten(), reduction="none")
    loss = losses[mask.flatten()].sum()
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


@given(st.integers(0, 9), st.integers(1, 9), st.integers(2, 40), st.sampled_from([1, 2, 3, 7, None]), st.integers(0, 2**31))
def test_loss_and_gradients_are_those_of_plain_cross_entropy(rows, width, vocabulary, chunk, seed):
    hidden, weight, targets, mask = problem((rows,), width, vocabulary, seed=seed)
    loss = sft_loss(hidden, weight, targets, mask, chunk=chunk)
    gradients = torch.autograd.grad(loss * 0.5, (hidden, weight))
    expected, *expected_gradients = plain(hidden, weight, targets, mask)
    torch.testing.assert_close(loss.detach(), expected)
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, reference * 0.5)


@pytest.mark.parametrize("chunk", [3, None])
def test_gradcheck(chunk):
    hidden, weight, targets, mask = problem()
    assert torch.autograd.gradcheck(lambda h, w: chunked_cross_entropy(h, w, targets, mask, chunk=chunk), (hidden, weight))
    assert torch.autograd.gradcheck(lambda h, w: chunked_cross_entropy(h, w, targets, chunk=chunk), (hidden, weight))
    assert torch.autograd.gradcheck(lambda h, w: sequence_logprobs(h, w, targets, mask, chunk=chunk), (hidden, weight))
    assert torch.autograd.gradcheck(lambda h, w: sequence_logprobs(h, w, targets, chunk=chunk), (hidden, weight))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("chunk", [5, None])
def test_accuracy_in_low_precision(dtype, tolerance, chunk):
    hidden, weight, targets, mask = problem((4, 60), 32, 100, dtype=dtype)
    expected, *expected_gradients = plain(hidden, weight, targets, mask)
    loss = sft_loss(hidden, weight, targets, mask, chunk=chunk)
    assert loss.dtype == torch.float32
    assert abs(loss.item() / expected.item() - 1) < tolerance
    for gradient, reference in zip(torch.autograd.grad(loss, (hidden, weight)), expected_gradients, strict=True):
        assert gradient.dtype == dtype
        assert (gradient.double() - reference).norm() / reference.norm() < tolerance


def test_uniform_logits_give_the_logarithm_of_the_vocabulary():
    loss = chunked_cross_entropy(torch.zeros(7, 4), torch.randn(50, 4), torch.arange(7))
    assert loss.item() == pytest.approx(7 * 3.912023005428146)  # 7 ln 50


def test_large_logits_do_not_overflow():
    hidden = torch.tensor([[3e4, 0.0]])
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])
    assert chunked_cross_entropy(hidden, weight, torch.tensor([0])).item() == 0.0
    assert chunked_cross_entropy(hidden, weight, torch.tensor([1])).item() == 6e4


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("chunk", [2, None])
def test_masked_positions_change_nothing(poison, chunk):
    hidden, weight, targets, mask = problem(dtype=torch.float32)
    poisoned = hidden.detach().masked_fill(~mask.unsqueeze(-1), poison).requires_grad_()
    ignored = targets.masked_fill(~mask, -100)
    for function in (sft_loss, sequence_logprobs):
        clean = function(hidden, weight, targets, mask, chunk=chunk).sum()
        dirty = function(poisoned, weight, ignored, mask, chunk=chunk).sum()
        assert torch.equal(clean, dirty)
        for a, b in zip(torch.autograd.grad(clean, (hidden, weight)), torch.autograd.grad(dirty, (poisoned, weight)), strict=True):
            assert torch.equal(a, b)
        assert (torch.autograd.grad(function(poisoned, weight, ignored, mask).sum(), poisoned)[0][~mask] == 0).all()


def test_nothing_trained_is_zero_with_zero_gradients():
    hidden, weight, targets, mask = problem()
    nothing = torch.zeros_like(mask)
    loss = sft_loss(hidden, weight, targets, nothing)
    assert loss.item() == 0.0
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(loss, (hidden, weight)))
    assert (sequence_logprobs(hidden, weight, targets, nothing) == 0).all()


def test_sequence_logprobs_are_the_parts_of_the_loss():
    hidden, weight, targets, mask = problem()
    logprobs = sequence_logprobs(hidden, weight, targets, mask, chunk=4)
    expected = torch.log_softmax(hidden @ weight.t(), -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(logprobs, expected.where(mask, 0.0))
    torch.testing.assert_close(-logprobs.sum(), sft_loss(hidden, weight, targets, mask))


def test_no_gradient_is_made_that_nobody_asked_for():
    hidden, weight, targets, mask = problem()
    with torch.no_grad():
        assert not sft_loss(hidden, weight, targets, mask).requires_grad
    loss = sft_loss(hidden, weight.detach(), targets, mask)  # as under LoRA: the head is frozen
    torch.testing.assert_close(torch.autograd.grad(loss, hidden)[0], plain(hidden, weight, targets, mask)[1])


@pytest.mark.parametrize("ways", [1, 2, 4])
def test_the_gradient_does_not_depend_on_how_the_step_is_cut(ways):
    # Lengths 1, 9, 3 and 17: a mean of means would weigh the short rows more (cases R001, R002).
    hidden, weight, targets, _ = problem((4, 17))
    mask = torch.arange(17) < torch.tensor([[1], [9], [3], [17]])
    trained = int(mask.sum())
    expected, *expected_gradients = plain(hidden, weight, targets, mask)
    total = 0.0
    for part in torch.arange(4).chunk(ways):
        loss = normalise(sft_loss(hidden[part], weight, targets[part], mask[part]), trained)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(expected.item() / trained, rel=1e-12)
    torch.testing.assert_close(hidden.grad, expected_gradients[0] / trained)
    torch.testing.assert_close(weight.grad, expected_gradients[1] / trained)


@pytest.mark.parametrize("units", [0, -1, float("nan")])
def test_normalise_refuses_a_step_that_trains_nothing(units):
    with pytest.raises(ValueError, match="must be skipped"):
        normalise(1.0, units)


def test_normalise_takes_numbers_and_tensors():
    assert normalise(6.0, 4) == 1.5
    assert normalise(torch.tensor(6.0), 4).item() == 1.5


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("function", [sft_loss, sequence_logprobs])
def test_the_whole_logits_never_exist(function):
    hidden, weight, targets, mask = problem((64,), 2, 50, trained=1.0)
    with LargestTensor() as seen:
        function(hidden, weight, targets, mask, chunk=4).sum().backward()
    assert seen.elements == 4 * 50


def test_wrong_arguments_are_named():
    hidden, weight, targets, mask = problem()
    with pytest.raises(ValueError, match=r"\(2, 4\)"):
        sft_loss(hidden, weight, targets[:, :4], mask)
    with pytest.raises(ValueError, match=r"torch\.int64"):
        sft_loss(hidden, weight, targets, mask.long())
    with pytest.raises(ValueError, match="chunk is 0"):
        sequence_logprobs(hidden, weight, targets, mask, chunk=0)


def test_small_vocabulary_costs_no_more_than_plain_cross_entropy():
    # The default model: 48 rows of 70 tokens, width 64, about 100 entries; a third of the tokens trained.
    hidden, weight, targets, mask = problem((48, 70), 64, 100, dtype=torch.float32, trained=0.33)

    def whole():
        logits = hidden @ weight.t()
        F.cross_entropy(logits.flatten(0, 1), targets.masked_fill(~mask, -100).flatten(), reduction="sum").backward()

    def chunked():
        sft_loss(hidden, weight, targets, mask).backward()

    def cpu_seconds(function):
        start = time.process_time()
        for _ in range(10):
            function()
        return time.process_time() - start

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cpu_seconds(whole), cpu_seconds(chunked)
        ratios = sorted(cpu_seconds(chunked) / cpu_seconds(whole) for _ in range(5))
    finally:
        torch.set_num_threads(threads)
    print(f"chunked / whole: {ratios[2]:.2f}")
    assert ratios[0] < 1.0


def test_readme():
    assert doctest.testfile(str(Path(__file__).parents[1] / "README.md"), module_relative=False) == (0, 10)
