"""The sampler's end: what stands between an engine that samples and the trainers that ask it."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterable
from typing import Protocol

from align.rollout_protocol._channel import Channel
from align.rollout_protocol._digest import weights_sha256
from align.rollout_protocol._errors import MessageError, RolloutProtocolError
from align.rollout_protocol._messages import (
    FROM_TRAINER,
    MAX_LINE,
    PROTOCOL,
    Alive,
    Cancel,
    Drawn,
    Error,
    Generate,
    Hello,
    Message,
    Samples,
    WeightsLoaded,
    WeightsUpdated,
    Welcome,
)

_SEND_S = 60.0  # a trainer that takes nothing for so long is given up
_IDLE_S = 0.5  # between looks at whether to stop
_MOST = 1 << 17  # requests of one connection that wait at once


class Engine(Protocol):
    """What samples. One thread calls it.

    name: told to the trainer. tokenizer: `tokenizer_sha256` of its model directory. features: of `align.rollout_protocol.FEATURES`.
    weights: `weights_sha256` of what it holds.
    """

    name: str
    tokenizer: str
    features: list[str]
    weights: str

    def add(self, key: str, request: Generate) -> None:
        """Takes a request. Raises ValueError: it cannot do that; the message goes to the trainer."""

    def step(self) -> list[tuple[str, list[Drawn]]]:
        """Works for a moment, a second at most; returns the keys of requests that are through, with their n answers."""

    def abort(self, key: str) -> None:
        """Forgets a request, which may be through."""

    def load(self, path: str) -> None:
        """Takes the weights of a model directory in place of its own; nothing is running. What it raises ends the server."""


class _Connection:
    def __init__(self, channel: Channel, number: int) -> None:
        self.channel, self.number, self.greeted, self.spoke = channel, number, False, time.monotonic()
        self.running: dict[str, Generate] = {}  # by the engine's key


class Server:
    """Serves one engine to any number of connections, one after another or at once.

    Weights change for all of them, and only while nothing runs. A connection that ends takes its requests with it.
    """

    def __init__(self, engine: Engine, *, version: int = 0, alive_s: float = 10.0, limit: int = MAX_LINE) -> None:
        """version: of the weights that it holds. alive_s: seconds between signs of life to a connection that waits for answers."""
        self._engine, self._version, self._alive_s, self._limit = engine, version, alive_s, limit
        self._arrived: queue.Queue[tuple[_Connection, Message | RolloutProtocolError] | None] = queue.Queue()
        self._connections: dict[int, _Connection] = {}
        self._count, self._stopping = 0, False

    def stop(self) -> None:
        """From any thread: `run` returns soon."""
        self._stopping = True
        self._arrived.put(None)

    def attach(self, channel: Channel) -> None:
        """Serves this connection too."""
        self._count += 1
        connection = _Connection(channel, self._count)
        self._connections[connection.number] = connection
        threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def accept(self, listener: socket.socket) -> None:
        """Serves whoever dials; the listener is closed when `run` returns."""

        def loop() -> None:
            while not self._stopping:
                with contextlib.suppress(OSError):
                    self.attach(Channel.of_socket(listener.accept()[0], limit=self._limit))

        listener.settimeout(_IDLE_S)
        threading.Thread(target=loop, daemon=True).start()

    def run(self, *, until_gone: bool = False) -> None:
        """Works until `stop`, or with until_gone until the last connection ends. What the engine raises in `load` or `step` ends it."""
        try:
            while not self._stopping and not (until_gone and not self._connections):
                busy = any(each.running for each in self._connections.values())
                for connection, message in self._news(wait=not busy):
                    self._handle(connection, message)
                if busy:
                    for key, drawn in self._engine.step():
                        self._answer(key, drawn)
                    self._sign()
        finally:
            self._stopping = True
            for connection in list(self._connections.values()):
                connection.channel.close()

    def _read(self, connection: _Connection) -> None:
        """The connection's own thread: hands on what comes, and at last the reason why nothing more will."""
        try:
            while True:
                self._arrived.put((connection, connection.channel.receive(FROM_TRAINER, timeout_s=None)))
        except RolloutProtocolError as error:
            self._arrived.put((connection, error))

    def _news(self, *, wait: bool) -> Iterable[tuple[_Connection, Message | RolloutProtocolError]]:
        with contextlib.suppress(queue.Empty):
            news = self._arrived.get(timeout=_IDLE_S) if wait else self._arrived.get_nowait()
            while news is not None:
                yield news
                news = self._arrived.get_nowait()

    def _handle(self, connection: _Connection, message: Message | RolloutProtocolError) -> None:
        if connection.number not in self._connections:
            return
        if isinstance(message, RolloutProtocolError):
            if isinstance(message, MessageError):
                print(f"sampler: connection {connection.number}: {message}", file=sys.stderr, flush=True)
            self._drop(connection)
        elif isinstance(message, Hello):
            self._greet(connection, message)
        elif not connection.greeted:
            self._say(connection, Error(None, "bad_message", "the first message must be hello"))
            self._drop(connection)
        elif isinstance(message, Generate):
            self._start(connection, message)
        elif isinstance(message, Cancel):
            self._cancel(connection, message)
        elif isinstance(message, WeightsUpdated):
            self._load(connection, message)

    def _greet(self, connection: _Connection, hello: Hello) -> None:
        engine = self._engine
        if hello.protocol != PROTOCOL:
            told = f"the trainer speaks version {hello.protocol} of the rollout protocol, this sampler {PROTOCOL}; install the same release"
            self._say(connection, Error(None, "wrong_protocol", told))
            self._drop(connection)
            return
        connection.greeted = True
        features = [*engine.features]
        self._say(connection, Welcome(PROTOCOL, engine.name, engine.weights, self._version, engine.tokenizer, features))

    def _start(self, connection: _Connection, request: Generate) -> None:
        key = f"{connection.number}:{request.id}"
        if request.weights != self._engine.weights:
            told = f"asked for weights {request.weights[:12]}, this sampler holds {self._engine.weights[:12]}; send weights_updated first"
            self._say(connection, Error(request.id, "wrong_weights", told))
        elif key in connection.running:
            self._say(connection, Error(request.id, "bad_message", f"request {request.id} is running already; give each its own id"))
        elif len(connection.running) >= _MOST:
            self._say(connection, Error(request.id, "busy", f"{_MOST} requests of this connection wait already; ask later"))
        else:
            try:
                self._engine.add(key, request)
            except ValueError as error:
                self._say(connection, Error(request.id, "unsupported", str(error)[:4000]))
            else:
                connection.running[key] = request

    def _cancel(self, connection: _Connection, message: Cancel) -> None:
        key = f"{connection.number}:{message.id}"
        if connection.running.pop(key, None) is not None:
            self._engine.abort(key)
            self._say(connection, Error(message.id, "cancelled", "as it was asked"))

    def _load(self, connection: _Connection, message: WeightsUpdated) -> None:
        if message.sha256 != self._engine.weights:
            running = sum(len(each.running) for each in self._connections.values())
            if running:
                self._say(connection, Error(None, "busy", f"{running} requests run on the present weights; cancel them or wait"))
                return
            try:
                found = weights_sha256(message.path)
            except (RolloutProtocolError, OSError) as error:
                self._say(connection, Error(None, "failed", str(error)[:4000]))
                return
            if found != message.sha256:
                told = f"{message.path} holds weights {found[:12]}, announced were {message.sha256[:12]}; the present ones stay"
                self._say(connection, Error(None, "wrong_weights", told))
                return
            try:
                self._engine.load(message.path)
            except Exception as error:
                self._say(connection, Error(None, "failed", f"{type(error).__name__}: {error}"[:4000]))
                raise  # half loaded weights serve nobody
            self._engine.weights = found
        self._version = message.version
        self._say(connection, WeightsLoaded(self._engine.weights, self._version))

    def _answer(self, key: str, drawn: list[Drawn]) -> None:
        connection = self._connections.get(int(key.partition(":")[0]))
        request = connection.running.pop(key, None) if connection is not None else None
        if connection is not None and request is not None:
            self._say(connection, Samples(request.id, self._engine.weights, self._version, drawn))

    def _sign(self) -> None:
        for connection in list(self._connections.values()):
            if connection.running and time.monotonic() - connection.spoke > self._alive_s:
                self._say(connection, Alive(len(connection.running)))

    def _say(self, connection: _Connection, message: Message) -> None:
        try:
            connection.channel.send(message, timeout_s=_SEND_S)
            connection.spoke = time.monotonic()
        except MessageError as error:  # the engine's answer is none, or longer than a message may be
            name = message.id if isinstance(message, Samples) else None
            with contextlib.suppress(RolloutProtocolError):
                connection.channel.send(Error(name, "failed", f"the engine's answer: {error}"[:4000]), timeout_s=_SEND_S)
        except RolloutProtocolError:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        connection.channel.close()
        if self._connections.pop(connection.number, None) is not None:
            for key in connection.running:
                self._engine.abort(key)


def stop_with_parent(server: Server, *, grace_s: float = 5.0) -> None:
    """Ends this process when its standard input ends, as it does with the process that holds the other end (`Launched`), however that one
    ends. grace_s: seconds for `run` to return, after which the process is ended all the same.
    """

    def wait() -> None:
        while os.read(0, 1 << 10):
            pass
        server.stop()
        time.sleep(grace_s)
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def standard_streams(*, limit: int = MAX_LINE) -> Channel:
    """This process's standard input and output as a channel; whatever else prints goes to standard error from now on."""
    reader, writer = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    return Channel(reader, writer, limit=limit)
