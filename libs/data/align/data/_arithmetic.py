"""The default task: generated word problems, demonstrations of mixed quality, and a tokenizer of their words."""

import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from ._errors import DataError

NAMES = ("Ana", "Ben", "Eva", "Leo", "Mia", "Noa", "Sam", "Tom")
THINGS = ("apples", "books", "cards", "coins", "pens", "shells")
GAINS = ("buys {} more", "finds {} more", "gets {} more")
LOSSES = ("gives away {}", "loses {}", "sells {}")
DOUBLES = ("doubles the number",)
LARGEST_NUMBER, LARGEST_RESULT = 20, 60
LEVELS = (1, 2, 3)


def arithmetic_rows(count: int, *, levels: Sequence[int] = LEVELS, seed: int, held_out: bool) -> list[dict[str, Any]]:
    """`count` different problems, {"prompt", "answer", "level"}, the levels in turn; a level is the number of operations.

    "Ana has 7 coins. Ana buys 12 more. Ana loses 4. How many coins now?" Numbers are at most 20, results at most 60. A problem is held
    out when crc32(prompt) % 10 == 0; demonstrations never hold such a problem. Raises DataError for a level that is not 1, 2 or 3, or
    when a level has not so many different problems.
    """
    if not levels or any(level not in LEVELS for level in levels):
        raise DataError(f"levels {tuple(levels)} must be some of {LEVELS}")
    draws = random.Random(f"arithmetic rows {seed} {held_out}")
    seen: set[str] = set()
    rows: list[dict[str, Any]] = []
    for level in (levels[index % len(levels)] for index in range(count)):
        for _ in range(1000):
            prompt, values = _problem(draws, level)
            if _is_held_out(prompt) == held_out and prompt not in seen:
                break
        else:
            raise DataError(f"level {level} has no more different problems after {len(rows)} rows; ask for fewer than {count}")
        seen.add(prompt)
        rows.append({"prompt": prompt, "answer": str(values[-1][-1]), "level": level})
    return rows


def arithmetic_demonstrations(count: int, *, seed: int, mix: Sequence[float] = (0.4, 0.4, 0.2)) -> list[dict[str, Any]]:
    """`count` demonstrations {"prompt", "completion"} of problems that are not held out, levels drawn evenly.

    mix: the shares of "7+12=19. 19-4=15. \\boxed{15}" (worked and boxed), "\\boxed{15}" (the bare answer) and "7+12=19. 19-4=15." (worked,
    not boxed, so a verifier that looks for a box gives it nothing). All are right; what differs is what can be learnt from them.
    """
    if len(mix) != 3 or min(mix) < 0 or not abs(sum(mix) - 1) <= 1e-6:
        raise DataError(f"mix {tuple(mix)} must be three shares that add up to 1: worked and boxed, bare, worked without a box")
    draws = random.Random(f"arithmetic demonstrations {seed}")
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        prompt, values = _problem(draws, LEVELS[_below(draws, 3)])
        if _is_held_out(prompt):
            continue
        steps = " ".join(f"{left}{operator}{right}={result}." for left, operator, right, result in values)
        boxed = f"\\boxed{{{values[-1][-1]}}}"
        style = draws.random()
        completion = f"{steps} {boxed}" if style < mix[0] else boxed if style < mix[0] + mix[1] else steps
        rows.append({"prompt": prompt, "completion": completion})
    return rows


def arithmetic_tokenizer_json() -> dict[str, Any]:
    """A tokenizer.json in Hugging Face's form: BPE without merges over the task's words and single characters.

    `ignore_merges` makes a word that is in the vocabulary one token; any other falls to characters, and what is no letter, digit or
    mark of the task to <unk>. A bos is put in front (add_special_tokens). Ids: 0 <pad>, 1 <s>, 2 </s>, 3 <unk>.
    """
    specials = ["<pad>", "<s>", "</s>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate([*specials, *_characters(), *_words()])}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            for i, token in enumerate(specials)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def arithmetic_tokenizer_config() -> dict[str, Any]:
    """The tokenizer_config.json beside it: which tokens are bos, eos, pad and unk."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 256,
        "clean_up_tokenization_spaces": False,
    }


def _problem(draws: random.Random, level: int) -> tuple[str, list[tuple[int, str, int, int]]]:
    """A prompt and its steps (left, operator, right, result)."""
    name, thing = NAMES[_below(draws, len(NAMES))], THINGS[_below(draws, len(THINGS))]
    value = 1 + _below(draws, LARGEST_NUMBER)
    said, steps = [f"{name} has {value} {thing}."], []
    for _ in range(level):
        operator, number, phrases = _operation(draws, value)
        result = {"+": value + number, "-": value - number, "*": value * number}[operator]
        said.append(f"{name} {phrases[_below(draws, len(phrases))].format(number)}.")
        steps.append((value, operator, number, result))
        value = result
    return f"{' '.join(said)} How many {thing} now?", steps


def _operation(draws: random.Random, value: int) -> tuple[str, int, tuple[str, ...]]:
    """One that keeps the result in 0..LARGEST_RESULT."""
    while True:
        operator, phrases = (("+", GAINS), ("-", LOSSES), ("*", DOUBLES))[_below(draws, 3)]
        if operator == "*" and 0 < 2 * value <= LARGEST_RESULT:
            return operator, 2, phrases
        most = min(LARGEST_NUMBER, LARGEST_RESULT - value if operator == "+" else value)
        if operator != "*" and most > 0:
            return operator, 1 + _below(draws, most), phrases


def _is_held_out(prompt: str) -> bool:
    return zlib.crc32(prompt.encode()) % 10 == 0


def _below(draws: random.Random, limit: int) -> int:
    """0..limit-1; `random()` is the one method whose sequence Python promises to keep."""
    return int(draws.random() * limit)


def _characters() -> Iterator[str]:
    """Letters, digits and marks, in byte-level form: Ġ is the space and Ċ the newline."""
    yield from "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789ĠĊ.?+-=*\\{}"


def _words() -> Iterator[str]:
    """What the pre-tokenizer makes of the task's texts, longer than a character: a word with the space before it, if there is one."""
    phrases = " ".join([*GAINS, *LOSSES, *DOUBLES, "has", "many", "now"]).replace("{}", "").split()
    yield from sorted({f"Ġ{word}" for word in (*NAMES, *THINGS, *phrases, "How")})
    yield from (*NAMES, "boxed")
