"""Every component of tokenizer.json alone, in all its settings, against the reference."""

import gzip
import json

import pytest
from tokenizer_cases import DATA, component_json, components

from align.tokenizer import Decoder, Tokenizer, TokenizerError


@pytest.mark.parametrize("index", range(86))
def test_component(index):
    tokenizer = Tokenizer.from_dict(component_json(index))
    for text, answer in zip(components()["texts"], components()["configs"][index][1], strict=False):
        if answer is None:  # the reference itself breaks down there
            continue
        ids, offsets, with_special, as_text, decoded, skipped = answer
        encoding = tokenizer.encode_with_offsets(text)
        assert (text, tokenizer.encode(text), encoding.ids) == (text, ids, ids)
        assert (text, [list(pair) for pair in encoding.offsets]) == (text, offsets)
        assert (text, tokenizer.encode(text, add_special_tokens=True)) == (text, with_special)
        assert (text, tokenizer.encode(text, special="text")) == (text, as_text)
        assert (text, tokenizer.decode(ids), tokenizer.decode(ids, skip_special=True)) == (text, decoded, skipped)
        decoder = Decoder(tokenizer)
        assert "".join(map(decoder.push, ids)) + decoder.finish() == decoded


def test_components_put_together_at_random():
    """136 files, each with up to 12 texts: every component with any other, vocabularies with gaps, merges in any order."""
    rows = json.loads(gzip.decompress((DATA / "random_components.json.gz").read_bytes()))
    assert sum(len(answers) for _, answers in rows) == 1632
    for number, (data, answers) in enumerate(rows):
        tokenizer = Tokenizer.from_dict(data)
        for text, ids, offsets, with_special, as_text, decoded, skipped in answers:
            encoding = tokenizer.encode_with_offsets(text)
            found = (tokenizer.encode(text), encoding.ids, [list(pair) for pair in encoding.offsets])
            assert (number, text, *found) == (number, text, ids, ids, offsets)
            found = (tokenizer.encode(text, add_special_tokens=True), tokenizer.encode(text, special="text"))
            assert (number, text, *found) == (number, text, with_special, as_text)
            found = (tokenizer.decode(ids), tokenizer.decode(ids, skip_special=True))
            assert (number, text, *found) == (number, text, decoded, skipped)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, "the normalizer leaves nothing of ' '"),
        ({"normalizer": {"type": "Lowercase"}}, "'A' and 'a' are the same once normalised"),
        (
            {"post_processor": {"type": "Sequence", "processors": [TEMPLATE := {
                "type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {},
            }, TEMPLATE]}},
            "post_processor.processors[1]: a second TemplateProcessing is not supported",
        ),
    ],
)  # fmt: skip
def test_what_the_reference_leaves_undefined_is_refused(changes, message):
    added = [{"id": i, "content": content, "normalized": True} for i, content in enumerate((" ", "A", "a"))]
    data = {"model": {"type": "BPE", "vocab": {" ": 0, "A": 1, "a": 2}, "merges": []}, "added_tokens": added}
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_dict({**data, **changes})
    assert message in str(caught.value)
