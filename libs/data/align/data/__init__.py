"""Rows of training data to exact batches: nothing lost, duplicated or leaked."""

from ._arithmetic import arithmetic_demonstrations, arithmetic_rows, arithmetic_tokenizer_config, arithmetic_tokenizer_json
from ._batch import Batch
from ._build import build_shards
from ._cursor import Cursor
from ._encode import Encoded, Example, chat_rows, encode_rows
from ._errors import DataError
from ._http import HubError
from ._hub import Hub, HubFile, RemoteFile
from ._loader import Loader, Step, eval_batches
from ._mixture import Mixture
from ._overlap import Decontaminated, Deduped, Hit, decontaminate, dedupe_rows
from ._packing import efficiency, pack
from ._prefetch import Prefetch
from ._readers import bundled, gsm8k_rows, lean_rows, math500_rows, preference_rows, prm800k_rows, solution_pairs
from ._rows import RowSet, read_rows, stream_rows
from ._shards import Shards, open_shards
from ._split import split_rows

__all__ = [
    "Batch",
    "Cursor",
    "DataError",
    "Decontaminated",
    "Deduped",
    "Encoded",
    "Example",
    "Hit",
    "Hub",
    "HubError",
    "HubFile",
    "Loader",
    "Mixture",
    "Prefetch",
    "RemoteFile",
    "RowSet",
    "Shards",
    "Step",
    "arithmetic_demonstrations",
    "arithmetic_rows",
    "arithmetic_tokenizer_config",
    "arithmetic_tokenizer_json",
    "build_shards",
    "bundled",
    "chat_rows",
    "decontaminate",
    "dedupe_rows",
    "efficiency",
    "encode_rows",
    "eval_batches",
    "gsm8k_rows",
    "lean_rows",
    "math500_rows",
    "open_shards",
    "pack",
    "preference_rows",
    "prm800k_rows",
    "read_rows",
    "solution_pairs",
    "split_rows",
    "stream_rows",
]
