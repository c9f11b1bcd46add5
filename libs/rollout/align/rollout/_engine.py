"""What outlives a call of generate on a paged cache: the cache, the state of the rows at fixed addresses, and the captured steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from align import kernels
from align.model import Decoder
from align.rollout import _advance
from align.rollout._advance import FIELDS, FLAG, IDLE, KEY, NEXT, POSITION, TOKEN
from align.rollout._forward import Cache, Forward, page_bytes
from align.rollout._pages import PAGE, SCRATCH, Pages, pages_for
from align.rollout._sampling import RolloutError, SamplingParams
from align.rollout._weights import addresses

_SHARE_OF_FREE = 0.6  # of the device's free memory, for the cache, where no budget is given
_MARGIN = 2**30
_SPARE = 2  # pages: the scratch page, and the last one of a prompt, which its samples copy


@dataclass
class Options:
    """How the tokens of all rows are drawn, a tensor of R each: the captured step reads it."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    filtered: bool = False  # whether any of the filters does something: a kernel of its own, so a graph of its own

    @classmethod
    def new(cls, rows: int, device: torch.device) -> Options:
        floats = [torch.ones(rows, device=device) for _ in range(3)]
        return cls(floats[0], torch.zeros(rows, dtype=torch.int32, device=device), *floats[1:])

    def set(self, params: SamplingParams) -> None:
        self.temperature.fill_(params.divisor)
        self.top_k.fill_(min(params.top_k, 2**31 - 1))
        self.top_p.fill_(params.top_p)
        self.min_p.fill_(params.min_p)
        self.filtered = params.filtered and params.temperature > 0

    def of(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.temperature[:count], self.top_k[:count], self.top_p[:count], self.min_p[:count]


class Engine:
    """R rows, each idle or running one sample. A step moves rows 0 .. n - 1 by one token; idle ones among them write to a scratch page."""

    def __init__(self, model: Decoder, *, rows: int, width: int, pages: int, strict: bool) -> None:
        """width: pages of a row at most. pages: of the cache, the scratch page included."""
        device, vocabulary = model.output_weight.device, model.config.vocab_size
        self.rows, self.width, self.device, self.strict = rows, width, device, strict
        self.pages = Pages(pages)
        self.page_count = pages
        self._cache = Cache.new(model, pages)
        self._forward = Forward(model, self._cache, rows, width * PAGE, strict=strict)
        self.addresses = addresses(model)
        self.table = torch.full((rows, width), SCRATCH, dtype=torch.int32, device=device)
        self.state = torch.zeros(FIELDS, rows, dtype=torch.int64, device=device)
        self.ids = torch.zeros(rows, width * PAGE, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(rows, width * PAGE, device=device)
        self.raw_logprobs = torch.zeros_like(self.logprobs)
        self.stops = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.options = Options.new(rows, device)
        self._counters = torch.zeros(rows, dtype=torch.int32, device=device)
        self._all = torch.arange(rows, device=device)
        self._graphs: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.idle(self._all)

    def forget(self) -> None:
        """Frees graphs and cache, for another engine to take their memory; this one is of no use then."""
        self._graphs.clear()
        del self._cache, self._forward

    def put(self, numbers: list[int] | list[list[int]]) -> Tensor:
        """As int64 on the device. Steps are queued ahead: this waits for none of them."""
        return self._send(torch.tensor(numbers))

    def _send(self, x: Tensor) -> Tensor:
        return x.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else x.to(self.device)

    def idle(self, rows: Tensor) -> None:
        """These rows, (k,) int64, run nothing from now on."""
        self.state[:, rows] = 0
        self.state[NEXT, rows] = 1
        self.state[FLAG, rows] = IDLE
        self.table[rows] = SCRATCH

    def clear(self) -> None:
        """Nothing runs and no page is held."""
        self.idle(self._all)
        self.pages.clear()

    def step(self, count: int, steps: int = 1) -> None:
        """`steps` tokens for rows 0 .. count - 1, by one graph; `count` is one of `bucket`'s."""
        if self.device.type != "cuda":
            for _ in range(steps):
                self._step(count)
            return
        key = count, steps, self.options.filtered
        if key not in self._graphs:
            self._graphs[key] = self._capture(count, steps)
        self._graphs[key].replay()

    def draw(self, hidden: Tensor, rows: Tensor) -> None:
        """The first token of these rows (k,), from the prompts' last hidden states (k, D); their state is set."""
        drawn = self._draw(self._forward.logits(hidden), self.state[KEY, rows], self.state[NEXT, rows])
        _advance.advance(self.state, *drawn, self.ids, self.logprobs, self.raw_logprobs, self.stops, rows)

    def prefill(self, prompts: list[list[int]], pages: list[list[int]]) -> Tensor:
        """Reads prompts into these pages; the hidden states of their last tokens, (n, D)."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ends = torch.zeros(len(prompts) + 1, dtype=torch.int32)
        ends[1:] = lengths.cumsum(0)
        widest = max(len(own) for own in pages)
        table = torch.tensor([own + [SCRATCH] * (widest - len(own)) for own in pages], dtype=torch.int32)
        rows = torch.repeat_interleave(torch.arange(len(prompts)), lengths)
        positions = torch.arange(int(ends[-1])) - ends[rows]
        tokens = torch.tensor([token for prompt in prompts for token in prompt])
        tokens, positions, rows, table, ends = (self._send(x) for x in (tokens, positions, rows, table, ends))
        hidden = self._forward.prefill(tokens, positions, rows, table, ends, int(lengths.max()))
        return hidden.index_select(0, ends[1:].long() - 1)

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """Copies whole pages: the last one of a prompt, which each of its samples goes on writing to."""
        if sources:
            of, to = self.put([sources, targets])
            self._cache.k[:, to], self._cache.v[:, to] = self._cache.k[:, of], self._cache.v[:, of]

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Rows of `sources` go on as rows of `targets`; the former are idle then."""
        of, to = self.put([sources, targets])
        for x in (self.table, self.ids, self.logprobs, self.raw_logprobs):
            x[to] = x[of]
        self.state[:, to] = self.state[:, of]
        self.idle(of)

    def _step(self, count: int) -> None:
        drawn = self._compute(count)
        _advance.advance(self.state, *drawn, self.ids, self.logprobs, self.raw_logprobs, self.stops, self._all[:count])

    def _compute(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """What a step does but for `advance`: doing it twice is doing it once."""
        state = self.state[:, :count]
        logits = self._forward.decode(state[TOKEN], state[POSITION], state[NEXT], self.table[:count])
        return self._draw(logits, state[KEY], state[NEXT])

    def _draw(self, logits: Tensor, keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        counters = None if self.options.filtered else self._counters
        tokens, own, raw = kernels.sample(logits, keys, positions, *self.options.of(len(logits)), counters=counters)
        # strict: in the arithmetic of the trainer's log-probabilities
        return tokens, own, kernels.logprob(logits, tokens) if self.strict else raw

    def _capture(self, count: int, steps: int) -> torch.cuda.CUDAGraph:
        """So many steps as a graph. Their kernels are compiled by a run before, on a stream beside: nothing may be while capturing."""
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            drawn = self._compute(count)
            idle = torch.full_like(self.state, IDLE)  # compiles `advance` and moves no row
            _advance.advance(idle, *drawn, self.ids, self.logprobs, self.raw_logprobs, self.stops, self._all[:count])
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            for _ in range(steps):
                self._step(count)
        return graph


def bucket(count: int, rows: int) -> int:
    """Rows of the step that moves `count` of them: few sizes, so that few graphs are captured."""
    for limit, unit in ((8, 0), (64, 8), (128, 16), (512, 32)):
        if count <= limit:
            size = 1 << max(0, count - 1).bit_length() if not unit else -(-count // unit) * unit
            return min(size, rows)
    return min(-(-count // 64) * 64, rows)


def engine_for(
    model: Decoder, kept: Engine | None, *, rows: int, longest: int, samples: int, kv_budget_gb: float | None, strict: bool
) -> Engine:
    """An engine whose rows hold `longest` positions: the kept one where it will do.

    rows: the most that run at once. samples: how many there are in all. kv_budget_gb: GiB that the cache may take; None: as many as
    `samples` need, at most 60 % of the device's free memory.

    Raises:
        RolloutError: one sample alone needs more than the budget.
    """
    least = pages_for(longest) + _SPARE  # one sample
    needed = (min(rows, samples) - 1) * pages_for(longest) + least
    if kept is not None and kept.addresses != addresses(model):
        kept = None
    size, device = page_bytes(model), model.output_weight.device
    if kept is not None and kept.width >= pages_for(longest) and kept.page_count >= needed:
        return kept
    budget = _budget(device, kept, size) if kv_budget_gb is None else int(kv_budget_gb * 2**30) // size
    if budget < least:
        raise RolloutError(
            f"a sample of {longest} positions needs {least * size / 2**30:.3g} GiB of cache, above the "
            f"{'free memory' if kv_budget_gb is None else 'kv_budget_gb'} of {budget * size / 2**30:.3g}; "
            "shorten prompt or max_new_tokens, or give more memory"
        )
    pages, width = min(needed, budget), 1 << max(3, (pages_for(longest) - 1).bit_length())
    width = min(width, pages_for(model.config.max_length))
    if kept is not None:
        if kept.width >= width and kept.page_count >= pages:
            return kept
        pages, width = max(pages, min(kept.page_count, budget)), max(width, kept.width)
        kept.forget()
    return Engine(model, rows=rows, width=width, pages=pages, strict=strict)


def _budget(device: torch.device, kept: Engine | None, size: int) -> int:
    """Pages that fit into the device's memory; on the CPU there is no limit but the need."""
    if device.type != "cuda":
        return 1 << 40
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    own = 0 if kept is None else kept.page_count * size
    return max(0, int((free + own - _MARGIN) * _SHARE_OF_FREE)) // size
