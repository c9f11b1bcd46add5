"""One call of generate on an engine: samples enter free rows, steps are queued ahead of what is known of them, finished rows leave.

The device is never waited for between steps but where a caller wants to see each token: whether a row has stopped is read some steps
later, and what it did in between is not looked at. A row that reaches its limit is known to without reading.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from align.rollout._advance import FIELDS, FLAG, KEY, LIMIT, NEXT, POSITION, RUNNING, STEP, STOPPED
from align.rollout._engine import Engine, bucket
from align.rollout._noise import sample_key
from align.rollout._pages import PAGE, pages_for
from align.rollout._run import Request, collect
from align.rollout._sampling import SamplingParams
from align.rollout._stops import StopStrings
from align.rollout._types import Sample

_PREFILL_TOKENS = 16384  # read at once; bounds the activations
STEPS = 4  # queued between two looks at which rows have stopped
_TOGETHER = 16  # a sixteenth of the rows must be free before samples enter: reading a prompt stops all that run


@dataclass
class _Prompt:
    """A prompt in the cache, held until its last sample has entered."""

    request: Request
    pages: list[int]
    hidden: Tensor  # (D,), of its last token
    waiting: deque[int]  # samples

    @property
    def full(self) -> int:
        """Pages that its samples share: they write to none of them."""
        return len(self.request.prompt) // PAGE


@dataclass
class _Row:
    sample: int
    left: int  # tokens until its limit, those queued counted as drawn
    pages: list[int] = field(default_factory=list)


class PagedRun:
    def __init__(
        self,
        engine: Engine,
        requests: list[Request],
        n: int,
        params: SamplingParams,
        max_batch: int,
        stop_ids: list[int],
        watch: Callable[[list[int]], StopStrings] | None,
        on_token: Callable[[int, int], None] | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> None:
        self._engine, self._requests, self._n, self._max_rows = engine, requests, n, min(max_batch, engine.rows)
        engine.options.set(params)
        engine.stops.zero_()
        engine.stops[stop_ids] = True
        self._watch, self._on_token, self._on_step = watch, on_token, on_step
        self._each = watch is not None or on_token is not None  # somebody looks at each token
        self._watchers: dict[int, StopStrings] = {}
        count, width = len(requests) * n, max(request.limit for request in requests)
        device = engine.device
        self._width = width
        self._ids = torch.zeros(count, width, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(count, width, device=device)
        self._raw_logprobs = torch.zeros_like(self._logprobs)
        self._ended = torch.zeros(2, count, dtype=torch.int64, device=device)  # STEP and FLAG of samples that are done
        # Long prompts first: the long samples don't run alone at the end.
        self._waiting = deque(sorted(range(len(requests)), key=lambda index: -len(requests[index].prompt)))
        self._read: deque[_Prompt] = deque()
        self._rows: dict[int, _Row] = {}
        self._free_rows = list(range(self._max_rows))
        self._looks: deque[tuple[torch.cuda.Event | None, Tensor, dict[int, int]]] = deque()

    def samples(self, weights_version: int) -> list[Sample]:
        """Runs all requests to their ends."""
        try:
            while self._rows or self._read or self._waiting:
                self._admit()
                if not self._rows and (self._read or self._waiting):
                    raise RuntimeError(f"{self._engine.pages.free} free pages, no row runs, and the next prompt does not fit")
                if self._rows:
                    self._advance()
                if self._on_step:
                    self._on_step()
        except BaseException:  # a caller's error, Ctrl-C: wherever it came, also between two steps of the bookkeeping, nothing stays behind
            self._engine.clear()
            raise
        steps, flags = self._ended.tolist()
        stopped = [flag == STOPPED for flag in flags]
        return collect(self._requests, self._n, self._ids, self._logprobs, self._raw_logprobs, steps, stopped, weights_version)

    def _advance(self) -> None:
        """Moves all rows, and looks at them as they were before the last steps."""
        self._queue()
        while len(self._looks) > 1:
            self._look_back()
        self._compact()

    def _queue(self) -> None:
        """Queues some steps; rows that reach their limits by them leave."""
        steps = 1 if self._each else min(STEPS, max(row.left for row in self._rows.values()))
        size = bucket(1 + max(self._rows), self._engine.rows)
        # One graph for all of them has fewer gaps, and takes the host longer to launch: after the reading of prompts the device waits for
        # that (6 % of the tokens where lengths differ). Nor are there graphs of two and three.
        together = steps if steps == STEPS and not self._read and not self._waiting else 1
        for _ in range(steps // together):
            self._engine.step(size, together)
        for row in self._rows.values():
            row.left -= steps
        if self._each:
            self._observe(sorted(self._rows))
        else:
            self._look()
        full = [number for number, row in self._rows.items() if row.left <= 0]
        if full:
            self._retire(full)

    def _admit(self) -> None:
        """Samples enter while there are rows and pages for them; a few at once, but for the last ones."""
        left = len(self._waiting) * self._n + sum(len(prompt.waiting) for prompt in self._read)
        if not left or (self._rows and len(self._free_rows) < min(left, self._max_rows // _TOGETHER)):
            return
        if self._rows and not self._each:
            self._queue()  # the device has work while the host launches the reading of prompts, which takes it longer than some steps
        while self._free_rows and (self._read or self._waiting):
            if not self._read and not self._prefill():
                return
            entering: list[tuple[_Prompt, int]] = []
            while self._read and len(entering) < len(self._free_rows):
                prompt = self._read[0]
                if self._engine.pages.free < self._own_pages(prompt.request):
                    break
                sample = prompt.waiting.popleft()
                entering.append((prompt, sample))
                self._reserve(prompt, sample)
                if not prompt.waiting:
                    self._read.popleft()
            if not entering:
                return
            self._enter(entering)

    def _own_pages(self, request: Request) -> int:
        """Pages of one sample beside the shared ones. The last token is drawn, never read."""
        return pages_for(len(request.prompt) + request.limit - 1) - len(request.prompt) // PAGE

    def _reserve(self, prompt: _Prompt, sample: int) -> None:
        """Gives the sample the lowest free row, and its pages: the prompt's full ones, and its own."""
        row = heapq.heappop(self._free_rows)
        shared = prompt.pages[: prompt.full]
        self._engine.pages.hold(shared)
        own = self._engine.pages.take(self._own_pages(prompt.request))
        self._rows[row] = _Row(sample, prompt.request.limit - 1, shared + own)

    def _prefill(self) -> bool:
        """Reads the next prompts, each once for all its samples, as many as there are rows for, and pages for one sample of each."""
        indices: list[int] = []
        tokens = rows = 0
        pages, free = self._engine.pages, self._engine.pages.free
        while self._waiting and rows < len(self._free_rows):
            request = self._requests[self._waiting[0]]
            wanted = pages_for(len(request.prompt)) + self._own_pages(request)
            if wanted > free or (indices and tokens + len(request.prompt) > _PREFILL_TOKENS):
                break
            free -= wanted
            tokens, rows = tokens + len(request.prompt), rows + self._n
            indices.append(self._waiting.popleft())
        if not indices:
            return False
        requests = [self._requests[index] for index in indices]
        taken = [pages.take(pages_for(len(request.prompt))) for request in requests]
        hidden = self._engine.prefill([request.prompt for request in requests], taken)
        if self._on_step:
            self._on_step()
        for index, request, own, last in zip(indices, requests, taken, hidden, strict=True):
            self._read.append(_Prompt(request, own, last, deque(range(index * self._n, (index + 1) * self._n))))
        return True

    def _enter(self, entering: list[tuple[_Prompt, int]]) -> None:
        """Sets the state of new rows and draws their first tokens."""
        engine = self._engine
        numbers = {row.sample: number for number, row in self._rows.items()}
        rows = [numbers[sample] for _, sample in entering]
        columns, tables, sources, targets = [], [], [], []
        for (prompt, sample), number in zip(entering, rows, strict=True):
            length, own = len(prompt.request.prompt), self._rows[number].pages
            column = [0] * FIELDS
            column[POSITION], column[NEXT], column[LIMIT], column[FLAG] = length - 1, length, prompt.request.limit, RUNNING
            column[KEY] = sample_key(prompt.request.seed, sample % self._n)
            columns.append(column)
            tables.append(own + [0] * (engine.width - len(own)))
            if length % PAGE and len(own) > prompt.full:
                sources.append(prompt.pages[prompt.full])
                targets.append(own[prompt.full])
            if self._watch:
                self._watchers[number] = self._watch(prompt.request.prompt)
        at = engine.put(rows)
        engine.state[:, at] = engine.put(columns).T
        engine.table[at] = engine.put(tables).int()
        engine.copy_pages(sources, targets)
        engine.draw(torch.stack([prompt.hidden for prompt, _ in entering]), at)
        for prompt in {id(prompt): prompt for prompt, _ in entering}.values():
            if not prompt.waiting:
                engine.pages.release(prompt.pages)  # its samples hold the full ones
        if self._each:
            self._observe(rows)
        full = [number for number in rows if number in self._rows and self._rows[number].left <= 0]
        if full:
            self._retire(full)

    def _look(self) -> None:
        """Asks for the rows' flags; the answer is read while later steps run."""
        flags, owners = self._engine.state[FLAG], {number: row.sample for number, row in self._rows.items()}
        if self._engine.device.type != "cuda":
            self._looks.append((None, flags.clone(), owners))
            return
        copy = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
        copy.copy_(flags, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._looks.append((event, copy, owners))

    def _look_back(self) -> None:
        event, flags, owners = self._looks.popleft()
        if event is not None:
            event.synchronize()
        done = [number for number in (flags != RUNNING).nonzero()[:, 0].tolist() if number in owners]
        done = [number for number in done if number in self._rows and self._rows[number].sample == owners[number]]
        if done:
            self._retire(done)

    def _observe(self, rows: list[int]) -> None:
        """Shows the tokens just drawn to the caller and to the watchers of stop strings; waits for the device."""
        at = self._engine.put(rows)
        state = self._engine.state[:, at]
        tokens = self._engine.ids[at].gather(1, state[STEP, :, None] - 1)[:, 0].tolist()
        flags, hits = state[FLAG].tolist(), []
        for number, token in zip(rows, tokens, strict=True):
            if self._on_token:
                self._on_token(self._rows[number].sample, token)
            if self._watch and self._watchers[number].push(token):
                hits.append(number)
        if hits:
            self._engine.state[FLAG, self._engine.put(hits)] = STOPPED
        done = set(hits) | {number for number, flag in zip(rows, flags, strict=True) if flag != RUNNING}
        if done:
            self._retire(sorted(done))

    def _retire(self, numbers: list[int]) -> None:
        """Notes the results of rows that are done, and frees them."""
        engine = self._engine
        samples = engine.put([self._rows[number].sample for number in numbers])
        at = engine.put(numbers)
        for kept, source in ((self._ids, engine.ids), (self._logprobs, engine.logprobs), (self._raw_logprobs, engine.raw_logprobs)):
            kept[samples] = source[at, : self._width]
        self._ended[:, samples] = engine.state[:, at][[STEP, FLAG]]
        engine.idle(at)
        for number in numbers:
            engine.pages.release(self._rows.pop(number).pages)
            self._watchers.pop(number, None)
            heapq.heappush(self._free_rows, number)

    def _compact(self) -> None:
        """Moves the last rows into gaps where that makes the step smaller and nobody else will fill them."""
        if not self._rows or self._read or self._waiting:
            return
        count = len(self._rows)
        if bucket(count, self._engine.rows) >= bucket(1 + max(self._rows), self._engine.rows):
            return
        sources = sorted(number for number in self._rows if number >= count)
        targets = sorted(set(range(count)) - set(self._rows))
        self._engine.move(sources, targets)
        for source, target in zip(sources, targets, strict=True):
            self._rows[target] = self._rows.pop(source)
            if source in self._watchers:
                self._watchers[target] = self._watchers.pop(source)
        self._free_rows = sorted(set(range(self._max_rows)) - set(self._rows))
