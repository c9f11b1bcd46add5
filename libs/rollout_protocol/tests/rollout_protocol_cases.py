"""An engine of a few lines, and servers around it."""

import contextlib
import hashlib
import socket
import threading
from pathlib import Path

from align.rollout_protocol import Channel, Drawn, Generate, Server, weights_sha256

VOCABULARY = 50


def answers(weights: str, request: Generate) -> list[Drawn]:
    """What FakeEngine says: a function of the weights and the request."""
    out = []
    for sample in range(request.n):
        noise = hashlib.sha256(f"{weights}:{request.seed}:{sample}:{request.prompt}".encode()).digest()
        ids = [byte % VOCABULARY for byte in noise[: request.max_new_tokens]]
        stop = next((at for at, token in enumerate(ids) if token in request.stop_ids), None)
        ids = ids if stop is None else ids[: stop + 1]
        out.append(Drawn(ids, [-1.0 - token for token in ids], [-2.0 - token for token in ids], "length" if stop is None else "stop"))
    return out


class FakeEngine:
    """Answers a request in `steps` steps, the oldest first."""

    name, tokenizer, features = "fake 1", "", ["seed", "raw_logprobs", "top_p", "cancel"]

    def __init__(self, weights: str, *, steps: int = 1, pause: threading.Event | None = None) -> None:
        self.weights, self._steps, self._pause = weights, steps, pause
        self.running: dict[str, tuple[Generate, int]] = {}
        self.aborted: list[str] = []
        self.loads = 0

    def add(self, key: str, request: Generate) -> None:
        if max(request.prompt) >= VOCABULARY:
            raise ValueError(f"prompt holds token {max(request.prompt)}; the vocabulary is {VOCABULARY}")
        self.running[key] = (request, self._steps)

    def step(self) -> list[tuple[str, list[Drawn]]]:
        if self._pause is not None and not self._pause.wait(0.01):
            return []
        key = next(iter(self.running))
        request, left = self.running.pop(key)
        if left > 1:
            self.running[key] = (request, left - 1)
            return []
        return [(key, answers(self.weights, request))]

    def abort(self, key: str) -> None:
        self.running.pop(key, None)
        self.aborted.append(key)

    def load(self, path: str) -> None:
        self.loads += 1


def write_weights(directory: Path, content: bytes = b"\0" * 8) -> str:
    """A model directory of one tensor; returns its digest."""
    directory.mkdir(parents=True, exist_ok=True)
    header = f'{{"w":{{"dtype":"F32","shape":[{len(content) // 4}],"data_offsets":[0,{len(content)}]}}}}'.encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content)
    return weights_sha256(directory)


class Serving:
    """A server in a thread; calling it connects."""

    def __init__(self, engine: FakeEngine, **options) -> None:
        self.server = Server(engine, **options)
        self.dialled = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with contextlib.suppress(ZeroDivisionError):  # what a test's engine raises
            self.server.run()

    def __call__(self) -> Channel:
        self.dialled += 1
        ours, theirs = socket.socketpair()
        self.server.attach(Channel.of_socket(theirs))
        return Channel.of_socket(ours)

    def __enter__(self) -> "Serving":
        return self

    def __exit__(self, *why) -> None:
        self.server.stop()
        self.thread.join(5)
