"""Optimizer steps from encoded rows: which documents, in which micro-batch, on which rank."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ._batch import Batch, packed_batch, padded_batch
from ._cursor import Cursor, permutation
from ._errors import DataError
from ._mixture import Documents, Mixture, MixtureCursor
from ._packing import pack


@dataclass(frozen=True, eq=False)
class Step:
    """One optimizer step. Counts are of all ranks and micro-batches, known before the first forward; `micro_batches` are this rank's."""

    micro_batches: list[Batch]
    trained_tokens: int  # targets: the denominator of the step's loss
    tokens: int  # fed, padding not counted
    documents: list[int]  # indices of the documents of all ranks, in the global order
    epoch: float  # epochs done after this step


class Loader:
    """Steps of `global_batch` rows, over all ranks, in an order that is a function of (seed, epoch, digest) alone.

    packing=False: a row is one document, padded to the longest of its micro-batch; a document may have at most max_length tokens.
    packing=True: a row is max_length positions holding whole documents, `pack`ed inside each window of the shuffled order, the
    window's rows shuffled again. Every document is seen exactly once an epoch; a step may begin in one epoch and end in the next.

    Of a step's rows, rank r works on the r-th block of global_batch / world. State is the same on every rank and counts what was
    delivered, so a run goes on exactly with another number of ranks or another micro_batch.
    """

    def __init__(
        self,
        encoded: Documents,
        *,
        global_batch: int,
        micro_batch: int,
        max_length: int,
        packing: bool,
        seed: int,
        rank: int = 0,
        world: int = 1,
        pad_id: int = 0,
        window: int = 4096,
    ):
        _check_shape(global_batch, micro_batch, rank, world)
        self._lengths, self._trained = encoded.lengths, encoded.trained
        longest = _longest(self._lengths, max_length)
        self._examples = encoded.examples
        self._global_batch, self._micro_batch, self._rank, self._world = global_batch, micro_batch, rank, world
        self._max_length, self._packing, self._pad_id, self._window = max_length, packing, pad_id, window
        self._documents, self._seed = encoded, seed
        self._cursor = self._new_cursor()
        self._start = self._cursor.state_dict()  # where the present window began
        self._rows: list[list[int]] = []  # of the present window
        self._row = 0  # rows of it that were delivered
        if packing:
            self._max_seqlen = 1 << (longest - 1).bit_length()
            self._segments = micro_batch * _most_segments(self._lengths, max_length, self._max_seqlen)

    @property
    def digest(self) -> str:
        return self._cursor.digest

    def next_step(self) -> Step:
        rows: list[list[int]] = []
        while len(rows) < self._global_batch:
            if self._row == len(self._rows):
                self._open_window()
            part = self._rows[self._row : self._row + self._global_batch - len(rows)]
            self._row += len(part)
            rows += part
        share = self._global_batch // self._world
        mine = rows[self._rank * share : (self._rank + 1) * share]
        documents = [index for row in rows for index in row]
        return Step(
            micro_batches=[self._batch(mine[at : at + self._micro_batch]) for at in range(0, share, self._micro_batch)],
            trained_tokens=int(self._trained[documents].sum()),
            tokens=int(self._lengths[documents].sum()),
            documents=documents,
            epoch=self._epochs_done(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON: the same on every rank."""
        return {
            "cursor": dict(self._start),
            "row": self._row,
            "global_batch": self._global_batch,
            "packing": self._packing,
            "max_length": self._max_length,
            "window": self._window,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow_change: tuple[str, ...] = ()) -> None:
        """Goes on where `state` was made, on any number of ranks.

        Raises DataError, naming the field, when the data or anything that the order depends on changed. A changed global_batch loses and
        repeats nothing but is another run: allow_change=("global_batch",) admits it.
        """
        given = {"packing": self._packing, "max_length": self._max_length, "window": self._window, "global_batch": self._global_batch}
        for name, value in given.items():
            if state.get(name) != value and not (name == "global_batch" and name in allow_change):
                raise DataError(
                    f"the saved run has {name} {state.get(name)!r}, this one {value!r}: it cannot be resumed exactly; restore {name}"
                )
        cursor = self._new_cursor()
        cursor.load_state_dict(state.get("cursor") or {})
        before = self._cursor, self._start, self._rows, self._row
        self._cursor, self._rows, self._row = cursor, [], 0
        self._start = cursor.state_dict()
        row = state.get("row")
        if row != 0:
            self._open_window()
        if type(row) is not int or not 0 <= row <= len(self._rows):
            self._cursor, self._start, self._rows, self._row = before
            raise DataError(f"the saved run stands at row {row!r} of a window that has no such row; use another checkpoint")
        self._row = row

    def _new_cursor(self) -> Cursor | MixtureCursor:
        if isinstance(self._documents, Mixture):
            return self._documents.cursor(self._seed)
        return Cursor(len(self._examples), seed=self._seed, digest=self._documents.digest)

    def _open_window(self) -> None:
        self._start = self._cursor.state_dict()
        taken = self._cursor.take(min(self._window, self._cursor.remaining))
        if self._packing:
            rows = pack(self._lengths[taken].tolist(), self._max_length, window=len(taken))
            # Best fit places the long documents first; without a shuffle every window would begin with them.
            key = f"rows:{self._cursor.seed}:{self._cursor.epoch}:{self._cursor.position}:{self._cursor.digest}"
            self._rows = [[taken[index] for index in rows[row]] for row in permutation(len(rows), key)]
        else:
            self._rows = [[index] for index in taken]
        self._row = 0

    def _batch(self, rows: list[list[int]]) -> Batch:
        if not self._packing:
            return padded_batch([self._examples[row[0]] for row in rows], pad_id=self._pad_id)
        examples = [[self._examples[index] for index in row] for row in rows]
        return packed_batch(examples, self._max_length, max_seqlen=self._max_seqlen, segments=self._segments, pad_id=self._pad_id)

    def _epochs_done(self) -> float:
        ahead = sum(len(row) for row in self._rows[self._row :])
        return self._cursor.progress - ahead / self._cursor.size


def eval_batches(
    documents: Documents, *, micro_batch: int, max_length: int, packing: bool, rank: int = 0, world: int = 1, pad_id: int = 0
) -> Iterator[Batch]:
    """One pass over all documents in their order, for a held-out loss: batch i is of rank i mod world.

    Every rank gets the same number of batches, so none waits for another: where they do not come out even, the last ones of the later
    ranks hold nothing that is trained (loss_mask all False). Shapes are as a `Loader`'s; the last batch may have fewer rows, when padded.
    """
    _check_shape(micro_batch * world, micro_batch, rank, world)
    lengths, longest = documents.lengths, _longest(documents.lengths, max_length)
    if packing:
        rows = pack(lengths.tolist(), max_length)
        max_seqlen = 1 << (longest - 1).bit_length()
        segments = micro_batch * _most_segments(lengths, max_length, max_seqlen)
    else:
        rows = [[index] for index in range(len(lengths))]
    parts = [rows[at : at + micro_batch] for at in range(0, len(rows), micro_batch)]
    for turn in range(-(-len(parts) // world)):
        mine = turn * world + rank
        examples = [[documents.examples[index] for index in row] for row in parts[min(mine, len(parts) - 1)]]
        if packing:
            examples += [[]] * (micro_batch - len(examples))
            batch = packed_batch(examples, max_length, max_seqlen=max_seqlen, segments=segments, pad_id=pad_id)
        else:
            batch = padded_batch([row[0] for row in examples], pad_id=pad_id)
        yield batch if mine < len(parts) else replace(batch, loss_mask=np.zeros_like(batch.loss_mask))


def _longest(lengths: np.ndarray, max_length: int) -> int:
    longest = int(lengths.max(initial=0))
    if longest > max_length:
        index = int(lengths.argmax())
        raise DataError(f"document {index} has {longest} tokens, more than max_length {max_length}; encode the rows with that max_length")
    return longest


def _most_segments(lengths: np.ndarray, row_length: int, max_seqlen: int) -> int:
    """The most documents that one row can hold, pieces of padding included."""
    shortest = np.sort(lengths)[:row_length]
    return int(np.searchsorted(np.cumsum(shortest), row_length, side="right")) + -(-row_length // max_seqlen)


def _check_shape(global_batch: int, micro_batch: int, rank: int, world: int) -> None:
    if min(global_batch, micro_batch, world) < 1 or not 0 <= rank < world:
        raise DataError(
            f"global_batch {global_batch}, micro_batch {micro_batch} and ranks {world} must be at least 1, and rank {rank} one of 0 to "
            f"{world - 1}"
        )
    if global_batch % world:
        fits = [value for value in (global_batch - global_batch % world, global_batch + -global_batch % world) if value]
        raise DataError(f"global_batch {global_batch} is not a multiple of ranks {world}; try global_batch {_or(fits)}")
    share = global_batch // world
    if share % micro_batch:
        below = [value for value in range(1, min(micro_batch, share + 1)) if share % value == 0][-1:]
        above = [value for value in range(micro_batch + 1, share + 1) if share % value == 0][:1]
        raise DataError(
            f"global_batch {global_batch} is not a multiple of ranks {world} × micro_batch {micro_batch}; "
            f"try micro_batch {_or(below + above)}"
        )


def _or(values: list[int]) -> str:
    return " or ".join(map(str, values))
