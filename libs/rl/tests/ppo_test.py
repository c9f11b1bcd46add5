"""Steps, reward model, critic and credit on a small model, against definitions written out."""

import json
import math
from contextlib import nullcontext

import pytest
import torch
from rl_cases import Letters, small_model

from align.data import Example
from align.objectives import gae, whiten
from align.rl import (
    Critic,
    CriticConfig,
    PolicyConfig,
    PpoCredit,
    PpoObjective,
    RlError,
    Rollout,
    Scorer,
    StepExample,
    StepObjective,
    StepRewardConfig,
    StepScorer,
    StepSource,
    as_batch,
    auc,
    check_critic,
    encode_steps,
    path_bias,
    read_path_bias,
    score_steps,
    step_batch,
    step_end_ids,
)
from align.rl._forward import to_tensors
from align.rollout import NativeSampler

CPU = torch.device("cpu")
EXAMPLES = [StepExample([1, 5, 9, 7, 8, 2], [3, 5], [1.0, 0.0]), StepExample([1, 6, 9, 2], [3], [0.0]), StepExample([1, 9, 9], [2], [1.0])]


class Words(Letters):
    """Encodes "5 9 " as [5, 9]; token 9 ends a step."""

    vocab_size = 40

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, ids, *, skip_special=False):
        return "".join("end. " if token == 9 else f"{token} " for token in ids)


def rollouts(model, tokens=6):
    found = NativeSampler(model, eos_ids=[2]).generate([[1, 5], [1, 7], [1, 9]], n=2, max_new_tokens=tokens, seeds=[1, 2, 3])
    return [Rollout(i // 2, i // 2, s.prompt_ids, s.ids, s.logprobs, s.truncated, "", 0.0, "") for i, s in enumerate(found)]


def test_rows_become_documents_with_the_ends_of_their_steps():
    rows = [
        {"prompt": "5", "steps": ["6 9", "7 9"], "labels": [1, -1]},
        {"prompt": "5", "steps": ["6 9", "8"], "labels": [0, None], "answer_label": True},
        {"prompt": "5", "steps": ["6 " * 30], "labels": [1]},
    ]
    encoded = encode_steps(rows, Words(), lambda row: [1, *Words().encode(row["prompt"])], max_length=12)
    assert encoded.examples == [StepExample([1, 5, 6, 9, 7, 9], [3, 5], [1.0, 0.0]), StepExample([1, 5, 6, 9, 8, 2], [3, 5], [1.0, 1.0])]
    assert encoded.dropped == {"overlong": 1} and encoded.base_rate == 0.75
    options = {"max_length": 12}
    prompt = lambda row: [1, *Words().encode(row["prompt"])]  # noqa: E731
    assert encode_steps(rows, Words(), prompt, neutral="bad", **options).examples[1].labels == [0.0, 1.0]
    assert encode_steps(rows, Words(), prompt, neutral="drop", **options).examples[1].ends == [5]
    assert encode_steps(rows, Words(), prompt, outcome=True, **options).examples[0] == StepExample([1, 5, 6, 9, 7, 9], [5], [0.0])
    with pytest.raises(RlError, match="label 7"):
        encode_steps([{"prompt": "5", "steps": ["6"], "labels": [7]}], Words(), prompt, **options)
    with pytest.raises(RlError, match="no rows are left of 1"):
        encode_steps(rows[2:], Words(), prompt, **options)


class Spaced(Words):
    """As SentencePiece: a space, 30, in front of every text; here every character is a token."""

    def encode(self, text):
        return [30, *(31 if character == "\n" else int(character) for character in text)]


def test_steps_get_no_space_that_is_not_their_own():
    row = {"prompt": "5", "steps": ["69", "7"], "labels": [1, 1]}
    (example,) = encode_steps([row], Spaced(), lambda row: Spaced().encode(row["prompt"]), max_length=12).examples
    assert example == StepExample([30, 5, 6, 9, 7], [3, 4], [1.0, 1.0])


def test_auc_is_the_share_of_pairs_in_order():
    scores, labels = [0.1, 0.4, 0.4, 0.8, -1.0], [0, 1, 0, 1, 0]
    good, bad = ([score for score, label in zip(scores, labels, strict=True) if label == kind] for kind in (1, 0))
    pairs = [(a > b) + 0.5 * (a == b) for a in good for b in bad]
    assert auc(scores, labels) == pytest.approx(sum(pairs) / len(pairs))
    assert auc([1.0, 2.0], [1, 1]) != auc([1.0, 2.0], [1, 1])  # NaN
    assert math.isnan(auc([1.0, math.nan, 2.0], [1, 0, 1])), "a model that has diverged; it did not end"


@pytest.mark.parametrize("labels", [[11, 12], None])
def test_the_step_loss_against_whole_logits(labels):
    """Label tokens: softmax over their two logits at the step's last token. Value head: 0 at first, so ln 2 a step."""
    model = small_model(1)
    scorer = StepScorer(model, labels)
    module = StepObjective(model, scorer, about={})
    loss, units, _ = module.loss(step_batch(EXAMPLES, pad_id=0))
    assert units == 4
    expected = 0.0
    for each in EXAMPLES:
        logits = model.lm_head(model(torch.tensor([each.ids])))[0].double()
        for end, label in zip(each.ends, each.labels, strict=True):
            good = logits[end, [11, 12]].softmax(0)[0] if labels else torch.tensor(0.5)
            expected -= float(torch.log(good if label else 1 - good))
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    trained = dict(module.named_parameters())
    assert ("score_head.weight" in trained) == (labels is None)
    assert all(parameter.grad is not None for name, parameter in trained.items() if name.startswith("score_head."))
    scores = score_steps(model, scorer, EXAMPLES, micro_batch=2, pad_id=0)
    assert len(scores) == 4 and (labels is not None or scores == [0.0] * 4)


def test_pairs_are_compared_at_their_last_tokens():
    sides = [
        Example(torch.tensor(ids, dtype=torch.int32).numpy(), torch.zeros(len(ids), dtype=torch.bool).numpy())
        for ids in ([1, 5, 9], [1, 5, 8, 7])
    ]
    model = small_model(1)
    scorer = StepScorer(model, [11, 12])
    loss, units, metrics = StepObjective(model, scorer, about={}, pairwise=True).loss(step_batch([tuple(sides)], pad_id=0))
    ends = [model.lm_head(model(torch.tensor(side.ids[None].tolist())))[0, -1] for side in sides]
    scores = [float((end[11] - end[12]).detach()) for end in ends]
    assert units == 1 and loss.item() == pytest.approx(float(torch.nn.functional.softplus(torch.tensor(scores[1] - scores[0]))), rel=1e-5)
    assert metrics["step_accuracy"] == float(scores[0] > scores[1])


def test_the_step_source_counts_labels_and_goes_on_after_a_resume():
    options = {"digest": "d", "global_batch": 2, "micro_batch": 1, "seed": 0, "pad_id": 0}
    whole = StepSource(EXAMPLES, **options)
    wanted = [whole.next_step() for _ in range(4)]
    assert all(step.trained_tokens == sum(int(batch["loss_mask"].sum()) for batch in step.micro_batches) for step in wanted)
    first, second = StepSource(EXAMPLES, **options), StepSource(EXAMPLES, **options)
    first.next_step()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert torch.equal(second.next_step().micro_batches[0]["input_ids"], wanted[1].micro_batches[0]["input_ids"])
    with pytest.raises(RlError, match="ranks 3"):
        StepSource(EXAMPLES, **options, world=3)


def test_step_ends_are_tokens_whose_text_ends_with_the_marker():
    assert [token for token, ends in enumerate(step_end_ids(Words(), ".")) if ends] == [9]
    with pytest.raises(RlError, match="no token"):
        step_end_ids(Words(), "\n")
    with pytest.raises(RlError, match="two different ids"):
        StepScorer(small_model(1), [3, 3])
    with pytest.raises(RlError, match="two different ids"):
        StepScorer(small_model(1), [3, 400])


def test_the_critic_starts_at_0_is_made_from_its_seed_and_leaves_the_policy_alone():
    """R144, and one copy of the base: with the critic's additions trained, the policy's forward is what it was, bit for bit."""
    model = small_model(1)
    batch = to_tensors(as_batch(rollouts(model), pad_id=0), CPU)
    before = model(batch["input_ids"])
    critic, again = Critic(model, CriticConfig(rank=2), seed=3), Critic(small_model(1), CriticConfig(rank=2), seed=3)
    assert all(torch.equal(a, b) for a, b in zip(critic.state_dict().values(), again.state_dict().values(), strict=True))
    assert (critic.values(batch) == 0).all()
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        with critic.fitting():
            loss = ((critic.values(batch) - 1.5)[batch["loss_mask"]] ** 2).mean()
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == pytest.approx(2.25) and losses[-1] < 0.05
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert any(float(value.detach().abs().max()) > 0 for value in critic.up.values()), "the additions are trained, not the head alone"
    assert torch.equal(model(batch["input_ids"]), before)
    assert sum(p.numel() for p in critic.parameters()) < sum(p.numel() for p in model.parameters()) / 2


def test_the_critic_s_gradient_is_right_where_blocks_are_computed_again():
    gradients = []
    for checkpointing in ("none", "full"):
        model = small_model(1)
        critic = Critic(model, CriticConfig(rank=2), seed=3)
        with torch.no_grad():
            critic.weight += 0.1
        model.checkpointing = checkpointing
        batch = to_tensors(as_batch(rollouts(model), pad_id=0), CPU)
        with critic.fitting():
            critic.values(batch)[batch["loss_mask"]].sum().backward()
        gradients.append({name: parameter.grad for name, parameter in critic.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def credit_of(model, critic, *, policy=None, rewards=None, critic_config=None, reference=None):
    policy = policy or PolicyConfig()
    prm = small_model(5)
    return PpoCredit(
        model, critic, prm, StepScorer(prm, [11, 12]), scores=Scorer(micro_batch=4, pad_id=0), config=rewards or StepRewardConfig(),
        critic_config=critic_config or CriticConfig(), policy=policy, step_ends=[token % 3 == 0 for token in range(40)], eos_ids=[2],
        reference=(lambda: nullcontext(reference)) if reference is not None else None,
    )  # fmt: skip


@pytest.mark.parametrize("how", ["score", "change"])
def test_credit_is_gae_of_step_rewards_and_kl(how):
    """R101, R106: everything from each answer alone, in Python, and then GAE (tested against its definition elsewhere)."""
    model, reference = small_model(1), small_model(2)
    policy = PolicyConfig(kl=0.3, kl_in="reward", kl_estimator="k1")
    critic = Critic(model, CriticConfig(), seed=0)
    with torch.no_grad():
        critic.weight += 0.3
    credit = credit_of(model, critic, policy=policy, rewards=StepRewardConfig(how=how), reference=reference)
    answers = rollouts(model)
    assert any(each.truncated for each in answers)
    credit.annotate(answers)
    numbers = credit.assign(answers, [0.0] * len(answers))
    prm, width = small_model(5), max(len(each.ids) for each in answers)
    paid, values, mask = (torch.zeros(len(answers), width, dtype=torch.float64) for _ in range(3))
    for row, each in enumerate(answers):
        whole, start = torch.tensor([[*each.prompt_ids, *each.ids]]), len(each.prompt_ids)
        judged = prm.lm_head(prm(whole))[0].detach().double()
        logprobs = [m.lm_head(m(whole)).detach().double().log_softmax(-1)[0] for m in (model, reference)]
        told = critic.values({"input_ids": whole, "lengths": torch.tensor([whole.shape[1]])})
        values[row, : len(each.ids)] = told.detach()[0, start - 1 : -1].double()
        last = 0.5
        for at, token in enumerate(each.ids):
            mask[row, at] = 1
            ends = (token % 3 == 0 and token != 2) or (at == len(each.ids) - 1 and not each.truncated)
            if ends:
                score = float((judged[start + at, 11] - judged[start + at, 12]).sigmoid())
                paid[row, at] += score - (last if how == "change" else 0.5)
                last = score
            if each.truncated and at == len(each.ids) - 1:
                paid[row, at] = -0.5
            paid[row, at] -= 0.3 * float(logprobs[0][start - 1 + at, token] - logprobs[1][start - 1 + at, token])
    advantages, returns = gae(paid, values, mask.bool(), gamma=1.0, lam=0.95)
    white = whiten(advantages, mask.bool())
    for row, each in enumerate(answers):
        size = len(each.ids)
        assert each.per_token["advantages"] == pytest.approx(white[row, :size].tolist(), abs=1e-4)
        assert each.per_token["returns"] == pytest.approx(returns[row, :size].tolist(), abs=1e-4)
    assert {"prm_reward", "step_score", "reward_kl", "explained_variance"} <= numbers.keys()


@pytest.mark.filterwarnings("error")
def test_credit_of_answers_without_a_token():
    """They get none, and change nothing for the others."""
    model, reference = small_model(1), small_model(2)
    policy = PolicyConfig(kl=0.3, kl_in="reward", kl_estimator="k1")
    credit = credit_of(model, Critic(model, CriticConfig(), seed=0), policy=policy, reference=reference)
    empty = [Rollout(0, 0, [5], [], [], truncated, "", 0.0, "", trained=False) for truncated in (False, True)]
    told = []
    for found in (empty[:], [*rollouts(model), *empty], rollouts(model)):
        credit.annotate(found)
        told.append((found, credit.assign(found, [0.0] * len(found))))
    (_, numbers), (mixed, _), (plain, _) = told
    assert numbers == {"prm_reward": 0.0, "step_score": 0.0, "reward_kl": 0.0, "explained_variance": 0.0}
    assert all(each.per_token["advantages"] == each.per_token["returns"] == [] for each in empty)
    for a, b in zip(mixed, plain, strict=False):
        assert a.per_token["advantages"] == pytest.approx(b.per_token["advantages"], abs=1e-5) and len(a.ids) > 0


def test_policy_and_value_gradients_are_added_once_each():
    model = small_model(1)
    critic = Critic(model, CriticConfig(clip=None, coefficient=0.7), seed=0)
    answers = rollouts(model)
    credit = credit_of(model, critic)
    credit.annotate(answers)
    credit.assign(answers, [0.0] * len(answers))
    batch = {**to_tensors(as_batch(answers, pad_id=0), CPU), "units": sum(len(each.ids) for each in answers)}
    objective = PpoObjective(model, critic, PolicyConfig(), CriticConfig(clip=None, coefficient=0.7), temperature=1.0, max_new_tokens=6)
    loss, units, metrics = objective.loss(batch)
    assert units == batch["units"] and all(parameter.grad is None for parameter in model.parameters())
    # at first every value is 0 and the head alone moves: d/dbias of 0.7 · mean ½(V − R)² = −0.7 · mean R
    mean = float(batch["returns"][batch["loss_mask"]].mean())
    assert critic.bias.grad.item() == pytest.approx(-0.7 * mean, rel=1e-4)
    assert metrics["value_loss"].item() == pytest.approx(0.5 * float((batch["returns"][batch["loss_mask"]] ** 2).sum()), rel=1e-4)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    state = objective.extra_state()
    assert {name for name in state if name.startswith("critic.")} == {f"critic.{name}" for name in critic.state_dict()}
    objective.load_extra_state({name: value + 1 if torch.is_tensor(value) else value for name, value in state.items()})
    assert critic.bias.item() == 1.0
    with pytest.raises(RlError, match="critic"):
        objective.load_extra_state({})


def test_values_do_not_depend_on_the_micro_batch():
    """R100."""
    model = small_model(1)
    critic = Critic(model, CriticConfig(), seed=0)
    with torch.no_grad():
        critic.weight += 0.3
    answers = rollouts(model)
    found = [Scorer(micro_batch=m, pad_id=0).ask(model, answers, lambda batch, mask: critic.values(batch)) for m in (1, 4, 6)]
    for a, b, c in zip(*found, strict=True):
        assert a == pytest.approx(b, abs=1e-5) and a == pytest.approx(c, abs=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [("gamma", 0.99), ("rank", 0), ("rank", 2**16 + 1), ("alpha", 0.0), ("clip", 0.0), ("coefficient", 0.0), ("lam", 1.5)],
)
def test_critic_settings_out_of_range_are_named(field, value):
    with pytest.raises(RlError, match=rf"critic\.{field}"):
        check_critic(CriticConfig(**{field: value}))
    with pytest.raises(RlError, match="targets"):
        Critic(small_model(1), CriticConfig(targets=["q_prof"]), seed=0)


def test_path_bias_is_bound_to_its_weights(tmp_path):
    model = small_model(1)
    found = path_bias(model, rollouts(model), ["sdpa_causal", "cpu_per_document"], micro_batch=2, pad_id=0)
    assert found.keys() == {"sampler - sdpa_causal", "sampler - cpu_per_document", "sdpa_causal - cpu_per_document"}
    assert all(
        pair["largest"] < 1e-5 and pair["mean_size"] <= pair["largest"] <= pair["largest_of_answers"] + 1e-9 for pair in found.values()
    )
    off = path_bias(small_model(2), rollouts(model), ["sdpa_causal"], micro_batch=2, pad_id=0)
    assert off["sampler - sdpa_causal"]["mean_size"] > 0.01
    with pytest.raises(RlError, match="of 1 answers none has a token"):
        path_bias(model, [Rollout(0, 0, [5], [], [], True, "", 0.0, "")], ["sdpa_causal"], micro_batch=2, pad_id=0)
    path = tmp_path / "path_bias.json"
    path.write_text(json.dumps({"weights": "abc", "dtype": "float32", "differences": {**found, **off}}))
    wanted = {"weights": "abc", "dtype": "float32", "forward_impl": "cpu_per_document", "limit": 0.01}
    read_path_bias(path, **wanted)
    for change, told in (
        ({"weights": "abd"}, "other weights"),
        ({"dtype": "bfloat16"}, "other dtype"),
        ({"forward_impl": "varlen"}, "does not compare"),
        ({"forward_impl": "sdpa_causal"}, "more than 0.01"),
    ):
        with pytest.raises(RlError, match=told):
            read_path_bias(path, **{**wanted, **change})
    pair = {"sampler - x": {"mean_size": 0.0}}
    for wrong in (
        "{}", "[" * 100_000, "[1]", json.dumps({"weights": "abc", "dtype": "float32", "differences": [pair]}),
        json.dumps({"weights": "abc", "dtype": "float32", "differences": {"sampler - x": 1}}),
        json.dumps({"weights": "abc", "dtype": "float32", "differences": {"sampler - x": {"mean_size": "small"}}}),
    ):  # fmt: skip
        path.write_text(wrong)
        with pytest.raises(RlError, match="no report"):
            read_path_bias(path, **wanted)
