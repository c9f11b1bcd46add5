"""The policy objective on a small model: against whole logits in float64, with and without padding, ratio 1 on policy, KL where asked."""

import math
from contextlib import nullcontext

import pytest
import torch
from rl_cases import small_model

from align.rl import GroupCredit, PolicyConfig, PolicyObjective, RlError, Rollout, Scorer, as_batch, check_policy
from align.rl._forward import per_answer, row_logprobs, to_tensors
from align.rl._rollouts import fed
from align.rollout import NativeSampler

CPU = torch.device("cpu")


def sampled(model, *, temperature=1.0, groups=2, group=3, tokens=6):
    sampler = NativeSampler(model, eos_ids=[2])
    found = sampler.generate(
        [[1, 5 + i, 9] for i in range(groups)], n=group, max_new_tokens=tokens, temperature=temperature, seeds=range(groups)
    )
    return [
        Rollout(i // group, i // group, s.prompt_ids, s.ids, s.logprobs, s.truncated, "", float(i % 2), "made") for i, s in enumerate(found)
    ]


def credited(model, config, rollouts, *, temperature=1.0, reference=None, inner_steps=1, scale="group", forward_impl=None):
    scorer = Scorer(micro_batch=4, pad_id=0, temperature=temperature, forward_impl=forward_impl)
    given = (lambda: nullcontext(reference)) if reference is not None else None
    credit = GroupCredit(model, config, scorer, scale=scale, group=3, inner_steps=inner_steps, reference=given)
    credit.annotate(rollouts)
    numbers = credit.assign(rollouts, [each.reward for each in rollouts])
    return to_tensors(as_batch(rollouts, pad_id=0), CPU), numbers


def plain_logprobs(model, rollouts, temperature):
    """Every answer alone, whole logits, float64 softmax."""
    out = []
    for each in rollouts:
        ids = torch.tensor([[*each.prompt_ids, *each.ids]])
        logits = model.lm_head(model(ids)).double()[0, len(each.prompt_ids) - 1 : -1] / temperature
        out.append(logits.log_softmax(-1).gather(1, torch.tensor(each.ids)[:, None])[:, 0])
    return out


@pytest.mark.parametrize("forward_impl", [None, "cpu_per_document"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_the_sampler_s_at_its_temperature(temperature, forward_impl):
    """R071, R058, R093: what the sampler recorded for the token it took is the trainer's, padded or not: ratio 1 within 1e-5."""
    model = small_model(1, layers=2)
    rollouts = sampled(model, temperature=temperature)
    found = Scorer(micro_batch=4, pad_id=0, temperature=temperature, forward_impl=forward_impl).logprobs(model, rollouts)
    for each, values, plain in zip(rollouts, found, plain_logprobs(model, rollouts, temperature), strict=True):
        assert values == pytest.approx(each.logprobs, abs=1e-5)
        assert values == pytest.approx(plain.tolist(), abs=1e-5)


@pytest.mark.parametrize("forward_impl", [None, "cpu_per_document"])
@pytest.mark.parametrize("temperature", [1e-18, 1e-30, 1e-40, 5e-324, 1e300])
def test_temperatures_that_fp32_cannot_divide_by_are_the_sampler_s_too(temperature, forward_impl):
    model = small_model(1, layers=2)
    rollouts = sampled(model, temperature=temperature)
    found = Scorer(micro_batch=4, pad_id=0, temperature=temperature, forward_impl=forward_impl).logprobs(model, rollouts)
    for each, values in zip(rollouts, found, strict=True):
        expected = 0.0 if temperature < 1 else -math.log(40)
        assert values == pytest.approx(each.logprobs, abs=1e-5) and values == pytest.approx([expected] * len(each.ids), abs=1e-5)
    for each in rollouts:
        each.ids = [7] * len(each.ids)  # not what the sampler takes: far away, and a number
    batch, _ = credited(model, PolicyConfig(), rollouts, temperature=temperature, forward_impl=forward_impl)
    loss, *_ = PolicyObjective(model, PolicyConfig(), temperature=temperature, max_new_tokens=6, forward_impl=forward_impl).loss(batch)
    loss.backward()
    told = row_logprobs(model, batch, batch["loss_mask"], temperature=temperature, forward_impl=forward_impl or "sdpa_causal")
    assert told.isfinite().all() and loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    with torch.no_grad():
        model.output_weight.zero_()  # every token as likely as the next
    told = row_logprobs(model, batch, batch["loss_mask"], temperature=temperature, forward_impl=forward_impl or "sdpa_causal")
    torch.testing.assert_close(told[batch["loss_mask"]], torch.full_like(told[batch["loss_mask"]], -math.log(40)))


@pytest.mark.parametrize("forward_impl", [None, "cpu_per_document", "invariant"])
def test_one_token_prompts_whose_answers_are_empty(forward_impl):
    """A rank whose micro-batch is of such answers alone runs its model all the same, for a loss and gradients of 0."""
    model = small_model(1, layers=2)
    empty = [Rollout(0, 0, [each], [], [], True, "", 0.0, "made", trained=False) for each in (5, 5, 9)]
    other = Rollout(0, 0, [5], [7, 2], [-1.0, -1.0], False, "", 1.0, "made")
    scorer = Scorer(micro_batch=4, pad_id=0, forward_impl=forward_impl)
    alone = scorer.logprobs(model, [other])
    assert scorer.logprobs(model, empty) == [[], [], []] and scorer.logprobs(model, [*empty, other]) == [[], [], [], *alone]
    for each in empty:
        each.per_token = {"advantages": []}
    batch = to_tensors(as_batch([empty[at] for at in fed(empty)], pad_id=0), CPU)
    assert (batch["input_ids"].tolist(), batch["loss_mask"].tolist(), batch["lengths"].tolist()) == ([[5]], [[False]], [1])
    for over in ("tokens", "sequences"):
        objective = PolicyObjective(model, PolicyConfig(over=over), temperature=1.0, max_new_tokens=6, forward_impl=forward_impl)
        loss, units, metrics = objective.loss(batch)
        loss.backward()
        assert (float(loss.detach()), int(units)) == (0.0, 0) and all(float(value) == 0 for value in metrics.values())
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


@pytest.mark.parametrize("forward_impl", [None, "cpu_per_document"])
def test_answers_that_are_not_trained_are_scored_and_not_fed(forward_impl):
    """The numbers of trained answers are to the bit those of the trainer's forward, which sees no others; the ratio is 1."""
    model = small_model(1, layers=2)
    rollouts = sampled(model)
    for at in (0, 4):
        rollouts[at].trained = False
    found = Scorer(micro_batch=6, pad_id=0, forward_impl=forward_impl).logprobs(model, rollouts)
    for values, plain in zip(found, plain_logprobs(model, rollouts, 1.0), strict=True):
        assert values == pytest.approx(plain.tolist(), abs=1e-5)
    batch = to_tensors(as_batch([rollouts[at] for at in fed(rollouts)], pad_id=0), CPU)
    trainer = row_logprobs(model, batch, batch["loss_mask"], forward_impl=forward_impl or "sdpa_causal")
    assert [values for at, values in enumerate(found) if at not in (0, 4)] == per_answer(trainer, batch["loss_mask"])
    for each in rollouts:
        each.trained = False
    assert fed(rollouts) == [0]


def test_ranks_run_as_many_forwards_whatever_is_trained_on_each(monkeypatch):
    """Of a sharded model each forward waits for all ranks: one more or less on one of them, and they wait for ever."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model, runs, scorer = small_model(1, layers=2), [], Scorer(micro_batch=3, pad_id=0)
    model.register_forward_hook(lambda *_: runs.append(1))
    rollouts = sampled(model)
    counts, wanted = [], plain_logprobs(model, rollouts, 1.0)
    for trained in ([True] * 6, [False] * 6, [True] * 3 + [False] * 3, [True, False] * 3):
        for each, flag in zip(rollouts, trained, strict=True):
            each.trained = flag
        runs.clear()
        for values, plain in zip(scorer.logprobs(model, rollouts), wanted, strict=True):
            assert values == pytest.approx(plain.tolist(), abs=1e-5)
        counts.append(len(runs))
    assert counts == [4] * 4


@pytest.mark.parametrize("forward_impl", [None, "cpu_per_document"])
@pytest.mark.parametrize("prompt", [[1], [1, 5, 9]])
def test_answers_without_tokens_change_nothing_for_those_that_share_their_prompt(prompt, forward_impl):
    """The row of such an answer ends before the prompt does, with a prompt of one token before it begins."""
    model = small_model(1, layers=2)
    answers = [[], [7, 3], [], [8, 2, 4], [7]]
    rollouts = [Rollout(0, 0, prompt, ids, [-0.5] * len(ids), False, "", 0.0, "made") for ids in answers]
    found = Scorer(micro_batch=5, pad_id=0, forward_impl=forward_impl).logprobs(model, rollouts)
    for values, each in zip(found, rollouts, strict=True):
        assert values == (pytest.approx(plain_logprobs(model, [each], 1.0)[0].tolist(), abs=1e-5) if each.ids else [])


@pytest.mark.parametrize("forward_impl", [None, "cpu_per_document"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"level": "gspo"},
        {"over": "sequences"},
        {"over": "constant"},
        {"correction": "truncate"},
        {"kl": 0.3, "kl_estimator": "k3"},
        {"kl": 0.3, "kl_estimator": "k2"},
        {"kl": 0.3, "kl_estimator": "k1", "kl_in": "both"},
    ],
    ids=str,
)
def test_loss_and_gradient_against_whole_logits(options, forward_impl):
    """On policy the surrogate's gradient is Σ A ∇log π in the chosen weighting, plus that of the KL; all from float64 whole logits."""
    config = PolicyConfig(**options)
    model, reference = small_model(1), small_model(2)
    rollouts = sampled(model)
    batch, _ = credited(model, config, rollouts, reference=reference if config.kl else None)
    objective = PolicyObjective(model, config, temperature=1.0, max_new_tokens=6, forward_impl=forward_impl)
    loss, units, metrics = objective.loss(batch)
    assert units == (len(rollouts) if objective.per_answer else sum(len(each.ids) for each in rollouts))
    gradient = torch.autograd.grad(loss, model.model.layers[0].mlp.up_proj.weight)[0]
    assert metrics["ratio"] / units == pytest.approx(1.0, abs=1e-6) and metrics["clipped"] == 0

    wide, fixed = small_model(1).double(), small_model(2).double()
    news = plain_logprobs(wide, rollouts, 1.0)
    references = plain_logprobs(fixed, rollouts, 1.0)
    expected = torch.zeros((), dtype=torch.float64)
    for each, new, other in zip(rollouts, news, references, strict=True):
        advantage = torch.tensor(each.per_token["advantages"], dtype=torch.float64)
        ratio = (new - new.detach()).exp()
        if config.level == "gspo":
            ratio = (new - new.detach()).mean().exp().expand_as(new)
        per_token = -advantage * ratio
        if config.correction == "truncate":
            per_token = per_token * (new.detach() - torch.tensor(each.logprobs)).exp().clamp(max=2.0)
        if config.kl:
            d = new - other.detach()
            estimate = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[config.kl_estimator]
            per_token = per_token + config.kl * (estimate if config.kl_estimator == "k2" else estimate * (new - new.detach()).exp())
        divisor = {"tokens": 1, "sequences": len(each.ids), "constant": 6}[config.over]
        expected = expected + per_token.sum() / divisor
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    wanted = torch.autograd.grad(expected, wide.model.layers[0].mlp.up_proj.weight)[0].float()
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


def test_log_softmax_is_fp32_for_bf16_weights():
    """R073: against float64 softmax of the same bf16 logits."""
    model = small_model(1).bfloat16()
    rollouts = sampled(model)
    found = Scorer(micro_batch=8, pad_id=0).logprobs(model, rollouts)
    for values, plain in zip(found, plain_logprobs(model, rollouts, 1.0), strict=True):
        # the logits of a batch and of a row alone differ by bf16 rounding; log-softmax itself adds nothing visible
        assert values == pytest.approx(plain.tolist(), abs=2e-2)


def test_ratio_is_exactly_one_on_the_first_inner_step_and_moves_on_the_second():
    model = small_model(1)
    rollouts = sampled(model)
    batch, _ = credited(model, PolicyConfig(), rollouts, inner_steps=2)
    objective = PolicyObjective(model, PolicyConfig(), temperature=1.0, max_new_tokens=6)
    loss, units, first = objective.loss(batch)
    assert first["ratio"] == units
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.05 * parameter.grad
    _, _, second = objective.loss(batch)
    assert second["ratio"] != units and second["clipped"] > 0


def test_kl_in_the_reward_changes_advantages_and_not_the_loss_and_both_only_by_name():
    model, reference = small_model(1), small_model(2)
    rewards = {}
    for where in ("loss", "reward", "both"):
        config = PolicyConfig(kl=0.5, kl_in=where)
        rollouts = sampled(model)
        batch, numbers = credited(model, config, rollouts, reference=reference, scale="none")
        loss, _, metrics = PolicyObjective(model, config, temperature=1.0, max_new_tokens=6).loss(batch)
        rewards[where] = [each.per_token["advantages"][0] for each in rollouts]
        penalty = loss.item() + sum(len(each.ids) * advantage for each, advantage in zip(rollouts, rewards[where], strict=True))
        assert ("reward_kl" in numbers) == (where != "loss")
        assert (abs(penalty) > 1e-3) == (where != "reward")
        assert metrics["kl"] > 0
    assert rewards["reward"] == rewards["both"] != rewards["loss"]
    assert sum(rewards["reward"][:3]) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"kl_in": "reward"}, "policy.kl is 0"),
        ({"clip_low": 1.0}, "clip_low"),
        ({"clip_high": 0.0}, "clip_high"),
        ({"kl": -1.0}, "policy.kl"),
    ],
)
def test_options_without_effect_are_refused(options, told):
    with pytest.raises(RlError, match=told):
        check_policy(PolicyConfig(**options))
    with pytest.raises(RlError, match=r"rollout\.group is 1"):
        GroupCredit(None, PolicyConfig(), None, scale="group", group=1)
