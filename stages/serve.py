"""Answers OpenAI-style completions over HTTP on this machine, with log-probabilities, so that outside harnesses can evaluate a checkpoint.

POST /v1/completions (echo, logprobs, n, stop, seed, stream), POST /v1/chat/completions, GET /v1/models, GET /health. One request is worked
on at a time; the prompts of one request are a batch. What would change an answer and is not supported is refused by name.
"""

import contextlib
import json
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

import _entry
from _common import (
    ModelSection,
    build_model,
    check_vocabulary,
    load_tokenizer,
    model_config_of,
    model_directory,
    pick_device,
    say,
    use_threads,
)
from _completions import Completer, RequestError

from align.config import ConfigError, Invocation

MOST_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class ServedModel(ModelSection):
    """Which checkpoint answers."""

    path: Annotated[Path, "checkpoint in HF layout, or a run directory: then its newest checkpoint"] = Path("stages/assets/arithmetic_sft")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """All of the stage's configuration."""

    host: Annotated[str, "address to listen on; there is no authentication, so keep it on loopback"] = "127.0.0.1"
    port: Annotated[int, "0: one that is free"] = 8000
    name: Annotated[str | None, "the model's name in answers; none: its directory's"] = None
    batch: Annotated[int, "answers made at once"] = 64
    seed: Annotated[int, "of requests that bring none"] = 0
    threads: Annotated[int, "CPU threads of torch; 0 leaves torch's own choice"] = 0
    model: ServedModel = field(default_factory=ServedModel)


class Server(ThreadingHTTPServer):
    """Threads take requests; a lock lets one at a time use the model."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], completer: Completer):
        self.completer, self.busy = completer, threading.Lock()
        super().__init__(address, Handler)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 60  # a client that sends nothing holds no thread for ever

    def do_GET(self) -> None:
        name = self.server.completer.name
        close = "Content-Length" in self.headers  # a body that nobody reads would be taken for the next request
        if self.path in ("/v1/models", "/v1/models/"):
            self._reply(200, {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "align"}]}, close=close)
        elif self.path in ("/health", "/"):
            self._reply(200, {"status": "ok", "model": name}, close=close)
        else:
            self._refuse(
                404, f"there is no {self.path}; POST /v1/completions or /v1/chat/completions, GET /v1/models or /health", close=close
            )

    def do_POST(self) -> None:
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            return self._refuse(411, "a request needs a Content-Length", close=True)
        if not 0 <= length <= MOST_BYTES:
            return self._refuse(413, f"a request of {length} bytes; at most {MOST_BYTES} are taken", close=True)
        try:
            data, chat = self.rfile.read(length), self.path == "/v1/chat/completions"
            if not chat and self.path != "/v1/completions":
                return self._refuse(404, f"there is no {self.path}; POST /v1/completions or /v1/chat/completions")
            body = json.loads(data)
            if not isinstance(body, dict):
                raise RequestError("the request is no JSON object")
            with self.server.busy:
                if body.get("stream"):
                    self._stream(body, chat)
                else:
                    self._reply(200, self.server.completer.answer(body, chat=chat))
        except (ValueError, RecursionError) as error:  # RequestError and JSON's own among them
            self._refuse(400, str(error))

    def _stream(self, body: dict[str, Any], chat: bool) -> None:
        """Server-sent events, a piece of text each; a client that is gone ends the answer. What the sampler refuses before the
        first of them is answered as without stream.
        """
        ask, begun = self.server.completer.check_stream(body, chat=chat), False

        def send(event: dict[str, Any] | str) -> None:
            nonlocal begun
            if not begun:
                begun = self.close_connection = True
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
            text = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
            self.wfile.write(f"data: {text}\n\n".encode())
            self.wfile.flush()

        try:
            try:
                self.server.completer.stream(ask, send)
            except RequestError as error:
                if not begun:
                    raise
                send(_error(str(error)))
            send("[DONE]")
        except OSError:
            pass

    def _reply(self, status: int, answer: dict[str, Any], *, close: bool = False) -> None:
        data = json.dumps(answer, ensure_ascii=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if close:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, message: str, *, close: bool = False) -> None:
        self._reply(status, _error(message), close=close)

    def log_message(self, format: str, *args: Any) -> None:
        print(f"{time.strftime('%H:%M:%S')} {self.address_string()} {format % args}", file=sys.stderr, flush=True)


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}


def serve(call: Invocation[ServeConfig]) -> int:
    config = call.config
    if call.resume or call.allow_change:
        raise ConfigError("serve has nothing to resume")
    if config.batch < 1:
        raise ConfigError(f"batch is {config.batch}; it must be at least 1")
    if not 0 <= config.port < 2**16:
        raise ConfigError(f"port is {config.port}; it must be from 1 to 65535, or 0 for one that is free")
    use_threads(config.threads)
    directory = model_directory(config.model.path)
    model_config = model_config_of(directory)
    tokenizer = load_tokenizer(config.model, directory)
    check_vocabulary(tokenizer, model_config, config.model)
    if call.dry_run:
        say(f"model    {directory}\ndry run: nothing was served")
        return 0
    model = build_model(config.model, directory, model_config, config.seed, pick_device(config.model, model_config)).eval()
    completer = Completer(model, tokenizer, name=config.name or directory.name, batch=config.batch, seed=config.seed)
    try:
        server = Server((config.host, config.port), completer)
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host}:{config.port} ({error.strerror}); choose another host= or port=") from None
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    say(f"model    {directory}\nserving  http://{config.host}:{server.server_port}/v1 (Ctrl-C ends)")
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    server.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(_entry.run_stage("serve", ServeConfig, serve, __doc__ or "", sys.argv[1:]))
