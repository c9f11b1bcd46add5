"""Many texts over several processes."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from align.tokenizer._errors import TokenizerError

if TYPE_CHECKING:
    from align.tokenizer._tokenizer import Tokenizer


def encode_batch(tokenizer: "Tokenizer", texts: Iterable[str], processes: int, add_special_tokens: bool, special: str) -> list[list[int]]:
    """In order. Processes are spawned, so that a parent with threads or a GPU is safe; a script that calls this needs the usual
    `if __name__ == "__main__":`. Raises TokenizerError, also when a worker dies."""
    if not isinstance(processes, int) or processes < 1:
        raise TokenizerError(f"processes {processes!r} should be a number from 1")
    if isinstance(texts, (str, bytes)):
        raise TokenizerError("encode_batch takes a list of texts, not one text")
    texts = list(texts)
    for text in texts:
        tokenizer._skipper(text, special)  # errors come from here, with their text still at hand
    if processes == 1 or len(texts) < 2:
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens, special=special) for text in texts]
    from align.tokenizer._workers import encode_over

    return encode_over(tokenizer, [(chunk, add_special_tokens, special) for chunk in _chunks(texts, processes * 4)], processes)


def _chunks(texts: list[str], count: int) -> list[list[str]]:
    """About `count` adjacent groups of about equally many characters."""
    limit = sum(map(len, texts)) / count
    out: list[list[str]] = [[]]
    size = 0
    for text in texts:
        if size > limit and out[-1]:
            out.append([])
            size = 0
        out[-1].append(text)
        size += len(text)
    return out
