"""Rows of training data to exact batches: nothing lost, duplicated or leaked."""

from ._arithmetic import arithmetic_demonstrations, arithmetic_rows, arithmetic_tokenizer_config, arithmetic_tokenizer_json
from ._batch import Batch, padded_batch
from ._build import build_shards
from ._cursor import Cursor
from ._encode import Encoded, Example, chat_rows, check_encoding, encode_continued, encode_rows
from ._errors import DataError
from ._http import HubError
from ._hub import Hub, HubFile, HubPath, RemoteFile
from ._loader import Loader, Step, eval_batches
from ._mixture import Mixture
from ._overlap import Contamination, Decontaminated, Deduped, Hit, SeenRows, decontaminate, dedupe_rows
from ._packing import efficiency, pack
from ._pairs import EncodedPairs, encode_preferences
from ._prefetch import Prefetch
from ._readers import bundled, bundled_rows, gsm8k_rows, lean_rows, math500_rows, preference_rows, prm800k_rows, solution_pairs
from ._rows import Row, RowSet, check_rows, parse_lines, read_objects, read_rows, stream_rows, text_rows
from ._shards import Shards, open_shards
from ._split import is_held_out, split_rows

__all__ = [
    "Batch",
    "Contamination",
    "Cursor",
    "DataError",
    "Decontaminated",
    "Deduped",
    "Encoded",
    "EncodedPairs",
    "Example",
    "Hit",
    "Hub",
    "HubError",
    "HubFile",
    "HubPath",
    "Loader",
    "Mixture",
    "Prefetch",
    "RemoteFile",
    "Row",
    "RowSet",
    "SeenRows",
    "Shards",
    "Step",
    "arithmetic_demonstrations",
    "arithmetic_rows",
    "arithmetic_tokenizer_config",
    "arithmetic_tokenizer_json",
    "build_shards",
    "bundled",
    "bundled_rows",
    "chat_rows",
    "check_encoding",
    "check_rows",
    "decontaminate",
    "dedupe_rows",
    "efficiency",
    "encode_continued",
    "encode_preferences",
    "encode_rows",
    "eval_batches",
    "gsm8k_rows",
    "is_held_out",
    "lean_rows",
    "math500_rows",
    "open_shards",
    "pack",
    "padded_batch",
    "parse_lines",
    "preference_rows",
    "prm800k_rows",
    "read_objects",
    "read_rows",
    "solution_pairs",
    "split_rows",
    "stream_rows",
    "text_rows",
]
