"""The decoder against transformers' frozen answers, and against itself: packed, cached, padded and plain forwards agree."""

import copy
import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import CASES, NEW_TOKENS, PROMPT, build, config, input_ids
from safetensors.torch import load_file

from align.model import FORWARD_IMPLS, Decoder, ModelConfig, ModelError, Stepper, init, pick_forward_impl
from align.model._norm import rms_norm
from align.model._rope import angles, rotate

EXPECTED = load_file(Path(__file__).parent / "data" / "transformers.safetensors")
WINDOWED = "mistral_window"  # window 8: shorter than most sequences below


@pytest.fixture(scope="module")
def models() -> dict[str, Decoder]:
    return {name: build(name).requires_grad_(False) for name in CASES}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().abs().max())


def greedy(model: Decoder, ids: torch.Tensor, count: int) -> list[int]:
    cache = model.new_cache(1, ids.shape[1] + count)
    tokens: list[int] = []
    with torch.inference_mode():
        for _ in range(count):
            ids = model.lm_head(model(ids, cache=cache)[:, -1:]).argmax(-1)
            tokens.append(int(ids))
    return tokens


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(models, name):
    logits = models[name].lm_head(models[name](input_ids(name)))
    assert distance(logits, EXPECTED[f"{name}.logits"]) <= 1e-5


@pytest.mark.parametrize("name", CASES)
def test_greedy_continuation_equals_transformers(models, name):
    assert greedy(models[name], input_ids(name)[:1, :PROMPT], NEW_TOKENS) == EXPECTED[f"{name}.greedy"].tolist()


@pytest.mark.parametrize("name", ["llama3", WINDOWED, "qwen3"])
def test_greedy_with_a_cache_equals_a_full_forward(models, name):
    model, ids = models[name], input_ids(name)[:1, :PROMPT]
    for _ in range(NEW_TOKENS):
        ids = torch.cat((ids, model.lm_head(model(ids)[:, -1:]).argmax(-1)), 1)
    assert ids[0, PROMPT:].tolist() == EXPECTED[f"{name}.greedy"].tolist()


@given(st.data())
@settings(max_examples=20)
def test_packed_documents_do_not_see_each_other(data):
    name = data.draw(st.sampled_from(["llama3", WINDOWED, "qwen3"]))
    model = init(config(name), 0).requires_grad_(False)  # logits up to 0.6; a packed row that leaks is off by 0.9
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    cuts = data.draw(st.lists(st.integers(0, batch * length), max_size=9))  # a cut may fall anywhere: across rows, twice at one place
    ends = [0, *sorted(cuts), batch * length]
    ids = torch.randint(96, (batch, length), generator=torch.Generator().manual_seed(len(cuts) * 64 + length))
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(ends)]).view(batch, length)
    given_positions = {"position_ids": positions} if data.draw(st.booleans()) else {}
    packed = model(ids, cu_seqlens=torch.tensor(ends, dtype=torch.int32), max_seqlen=batch * length, **given_positions)
    alone = [model(ids.flatten()[None, a:b])[0] for a, b in pairwise(ends) if b > a]
    assert distance(model.lm_head(packed.flatten(0, 1)), model.lm_head(torch.cat(alone))) <= 1e-6


def test_packed_gradient_is_the_sum_of_the_documents_gradients():
    model = build(WINDOWED)
    ids, ends = input_ids(WINDOWED), [0, 13, 14, 52, 80]

    def gradient(hidden: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        (hidden * torch.linspace(-1, 1, hidden.shape[1])[None, :, None]).sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])

    packed = gradient(model(ids, cu_seqlens=torch.tensor(ends, dtype=torch.int32)).view(1, 80, -1))
    rows = torch.cat([model(ids.flatten()[None, a:b]) for a, b in pairwise(ends)], 1)
    assert distance(packed, gradient(rows)) <= 1e-5 * float(packed.abs().max())


@pytest.mark.parametrize("name", ["qwen3", WINDOWED])
def test_a_beginning_that_sequences_share_is_computed_once(name):
    """Three answers to the first 9 tokens and one of its own: hidden states and gradients are those of whole rows."""
    model, ids = build(name), input_ids(name).flatten()
    prompt, answers = list(range(9)), [list(range(9, 30)), list(range(30, 32)), list(range(32, 50))]
    sequences = [*(prompt + answer for answer in answers), list(range(50, 61))]
    paths = torch.full((4, 32), -1)
    for row, sequence in enumerate(sequences):
        paths[row, : len(sequence)] = torch.tensor(sequence)
    positions = torch.empty(61, dtype=torch.int64)
    for sequence in sequences:
        positions[sequence] = torch.arange(len(sequence))

    def told(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        (hidden * torch.linspace(-1, 1, hidden.shape[0])[:, None]).sum().backward()
        return hidden.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])

    shared, gradient = told(model(ids[None, :61], position_ids=positions[None], paths=paths)[0, paths[paths >= 0]])
    rows, wanted = told(torch.cat([model(ids[None, sequence])[0] for sequence in sequences]))
    assert distance(shared, rows) <= 1e-5
    assert distance(gradient, wanted) <= 1e-5 * float(wanted.abs().max())
    with pytest.raises(ModelError, match="through each of the 61 tokens"):
        model(ids[None, :61], position_ids=positions[None], paths=paths[:3])
    with pytest.raises(ModelError, match="without position_ids"):
        model(ids[None, :61], paths=paths)
    with pytest.raises(ModelError, match="without cu_seqlens and cache"):
        model(ids[None, :61], position_ids=positions[None], paths=paths, forward_impl="sdpa_causal")


@given(st.data())
@settings(max_examples=20)
def test_a_cache_in_any_pieces_equals_one_forward(data):
    name = data.draw(st.sampled_from(["llama_biased_tied", WINDOWED, "qwen2_window", "qwen3"]))
    model, ids = build(name).requires_grad_(False), input_ids(name)
    length = data.draw(st.integers(1, 40))
    ends = [0, *sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=6)) if length > 1 else ()), length]
    cache = model.new_cache(2, length + data.draw(st.integers(0, 3)))
    pieces = [model(ids[:, a:b], cache=cache) for a, b in pairwise(ends)]
    assert cache.length == length
    assert distance(torch.cat(pieces, 1), model(ids[:, :length])) <= 1e-5


def test_right_padded_prompts_of_different_length_decode_as_if_alone(models):
    model, ids = models[WINDOWED], input_ids(WINDOWED)
    lengths, steps = torch.tensor([5, 20]), 15
    cache = model.new_cache(2, 40)
    padded = ids[:, :20].clone()
    padded[0, 5:] = 95  # padding, written to the cache and then overwritten
    model(padded, cache=cache)
    for step in range(steps):
        positions = (lengths + step)[:, None]
        hidden = model(ids.gather(1, positions), position_ids=positions, cache=cache)
        for row, length in enumerate((lengths + step).tolist()):
            assert distance(hidden[row, 0], model(ids[row : row + 1, : length + 1])[0, -1]) <= 1e-5


@pytest.mark.parametrize("rows", [3, 40], ids=["few", "many"])  # many: the first block's products are made for the whole vocabulary
@pytest.mark.parametrize("name", CASES)
def test_stepper_does_what_forward_does(models, name, rows):
    model, ids = models[name], input_ids(name)
    lengths = torch.tensor([12, 9])
    cache, plain = model.new_cache(3, 40), model.new_cache(2, 40)
    with torch.inference_mode():
        model(torch.cat((ids, ids[:1]))[:, :12], cache=cache), model(ids[:, :12], cache=plain)
        stepper = Stepper(model, rows, 40)
        stepper.enter(0, cache, torch.tensor([0, 1]), lengths.tolist())
        for step in range(20):
            positions = lengths + step
            tokens = ids.gather(1, positions[:, None])
            logits = stepper(tokens[:, 0], positions, int(positions.max()) + 1)
            assert distance(logits, model.lm_head(model(tokens, position_ids=positions[:, None], cache=plain)[:, 0])) <= 1e-5


@pytest.mark.parametrize("rows", [3, 40], ids=["few", "many"])
@pytest.mark.parametrize("large", [False, True], ids=["joined", "apart"])
@pytest.mark.parametrize("name", CASES)
def test_a_stepper_reads_prompts_as_forward_does(models, name, large, rows, monkeypatch):
    if large:
        monkeypatch.setattr("align.model._step._JOIN_BELOW", 0)
    model, ids, lengths = models[name], input_ids(name)[:, :20], [20, 7]
    cache = model.new_cache(2, 20)
    with torch.inference_mode():
        hidden = model(ids, cache=cache)
        ours, logits = Stepper(model, rows, 40).read(ids, lengths)
        assert distance(logits, model.lm_head(torch.stack((hidden[0, 19], hidden[1, 6])))) <= 1e-5
        assert distance(ours.k, cache.k) <= 1e-5 and distance(ours.v, cache.v) <= 1e-5


@pytest.mark.parametrize("large", [False, True], ids=["joined", "apart"])
@pytest.mark.parametrize("name", ["qwen3", WINDOWED, "llama_biased_tied"])
def test_rows_of_a_stepper_come_and_go(models, name, large, monkeypatch):
    """Rows enter with short and long prompts, leave and are overwritten, so often that what is kept moves to the front again and again."""
    if large:  # as if: weights stay where they are
        monkeypatch.setattr("align.model._step._JOIN_BELOW", 0)
    monkeypatch.setattr("align.model._step._SLACK", 3)
    model, ids, room = models[name], input_ids(name), 24
    generator = random.Random(0)
    with torch.inference_mode():
        wanted = model.lm_head(model(ids))
        cache = model.new_cache(2, 20)
        model(ids[:, :20], cache=cache)
        stepper, running = Stepper(model, 4, room), []  # (which text, next position) of each row
        for _ in range(150):
            if (len(running) < 4 and generator.random() < 0.3) or not running:
                new = [(generator.randrange(2), generator.randint(1, 20)) for _ in range(generator.randint(1, 4 - len(running)))]
                stepper.enter(len(running), cache, torch.tensor([text for text, _ in new]), [length for _, length in new])
                running += new
            texts, positions = (torch.tensor(values) for values in zip(*running, strict=True))
            logits = stepper(ids[texts, positions], positions, int(positions.max()) + 1)
            assert distance(logits, wanted[texts, positions]) <= 2e-5
            running = [(text, position + 1) for text, position in running]
            for row in reversed(range(len(running))):
                if running[row][1] == room or generator.random() < 0.05:
                    stepper.move(len(running) - 1, row)
                    running[row] = running[-1]
                    running.pop()


def test_selected_rows_of_a_cache_go_on_alone(models):
    model, ids = models["qwen3"], input_ids("qwen3")
    cache = model.new_cache(2, 40)
    model(ids[:, :10], cache=cache)
    group = cache.select(torch.tensor([1, 1, 0]))
    hidden = model(ids[[1, 1, 0], 10:20], cache=group)
    assert distance(hidden, model(ids[[1, 1, 0], :20])[:, 10:]) <= 1e-5
    assert (cache.length, group.length, group.max_length) == (10, 20, 40)
    assert cache.nbytes == 2 * 3 * 2 * 40 * 2 * 32 * 4  # k and v, layers, rows, positions, key heads, head_dim, bytes


@pytest.mark.parametrize("name", ["llama", WINDOWED])
def test_what_follows_a_position_does_not_change_it(models, name):
    ids, other = input_ids(name), input_ids(name).clone()
    other[:, 20:] = (other[:, 20:] + 7) % 96
    assert torch.equal(models[name](ids)[:, :20], models[name](other)[:, :20])


def test_a_window_cuts_off_the_past(models):
    ids, other = input_ids(WINDOWED), input_ids(WINDOWED).clone()
    other[:, 0] = (other[:, 0] + 7) % 96
    reach = 3 * (8 - 1)  # three layers, each looking 7 back
    changed = (models[WINDOWED](ids) != models[WINDOWED](other)).any(-1)
    assert changed[:, reach].all() and not changed[:, reach + 1 :].any()


def test_init_is_a_function_of_seed():
    cfg = config("qwen2")
    first, again, other = init(cfg, 1).state_dict(), init(cfg, 1).state_dict(), init(cfg, 2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[name], other[name])
    assert abs(float(first[name].std()) - cfg.initializer_range) < 1e-3
    assert not first["model.layers.0.self_attn.q_proj.bias"].any() and (first["model.norm.weight"] == 1).all()
    assert init(cfg, 1, torch.bfloat16).lm_head.weight.dtype == torch.bfloat16


def test_a_tied_head_is_one_parameter():
    model = init(config("qwen2"), 0)
    names = [name for name, _ in model.named_parameters()]
    assert "lm_head.weight" not in names and "lm_head.weight" not in model.state_dict()
    assert model.output_weight is model.model.embed_tokens.weight
    twin = copy.deepcopy(model)
    assert twin.output_weight is twin.model.embed_tokens.weight and twin.output_weight is not model.output_weight


def test_bfloat16_keeps_exact_angles():
    model = init(config("llama3"), 0).to(torch.bfloat16)
    assert model(input_ids("llama3")).dtype == torch.bfloat16
    assert torch.equal(model._frequencies, init(config("llama3"), 0)._frequencies)


def test_gradients_of_norm_and_rotation():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, generator=generator, requires_grad=True)
    upstream = torch.randn(2, 5, 3, 8, dtype=torch.float64, generator=generator)
    cos, sin = angles(torch.arange(5)[None], torch.tensor([1.0, 0.3, 0.1, 0.01]), 1.2, torch.float64)
    plain = torch.nn.functional.rms_norm(x, (8,), weight, 1e-5)
    assert distance(rms_norm(x, weight, 1e-5), plain) <= 1e-12
    for ours, theirs in zip(gradients(rms_norm(x, weight, 1e-5), upstream, x, weight), gradients(plain, upstream, x, weight), strict=True):
        assert distance(ours, theirs) <= 1e-12
    half = torch.cat((-x[..., 4:], x[..., :4]), -1)
    by_hand = x * cos + half * torch.cat((-sin[..., :4], sin[..., 4:]), -1)
    assert distance(rotate(x, cos, sin), by_hand) <= 1e-12
    assert distance(*(gradients(out, upstream, x)[0] for out in (rotate(x, cos, sin), by_hand))) <= 1e-12


def gradients(out: torch.Tensor, upstream: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(out, inputs, upstream)


def test_rotation_keeps_lengths_and_relative_angles():
    # RoFormer, section 3.2.2: scores depend on the distance of query and key alone.
    q, k = torch.linspace(-1, 1, 16).expand(1, 9, 1, 16), torch.ones(1, 9, 1, 16)
    cos, sin = angles(torch.arange(9)[None], 10000.0 ** (-torch.arange(8) / 8), 1.0, torch.float32)
    rotated_q, rotated_k = rotate(q, cos, sin)[0, :, 0], rotate(k, cos, sin)[0, :, 0]
    assert distance(rotated_q.norm(dim=-1), q[0, :, 0].norm(dim=-1)) <= 1e-5
    scores = rotated_q @ rotated_k.T
    assert distance(scores[2:, 2:], scores[:-2, :-2]) <= 1e-4


def test_forward_impl_is_a_name(models):
    model, ids = models["llama"], input_ids("llama")
    assert [pick_forward_impl(), pick_forward_impl(packed=True), pick_forward_impl(cached=True)] == list(FORWARD_IMPLS[:3])
    assert torch.equal(model(ids), model(ids, forward_impl="sdpa_causal"))
    with pytest.raises(ModelError, match="'flash' is unknown; known are sdpa_causal"):
        model(ids, forward_impl="flash")
    with pytest.raises(ModelError, match="does not fit this call, which wants 'sdpa_causal'"):
        model(ids, forward_impl="cpu_per_document")


def test_lengths_are_checked(models):
    model = models["llama"]  # max_position_embeddings 128
    with pytest.raises(ModelError, match="129 tokens is longer than the model's 128"):
        model(torch.zeros(1, 129, dtype=torch.int64))
    with pytest.raises(ModelError, match="129 tokens is longer"):
        model(torch.zeros(1, 200, dtype=torch.int64), cu_seqlens=torch.tensor([0, 71, 200]))
    model(torch.zeros(1, 200, dtype=torch.int64), cu_seqlens=torch.tensor([0, 100, 200]))
    with pytest.raises(ModelError, match="max_length 129 is above the model's 128"):
        model.new_cache(1, 129)
    model.new_cache(1, 128)
    models["qwen2_yarn"].new_cache(1, 128), models["llama_linear"].new_cache(1, 512)
    cache = model.new_cache(1, 10)
    with pytest.raises(ModelError, match="position 10 is outside a cache of max_length 10"):
        model(torch.zeros(1, 11, dtype=torch.int64), cache=cache)
    with pytest.raises(ModelError, match="position 12 is outside a cache of max_length 10"):
        model(torch.zeros(1, 1, dtype=torch.int64), position_ids=torch.tensor([[12]]), cache=cache)


def test_arguments_that_do_not_fit(models):
    model, ids = models["llama"], input_ids("llama")
    with pytest.raises(ModelError, match=r"shape \(40,\); it must be \(B, T\)"):
        model(ids[0])
    with pytest.raises(ModelError, match=r"cu_seqlens must rise from 0 to B \* T = 80; got"):
        model(ids, cu_seqlens=torch.tensor([0, 40]))
    with pytest.raises(ModelError, match="max_seqlen is 30, but cu_seqlens holds a document of 40"):
        model(ids, cu_seqlens=torch.tensor([0, 40, 80]), max_seqlen=30)
    with pytest.raises(ModelError, match="2 rows, the cache 3"):
        model(ids, cache=model.new_cache(3, 40))
    with pytest.raises(ModelError, match="packed rows have no cache"):
        model(ids, cache=model.new_cache(2, 40), cu_seqlens=torch.tensor([0, 80]))
    with pytest.raises(ModelError, match="holds -1; positions start at 0"):
        model(ids[:, :1], cache=model.new_cache(2, 40), position_ids=torch.tensor([[-1], [0]]))
    with pytest.raises(ModelError, match="position_ids begin again within a row"):
        model(ids, position_ids=torch.arange(40).remainder(20)[None])


def test_the_default_size_has_the_known_number_of_parameters():
    cfg = ModelConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 176 + 2 * 64
    assert sum(parameter.numel() for parameter in init(cfg, 0).parameters()) == 64 * 64 + 2 * layer + 64


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("newer", [False, True])
def test_varlen_asks_torch_for_the_same_attention(monkeypatch, window, newer):
    """torch's kernel does not run on a CPU: here a reference of its contract stands in its place, with the signature of 2.11 or 2.13."""
    from torch.nn.attention import varlen

    from align.model import _attention

    def reference(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
        assert window_size[1] == 0 and cu_seq_q is cu_seq_k and max_q == max_k == 8  # causal by its right side
        outs = []
        for a, b in pairwise(cu_seq_q.tolist()):
            at = torch.arange(b - a)
            seen = at <= at[:, None]
            if window_size[0] >= 0:
                seen &= at >= at[:, None] - window_size[0]
            q, k, v = (x[a:b].transpose(0, 1) for x in (query, key, value))
            outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(0, 1))
        return torch.cat(outs)

    def with_gqa(*args, enable_gqa, **options):
        assert enable_gqa
        return reference(*args, **options)

    monkeypatch.setattr(varlen, "varlen_attn", with_gqa if newer else reference)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 8, heads, 4, generator=generator) for heads in (4, 2, 2))
    ends = torch.tensor([0, 5, 8, 16, 16], dtype=torch.int32)
    packed = _attention._varlen_context(ends, 8)
    expected = _attention._packed_context(((0, 5), (5, 8), (8, 16)), torch.device("cpu"))
    ours, theirs = (_attention.attend(q, k, v, context, 0, window) for context in (packed, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
