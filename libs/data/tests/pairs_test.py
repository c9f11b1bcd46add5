"""Preference pairs: one prompt, two answers, nothing else trained."""

import numpy as np
import pytest
from data_cases import BOS, EOS, Characters, ids_of
from hypothesis import given
from hypothesis import strategies as st

from align.data import DataError, bundled_rows, encode_preferences, padded_batch
from align.tokenizer import vendored

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def encode(rows, tokenizer=None, max_length=100, **options):
    return encode_preferences(rows, tokenizer or Characters(), max_length=max_length, **options)


def show(example):
    return example.ids.tolist(), example.mask.astype(int).tolist()


def row(prompt, chosen, rejected):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def test_a_string_prompt_is_encoded_as_a_completion_is():
    done = encode([row("2+2=", "4", "55")])
    (chosen, rejected), head = done.pairs[0], [BOS, *ids_of("2+2=")]
    assert show(chosen) == ([*head, *ids_of("4"), EOS], [0] * 5 + [1, 1])
    assert show(rejected) == ([*head, *ids_of("55"), EOS], [0] * 5 + [1, 1, 1])
    assert (done.kept, done.truncated, done.tokens, done.trained_tokens, done.prompt_lengths.tolist()) == (1, 0, 15, 5, [5])
    assert done.summary() == "1 pairs kept, 0 dropped, 0 truncated; 15 tokens, 5 trained"


def test_of_a_conversation_the_last_turn_alone_is_trained():
    (chosen, rejected) = encode([row(CHAT, "yes", "n")]).pairs[0]
    ids = [BOS, 3, *ids_of("a"), 4, 3, *ids_of("b"), 4, 3, *ids_of("c"), 4, 3]
    assert show(chosen) == ([*ids, *ids_of("yes"), 4], [0] * len(ids) + [1] * 4)
    assert show(rejected) == ([*ids, *ids_of("n"), 4], [0] * len(ids) + [1] * 2)


def test_chat_puts_a_string_prompt_into_the_template_with_its_system_message():
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    one = encode([row("q", "x", "y")], chat=True, system="s").pairs[0]
    other = encode([row(asked, "x", "y")]).pairs[0]
    assert [show(side) for side in one] == [show(side) for side in other]


@given(
    st.lists(st.tuples(*[st.text(alphabet="ab", max_size=8)] * 3), min_size=1, max_size=6),
    st.integers(2, 14),
    st.sampled_from(["truncate", "drop"]),
    st.booleans(),
)
def test_what_is_kept_shares_its_prompt_and_every_row_is_accounted_for(texts, max_length, overlong, chat):
    rows = [row(*text) for text in texts]
    try:
        done = encode(rows, max_length=max_length, overlong=overlong, chat=chat)
    except DataError as error:
        assert f"no rows are left of {len(rows)}" in str(error)
        return
    assert done.kept + done.dropped.total() == len(rows) and len(done.pairs) == done.kept
    for (chosen, rejected), prompt in zip(done.pairs, done.prompt_lengths, strict=True):
        assert chosen.ids[:prompt].tolist() == rejected.ids[:prompt].tolist() != []
        for side in (chosen, rejected):
            assert prompt < len(side.ids) <= max_length and not side.mask[:prompt].any() and side.mask[prompt:].all()
        assert chosen.ids.tolist() != rejected.ids.tolist()
    assert done.tokens == sum(len(side.ids) for pair in done.pairs for side in pair)


def test_rows_that_cannot_be_compared_are_dropped_with_a_reason():
    rows = [row("p", "x", "y"), row("p", "x", ""), row("p", "x", "x"), row("p" * 20, "x", "y"), row("p", "x" * 12 + "a", "x" * 12 + "b")]
    done = encode(rows, max_length=10)
    assert (done.kept, done.truncated, done.dropped) == (1, 0, {"empty": 1, "same": 2, "overlong": 1})
    assert encode([*rows, row("p", "x" * 20, "y")], max_length=10).truncated == 1
    assert encode([*rows, row("p", "x" * 20, "y")], max_length=10, overlong="drop").dropped["overlong"] == 3


def test_what_is_wrong_is_told_with_its_place():
    class Peeking(Characters):
        """A template that looks at the answer before it is given."""

        def render_chat(self, messages, *, template=None):
            return super().render_chat([{"role": "user", "content": messages[-1]["content"]}, *messages], template=template)

    for rows, options, message in (
        ([row("p", "x", "y")], {"overlong": "split"}, "overlong 'split' is not known; for pairs it is truncate, drop or error"),
        ([row("p", "x" * 30, "y")], {"max_length": 9, "overlong": "error"}, "row 0: 33 tokens, more than max_length 9"),
        ([{"prompt": "p", "chosen": "x"}], {}, "row 0: field 'rejected' is missing"),
        ([row(CHAT[:2], "x", "y")], {}, "row 0: the prompt ends with the assistant's turn"),
        ([row(CHAT, "x", "y")], {"tokenizer": Peeking()}, "row 0: the prompt is encoded in two ways before chosen"),
        ([row("p", "x", "x")], {}, r"no rows are left of 1 \(same 1\)"),
        ([], {}, r"no rows are left of 0 \(none given\)"),
    ):
        with pytest.raises(DataError, match=message):
            encode(rows, **options)


def test_the_digest_is_of_ids_masks_and_sides():
    first = encode([row("p", "x", "y")]).digest
    assert first == encode([row("p", "x", "y")]).digest
    assert len({first, encode([row("p", "y", "x")]).digest, encode([row("px", "x", "y")]).digest}) == 3


def test_real_pairs_with_a_real_tokenizer_and_a_batch_of_them():
    rows = bundled_rows("gsm8k_solutions").rows[:100]
    tokenizer = vendored("mistral-7b-v0.3")
    for options in ({}, {"chat": True, "template": TEMPLATE}):
        done = encode_preferences(rows, tokenizer, max_length=4096, **options)
        assert done.kept == 100
        for source, pair, prompt in zip(rows, done.pairs, done.prompt_lengths, strict=True):
            for side, name in zip(pair, ("chosen", "rejected"), strict=True):
                answer = tokenizer.decode(side.ids[prompt:].tolist(), skip_special=True)
                assert answer.strip() == source[name].strip() and side.ids[-1] == tokenizer.eos_id
                assert source["prompt"] in tokenizer.decode(side.ids[:prompt].tolist(), skip_special=True)
    batch = padded_batch([side for pair in done.pairs[:3] for side in pair], pad_id=0)
    assert batch.loss_mask.sum() == sum(side.mask[1:].sum() for pair in done.pairs[:3] for side in pair)
    assert np.all(batch.input_ids[0, : done.prompt_lengths[0]] == batch.input_ids[1, : done.prompt_lengths[0]])
