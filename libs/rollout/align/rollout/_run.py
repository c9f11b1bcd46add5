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
_NOISE_STEPS = 4  # whose noise is made at once, where it stays small: for few numbers the calls of operators cost more than the work
_NOISE_NUMBERS = 1 << 16

# Rows of the state matrix, one column for each running sample.
_POSITION = 0  # of its last token, which is not yet in the cache, counted from the start of the prompt
_CELL = 1  # where its next token goes in the flat results


@dataclass(frozen=True)
class Request:
    """A prompt, its seed, and how many tokens a sample of it may have."""

    prompt: list[int]
    seed: int
    limit: int


@dataclass(slots=True)
class _Row:
    """What is known of a running row without looking at the device."""

    sample: int
    entered: int  # step at which its first token was drawn
    last: int  # step at which its last one is drawn, if nothing stops it before
    offset: int  # its position is so much more than the step


class Run:
    """Rows 0 .. active - 1 of the stepper belong to running samples; a finished row is overwritten by the last one."""

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
        self._requests, self._n, self._params = requests, n, params
        self._room = min(max_batch, len(requests) * n)
        self._stepper = Stepper(model, self._room, max(len(request.prompt) + request.limit for request in requests))
        self._ahead = min(_NOISE_STEPS, max(1, _NOISE_NUMBERS // (self._room * vocab_size)))
        self._noise = Noise(self._room * self._ahead, vocab_size, device)
        self._noises: list[torch.Tensor] = []  # of the steps that follow, parts of
        self._noise_block = torch.empty(0, self._room, vocab_size, device=device)
        self._stop_ids = frozenset(stop_ids)
        self._watch = watch  # None without stop strings
        self._on_token, self._on_step = on_token, on_step
        self._watchers: list[StopStrings] = []  # then one a running row
        self._rows: list[_Row] = []
        # Results of sample s: cells s * width .. s * width + length - 1.
        count, self._width = len(requests) * n, max(request.limit for request in requests)
        # Noise keys, made for all its tokens when a sample enters; some more, which a row that is done may point at.
        self._keys = torch.zeros(count * self._width + self._ahead, dtype=torch.int64, device=device)
        self._lengths, self._stopped = [0] * count, [False] * count
        self._state = torch.zeros(2, self._room, dtype=torch.int64, device=device)
        self._tokens = self._state[0]  # the last one of each row, and of what follows the running rows anything
        self._drawn: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # since rows came or went: tokens, log-probabilities
        self._noted: list[tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]] = []  # before that
        self._steps = 0
        self._measure()
        # Long prompts first: rows of one prefill are of like length, and the long samples don't run alone at the end.
        self._waiting = deque(sorted(range(len(requests)), key=lambda index: -len(requests[index].prompt)))
        self._read: deque[tuple[int, int]] = deque()  # of prompts that are read: (sample without a row, row of the prompt cache)
        self._prompt_cache = model.new_cache(0, 1)  # of the prompts read last; each prefill makes its own
        self._prompt_logits = torch.empty(0, vocab_size, device=device)

    def samples(self, weights_version: int) -> list[Sample]:
        """Runs all requests to their ends."""
        while self._rows or self._read or self._waiting:
            free = self._room - len(self._rows)
            # A few rows enter together: reading one prompt costs about as much as reading several.
            if (self._read or self._waiting) and (free >= max(1, self._room // 8) or not self._rows):
                self._admit(free)
            if self._rows:
                logits = self._stepper(self._tokens, self._positions, self._bound)
                self._bound += 1
                self._steps += 1
                self._accept(logits, 0)
        return self._collect(weights_version)

    def _admit(self, free: int) -> None:
        """Gives free rows to waiting samples and draws their first token."""
        while free and (self._read or self._waiting):
            if not self._read:
                self._prefill(-(-free // self._n))
            entering = [self._read.popleft() for _ in range(min(free, len(self._read)))]
            first, device = len(self._rows), self._state.device
            requests = [self._requests[sample // self._n] for sample, _ in entering]
            lengths = [len(request.prompt) for request in requests]
            sources = torch.tensor([row for _, row in entering], device=device)
            self._note(0)
            self._noises = []
            self._stepper.enter(first, self._prompt_cache, sources, lengths)
            for (sample, _), request, length in zip(entering, requests, lengths, strict=True):
                self._rows.append(_Row(sample, self._steps, self._steps + request.limit - 1, length - self._steps))
                if self._watch:
                    self._watchers.append(self._watch(request.prompt))
            self._next_end = min(row.last for row in self._rows)  # a limit of one token ends with the first
            samples = torch.tensor([sample for sample, _ in entering], device=device)
            state = torch.stack((torch.tensor(lengths, device=device) - 1, samples * self._width))  # (2, entering)
            self._state[:, first : first + len(entering)] = state
            keys = [sample_key(request.seed, sample % self._n) for (sample, _), request in zip(entering, requests, strict=True)]
            positions = state[_POSITION, :, None] + 1 + torch.arange(self._width, device=device)
            self._keys[: -self._ahead].view(-1, self._width)[samples] = token_keys(torch.tensor(keys, device=device)[:, None], positions)
            self._accept(self._prompt_logits.index_select(0, sources), first)
            self._measure()
            free = self._room - len(self._rows)

    def _prefill(self, count: int) -> None:
        """Reads the next prompts, padded on the right, into a cache of their own: each once, however many samples it has."""
        longest = len(self._requests[self._waiting[0]].prompt)
        indices = [self._waiting.popleft() for _ in range(min(count, len(self._waiting), max(1, _PREFILL_TOKENS // longest)))]
        prompts = [self._requests[index].prompt for index in indices]
        padded = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=self._state.device)
        self._prompt_cache, self._prompt_logits = self._stepper.read(padded, [len(prompt) for prompt in prompts])
        self._read.extend((index * self._n + j, row) for row, index in enumerate(indices) for j in range(self._n))

    def _accept(self, logits: torch.Tensor, first: int) -> None:
        """Draws the next token of rows `first` and on from their logits (rows, V), which may go on after the running ones; rows that are
        done leave."""
        if self._on_step:
            self._on_step()
        drawn = draw(logits, self._params, self._next_noise(first, len(logits)) if self._params.temperature else None)
        self._drawn.append(drawn)
        running = self._state[:, first : len(self._rows)]
        running.add_(1)
        self._tokens = torch.cat((self._tokens[:first], drawn[0])) if first else drawn[0]
        if first:
            self._note(first)
        looked = self._stop_ids or self._watch or self._on_token
        tokens = drawn[0].tolist()[: running.shape[1]] if looked else []
        if self._on_token:
            for row, token in zip(self._rows[first:], tokens, strict=True):
                self._on_token(row.sample, token)
        hits = self._stopped_rows(tokens, first)
        if hits or self._steps >= self._next_end:
            self._note(0)
            self._retire(hits)
            self._measure()

    def _next_noise(self, first: int, count: int) -> torch.Tensor:
        """(count, V) for the rows `first` and on, whose next tokens go to their present cells."""
        if first or not self._noises:
            steps = 1 if first else self._ahead
            cells = self._state[_CELL, first : first + count] + torch.arange(steps, device=self._state.device)[:, None]
            self._noise_block = self._noise.negative_exponential(self._keys.index_select(0, cells.flatten())).view(steps, count, -1)
            self._noises = list(self._noise_block.unbind(0))
        return self._noises.pop(0)[:count]

    def _stopped_rows(self, tokens: list[int], first: int) -> set[int]:
        """Of the rows `first` and on, which drew these tokens, those that end with them."""
        hits: set[int] = set()
        if not self._stop_ids.isdisjoint(tokens):
            hits.update(row for row, token in enumerate(tokens, first) if token in self._stop_ids)
        if self._watch:
            hits.update(first + at for at, token in enumerate(tokens) if self._watchers[first + at].push(token))
        return hits

    def _note(self, first: int) -> None:
        """Puts by what was drawn for rows `first` and on since rows last came or went, with the cells that follow it."""
        if self._drawn and len(self._rows) > first:
            self._noted.append((self._state[_CELL, first : len(self._rows)].clone(), self._drawn))
        self._drawn = []

    def _retire(self, stopped: set[int]) -> None:
        """Notes the results of rows that are done, and closes the gaps with rows from the end."""
        full = {at for at, row in enumerate(self._rows) if row.last <= self._steps} if self._steps >= self._next_end else set()
        ended = sorted(stopped | full)
        before = len(self._rows)
        left = before - len(ended)
        for at in ended:
            row = self._rows[at]
            self._lengths[row.sample], self._stopped[row.sample] = 1 + self._steps - row.entered, at in stopped
        holes = [at for at in ended if at < left]
        if holes:
            self._move(sorted(set(range(left, before)) - set(ended)), holes)
        del self._rows[left:], self._watchers[left:]

    def _move(self, rows: list[int], holes: list[int]) -> None:
        for row, hole in zip(rows, holes, strict=True):
            self._stepper.move(row, hole)
            self._rows[hole] = self._rows[row]
            if self._watch:
                self._watchers[hole] = self._watchers[row]
        source, target = (torch.tensor(numbers, device=self._state.device) for numbers in (rows, holes))
        self._state.index_copy_(1, target, self._state.index_select(1, source))
        self._tokens = self._tokens.index_copy(0, target, self._tokens.index_select(0, source))  # those put by stay
        if self._noises:
            self._noise_block.index_copy_(1, target, self._noise_block.index_select(1, source))

    def _measure(self) -> None:
        """After rows came or went: what a step needs to know of the running ones."""
        # Rows in eights, a few idle ones among them: the stepper has met most such numbers before.
        rows = self._rows
        count = min(-(-len(rows) // 8) * 8, len(self._tokens))
        self._tokens, self._positions = self._tokens[:count], self._state[_POSITION, :count]
        self._bound = self._steps + max([row.offset for row in rows], default=0) + 1  # above all their positions
        self._next_end = min([row.last for row in rows], default=0)

    def _collect(self, weights_version: int) -> list[Sample]:
        cells = torch.cat([after - back for after, drawn in self._noted for back in range(len(drawn), 0, -1)])

        def placed(number: int) -> torch.Tensor:
            values = torch.cat([each[number][: len(after)] for after, drawn in self._noted for each in drawn])
            buffer = values.new_zeros(len(self._lengths) * self._width).index_copy_(0, cells, values)
            return buffer.view(-1, self._width)

        # Drawn from softmax(logits) itself, the two log-probabilities are one.
        own = placed(1)
        raw = own if self._params.temperature == 1 and not self._params.filtered else placed(2)
        return collect(self._requests, self._n, placed(0), own, raw, self._lengths, self._stopped, weights_version)


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
    tokens, own, raw = (buffer.cpu().numpy() for buffer in (ids, logprobs, raw_logprobs))
    out = []
    for sample, (length, stop) in enumerate(zip(lengths, stopped, strict=True)):
        reason: Literal["stop", "length"] = "stop" if stop else "length"
        new, its, plain = (buffer[sample, :length].tolist() for buffer in (tokens, own, raw))
        out.append(Sample(requests[sample // n].prompt, new, its, plain, reason, weights_version))
    return out
