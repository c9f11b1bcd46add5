"""Reference caches that belong to one thing only; pairs as steps; the preference objective on a small model."""

import json
import math
import random
from contextlib import nullcontext

import pytest
import torch
from rl_cases import Letters, Scripted, small_model

from align.data import DataError, EncodedPairs, Example
from align.model import save
from align.objectives import dpo_loss
from align.rl import (
    CacheKey,
    PairSource,
    PreferenceConfig,
    PreferenceObjective,
    ReferenceCache,
    RlError,
    Scored,
    check_preference,
    pair_batch,
    read_cache,
    read_header,
    reference_logprobs,
    verified_pairs,
    weights_sha256,
    write_cache,
)

KEY = CacheKey(arm="a", weights="w", tokenizer="t", rows="r", pairs=2, max_length=8, forward_impl="sdpa_causal", dtype="float32")


def example(prompt, answer):
    ids = [1, *prompt, *answer]
    return Example(torch.tensor(ids, dtype=torch.int32).numpy(), torch.tensor([False] * (1 + len(prompt)) + [True] * len(answer)).numpy())


def pairs(count=5, seed=0):
    draws = random.Random(seed)

    def some(most):
        return [draws.randrange(3, 40) for _ in range(draws.randint(1, most))]

    made = []
    for _ in range(count):
        prompt = some(3)
        made.append(tuple(example(prompt, some(6)) for _ in range(2)))
    tokens = sum(len(side.ids) for pair in made for side in pair)
    return EncodedPairs(made, count, {}, 0, tokens, 0, f"rows {seed}")


def alone(model, side):
    """An answer's summed log-probability: one row, whole logits, float64."""
    ids = torch.from_numpy(side.ids).long()[None]
    found = model.lm_head(model(ids)).double()[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return found[torch.from_numpy(side.mask[1:])].sum()


@pytest.mark.parametrize("forward_impl", [None, "cpu_per_document"])
@pytest.mark.parametrize("micro_batch", [1, 2, 5])
def test_log_probabilities_do_not_depend_on_the_batch_or_on_padding(micro_batch, forward_impl):
    """R057, R058, R059: each side is a document of its own, whatever lies beside it; token 0 is a real token here."""
    model, encoded = small_model(1, layers=2), pairs()
    found = reference_logprobs(model, encoded, micro_batch=micro_batch, pad_id=0, forward_impl=forward_impl)
    for number in (0, 1):
        assert found[number] == pytest.approx([alone(model, pair[number]).item() for pair in encoded.pairs], abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss": "ipo"},
        {"loss": "hinge", "beta": 1.0},
        {"loss": "robust", "label_smoothing": 0.2},
        {"label_smoothing": 0.1},
        {"length_normalised": True},
        {"loss": "simpo", "beta": 2.0, "margin": 0.5},
        {"nll": 0.3},
    ],
    ids=str,
)
def test_loss_and_gradient_against_whole_logits(options):
    config = PreferenceConfig(**options)
    model, reference, encoded = small_model(1), small_model(2), pairs()
    given = (lambda: nullcontext(reference)) if config.loss != "simpo" else None
    loss, units, metrics = PreferenceObjective(model, config, reference=given).loss(pair_batch(encoded.pairs, pad_id=0))
    assert units == 5

    wide = small_model(1).double()
    policy = [torch.stack([alone(wide, pair[number]) for pair in encoded.pairs]) for number in (0, 1)]
    refs = [torch.stack([alone(reference, pair[number]) for pair in encoded.pairs]).detach() for number in (0, 1)]
    lengths = [torch.tensor([int(pair[number].mask.sum()) for pair in encoded.pairs]) for number in (0, 1)]
    terms = dpo_loss(
        *policy, *(refs if config.loss != "simpo" else []), beta=config.beta, loss=config.loss, label_smoothing=config.label_smoothing,
        length_normalised=config.length_normalised, margin=config.margin, chosen_lengths=lengths[0], rejected_lengths=lengths[1],
    )  # fmt: skip
    expected = terms.losses.sum() - config.nll * (policy[0] / lengths[0]).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["chosen_logprob"].item() == pytest.approx(policy[0].sum().item(), rel=1e-5)
    gradients = [torch.autograd.grad(value, m.model.layers[0].mlp.down_proj.weight)[0] for value, m in ((loss, model), (expected, wide))]
    torch.testing.assert_close(gradients[0], gradients[1].float(), rtol=1e-3, atol=1e-5)


def test_step_0_is_exactly_ln_2_and_rewards_are_exactly_0():
    """R069: the same dtype, forward and batch on both sides."""
    model, encoded = small_model(1), pairs()
    loss, units, metrics = PreferenceObjective(model, PreferenceConfig(), reference=lambda: nullcontext(small_model(1))).loss(
        pair_batch(encoded.pairs, pad_id=0)
    )
    assert loss.item() == pytest.approx(units * math.log(2), rel=1e-6) and metrics["margin"] == metrics["chosen_reward"] == 0


def test_a_width_is_that_of_the_longest_row_of_its_own_batch():
    """R053, R054: nothing is padded further, no real token is lost."""
    encoded = pairs(8)
    batch = pair_batch(encoded.pairs[:3], pad_id=0)
    sides = [chosen for chosen, _ in encoded.pairs[:3]] + [rejected for _, rejected in encoded.pairs[:3]]
    assert batch["input_ids"].shape == (6, max(len(side.ids) for side in sides) - 1)
    assert batch["loss_mask"].sum(1).tolist() == [int(side.mask.sum()) for side in sides]
    for row, side in enumerate(sides):
        assert batch["targets"][row][batch["loss_mask"][row]].tolist() == side.ids[side.mask].tolist()


def test_the_source_s_order_state_and_references():
    encoded = pairs(6)
    key = CacheKey(**{**vars(KEY), "rows": encoded.digest, "pairs": 6})
    cache = ReferenceCache(key, [float(i) for i in range(6)], [-float(i) for i in range(6)])
    options = {"global_batch": 4, "micro_batch": 2, "seed": 1, "pad_id": 0, "cache": cache}
    whole = PairSource(encoded, **options)
    wanted = [whole.next_step() for _ in range(5)]
    for step in wanted:
        assert step.trained_tokens == 4 and len(step.micro_batches) == 2
        for batch in step.micro_batches:
            chosen, rejected = batch["reference"].chunk(2)
            assert torch.equal(chosen, -rejected)
            row = int(chosen[0])
            assert batch["input_ids"][0, : len(encoded.pairs[row][0].ids) - 1].tolist() == encoded.pairs[row][0].ids[:-1].tolist()
    for k in range(5):
        first = PairSource(encoded, **options)
        for _ in range(k):
            first.next_step()
        second = PairSource(encoded, **options)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        for step in wanted[k:]:
            got = second.next_step()
            assert all(torch.equal(a[x], b[x]) for a, b in zip(got.micro_batches, step.micro_batches, strict=True) for x in a)
    ranks = [PairSource(encoded, **options, rank=rank, world=2).next_step() for rank in range(2)]
    assert all(torch.equal(ranks[r].micro_batches[0]["input_ids"], wanted[0].micro_batches[r]["input_ids"]) for r in range(2))
    with pytest.raises(DataError):
        PairSource(pairs(6, seed=1), **{**options, "cache": None}).load_state_dict(whole.state_dict())
    with pytest.raises(RlError, match="global_batch"):
        PairSource(encoded, **{**options, "global_batch": 2}).load_state_dict(whole.state_dict())
    with pytest.raises(RlError, match="other rows"):
        PairSource(pairs(6, seed=1), **options)
    with pytest.raises(RlError, match="ranks 2"):
        PairSource(encoded, **{**options, "micro_batch": 4}, world=2)


def test_a_cache_is_read_for_its_own_key_alone(tmp_path):
    path = tmp_path / "some/reference.cache"
    write_cache(path, ReferenceCache(KEY, [-1.5, 1e-300], [-2.5, -1 / 3]))
    assert read_cache(path, KEY) == ReferenceCache(KEY, [-1.5, 1e-300], [-2.5, -1 / 3])
    assert read_header(path) == KEY
    for name, value in vars(KEY).items():
        other = CacheKey(**{**vars(KEY), name: value + 1 if isinstance(value, int) else value + "x"})
        with pytest.raises(RlError, match=name):
            read_cache(path, other)


def test_a_partial_or_changed_cache_is_refused(tmp_path):
    path = tmp_path / "reference.cache"
    with pytest.raises(RlError, match="2 pairs"):
        write_cache(path, ReferenceCache(KEY, [0.0], [0.0]))
    assert not path.exists()
    write_cache(path, ReferenceCache(KEY, [-1.0, -2.0], [-3.0, -4.0]))
    whole = path.read_bytes()
    for stop in range(len(whole)):
        path.write_bytes(whole[:stop])
        with pytest.raises(RlError, match="reference"):
            read_cache(path, KEY)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(RlError, match="not whole"):
        read_cache(path, KEY)
    path.write_bytes(whole.replace(b'"format": 1', b'"format": 2'))
    with pytest.raises(RlError, match="format 2"):
        read_cache(path, KEY)


def test_the_digest_of_weights_sees_every_byte_name_shape_and_dtype(tmp_path):
    model = small_model(1)
    save(model, tmp_path / "a")
    save(small_model(1), tmp_path / "b")
    first = weights_sha256(tmp_path / "a")
    assert first == weights_sha256(tmp_path / "b")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 4] += 1e-6
    save(model, tmp_path / "c")
    save(small_model(1).bfloat16(), tmp_path / "d")
    assert len({first, weights_sha256(tmp_path / "c"), weights_sha256(tmp_path / "d")}) == 3
    with pytest.raises(RlError, match="safetensors"):
        weights_sha256(tmp_path)
    (tmp_path / "c/model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(RlError, match="safetensors"):
        weights_sha256(tmp_path / "c")


def test_verified_pairs_are_right_over_wrong_and_whole():
    class Even:
        def score(self, rows, completions):
            return [Scored(float(int(text.split()[-1]) % 2 == 0), "") for text in completions]

        def close(self):
            pass

    answers = {10: [4, 5, 6, 7], 11: [4, 4, 6, 8], 12: [5, 4, 6, 4], 13: [4, 5, 5, 5]}
    sampler = Scripted(lambda prompt, seed, j: ([answers[prompt[1]][j], 2], prompt[1] == 12 and j == 0))
    rows = [{"prompt": str(10 + index)} for index in range(4)]
    made, dropped = verified_pairs(
        rows, [[1, 10 + index] for index in range(4)], sampler, Letters(), Even(), samples=4, per_prompt=2, max_new_tokens=2
    )
    assert [(row["prompt"], row["chosen"].strip(), row["rejected"].strip()) for row in made] == [
        ("10", "4", "5"), ("10", "6", "7"), ("13", "4", "5"),
    ]  # fmt: skip
    assert dropped == {"all_alike": 2, "cut_off": 0}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"beta": 0.0}, "beta"),
        ({"label_smoothing": 0.6}, "label_smoothing"),
        ({"margin": 1.0}, "no effect"),
        ({"loss": "robust"}, "label_smoothing 0"),
        ({"nll": -1.0}, "nll"),
        ({"loss": "ipo", "length_normalised": True}, "already"),
    ],
)
def test_options_without_effect_are_refused(options, told):
    with pytest.raises(RlError, match=told):
        check_preference(PreferenceConfig(**options))
    with pytest.raises(RlError, match="needs a reference"):
        PreferenceObjective(small_model(1), PreferenceConfig()).loss(pair_batch(pairs().pairs, pad_id=0))
