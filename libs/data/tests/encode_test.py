"""Encoding: which tokens, which of them are trained, and what became of every row."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_cases import BOS, EOS, Characters, Spaced, ids_of
from hypothesis import given
from hypothesis import strategies as st

from align.data import (
    DataError,
    arithmetic_demonstrations,
    arithmetic_tokenizer_config,
    arithmetic_tokenizer_json,
    chat_rows,
    check_encoding,
    encode_rows,
)
from align.tokenizer import Tokenizer


def encode(rows, kind, max_length=100, tokenizer=None, **options):
    return encode_rows(rows, tokenizer or Characters(), kind=kind, max_length=max_length, **options)


def show(example):
    return example.ids.tolist(), example.mask.astype(int).tolist()


def test_a_completion_is_trained_with_its_eos_and_the_prompt_is_not():
    (example,) = encode([{"prompt": "ab", "completion": "xy"}], "completion").examples
    assert show(example) == ([BOS, *ids_of("abxy"), EOS], [0, 0, 0, 1, 1, 1])
    assert (example.ids.dtype, example.mask.dtype) == (np.int32, np.bool_)


def test_text_is_trained_whole():
    (example,) = encode([{"text": "abc"}], "text").examples
    assert show(example) == ([BOS, *ids_of("abc"), EOS], [1, 1, 1, 1, 1])


def test_messages_follow_the_templates_mask():
    rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}]
    (example,) = encode(rows, "messages").examples
    assert show(example) == ([BOS, 3, *ids_of("q"), 4, 3, *ids_of("a"), 4], [0, 0, 0, 0, 0, 1, 1])


def test_a_system_message_is_put_in_front_of_rows_without_one():
    plain = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    own = {"messages": [{"role": "system", "content": "z"}, *plain["messages"]]}
    first, second = encode([plain, own], "messages", system="s").examples
    assert first.ids.tolist()[1:4] == [3, *ids_of("s"), 4] and second.ids.tolist()[1:4] == [3, *ids_of("z"), 4]


@pytest.mark.parametrize("bos", [True, False])
def test_bos_and_eos_are_there_exactly_once(bos):
    rows = [{"prompt": "<s>a", "completion": "b</s>"}, {"prompt": "a", "completion": "b"}]
    first, second = encode(rows, "completion", tokenizer=Characters(bos=bos)).examples
    assert first.ids.tolist() == [BOS, *ids_of("ab"), EOS]
    assert second.ids.tolist() == [BOS] * bos + [*ids_of("ab"), EOS]


def test_a_seam_that_would_encode_otherwise_keeps_the_prompts_own_ids():
    """What a sampler sees is the prompt encoded alone; joined, the two newlines would be one token."""
    (example,) = encode([{"prompt": "a\n", "completion": "\nb"}], "completion").examples
    assert show(example) == ([BOS, *ids_of("a\n\nb"), EOS], [0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize(
    "prompt, completion, tail",
    [("a: ", "yz", ids_of("yz")), ("he", "y", ids_of("y")), ("a:", " y", [1000 + ord("y") + 10]), ("a: ", " y", [1000 + ord("y") + 10])],
)
def test_a_completion_gets_no_space_that_is_not_its_own(prompt, completion, tail):
    tokenizer = Spaced()
    (example,) = encode([{"prompt": prompt, "completion": completion}], "completion", tokenizer=tokenizer).examples
    assert example.ids.tolist() == [BOS, *tokenizer.encode(prompt), *tail, EOS]


def test_truncation_cuts_ids_and_mask_together_and_puts_no_eos():
    rows = [{"prompt": "ab", "completion": "wxyz"}, {"prompt": "abcdefgh", "completion": "w"}, {"prompt": "a", "completion": "w"}]
    encoded = encode(rows, "completion", max_length=5)
    assert [show(example) for example in encoded.examples] == [
        ([BOS, *ids_of("abwx")], [0, 0, 0, 1, 1]),
        ([BOS, *ids_of("aw"), EOS], [0, 0, 1, 1]),
    ]
    assert (encoded.kept, dict(encoded.dropped), encoded.truncated) == (2, {"nothing_trained": 1}, 1)
    assert (encoded.tokens, encoded.trained_tokens) == (9, 4)
    assert encoded.summary() == "2 rows kept, 1 dropped (nothing_trained 1), 1 truncated; 9 tokens, 4 trained"


def test_drop_and_error():
    rows = [{"text": "abcdef"}, {"text": "ab"}, {"text": ""}]
    encoded = encode(rows, "text", max_length=5, overlong="drop")
    assert (encoded.kept, dict(encoded.dropped), encoded.truncated) == (1, {"overlong": 1, "empty": 1}, 0)
    with pytest.raises(DataError, match="row 0: 8 tokens, more than max_length 5; raise max_length, or let overlong be truncate or drop"):
        encode(rows, "text", max_length=5, overlong="error")


def test_long_text_is_split_when_asked_and_loses_nothing():
    encoded = encode([{"text": "abcdefgh"}, {"text": "xy"}, {"text": "abcd"}], "text", max_length=5, overlong="split")
    assert [example.ids.tolist() for example in encoded.examples] == [
        [BOS, *ids_of("abcd")],
        [*ids_of("efgh"), EOS],
        [BOS, *ids_of("xy"), EOS],
        [BOS, *ids_of("abc")],
        [*ids_of("d"), EOS],
    ]
    assert (encoded.kept, encoded.truncated, encoded.dropped.total(), encoded.tokens) == (3, 0, 0, 20)
    with pytest.raises(DataError, match="overlong 'split' would train the tail of a row of kind completion without its prompt"):
        encode([{"prompt": "a", "completion": "b"}], "completion", overlong="split")


def test_a_chat_without_an_assistant_turn_is_dropped():
    rows = [{"messages": [{"role": "user", "content": "q"}]}, {"messages": [{"role": "assistant", "content": "a"}]}]
    assert dict(encode(rows, "messages").dropped) == {"nothing_trained": 1}


def test_what_cannot_be_encoded_is_refused():
    row = {"prompt": "a", "answer": "b"}
    for message, call in {
        "rows of kind 'answer' hold nothing to train on": lambda: encode([row], "answer"),
        "overlong 'cut' is not known; it is truncate, drop, error or split": lambda: encode([row], "text", overlong="cut"),
        "max_length 1 leaves no target": lambda: encode([row], "text", max_length=1),
        "template and system are for rows of kind messages, these are text": lambda: encode([row], "text", system="s"),
        "row 0: field 'text' is missing": lambda: encode([row], "text"),
        "no rows are left of 0": lambda: encode([], "text"),
        r"no rows are left of 1 \(empty 1\); look at max_length 100": lambda: encode([{"text": ""}], "text"),
        "the tokenizer names no eos token": lambda: encode([{"text": "a"}], "text", tokenizer=Characters(eos_id=None)),
        "row 0: the template has no system message": lambda: encode(
            [{"messages": [{"role": "system", "content": ""}]}], "messages", template="no system"
        ),
    }.items():
        with pytest.raises(DataError, match=message):
            call()


def test_completions_become_chats():
    rows = chat_rows([{"prompt": "q", "completion": "a", "answer": "4"}])
    assert rows == [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "answer": "4"}]


@given(st.lists(st.tuples(st.text("ab\n<s>", max_size=9), st.text("xy\n", max_size=9)), min_size=1, max_size=8), st.integers(2, 12))
def test_counts_add_up_and_the_completion_is_what_is_trained(pairs, max_length):
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    try:
        encoded = encode(rows, "completion", max_length=max_length)
    except DataError:
        return
    assert encoded.kept + encoded.dropped.total() == len(rows)
    assert encoded.tokens == encoded.lengths.sum() and encoded.trained_tokens == encoded.trained.sum()
    whole = encode(rows, "completion", max_length=1000)
    for example in encoded.examples:
        assert len(example.ids) == len(example.mask) <= max_length and example.mask[1:].any()
        assert any(example.ids.tolist() == other.ids[: len(example.ids)].tolist() for other in whole.examples)
    for example, row in zip(whole.examples, (row for row in rows if row["completion"]), strict=True):
        trained = example.ids[example.mask].tolist()
        text = "".join("\n\n" if i == 5 else chr(i - 10) for i in trained[:-1])
        assert (text, trained[-1]) == (row["completion"], EOS)


def test_the_digest_sees_ids_masks_boundaries_and_order():
    def digest(*texts, kind="text"):
        return encode([{"text": t, "prompt": t[:1], "completion": t[1:]} for t in texts], kind).digest

    digests = [digest("ab", "c"), digest("c", "ab"), digest("abc"), digest("ab")]
    digests += [digest("ab", kind="completion"), digest("abc", kind="completion")]
    assert len(set(digests)) == len(digests)
    assert digest("ab", "c") == digests[0]


def test_the_arithmetic_tokenizer_encodes_the_task_and_back():
    tokenizer = Tokenizer.from_dict(arithmetic_tokenizer_json(), arithmetic_tokenizer_config())
    rows = arithmetic_demonstrations(200, seed=0)
    encoded = encode_rows(rows, tokenizer, kind="completion", max_length=128)
    for row, example in zip(rows, encoded.examples, strict=True):
        ids = example.ids.tolist()
        assert tokenizer.decode(ids) == f"<s>{row['prompt']}{row['completion']}</s>"
        assert tokenizer.decode(example.ids[example.mask].tolist()) == f"{row['completion']}</s>"
        assert tokenizer.token_to_id("<unk>") not in ids
        assert ids[: len(ids) - example.mask.sum()] == tokenizer.encode(row["prompt"], add_special_tokens=True)
    assert encoded.lengths.max() <= 72 and encoded.lengths.mean() < 42


def test_the_readme_runs(tmp_path):
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    code, _, printed = readme.split("```python\n")[1].split("```")[:3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stderr, done.stdout) == ("", printed.lstrip("\n"))


def test_arguments_that_fit_no_row_are_refused_before_there_are_rows():
    check_encoding(Characters(), kind="text", max_length=9, overlong="split")
    for options, message in (
        ({"kind": "answer"}, "rows of kind 'answer' hold nothing to train on"),
        ({"max_length": 1}, "max_length 1 leaves no target"),
        ({"overlong": "split"}, "overlong 'split' would train the tail"),
        ({"template": "x"}, "template and system are for rows of kind messages"),
        ({"tokenizer": Characters(eos_id=None)}, "names no eos token"),
    ):
        given_options = {"tokenizer": Characters(), "kind": "completion", "max_length": 9, "overlong": "truncate"} | options
        with pytest.raises(DataError, match=message):
            check_encoding(given_options.pop("tokenizer"), **given_options)
