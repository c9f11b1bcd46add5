"""The loader's packed rows through the model: no document's attention crosses a boundary, and nothing is lost by packing."""

from itertools import pairwise

import pytest
import torch

from align.data import Loader, bundled_rows, chat_rows, encode_rows, padded_batch
from align.model import ModelConfig, init
from align.tokenizer import vendored

TEMPLATE = "{% for m in messages %}{{ m.role + m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"


@pytest.fixture(scope="module")
def packed():
    """Two steps of GSM8K chats in rows of 1024, and what they are of."""
    rows = chat_rows(bundled_rows("gsm8k_train").rows[:90])
    encoded = encode_rows(rows, vendored("mistral-7b-v0.3"), kind="messages", max_length=1024, template=TEMPLATE)
    loader = Loader(encoded, global_batch=4, micro_batch=2, max_length=1024, packing=True, seed=0)
    return encoded, [loader.next_step() for _ in range(2)]


@pytest.fixture(scope="module")
def model():
    config = ModelConfig(
        model_type="mistral", vocab_size=32768, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return init(config, 0, torch.float32)


def run(model, batch, ids=None):
    """hidden (B*T, D) of a packed batch; `ids` in place of its own."""
    tensors = {name: torch.from_numpy(getattr(batch, name)) for name in ("input_ids", "position_ids", "cu_seqlens")}
    hidden = model(
        tensors["input_ids"] if ids is None else ids,
        position_ids=tensors["position_ids"],
        cu_seqlens=tensors["cu_seqlens"],
        max_seqlen=batch.max_seqlen,
    )
    return hidden.flatten(0, 1)


def spans(batch):
    return [(start, stop) for start, stop in pairwise(batch.cu_seqlens.tolist()) if start < stop]


def test_a_packed_document_is_what_it_is_alone(packed, model):
    encoded, steps = packed
    seen = 0
    with torch.no_grad():
        for step in steps:
            documents = iter(step.documents)
            for batch in step.micro_batches:
                hidden, ids = run(model, batch), batch.input_ids.reshape(-1)
                for start, stop in spans(batch):
                    if not batch.loss_mask.reshape(-1)[start:stop].any():
                        assert not ids[start:stop].any()  # padding
                        continue
                    example = encoded.examples[next(documents)]
                    assert ids[start:stop].tolist() == example.ids.tolist()
                    alone = model(torch.from_numpy(padded_batch([example]).input_ids))[0]
                    assert (hidden[start:stop] - alone).abs().max() < 1e-5
                    seen += 1
    assert seen == sum(len(step.documents) for step in steps) >= 40


def test_a_change_of_one_document_changes_no_other_by_a_bit(packed, model):
    _, steps = packed
    batch = steps[0].micro_batches[0]
    ids = torch.from_numpy(batch.input_ids)
    with torch.no_grad():
        before = run(model, batch)
        for start, stop in spans(batch):
            other = ids.flatten().clone()
            other[start:stop] = (other[start:stop] + 7) % 32768
            after = run(model, batch, other.view_as(ids))
            changed = (before != after).any(-1).nonzero().flatten()
            assert len(changed) and start <= changed.min() and changed.max() < stop


def test_no_gradient_crosses_a_boundary(packed, model):
    _, steps = packed
    batch, kept = steps[1].micro_batches[1], []
    handle = model.get_submodule("model.embed_tokens").register_forward_hook(lambda module, given, made: kept.append(made))
    hidden = run(model, batch)
    handle.remove()
    bounds = spans(batch)
    assert len(bounds) >= 10
    for start, stop in bounds:
        (gradient,) = torch.autograd.grad(hidden[stop - 1].sum(), kept[0], retain_graph=True)
        reached = gradient.flatten(0, 1).ne(0).any(-1).nonzero().flatten().tolist()
        assert reached == list(range(start, stop))  # the last position sees all of its document and nothing else
