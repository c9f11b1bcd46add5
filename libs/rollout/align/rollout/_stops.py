"""Stop strings, looked for in the text as it comes out of the streaming decoder."""

from __future__ import annotations

from collections.abc import Sequence

from align.tokenizer import Decoder, Tokenizer


class StopStrings:
    """Watches one sample. The prompt shapes the decoding (a leading space, an unfinished character) but is not searched."""

    def __init__(self, stop_strings: Sequence[str], tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._stop_strings = stop_strings
        self._decoder = Decoder(tokenizer, prefix=prompt_ids)
        self._keep = max(map(len, stop_strings)) - 1  # what a string that ends later may have begun with
        self._tail = ""

    def push(self, token_id: int) -> bool:
        """Whether this token completes a stop string."""
        text = self._tail + self._decoder.push(token_id)
        self._tail = text[max(0, len(text) - self._keep) :]
        return any(stop in text for stop in self._stop_strings)
