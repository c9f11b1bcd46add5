"""What the tests of this library share: a tokenizer of single characters, a sampler that answers by script, and rows."""

from dataclasses import dataclass

from align.tokenizer import Tokenizer

ALPHABET = [chr(code) for code in range(32, 127)]
SPECIAL = [{"id": 95 + i, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
           for i, name in enumerate(["<s>", "</s>"])]  # fmt: skip


def make_tokenizer(bos=True):
    template = [{kind: {"id": name, "type_id": 0}} for kind, name in (("SpecialToken", "<s>"), ("Sequence", "A"), ("SpecialToken", "</s>"))]
    processor = {
        "type": "TemplateProcessing", "single": template, "pair": [*template, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {s["content"]: {"id": s["content"], "ids": [s["id"]], "tokens": [s["content"]]} for s in SPECIAL},
    }  # fmt: skip
    vocab = {c: i for i, c in enumerate(ALPHABET)} | {s["content"]: s["id"] for s in SPECIAL}
    return Tokenizer.from_dict(
        {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": SPECIAL, "normalizer": None, "pre_tokenizer": None,
         "post_processor": processor if bos else None, "decoder": {"type": "Fuse"}},
        {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"
         "{% if add_generation_prompt %}>{% endif %}"},
    )  # fmt: skip


TOKENIZER = make_tokenizer()


@dataclass
class FakeSample:
    ids: list[int]
    finish_reason: str


class FakeSampler:
    """Answers each prompt with the next of its scripted texts; remembers how it was asked."""

    def __init__(self, script):
        self.script, self.calls = script, []

    def generate(self, prompts_ids, *, n, max_new_tokens, temperature, seeds):
        self.calls.append((n, max_new_tokens, temperature, list(seeds)))
        texts = [text for ids in prompts_ids for text in self.script[TOKENIZER.decode(ids, skip_special=True)][:n]]
        reasons = ("stop" if len(text) <= max_new_tokens else "length" for text in texts)
        return [FakeSample([*TOKENIZER.encode(text)[:max_new_tokens], 96], reason) for text, reason in zip(texts, reasons, strict=True)]


ROWS = [
    {"prompt": "3+4?", "answer": "7", "level": 1},
    {"prompt": "5-5?", "answer": "0", "level": 1},
    {"prompt": "1+1+1?", "answer": "3", "level": 2},
    {"prompt": "half of 1?", "answer": "\\frac{1}{2}", "level": 2},
]
SCRIPT = {
    "3+4?": [r"3+4=7. \boxed{7}", r"\boxed{8}", "7"],
    "5-5?": [r"\boxed{0.0}", r"\boxed{0}", r"\boxed{1}"],
    "1+1+1?": ["3", r"\boxed{3}", r"\boxed{3}"],
    "half of 1?": [r"\boxed{0.5}", r"\boxed{2/4}", r"\boxed{\frac12}"],
}
