"""Several data sets as one, in given shares."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, overload

import numpy as np

from ._cursor import Cursor
from ._encode import Example
from ._errors import DataError


class Documents(Protocol):
    """What is loaded: an `Encoded`, `Shards` or a `Mixture`."""

    @property
    def examples(self) -> Sequence[Example]: ...

    @property
    def lengths(self) -> np.ndarray: ...  # (N,) int64

    @property
    def trained(self) -> np.ndarray: ...  # (N,) int64

    @property
    def digest(self) -> str: ...


class Mixture:
    """Documents of several sources, drawn so that at every point the shares are those of `weights`, to within one document.

    by="tokens" counts tokens, "documents" documents. Each source goes through its own epochs in its own order, a small one more often
    than a large one; a `Loader` over a mixture counts as an epoch as many documents as all sources have. Weights need not add up to 1.
    Indices are those of the sources one after the other, in the order given. Raises DataError: names that differ, a weight that is not
    a positive number.
    """

    def __init__(self, sources: Mapping[str, Documents], weights: Mapping[str, float], *, by: Literal["tokens", "documents"] = "tokens"):
        if not sources or set(sources) != set(weights):
            names = [", ".join(given) or "none" for given in (sources, weights)]
            raise DataError(f"the mixture has sources {names[0]} but weights for {names[1]}; name the same")
        for name, weight in weights.items():
            if not (isinstance(weight, (int, float)) and math.isfinite(weight) and weight > 0):
                raise DataError(f"the weight of {name} is {weight!r}; it must be a positive number: to give it 0, leave it out")
        if by not in ("tokens", "documents"):
            raise DataError(f"by {by!r} is not known; a mixture counts by tokens or documents")
        self.sources, self.weights, self.by = dict(sources), {name: float(weights[name]) for name in sources}, by
        self.lengths = np.concatenate([source.lengths for source in sources.values()])
        self.trained = np.concatenate([source.trained for source in sources.values()])
        self.examples: Sequence[Example] = _Joined([source.examples for source in sources.values()])
        parts = [[name, self.weights[name], source.digest] for name, source in sources.items()]
        self.digest = hashlib.sha256(json.dumps([by, parts]).encode()).hexdigest()

    def cursor(self, seed: int) -> "MixtureCursor":
        return MixtureCursor(self, seed)


class MixtureCursor:
    """A `Cursor` over a mixture: the source that is furthest behind its share gives the next document."""

    epoch = 0  # a mixture has no end; position counts all that was taken
    remaining = 1 << 62

    def __init__(self, mixture: Mixture, seed: int):
        self.size, self.seed, self.digest = len(mixture.examples), seed, mixture.digest
        self.position = 0
        self._weights, self._names = list(mixture.weights.values()), list(mixture.sources)
        self._cursors = [Cursor(len(s.examples), seed=seed, digest=s.digest) for s in mixture.sources.values()]
        self._offsets = np.cumsum([0, *(cursor.size for cursor in self._cursors)]).tolist()
        self._units = mixture.lengths if mixture.by == "tokens" else np.ones_like(mixture.lengths)
        self._drawn = [0] * len(self._cursors)

    @property
    def progress(self) -> float:
        return self.position / self.size

    def take(self, k: int) -> list[int]:
        taken = []
        for _ in range(k):
            behind = min(range(len(self._drawn)), key=lambda i: self._drawn[i] / self._weights[i])
            index = self._offsets[behind] + self._cursors[behind].take(1)[0]
            self._drawn[behind] += int(self._units[index])
            taken.append(index)
        self.position += k
        return taken

    def state_dict(self) -> dict[str, Any]:
        sources = {name: cursor.state_dict() for name, cursor in zip(self._names, self._cursors, strict=True)}
        return {"digest": self.digest, "seed": self.seed, "position": self.position, "drawn": list(self._drawn), "sources": sources}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in ("digest", "seed"):
            if state.get(name) != getattr(self, name):
                raise DataError(
                    f"the saved mixture has {name} {state.get(name)!r}, not {getattr(self, name)!r}: sources, weights or order changed, "
                    f"nothing can be resumed exactly; restore them, or start anew"
                )
        for name, cursor in zip(self._names, self._cursors, strict=True):
            cursor.load_state_dict(state["sources"][name])
        self.position, self._drawn = state["position"], list(state["drawn"])


class _Joined(Sequence[Example]):
    def __init__(self, parts: Sequence[Sequence[Example]]):
        self._parts = parts
        self._firsts = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        part = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return self._parts[part][index - int(self._firsts[part])]

    def __iter__(self) -> Iterator[Example]:
        return (example for part in self._parts for example in part)
