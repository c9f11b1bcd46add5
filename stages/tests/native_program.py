"""A sampler program for tests in vLLM's place: align's own sampler behind the rollout protocol, one request after another.

native_program.py --model DIR --listen ADDRESS --lifeline [--die-after N FILE] [--hang]: after N answers it kills itself, once (FILE
remembers); with --hang it takes requests and never answers.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch

from align.model import load
from align.rollout import NativeSampler
from align.rollout_protocol import Drawn, Generate, Server, listen, stop_with_parent, tokenizer_sha256, weights_sha256


class NativeEngine:
    name, features = "native", ["seed", "raw_logprobs", "top_p", "top_k", "min_p", "cancel"]

    def __init__(self, directory: str, left: int | None, memory: Path | None) -> None:
        self.weights, self.tokenizer = weights_sha256(directory), tokenizer_sha256(directory)
        self._left, self._memory, self._running = left, memory, dict[str, Generate]()
        self.load(directory)

    def add(self, key: str, request: Generate) -> None:
        self._running[key] = request

    def abort(self, key: str) -> None:
        self._running.pop(key, None)

    def load(self, path: str) -> None:
        self._model = load(path)

    def step(self) -> list[tuple[str, list[Drawn]]]:
        if self._left == 0 and self._memory is not None and not self._memory.exists():
            self._memory.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self._left = None if self._left is None else self._left - 1
        key, request = next(iter(self._running.items()))
        del self._running[key]
        samples = NativeSampler(self._model, eos_ids=[]).generate(
            [request.prompt], n=request.n, max_new_tokens=request.max_new_tokens, temperature=request.temperature,
            stop_ids=request.stop_ids, seeds=[request.seed],
        )  # fmt: skip
        return [(key, [Drawn(one.ids, one.logprobs, one.raw_logprobs, one.finish_reason) for one in samples])]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--listen"):
        parser.add_argument(name, required=True)
    parser.add_argument("--lifeline", action="store_true")
    parser.add_argument("--die-after", nargs=2)
    parser.add_argument("--hang", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    left, memory = (int(arguments.die_after[0]), Path(arguments.die_after[1])) if arguments.die_after else (None, None)
    engine = NativeEngine(arguments.model, left, memory)
    if arguments.hang:
        engine.step = lambda: time.sleep(60) or []  # type: ignore[method-assign,func-returns-value]
    server = Server(engine)
    stop_with_parent(server)
    server.accept(listen(arguments.listen))
    server.run()


if __name__ == "__main__":
    main()
