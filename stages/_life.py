"""Signs of life in long phases: what works shows it, and a run that hangs is seen to (`RunDir.alive`)."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

from torch import nn

from align.rollout import Sample

T = TypeVar("T")
WAIT_S = 10.0  # between two signs while something is waited for that has a limit of its own


class _Sampler(Protocol):
    def generate(self, prompts_ids: Sequence[Sequence[int]], **options: Any) -> list[Sample]: ...


class LivingSampler:
    """A sampler that shows life every few steps."""

    def __init__(self, sampler: _Sampler, alive: Callable[[], None]) -> None:
        self._sampler, self._alive = sampler, alive

    def generate(self, prompts_ids: Sequence[Sequence[int]], **options: Any) -> list[Sample]:
        return self._sampler.generate(prompts_ids, on_step=self._alive, **options)


def show_forwards(alive: Callable[[], None], *models: nn.Module) -> None:
    """From now on each forward of the models is a sign of life, whoever asks for it: a step, an evaluation, a reference."""
    for model in models:
        model.register_forward_hook(lambda *_: alive())


def awaited(call: Callable[[], T], alive: Callable[[], None], thread: Executor | None = None) -> T:
    """What `call` gives, with a sign of life every 10 s: for a judge in other processes, who has limits of his own.

    thread: of one worker, kept between calls that are short, since a new one costs milliseconds.
    """
    if thread is None:
        with ThreadPoolExecutor(1) as own:
            return awaited(call, alive, own)
    future = thread.submit(call)
    while not wait([future], timeout=WAIT_S).done:
        alive()
    alive()
    return future.result()
