"""Policy, value and step objectives against formulas written out in Python floats, finite differences and exact expectations."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from align.objectives import (
    aggregate,
    count_units,
    dead_groups,
    gae,
    group_advantages,
    kl,
    label_logits,
    policy_loss,
    step_loss,
    step_rewards,
    value_loss,
    whiten,
)

NAN = float("nan")
OPTIONS = [
    {},
    {"clip_low": 0.1, "clip_high": 0.28},
    {"level": "sequence"},
    {"level": "gspo", "clip_low": 0.02, "clip_high": 0.03},
    {"correction": "truncate", "correction_cap": 1.2},
    {"correction": "mask", "correction_cap": 1.1},
    {"level": "gspo", "correction": "truncate"},
]


def problem(seed, rows=3, width=5):
    generator = torch.Generator().manual_seed(seed)
    new, old, sampler = (-3 * torch.rand(rows, width, generator=generator, dtype=torch.float64) for _ in range(3))
    old, sampler = new + 0.3 * (old + 1.5), new + 0.2 * (sampler + 1.5)
    advantages = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[0, 0], mask[-1] = True, False  # one row is masked wholly
    return new, old, sampler, advantages, mask


def plain_policy_loss(
    new, old, sampler, advantages, mask, *, clip_low=0.2, clip_high=0.2, level="token", correction="none", correction_cap=2.0
):
    out = [[0.0] * new.shape[1] for _ in range(new.shape[0])]
    for b in range(new.shape[0]):
        kept = [t for t in range(new.shape[1]) if mask[b, t]]
        total = sum(float(new[b, t] - old[b, t]) for t in kept)
        for t in kept:
            log_ratio = {"token": float(new[b, t] - old[b, t]), "sequence": total, "gspo": total / len(kept)}[level]
            ratio, a = math.exp(log_ratio), float(advantages[b, 0])
            value = -min(ratio * a, min(max(ratio, 1 - clip_low), 1 + clip_high) * a)
            w = math.exp(float(old[b, t] - sampler[b, t]))
            if correction == "truncate":
                value *= min(w, correction_cap)
            elif correction == "mask":
                value *= w if 1 / correction_cap <= w <= correction_cap else 0.0
            out[b][t] = value
    return torch.tensor(out, dtype=torch.float64)


def ours(new, old, sampler, advantages, mask, options):
    given_sampler = {"sampler_logprobs": sampler} if options.get("correction", "none") != "none" else {}
    return policy_loss(new, old, advantages, mask, **options, **given_sampler)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("over", ["tokens", "sequences", "constant"])
def test_policy_loss_and_gradient_of_every_option(options, over):
    """Values from the formula; gradients by central differences of the formula, not of our code."""
    for seed in range(4):
        new, old, sampler, advantages, mask = problem(seed)
        length = 7 if over == "constant" else None

        def reference(x, seed=seed, length=length):
            _, old, sampler, advantages, mask = problem(seed)
            per_token = plain_policy_loss(x, old, sampler, advantages, mask, **options)
            rows = per_token.sum(1)
            if over == "sequences":
                rows = rows / mask.sum(1).clamp(min=1)
            return float(rows.sum()) / (length or 1)

        leaf = new.clone().requires_grad_()
        terms = ours(leaf, old, sampler, advantages, mask, options)
        torch.testing.assert_close(
            terms.loss.detach(), plain_policy_loss(new, old, sampler, advantages, mask, **options), rtol=1e-10, atol=1e-12
        )
        summed = aggregate(terms.loss, mask, over=over, length=length)
        assert summed.item() == pytest.approx(reference(new), rel=1e-10, abs=1e-12)
        (gradient,) = torch.autograd.grad(summed, leaf)
        step = 1e-6
        for b in range(new.shape[0]):
            for t in range(new.shape[1]):
                up, down = new.clone(), new.clone()
                up[b, t] += step
                down[b, t] -= step
                assert gradient[b, t].item() == pytest.approx((reference(up) - reference(down)) / (2 * step), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_nothing_behind_the_mask_is_read(options):
    """R077: NaN and infinity where masked reach neither the loss nor a gradient."""
    new, old, sampler, advantages, mask = problem(2)
    clean = ours(leaf := new.clone().requires_grad_(), old, sampler, advantages, mask, options)
    (expected,) = torch.autograd.grad(clean.loss.sum(), leaf)
    dirty = [torch.where(mask, x, torch.tensor(bad, dtype=x.dtype)) for x, bad in ((new, NAN), (old, -math.inf), (sampler, NAN))]
    terms = ours(leaf := dirty[0].requires_grad_(), dirty[1], dirty[2], advantages, mask, options)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), leaf)
    assert torch.equal(terms.loss, clean.loss) and torch.equal(gradient, expected)
    assert not terms.log_ratio.isnan().any() and (terms.loss[~mask] == 0).all() and (gradient[~mask] == 0).all()


def test_on_policy_the_gradient_is_plain_policy_gradient():
    new, _, _, advantages, mask = problem(1)
    leaf = new.clone().requires_grad_()
    terms = policy_loss(leaf, new, advantages, mask)
    assert (terms.log_ratio == 0).all() and not terms.clipped.any()
    (gradient,) = torch.autograd.grad(terms.loss.sum(), leaf)
    torch.testing.assert_close(gradient, torch.where(mask, -advantages, 0.0).double())


def test_a_blow_up_is_seen_raw_and_stays_finite():
    """R097: log ratio 30 and 200 are reported as they are; the loss and its gradient stay finite."""
    new, old = torch.tensor([[30.0, 200.0, -200.0]]), torch.zeros(1, 3)
    for advantage in (-1.0, 1.0, 0.0):
        leaf = new.clone().requires_grad_()
        terms = policy_loss(leaf, old, torch.tensor([[advantage]]), torch.ones(1, 3, dtype=torch.bool))
        (gradient,) = torch.autograd.grad(terms.loss.sum(), leaf)
        assert terms.log_ratio.tolist() == new.tolist()
        assert terms.loss.isfinite().all() and gradient.isfinite().all()
        assert (gradient[0, :2] > 0).all() == (advantage < 0), "a bad token far above the old policy must still be pushed down"


def test_truncated_rows_leave_numerator_and_denominator_alike():
    """R079, R080: one mask for both; a batch without a trained token is 0, and units say 0."""
    per_token = torch.ones(2, 4)
    mask = torch.tensor([[True, True, False, False], [False] * 4])
    assert aggregate(per_token, mask).item() == 2.0 and count_units(mask).item() == 2
    assert aggregate(per_token, mask, over="sequences").item() == 1.0 and count_units(mask, over="sequences").item() == 1
    nothing = torch.zeros(2, 4, dtype=torch.bool)
    for over, length in (("tokens", None), ("sequences", None), ("constant", 4)):
        assert aggregate(per_token * NAN, nothing, over=over, length=length).item() == 0.0
        assert count_units(nothing, over=over).item() == 0


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, -2.0]), min_size=4, max_size=4), min_size=1, max_size=4))
def test_group_advantages_are_the_papers(rewards):
    tensor = torch.tensor(rewards, dtype=torch.float64)
    for scale in ("group", "none"):
        found = group_advantages(tensor, scale=scale).tolist()
        for group, advantages in zip(rewards, found, strict=True):
            mean, spread = statistics.fmean(group), statistics.stdev(group)
            divisor = spread + 1e-4 if scale == "group" else 1.0
            assert advantages == pytest.approx([(r - mean) / divisor for r in group], abs=1e-12)
    assert dead_groups(tensor).tolist() == [len(set(group)) == 1 for group in rewards]


def test_a_dead_group_has_no_advantage_at_all():
    """R086: exactly 0, also where the mean of equal rewards is not representable."""
    rewards = torch.full((2, 3), 0.1)
    rewards[1] = 1.0
    assert (group_advantages(rewards) == 0).all() and (group_advantages(rewards, scale="none") == 0).all()


@pytest.mark.parametrize(
    ("rewards", "told"),
    [
        (torch.ones(3, 1), "at least 2"),
        (torch.tensor([[0.0, NAN]]), "sample 1 of group 0 is nan"),
        (torch.tensor([[0.0, math.inf]]), "inf"),
    ],
)
def test_rewards_that_say_nothing_are_refused(rewards, told):
    with pytest.raises(ValueError, match=told):
        group_advantages(rewards)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("off_policy", [False, True])
def test_the_kl_gradient_is_the_reverse_kl_s_in_the_mean(estimator, off_policy):
    """R076: over a vocabulary of 5, the expectation under the sampling policy of value and gradient, enumerated, is KL(π‖ref) and its."""
    torch.manual_seed(3)
    logits, reference = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    reference[4] -= 4  # one token far from the policy
    reference = torch.log_softmax(reference, 0)
    sampling = torch.log_softmax(logits + (0.5 * torch.randn(5, dtype=torch.float64) if off_policy else 0.0), 0)
    leaf = logits.clone().requires_grad_()
    policy = torch.log_softmax(leaf, 0)
    exact = (policy.exp() * (policy - reference)).sum()
    (wanted,) = torch.autograd.grad(exact, leaf, retain_graph=True)
    mask = torch.ones(5, 1, dtype=torch.bool)
    estimate = kl(policy[:, None], reference[:, None], mask, estimator=estimator, old_logprobs=sampling[:, None])
    mean = (sampling.exp() * estimate[:, 0]).sum()
    assert mean.item() == pytest.approx(exact.item(), rel=1e-10)
    torch.testing.assert_close(torch.autograd.grad(mean, leaf)[0], wanted)


def test_kl_values_dtype_mask_and_k2_gradient():
    new, reference = torch.tensor([[-1.0, -2.0, NAN]]), torch.tensor([[-1.5, -1.0, NAN]])
    mask = torch.tensor([[True, True, False]])
    d = [0.5, -1.0]
    for estimator, formula in (("k1", lambda x: x), ("k2", lambda x: x * x / 2), ("k3", lambda x: math.exp(-x) - 1 + x)):
        assert kl(new, reference, mask, estimator=estimator).tolist()[0] == pytest.approx([*map(formula, d), 0.0], rel=1e-6)
    leaf = new.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(kl(leaf, reference, mask, estimator="k2").sum(), leaf)
    assert gradient.tolist()[0] == pytest.approx([*d, 0.0])
    # R074: the difference is taken in fp32 also for bf16 input
    near = kl(torch.tensor([[-1.0]]).bfloat16(), torch.tensor([[-1.0078125]]).bfloat16(), mask[:, :1], estimator="k1")
    assert near.dtype == torch.float32 and near.item() == 0.0078125


def plain_gae(rewards, values, mask, gamma, lam):
    """The definition: A_t = Σ (γλ)^l δ_{t+l} over the trained tokens of one row."""
    kept = [t for t in range(len(values)) if mask[t]]
    out = [0.0] * len(values)
    for i, t in enumerate(kept):
        total = 0.0
        for l, s in enumerate(kept[i:]):
            following = values[kept[i + l + 1]] if i + l + 1 < len(kept) else 0.0
            total += (gamma * lam) ** l * (rewards[s] + gamma * following - values[s])
        out[t] = total
    return out


@given(
    st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.booleans()), min_size=1, max_size=7),
    st.sampled_from([(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.7, 0.0)]),
)
def test_gae_is_the_definition(row, factors):
    """R101, R105, R106: nothing after the last trained token, nothing through masked ones, whatever stands there."""
    gamma, lam = factors
    rewards, values, mask = ([part] for part in zip(*row, strict=True))
    kept = torch.tensor(mask)
    r, v = (torch.where(kept, torch.tensor(x, dtype=torch.float64), torch.tensor(NAN, dtype=torch.float64)) for x in (rewards, values))
    advantages, returns = gae(r, v, kept, gamma=gamma, lam=lam)
    expected = plain_gae(rewards[0], values[0], mask[0], gamma, lam)
    assert advantages[0].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert returns[0].tolist() == pytest.approx(
        [e + v if m else 0.0 for e, v, m in zip(expected, values[0], mask[0], strict=True)], abs=1e-9
    )


def test_a_terminal_reward_reaches_the_first_token_undamped():
    """R105: mask 1 0 0 1, γ = λ = 1: the reward of the last token is the return of the first."""
    rewards, values = torch.tensor([[0.0, 9.0, 9.0, 1.0]]), torch.zeros(1, 4)
    _, returns = gae(rewards, values, torch.tensor([[True, False, False, True]]), gamma=1.0, lam=1.0)
    assert returns.tolist() == [[1.0, 0.0, 0.0, 1.0]]


def test_whiten_is_over_the_mask_and_masked_again():
    """R102, R103."""
    x, mask = torch.tensor([[1.0, 2.0, NAN], [4.0, math.inf, 7.0]]), torch.tensor([[True, True, False], [True, False, True]])
    white = whiten(x, mask)
    kept = white[mask].tolist()
    assert statistics.fmean(kept) == pytest.approx(0, abs=1e-6) and statistics.pvariance(kept) == pytest.approx(1, abs=1e-5)
    assert (white[~mask] == 0).all()
    assert (whiten(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)) == 0).all()
    assert (whiten(x, torch.zeros(2, 3, dtype=torch.bool)) == 0).all()


def test_value_loss_by_hand_clipped_masked_and_halved():
    """R104: ½ max of the two squared errors."""
    values = torch.tensor([[1.0, 0.1, NAN]], dtype=torch.float64, requires_grad=True)
    old, returns = torch.tensor([[0.0, 0.0, NAN]], dtype=torch.float64), torch.tensor([[2.0, 1.0, NAN]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False]])
    assert value_loss(values, returns, mask).tolist()[0] == pytest.approx([0.5, 0.405, 0.0])
    clipped = value_loss(values, returns, mask, old_values=old, clip=0.2)
    assert clipped.tolist()[0] == pytest.approx([0.5 * 1.8**2, 0.405, 0.0])
    (gradient,) = torch.autograd.grad(clipped.sum(), values)
    assert gradient.tolist()[0] == pytest.approx([0.0, -0.9, 0.0])
    leaf = torch.randn(2, 3, dtype=torch.float64).requires_grad_()
    keep = torch.tensor([[True, False, True], [True, True, True]])
    assert torch.autograd.gradcheck(lambda v: value_loss(v, torch.ones_like(v), keep, old_values=torch.zeros_like(v), clip=0.3), (leaf,))


def test_label_logits_are_the_softmax_of_two_labels():
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(11, 8, dtype=torch.float64)
    both = (hidden @ weight.t())[..., [4, 9]].softmax(-1)[..., 0]
    torch.testing.assert_close(label_logits(hidden, weight, 4, 9).sigmoid(), both)


def test_step_loss_by_hand_and_masked():
    logits = torch.tensor([0.3, NAN, -2.0], dtype=torch.float64, requires_grad=True)
    labels, mask = torch.tensor([1, 0, 0]), torch.tensor([True, False, True])
    loss = step_loss(logits, labels, mask)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-0.3)) + math.log1p(math.exp(-2.0)))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.tolist() == pytest.approx([1 / (1 + math.exp(-0.3)) - 1, 0.0, 1 / (1 + math.exp(2.0))])


def test_step_rewards():
    scores = torch.tensor([[NAN, 0.9, NAN, 0.4, 0.7]])
    ends = torch.tensor([[False, True, False, True, True]])
    assert step_rewards(scores, ends, baseline=0.5).tolist()[0] == pytest.approx([0.0, 0.4, 0.0, -0.1, 0.2])
    changes = step_rewards(scores, ends, how="change", baseline=0.5)
    assert changes.tolist()[0] == pytest.approx([0.0, 0.4, 0.0, -0.5, 0.3])
    assert changes.sum().item() == pytest.approx(0.7 - 0.5)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda x, m: policy_loss(x, x, x, m, correction="truncate"), "give both or neither"),
        (lambda x, m: policy_loss(x, x, x, m, sampler_logprobs=x), "give both or neither"),
        (lambda x, m: policy_loss(x, x, x, m, clip_low=1.0), "clip_low"),
        (lambda x, m: policy_loss(x, x, x, m.float()), "expected alike"),
        (lambda x, m: kl(x, x, m, estimator="k4"), "k4"),
        (lambda x, m: kl(x, x, m, estimator="k2", old_logprobs=x), "k2"),
        (lambda x, m: aggregate(x, m, over="constant"), "length"),
        (lambda x, m: aggregate(x, m, length=3), "length"),
        (lambda x, m: gae(x, x, m, gamma=1.1), "gamma is 1.1"),
        (lambda x, m: value_loss(x, x, m, clip=0.2), "give both"),
        (lambda x, m: step_rewards(x, m, how="sum"), "sum"),
    ],
)
def test_wrong_options_are_named(call, told):
    with pytest.raises(ValueError, match=told):
        call(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))
