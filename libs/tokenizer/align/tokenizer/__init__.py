"""Tokenizers in pure Python: exact ids, exact masks, no dependency.

>>> from align.tokenizer import vendored
>>> tokenizer = vendored("mistral-7b-v0.3")
>>> tokenizer.encode("Hello world")
[23325, 2294]
>>> tokenizer.decode([23325, 2294])
'Hello world'
"""

from align.tokenizer._added import AddedToken
from align.tokenizer._chat import Chat, Segment
from align.tokenizer._decode import Decoder
from align.tokenizer._errors import ChatError, PrefixWarning, TokenizerError, VendoredWarning
from align.tokenizer._files import resolve_tokenizer, vendored, vendored_dir
from align.tokenizer._offsets import Offsets
from align.tokenizer._report import Drift, Loss, LossReport
from align.tokenizer._tokenizer import Encoding, Tokenizer

__all__ = [
    "AddedToken",
    "Chat",
    "ChatError",
    "Decoder",
    "Drift",
    "Encoding",
    "Loss",
    "LossReport",
    "Offsets",
    "PrefixWarning",
    "Segment",
    "Tokenizer",
    "TokenizerError",
    "VendoredWarning",
    "resolve_tokenizer",
    "vendored",
    "vendored_dir",
]
