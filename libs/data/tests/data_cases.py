"""A tokenizer over characters, for the tests of encoding."""

import re
from dataclasses import dataclass

BOS, EOS = 1, 2


@dataclass
class Chat:
    ids: list[int]
    assistant_mask: list[bool]


class Characters:
    """The contract's methods over characters: id = code point + 10; "<s>", "</s>" and, as byte-level BPE has it, "\\n\\n" one token."""

    def __init__(self, eos_id=EOS, bos=True):
        self.eos_id, self.bos = eos_id, bos

    def encode(self, text, *, add_special_tokens=False):
        pieces = re.findall(r"</?s>|\n\n|.", text, re.DOTALL)
        ids = [{"<s>": BOS, "</s>": EOS, "\n\n": 5}.get(piece) or ord(piece) + 10 for piece in pieces]
        return [BOS] * (self.bos and add_special_tokens) + ids

    def render_chat(self, messages, *, template=None):
        ids, mask = [BOS], [False]
        for message in messages:
            if template == "no system" and message["role"] == "system":
                raise ValueError("the template has no system message")
            body = [3, *self.encode(message["content"]), 4]
            ids += body
            mask += [False] + [message["role"] == "assistant"] * (len(body) - 1)
        return Chat(ids, mask)


class Spaced(Characters):
    """As SentencePiece has it: a space in front of every text, and a space with the letter after it one token, 1000 above the letter's."""

    def encode(self, text, *, add_special_tokens=False):
        pieces = re.findall(r" [a-z]|.", text if text[:1] in ("", " ") else f" {text}", re.DOTALL)
        ids = [ord(piece[-1]) + 10 + 1000 * (len(piece) - 1) for piece in pieces]
        return [BOS] * (self.bos and add_special_tokens) + ids


def ids_of(text):
    return [ord(character) + 10 for character in text]
