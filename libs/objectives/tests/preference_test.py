"""Pair losses against TRL's frozen values, against formulas written out in Python floats, and finite differences."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from align.objectives import bradley_terry_loss, dpo_loss

TRL = json.loads((Path(__file__).parent / "data/trl_dpo.json").read_text())
NAMES = {"sigmoid_norm": ("sigmoid", True)}  # TRL's name: (ours, length_normalised)


def log_sigmoid(x):
    return min(x, 0.0) - math.log1p(math.exp(-abs(x)))


def plain(loss, c, r, rc, rr, nc, nr, *, beta, share, normalised, margin):
    """One pair, in Python floats, from the papers' formulas."""
    if loss == "simpo":
        rc = rr = 0.0
    if normalised or loss in ("ipo", "simpo"):
        delta = (c - rc) / nc - (r - rr) / nr
    else:
        delta = (c - rc) - (r - rr)
    one = {
        "sigmoid": lambda d: -log_sigmoid(beta * d),
        "robust": lambda d: -log_sigmoid(beta * d),
        "hinge": lambda d: max(0.0, 1 - beta * d),
        "ipo": lambda d: (d - 1 / (2 * beta)) ** 2,
        "simpo": lambda d: -log_sigmoid(beta * d - margin),
    }[loss]
    if loss == "robust":
        return ((1 - share) * one(delta) - share * one(-delta)) / (1 - 2 * share)
    return (1 - share) * one(delta) + share * one(-delta)


@pytest.mark.parametrize("case", TRL["cases"], ids=lambda case: f"{case['loss']}-{case['beta']}-{case['label_smoothing']}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_gradient_and_rewards_are_trl_s(case, dtype):
    chosen, rejected = (torch.tensor(TRL[name], dtype=dtype, requires_grad=True) for name in ("chosen", "rejected"))
    loss, normalised = NAMES.get(case["loss"], (case["loss"], False))
    lengths = {name: torch.tensor(TRL[name]) for name in ("chosen_lengths", "rejected_lengths")}
    terms = dpo_loss(
        chosen,
        rejected,
        *(torch.tensor(TRL[name], dtype=dtype) for name in ("reference_chosen", "reference_rejected")),
        beta=case["beta"],
        loss=loss,
        label_smoothing=case["label_smoothing"],
        length_normalised=normalised,
        **(lengths if normalised or loss == "ipo" else {}),
    )
    value = terms.losses.mean()
    assert value.item() == pytest.approx(case["value"], abs=1e-5, rel=2e-7)
    gradient = torch.cat(torch.autograd.grad(value, (chosen, rejected)))
    torch.testing.assert_close(gradient, torch.tensor(case["gradient"], dtype=dtype), rtol=0, atol=1e-5)
    if not normalised and loss != "ipo":  # TRL logs these two without the division
        assert terms.chosen_rewards.mean().item() == pytest.approx(case["rewards_chosen"], abs=1e-5)
        assert terms.rejected_rewards.mean().item() == pytest.approx(case["rewards_rejected"], abs=1e-5)


numbers = st.floats(-30, 0)


@given(
    st.sampled_from(["sigmoid", "ipo", "hinge", "robust", "simpo"]),
    st.lists(st.tuples(numbers, numbers, numbers, numbers, st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=4),
    st.floats(0.01, 3),
    st.sampled_from([0.0, 0.1, 0.4]),
    st.booleans(),
)
def test_every_option_against_the_formula(loss, pairs, beta, share, normalised):
    normalised = normalised and loss not in ("ipo", "simpo")
    margin = 0.7 if loss == "simpo" else 0.0
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True)]
    references = [] if loss == "simpo" else columns[2:4]
    terms = dpo_loss(
        *columns[:2],
        *references,
        beta=beta,
        loss=loss,
        label_smoothing=share,
        chosen_lengths=columns[4],
        rejected_lengths=columns[5],
        length_normalised=normalised,
        margin=margin,
    )
    expected = [plain(loss, *pair, beta=beta, share=share, normalised=normalised, margin=margin) for pair in pairs]
    assert terms.losses.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge", "robust", "simpo"])
def test_gradcheck(loss):
    torch.manual_seed(1)
    chosen, rejected, *references = (-torch.rand(4, dtype=torch.float64) * 5 for _ in range(4))
    lengths = {"chosen_lengths": torch.tensor([1, 2, 3, 4]), "rejected_lengths": torch.tensor([4, 3, 2, 1])}

    def losses(c, r):
        return dpo_loss(c, r, *([] if loss == "simpo" else references), beta=0.3, loss=loss, label_smoothing=0.1, **lengths).losses

    assert torch.autograd.gradcheck(losses, (chosen.requires_grad_(), rejected.requires_grad_()))


def test_policy_equal_to_reference_is_ln_2_and_smoothing_is_not_ignored():
    """R067, R068: at step 0 the loss is ln 2 whatever the smoothing; away from it smoothing changes the loss (cDPO, by hand)."""
    c, r = torch.tensor([-3.0, -40.0], dtype=torch.float64), torch.tensor([-5.0, -2.0], dtype=torch.float64)
    for share in (0.0, 0.1):
        terms = dpo_loss(c, r, c, r, beta=0.1, label_smoothing=share)
        assert terms.losses.tolist() == pytest.approx([math.log(2)] * 2, abs=1e-15)
        assert terms.chosen_rewards.tolist() == terms.rejected_rewards.tolist() == [0.0, 0.0]
    moved = dpo_loss(c + 1, r, c, r, beta=0.1, label_smoothing=0.1).losses[0].item()
    assert moved == pytest.approx(0.9 * math.log1p(math.exp(-0.1)) + 0.1 * math.log1p(math.exp(0.1)), abs=1e-12)
    assert moved != pytest.approx(math.log1p(math.exp(-0.1)), abs=1e-3)


def test_robust_is_unbiased_under_flipped_labels():
    """The mean over labels flipped with probability ε is the loss of the clean label: the defining property of rDPO."""
    c, r, rc, rr = (torch.tensor([x], dtype=torch.float64) for x in (-3.0, -4.5, -3.5, -4.0))
    share = 0.2
    clean = dpo_loss(c, r, rc, rr, beta=0.7).losses
    kept = dpo_loss(c, r, rc, rr, beta=0.7, loss="robust", label_smoothing=share).losses
    flipped = dpo_loss(r, c, rr, rc, beta=0.7, loss="robust", label_smoothing=share).losses
    torch.testing.assert_close((1 - share) * kept + share * flipped, clean)


def test_bradley_terry():
    loss = bradley_terry_loss(torch.tensor([2.0, -1.0]), torch.tensor([0.5, 3.0]), margin=0.25)
    assert loss.tolist() == pytest.approx([math.log1p(math.exp(-1.25)), math.log1p(math.exp(4.25))], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"loss": "kto"}, "sigmoid, ipo"),
        ({"beta": 0.0}, "beta is 0.0"),
        ({"label_smoothing": 0.5}, "0.5"),
        ({"loss": "ipo"}, "chosen_lengths"),
        ({"loss": "sigmoid", "margin": 1.0}, "no effect"),
        ({"loss": "simpo", "chosen_lengths": torch.ones(1), "rejected_lengths": torch.ones(1)}, "no reference"),
        ({"loss": "ipo", "length_normalised": True}, "already"),
        ({"reference": False}, "reference"),
    ],
)
def test_options_without_effect_are_refused(options, told):
    x = torch.zeros(1)
    options = {"beta": 0.1, **options}
    references = (x, x) if options.pop("reference", True) else ()
    with pytest.raises(ValueError, match=told):
        dpo_loss(x, x, *references, **options)
