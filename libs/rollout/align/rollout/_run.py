"""One call of generate: continuous batching over the rows of one cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from align.model import Decoder, Stepper
from align.rollout._noise import Noise, sample_key, token_keys
from align.rollout._sampling import RolloutError, SamplingParams, draw
from align.rollout._stops import StopStrings
from align.rollout._types import Sample

_PREFILL_TOKENS = 4096  # read at once, padding included; bounds the activations

# Rows of the state matrix, one column for each running sample.
_TOKEN = 0  # the last token, not yet in the cache
_POSITION = 1  # its position, counted from the start of the prompt
_CELL = 2  # where its successor goes in the flat result buffers
_END = 3  # the cell that must not be written any more


@dataclass(frozen=True)
class Request:
    """A prompt, its seed, and how many tokens a sample of it may have."""

    prompt: list[int]
    seed: int
    limit: int


class Run:
    """Rows 0 .. active - 1 of the cache belong to running samples; a finished row is overwritten by the last one."""

    def __init__(
        self,
        model: Decoder,
        requests: list[Request],
        n: int,
        params: SamplingParams,
        max_batch: int,
        stop_ids: list[int],
        watch: Callable[[list[int]], StopStrings] | None,
        on_token: Callable[[int, int], None] | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> None:
        device, vocab_size = model.output_weight.device, model.config.vocab_size
        self._model, self._requests, self._n, self._params = model, requests, n, params
        self._rows = min(max_batch, len(requests) * n)
        self._cache = model.new_cache(self._rows, max(len(request.prompt) + request.limit for request in requests))
        self._stepper = Stepper(model, self._cache)
        self._noise = Noise(self._rows, vocab_size, device)
        self._stop_table = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._stop_table[stop_ids] = True
        self._watch = watch  # None without stop strings
        self._on_token, self._on_step = on_token, on_step
        self._watchers: list[StopStrings] = []  # then one a running row
        self._owners: list[tuple[int, int]] = []  # one a running row: its sample, the step at which it entered
        # Results of sample s: cells s * width .. s * width + length - 1.
        count, self._width = len(requests) * n, max(request.limit for request in requests)
        self._ids = torch.zeros(count * self._width, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(count * self._width, device=device)
        self._raw_logprobs = torch.zeros_like(self._logprobs)
        self._keys = torch.zeros_like(self._ids)  # noise keys, made for all its tokens when a sample enters
        self._lengths, self._stopped = [0] * count, [False] * count
        self._state = torch.zeros(4, self._rows, dtype=torch.int64, device=device)
        self._active = self._steps = 0
        self._bound = 0  # above the position of every running row
        # Long prompts first: rows of one prefill are of like length, and the long samples don't run alone at the end.
        self._waiting = deque(sorted(range(len(requests)), key=lambda index: -len(requests[index].prompt)))
        self._read: deque[tuple[int, int]] = deque()  # of prompts that are read: (sample without a row, row of the prompt cache)
        self._prompt_cache = self._cache  # of the prompts read last; each prefill makes its own
        self._prompt_logits = torch.empty(0, vocab_size, device=device)

    def samples(self, weights_version: int) -> list[Sample]:
        """Runs all requests to their ends."""
        while self._active or self._read or self._waiting:
            free = self._rows - self._active
            # A few rows enter together: reading one prompt costs about as much as reading several.
            if (self._read or self._waiting) and (free >= max(1, self._rows // 8) or not self._active):
                self._admit(free)
            if self._active:
                # Rows in eights, a few idle ones among them: the stepper has met most such numbers before.
                state = self._state[:, : min(-(-self._active // 8) * 8, self._rows)]
                hidden = self._stepper(state[_TOKEN], state[_POSITION], self._bound)
                self._bound += 1
                self._steps += 1
                self._accept(self._model.lm_head(hidden[: self._active]), 0)
        return self._collect(weights_version)

    def _admit(self, free: int) -> None:
        """Gives free rows to waiting samples and draws their first token."""
        while free and (self._read or self._waiting):
            if not self._read:
                self._prefill(-(-free // self._n))
            entering = [self._read.popleft() for _ in range(min(free, len(self._read)))]
            first, last = self._active, self._active + len(entering)
            sources = torch.tensor([row for _, row in entering], device=self._state.device)
            length = self._prompt_cache.max_length
            self._cache.k[:, first:last, :length] = self._prompt_cache.k.index_select(1, sources)
            self._cache.v[:, first:last, :length] = self._prompt_cache.v.index_select(1, sources)
            columns, keys = [], []
            for sample, _ in entering:
                request = self._requests[sample // self._n]
                cell = sample * self._width
                columns.append((0, len(request.prompt) - 1, cell, cell + request.limit))
                keys.append(sample_key(request.seed, sample % self._n))
                self._owners.append((sample, self._steps))
                if self._watch:
                    self._watchers.append(self._watch(request.prompt))
            state = torch.tensor(columns, device=self._state.device).T  # (4, entering)
            self._state[:, first:last] = state
            ahead = torch.arange(self._width, device=state.device)
            samples = torch.tensor([sample for sample, _ in entering], device=state.device)
            positions = state[_POSITION, :, None] + 1 + ahead
            self._keys.view(-1, self._width)[samples] = token_keys(torch.tensor(keys, device=state.device)[:, None], positions)
            self._active = last
            self._accept(self._prompt_logits.index_select(0, sources), first)
            self._measure()
            free = self._rows - self._active

    def _prefill(self, count: int) -> None:
        """Reads the next prompts, padded on the right, into a cache of their own: each once, however many samples it has."""
        longest = len(self._requests[self._waiting[0]].prompt)
        indices = [self._waiting.popleft() for _ in range(min(count, len(self._waiting), max(1, _PREFILL_TOKENS // longest)))]
        device = self._state.device
        lengths = torch.tensor([len(self._requests[index].prompt) for index in indices], device=device)
        padded = [self._requests[index].prompt + [0] * (longest - len(self._requests[index].prompt)) for index in indices]
        self._prompt_cache = self._model.new_cache(len(indices), longest)
        hidden = self._model(torch.tensor(padded, device=device), cache=self._prompt_cache)  # (P, T, D)
        self._prompt_logits = self._model.lm_head(hidden[torch.arange(len(indices), device=device), lengths - 1])
        self._read.extend((index * self._n + j, row) for row, index in enumerate(indices) for j in range(self._n))

    def _accept(self, logits: torch.Tensor, first: int) -> None:
        """Draws and records the next token of rows first .. active - 1 from their logits (rows, V); rows that are done leave."""
        state = self._state[:, first : self._active]
        cell = state[_CELL]
        if self._on_step:
            self._on_step()
        noise = self._noise.negative_exponential(self._keys.index_select(0, cell)) if self._params.temperature else None
        tokens, logprobs, raw_logprobs = draw(logits, self._params, noise)
        self._ids.index_copy_(0, cell, tokens)
        self._logprobs.index_copy_(0, cell, logprobs)
        self._raw_logprobs.index_copy_(0, cell, raw_logprobs)
        state[_TOKEN] = tokens
        state[_POSITION : _CELL + 1].add_(1)
        if self._on_token:
            for (sample, _), token in zip(self._owners[first:], tokens.tolist(), strict=True):
                self._on_token(sample, token)
        stopped = self._stop_table.index_select(0, tokens)
        if self._watch:
            hits = [watcher.push(token) for watcher, token in zip(self._watchers[first:], tokens.tolist(), strict=True)]
            stopped |= torch.tensor(hits, device=stopped.device)
        done = stopped | (cell == state[_END])
        if done.any():
            self._retire(done, stopped, first)
            self._measure()

    def _retire(self, done: torch.Tensor, stopped: torch.Tensor, first: int) -> None:
        """Notes the results of rows that are done and closes the gaps with rows from the end; `done` and `stopped` begin at row `first`."""
        ended, stops, before = [first + row for row in done.nonzero().flatten().tolist()], stopped.tolist(), self._active
        for row in ended:
            sample, entered = self._owners[row]
            self._lengths[sample], self._stopped[sample] = 1 + self._steps - entered, stops[row - first]
        self._active -= len(ended)
        movers = iter(sorted(set(range(self._active, before)) - set(ended)))
        for hole in ended:
            if hole < self._active:
                self._move(next(movers), hole)
        del self._owners[self._active :], self._watchers[self._active :]

    def _move(self, row: int, to: int) -> None:
        self._owners[to] = self._owners[row]
        if self._watch:
            self._watchers[to] = self._watchers[row]
        self._state[:, to] = self._state[:, row]
        self._cache.k[:, to] = self._cache.k[:, row]
        self._cache.v[:, to] = self._cache.v[:, row]

    def _measure(self) -> None:
        """Looks up `_bound` after rows came or went; between, it grows by one a step."""
        self._bound = int(self._state[_POSITION, : self._active].max()) + 1 if self._active else 0

    def _collect(self, weights_version: int) -> list[Sample]:
        ids, own, raw = (buffer.view(len(self._lengths), self._width) for buffer in (self._ids, self._logprobs, self._raw_logprobs))
        return collect(self._requests, self._n, ids, own, raw, self._lengths, self._stopped, weights_version)


def collect(
    requests: list[Request],
    n: int,
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    raw_logprobs: torch.Tensor,
    lengths: list[int],
    stopped: list[bool],
    weights_version: int,
) -> list[Sample]:
    """The samples of buffers (samples, width), of which the first `lengths` columns count.

    Raises:
        RolloutError: a log-probability is not finite.
    """
    taken = torch.arange(ids.shape[1], device=ids.device) < torch.tensor(lengths, device=ids.device)[:, None]  # (samples, width)
    bad = (taken & ~torch.isfinite(raw_logprobs)).any(1)
    if bad.any():
        sample = int(bad.nonzero()[0])
        raise RolloutError(f"logits are not finite in sample {sample % n} of prompt {sample // n}; look for NaN in the weights")
    tokens, own, raw = (buffer[taken].tolist() for buffer in (ids, logprobs, raw_logprobs))
    out, start = [], 0
    for sample, (length, stop) in enumerate(zip(lengths, stopped, strict=True)):
        end = start + length
        reason: Literal["stop", "length"] = "stop" if stop else "length"
        out.append(Sample(requests[sample // n].prompt, tokens[start:end], own[start:end], raw[start:end], reason, weights_version))
        start = end
    return out
