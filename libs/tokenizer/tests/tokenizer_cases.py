"""The reference's answers (tests/data/PROVENANCE.md) and the tokenizers they belong to."""

import gzip
import json
from collections import Counter
from functools import cache
from pathlib import Path

from align.tokenizer import Decoder, Tokenizer, vendored_dir

DATA = Path(__file__).parent / "data"


@cache
def load(name: str) -> Tokenizer:
    """A tokenizer of the cases; two of them are made from another's file."""
    if name == "mistral-7b-v0.3":
        return Tokenizer.load(vendored_dir(name))
    if name == "mistral-7b-v0.3-legacy":  # the shape of older conversions of Llama-2 and Mistral
        data = json.loads((vendored_dir("mistral-7b-v0.3") / "tokenizer.json").read_text("utf-8"))
        data["pre_tokenizer"] = None
        data["normalizer"] = {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}],
        }
        return Tokenizer.from_dict(data)
    if name == "qwen2.5":  # Qwen3's file without its four last added tokens
        data = json.loads(gzip.decompress((DATA / "qwen3" / "tokenizer.json.gz").read_bytes()))
        data["added_tokens"] = data["added_tokens"][:-4]
        return Tokenizer.from_dict(data)
    return Tokenizer.load(DATA / name)


@cache
def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in gzip.decompress((DATA / f"{name}.jsonl.gz").read_bytes()).decode().splitlines()]


def wrong_cases(name: str) -> tuple[int, Counter, list]:
    """(rows, wrong answers by kind, the first few of them) over the text cases of a tokenizer."""
    tokenizer = load(name)
    wrong: Counter = Counter()
    shown: list = []
    mine = [row for row in rows("cases") if row["tokenizer"] == name]
    for row in mine:
        text, ids = row["text"], row["ids"]
        encoding = tokenizer.encode_with_offsets(text)
        answers = {
            "ids": tokenizer.encode(text),
            "ids_with_special": tokenizer.encode(text, add_special_tokens=True),
            "ids_special_as_text": tokenizer.encode(text, special="text"),
            "offsets": [list(pair) for pair in encoding.offsets],
            "decoded": tokenizer.decode(ids),
            "decoded_skip_special": tokenizer.decode(ids, skip_special=True),
        }
        if encoding.ids != ids:
            wrong["ids of encode_with_offsets"] += 1
        for kind, answer in answers.items():
            if answer != row[kind]:
                wrong[kind] += 1
                shown.append((row["id"], kind, text, answer, row[kind]))
    return len(mine), wrong, shown[:3]


def wrong_streams(name: str) -> tuple[int, list]:
    """(streams, the wrong ones): pushed one by one, the text must be the whole decode's."""
    tokenizer = load(name)
    mine = [row for row in rows("stream_cases") if row["tokenizer"] == name]
    wrong = []
    for row in mine:
        decoder = Decoder(tokenizer, skip_special=row["skip_special"])
        text = "".join(map(decoder.push, row["ids"])) + decoder.finish()
        if text != row["full"] or tokenizer.decode(row["ids"], skip_special=row["skip_special"]) != row["full"]:
            wrong.append((row["id"], text, row["full"]))
    return len(mine), wrong


def wrong_chats(name: str) -> tuple[int, list]:
    """(chats, the wrong ones) in compat mode, rows that expect an error included."""
    from align.tokenizer import ChatError

    tokenizer = load(name)
    mine = [row for row in rows("chat_cases") if row["tokenizer"] == name]
    wrong = []
    for row in mine:
        template = (DATA / "templates" / f"{row['template']}.jinja").read_text("utf-8")
        try:
            chat = tokenizer.render_chat(
                row["messages"], tools=row["tools"], add_generation_prompt=row["add_generation_prompt"],
                template=template, variables=row["variables"], compat=True,
            )  # fmt: skip
        except ChatError as error:
            if "error" not in row:
                wrong.append((row["id"], str(error)))
            continue
        if "error" in row or chat.text != row["text"] or chat.ids != row["ids"]:
            wrong.append((row["id"], chat.text, row.get("text")))
    return len(mine), wrong


@cache
def components() -> dict:
    """Small tokenizers that together use every component, and the reference's answers on 17 texts each."""
    return json.loads(gzip.decompress((DATA / "component_cases.json.gz").read_bytes()))


def component_json(index: int) -> dict:
    """The tokenizer.json of one of them."""
    every = components()
    data = json.loads(json.dumps(every["configs"][index][0]))
    model = data["model"]
    vocab, merges = ("bytes", "byte_merges") if model["vocab"] == "BYTES" else ("chars", "merges")
    model["vocab"], model["merges"] = dict(every[vocab]), list(every[merges])
    return data
