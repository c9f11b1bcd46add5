"""Loading, saving, the vendored files, and errors that name the place."""

import functools
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from align.tokenizer import ChatError, Decoder, Tokenizer, TokenizerError, VendoredWarning, resolve_tokenizer, vendored_dir
from align.tokenizer import vendored as load_vendored

vendored = functools.cache(load_vendored)

# The official files' digests; tests/data/PROVENANCE.md and the assets' own say where they come from.
MISTRAL = {
    "tokenizer.json": ("32d192f59838957494261e9ae868506b", "e553af6fff7d7ad76e830608b218c5c0b0822998d5a1a96099a74cd3c1cb1a49"),
    "tokenizer.model": ("2bbc01eba250283314fdbd53d05de94b", "37f00374dea48658ee8f5d0f21895b9bc55cb0103939607c8185bfd1c6ca1f89"),
    "tokenizer_config.json": ("b9b3b758e765622b72047d10180a6827", "0533dec9cfe319163801b6618d0f3ec9cfa126b6288e3df5deca6e32acb09cd2"),
    "special_tokens_map.json": ("e60ae4706e691cf378545ad0bd042f6f", "6fa06efa2785e450051989a6f8fb4416b10149ded485ddd3f127a40734f5cfd0"),
}

# A toy model of whole words and single characters, as small tasks make it: BPE with ignore_merges and no merges.
TOY = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {"id": i, "content": c, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i, c in enumerate(("<pad>", "<s>", "</s>"))
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[a-z]+|\s|[^a-z\s]"}, "behavior": "Isolated", "invert": False},
    "post_processor": None,
    "decoder": {"type": "Fuse"},
    "model": {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
        "vocab": {"<pad>": 0, "<s>": 1, "</s>": 2, "what": 3, "is": 4, " ": 5, "1": 6, "+": 7, "w": 8, "s": 9, "?": 10}, "merges": [],
    },
}  # fmt: skip


def toy(**changes) -> dict:
    data = json.loads(json.dumps(TOY))
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = data
        for key in parents:
            node = node[key]
        node[last] = value
    return data


def test_vendored_files_are_the_official_ones():
    directory = vendored_dir("mistral-7b-v0.3")
    provenance = (directory / "PROVENANCE.md").read_text("utf-8")
    for name, (md5, sha256) in MISTRAL.items():
        data = (directory / name).read_bytes()
        assert hashlib.md5(data).hexdigest() == md5 and hashlib.sha256(data).hexdigest() == sha256
        assert md5 in provenance and sha256 in provenance
    assert {path.name for path in directory.iterdir()} == {*MISTRAL, "PROVENANCE.md"}


def test_vendored_tokenizer_knows_its_names():
    tokenizer = vendored("mistral-7b-v0.3")
    assert (tokenizer.bos_token, tokenizer.bos_id, tokenizer.eos_token, tokenizer.eos_id) == ("<s>", 1, "</s>", 2)
    assert tokenizer.vocab_size == 32768
    assert tokenizer.pad_id is None
    assert tokenizer.token_to_id("[/INST]") == 4 and tokenizer.id_to_token(4) == "[/INST]"


def test_unknown_vendored_name():
    with pytest.raises(TokenizerError, match=r"no vendored tokenizer 'mistral'; there is mistral-7b-v0.3"):
        vendored("mistral")


def test_save_copies_byte_for_byte(tmp_path):
    written = vendored().save(tmp_path / "copy")
    assert sorted(path.name for path in written) == sorted(MISTRAL)
    for path in written:
        assert hashlib.md5(path.read_bytes()).hexdigest() == MISTRAL[path.name][0]
    again = Tokenizer.load(tmp_path / "copy")
    assert again.files == written
    assert again.save(tmp_path / "copy") == written  # onto itself
    assert again.fingerprint == vendored().fingerprint


def test_toy_with_ignore_merges_and_no_merges(tmp_path):
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": "{{ messages[0].content }}"}
    tokenizer = Tokenizer.from_dict(TOY, config)
    assert tokenizer.encode("<s>what is 1+1?</s>") == [1, 3, 5, 4, 5, 6, 7, 6, 10, 2]
    assert tokenizer.encode("ws") == [8, 9]  # no whole word: single characters
    assert tokenizer.decode([1, 3, 5, 4, 2], skip_special=True) == "what is"
    tokenizer.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert (again.eos_id, again.pad_id, again.chat_template) == (2, 0, config["chat_template"])
    assert again.fingerprint == tokenizer.fingerprint
    assert again.encode("what") == [3]


def test_fingerprint_tells_tokenizers_apart():
    base = Tokenizer.from_dict(TOY).fingerprint
    assert re.fullmatch("[0-9a-f]{64}", base)
    assert Tokenizer.from_dict(toy(normalizer={"type": "Prepend", "prepend": "w"})).fingerprint != base
    assert Tokenizer.from_dict(toy(model__vocab={**TOY["model"]["vocab"], "x": 11})).fingerprint != base
    assert Tokenizer.from_dict(toy(added_tokens=TOY["added_tokens"][:2])).fingerprint != base
    strings = toy(model__merges=["w s"], model__vocab={**TOY["model"]["vocab"], "ws": 11})
    pairs = toy(model__merges=[["w", "s"]], model__vocab={**TOY["model"]["vocab"], "ws": 11})
    assert Tokenizer.from_dict(strings).fingerprint == Tokenizer.from_dict(pairs).fingerprint != base


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"truncation": {"max_length": 8}}, "tokenizer.json: 'truncation' is set"),
        ({"padding": {"strategy": "BatchLongest"}}, "tokenizer.json: 'padding' is set"),
        ({"model__type": "WordPiece"}, "tokenizer.json.model: type 'WordPiece' is not supported"),
        ({"model__dropout": 0.1}, "tokenizer.json.model: 'dropout' is not supported"),
        ({"model__merges": ["w z"]}, "tokenizer.json.model.merges[0]: token 'z' is not in the vocabulary"),
        ({"model__merges": ["wz"]}, "tokenizer.json.model.merges[0]: should be a pair of tokens"),
        ({"model__vocab": {"a": "1"}}, "tokenizer.json.model: vocab['a'] should be a number"),
        ({"model__vocab": {"a": 1, "b": 1}}, "vocab['b'] and vocab['a'] have the same id 1"),
        ({"model__vocab": {"a\ud800": 1}}, "holds a lone surrogate, which is no text"),
        ({"normalizer": {"type": "Prepend", "prepend": "\ud800"}}, "tokenizer.json.normalizer: 'prepend' holds a lone surrogate"),
        ({"normalizer": {"type": "Precompiled"}}, "tokenizer.json.normalizer: type 'Precompiled' is not supported"),
        ({"pre_tokenizer__pattern": {"Regex": "a(?<name>b)"}}, "tokenizer.json.pre_tokenizer.pattern.Regex: "),
        ({"pre_tokenizer__behavior": "Sideways"}, "behavior 'Sideways' is none of Isolated, Removed"),
        ({"decoder": {"type": "WordPiece"}}, "tokenizer.json.decoder: type 'WordPiece' is not supported"),
        ({"post_processor": {"type": "BertProcessing"}}, "tokenizer.json.post_processor: type 'BertProcessing' is not supported"),
        ({"added_tokens": [{"id": 3, "content": "x"}]}, "added_tokens[0]: 'x' and id 3 belong to different tokens"),
    ],
)
def test_what_is_not_supported_names_its_place(changes, message):
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_dict(toy(**changes))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_errors_of_load(tmp_path):
    with pytest.raises(TokenizerError, match="no such file or directory"):
        Tokenizer.load(tmp_path / "nothing")
    with pytest.raises(TokenizerError, match=r"no tokenizer.json in this directory"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer.json: not JSON"):
        Tokenizer.load(tmp_path)
    with pytest.raises(TokenizerError, match="bos_token '<b>' is no token of the vocabulary"):
        Tokenizer.from_dict(TOY, {"bos_token": "<b>"})


def test_resolve_prefers_the_directory_and_falls_back_loudly(tmp_path):
    own = tmp_path / "own"
    vendored().save(own)
    assert resolve_tokenizer(own).files[0].parent == own
    assert resolve_tokenizer("mistralai/Mistral-7B-v0.3").fingerprint == vendored().fingerprint
    broken = tmp_path / "Mistral-7B-v0.3"
    broken.mkdir()
    with pytest.warns(VendoredWarning, match=r"no usable tokenizer .*using the vendored mistral-7b-v0.3"):
        assert resolve_tokenizer(broken).vocab_size == 32768
    by_config = tmp_path / "checkpoint"
    by_config.mkdir()
    (by_config / "config.json").write_text('{"model_type": "mistral", "vocab_size": 32768}')
    with pytest.warns(VendoredWarning):
        resolve_tokenizer(by_config)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(TokenizerError, match=r"no tokenizer.json"):
        resolve_tokenizer(other)
    with pytest.raises(TokenizerError, match="neither a directory"):
        resolve_tokenizer(tmp_path / "absent")


def test_special_modes():
    tokenizer = vendored()
    assert tokenizer.encode("x[/INST]y") == [2086, 4, 29492]
    assert tokenizer.encode("x[/INST]y", special="text") == [2086, 29560, 29516, 17057, 29561, 29492]
    assert tokenizer.encode("x[/INST]y", special="literal") == [2086, 29560, 29516, 17057, 29561, 29492]
    with pytest.raises(TokenizerError, match=r"holds the token '\[/INST\]' near character 1"):
        tokenizer.encode("x[/INST]y", special="refuse")
    assert tokenizer.encode("xy", special="refuse") == tokenizer.encode("xy")
    with pytest.raises(TokenizerError, match="special 'no' is none of"):
        tokenizer.encode("x", special="no")


def test_text_that_is_none():
    with pytest.raises(TokenizerError, match=r"character 1 is the lone surrogate U\+D800"):
        vendored().encode("a\ud800")
    with pytest.raises(TokenizerError, match="takes a str, not bytes"):
        vendored().encode(b"a")


def test_decoder_after_a_prompt_shows_only_what_follows():
    tokenizer = vendored()
    prompt, answer = tokenizer.encode("Hello"), [2294]
    decoder = Decoder(tokenizer, prefix=prompt)
    assert decoder.push(answer[0]) + decoder.finish() == " world"
    assert Decoder(tokenizer).push(answer[0]) == "world"


@pytest.mark.parametrize("prompt", ["Q: 1 + 1\nA:\n", "\U0001f466", "a\r\n\r\n", "\t"])
def test_the_bytes_that_end_a_prompt_are_no_part_of_the_answer(prompt):
    tokenizer = vendored()  # a line break is a byte token there
    decoder = Decoder(tokenizer, prefix=tokenizer.encode(prompt))
    assert decoder.push(2294) + decoder.finish() == " world"
    half = tokenizer.encode(prompt) + [1011, 930]  # the first two bytes of a character, whose others the answer has
    decoder = Decoder(tokenizer, prefix=half)
    assert decoder.push(916) + decoder.push(937) + decoder.push(2294) == "\U0001f466 world"


def test_ids_without_a_token():
    tokenizer = vendored()
    assert tokenizer.decode([32768, 23325]) == "Hello"
    with pytest.raises(TokenizerError, match="-1 is no token id"):
        tokenizer.decode([-1])


def test_the_readme_runs():
    code = (Path(__file__).parent.parent / "README.md").read_text("utf-8").split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nesting_without_end():
    part = {"type": "NFC"}
    for _ in range(2000):
        part = {"type": "Sequence", "normalizers": [part]}
    with pytest.raises(TokenizerError, match="nested too deeply"):
        Tokenizer.from_dict({**TOY, "normalizer": part})


def test_arguments_of_another_type(tmp_path):
    tokenizer = vendored()
    with pytest.raises(TokenizerError, match="a list of texts, not one text"):
        tokenizer.encode_batch("abc")
    with pytest.raises(TokenizerError, match="the configuration should be a JSON object, not list"):
        Tokenizer.from_dict(TOY, [1])
    (tmp_path / "file").write_text("")
    with pytest.raises(TokenizerError, match="the tokenizer's files cannot be written"):
        tokenizer.save(tmp_path / "file")
    with pytest.raises(ChatError, match="template should be a str, not bytes"):
        tokenizer.render_chat([], template=b"x")
    with pytest.raises(ChatError, match="variables should be a dict of names, not list"):
        tokenizer.render_chat([], variables=[1])
    with pytest.raises(ChatError, match=r"messages\[0\] should be an object with a role"):
        tokenizer.check_prefixes([{"content": 1}, {}])
