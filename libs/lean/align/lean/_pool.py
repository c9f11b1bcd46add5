"""A pool of REPL children: borrowed one at a time, killed on any fault, recycled by use and by memory, never outliving the caller."""

import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from align.lean._child import Child, Fault
from align.lean._errors import HeaderError, LeanError
from align.lean._toolchain import Toolchain

_GIB = 1 << 30
_SUPERVISOR = Path(__file__).with_name("_supervisor.py")
_MOST_SUPERVISORS = 100  # of one pool; something kills them
_ANSWER_S = 60.0  # the supervisor answers in milliseconds; a machine that swaps may take long


@dataclass(frozen=True)
class Limits:
    """What one child may use. Bytes and seconds.

    memory_bytes: what no file backs, over the child's process tree; the cap that counts, looked at every 20 ms.
    address_space_bytes: RLIMIT_AS; far above memory_bytes, because Lean maps .olean files and reserves a GiB of stack a thread.
    """

    seconds: float = 60.0  # one proof, wall clock
    start_seconds: float = 300.0  # starting a child and importing its header
    memory_bytes: int = 4 * _GIB
    address_space_bytes: int = 12 * _GIB
    file_bytes: int = 1 << 20  # the largest file a child may write
    reply_bytes: int = 16 << 20
    uses: int = 200  # proofs until a child is replaced: a REPL keeps every environment for ever
    recycle_bytes: int = 2 * _GIB  # private bytes above which a child is replaced after its proof

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0 or not math.isfinite(value):
                raise LeanError(f"limits.{field.name} is {value!r}; it must be above 0 and finite")


@dataclass(frozen=True)
class End:
    """How a child ended: exit code (negative: the signal), why the supervisor killed it ("", "asked", "memory"), peak resident bytes,
    stderr's tail."""

    code: int
    why: str
    peak: int
    stderr: str


class _Channel:
    """The supervisor process and the thread that reads its answers."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", _SUPERVISOR, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={"PATH": os.defpath},
                cwd="/",
            )
        self.socket = ours
        self.lock = threading.Lock()
        self.waiting: dict[tuple[str, int], Future[Any]] = {}
        self.lost = False
        self.reader = threading.Thread(target=self._read, name="lean-pool", daemon=True)
        self.reader.start()

    def ask(self, message: dict[str, Any], answer: str) -> "Future[Any]":
        future: Future[Any] = Future()
        with self.lock:
            if self.lost:
                raise Fault("died", "the supervisor is gone")
            self.waiting[answer, message["id"]] = future
            try:
                self.socket.sendall(json.dumps(message).encode())
            except OSError as trouble:
                self.lost = True
                raise Fault("died", f"the supervisor is gone: {trouble}") from None
        return future

    def _read(self) -> None:
        while True:
            try:
                packet, fds, _, _ = socket.recv_fds(self.socket, 1 << 16, 2)
            except OSError:
                packet, fds = b"", []
            if not packet:
                break
            message = json.loads(packet)
            with self.lock:
                future = self.waiting.pop((message["op"], message["id"]), None)
            if future:
                future.set_result((message, fds))
        with self.lock:
            self.lost = True
            left, self.waiting = list(self.waiting.values()), {}
        for future in left:
            future.set_exception(Fault("died", "the supervisor is gone"))

    def close(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.reader.join(15)
        self.socket.close()


class LeanPool:
    """`workers` children of one toolchain behind one supervisor process; thread-safe; a context manager.

    Children are started when first needed and keep one header each: a request for another header replaces the child that has waited
    longest. After a fork the copy in the new process refuses to work; the original goes on."""

    def __init__(self, toolchain: Toolchain, workers: int | None = None, limits: Limits | None = None):
        self.toolchain = toolchain
        self.workers = len(os.sched_getaffinity(0)) if workers is None else workers
        self.limits = limits or Limits()
        if self.workers < 1:
            raise LeanError(f"workers is {self.workers}; a pool needs at least 1")
        self.counts: Counter[str] = Counter()  # starts, recycled, killed, retries, header hits …
        self._owner = os.getpid()
        self._idle: list[Child | None] = [None] * self.workers  # None: a place whose child is not started
        self._ready = threading.Condition()
        self._closed = False
        self._numbers = 0
        self._channel: _Channel | None = None

    def __enter__(self) -> "LeanPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills every child and waits until all are gone. Checks that run in other threads end as crash or raise LeanError."""
        if self._owner != os.getpid():
            return
        with self._ready:
            self._closed = True
            children, self._idle = [c for c in self._idle if c], []
            channel, self._channel = self._channel, None
            self._ready.notify_all()
        if channel:
            channel.close()
        for child in children:
            child.close()

    @contextmanager
    def borrow(self, header: str, fresh: bool = False) -> Iterator[Child]:
        """A child whose root environment is the header's. On any exception it is killed; else it goes back, or is replaced when worn.

        Raises HeaderError, LeanError (closed), Fault (no child could be started).
        """
        place = self._take(header)
        child: Child | None = place
        try:
            if child is not None and (child.header != header or fresh):
                self.end(child)
                child = None
            if child is None:
                child = self._start(header)
            else:
                self.counts["header hits"] += 1
            yield child
            child.uses += 1
            if child.stdin < 0:  # ended by its borrower
                child = None
            elif child.uses >= self.limits.uses or child.memory()[1] > self.limits.recycle_bytes:
                self.counts["recycled"] += 1
                self.end(child)
                child = None
        except BaseException:
            if child is not None:
                self.end(child)
                child = None
            raise
        finally:
            with self._ready:
                if not self._closed:
                    self._idle.append(child)
                    self._ready.notify()
                elif child:
                    child.close()

    def _take(self, header: str) -> Child | None:
        if self._owner != os.getpid():
            raise LeanError("this pool belongs to the process that made it; make a new one after a fork")
        with self._ready:
            while not self._idle and not self._closed:
                self._ready.wait()
            if self._closed:
                raise LeanError("the pool is closed")
            fitting = [c for c in self._idle if c and c.header == header]
            empty = [c for c in self._idle if c is None]
            chosen = fitting[-1] if fitting else None if empty else self._idle[0]
            self._idle.remove(chosen)
            return chosen

    def _start(self, header: str) -> Child:
        deadline = time.monotonic() + self.limits.start_seconds
        child = self._spawn()
        try:
            reply = child.request({"cmd": header}, deadline=deadline, cap=self.limits.reply_bytes)
            errors = [m["data"] for m in reply.get("messages", []) if m["severity"] == "error"]
            if errors or "message" in reply:
                raise HeaderError(
                    f"the header does not elaborate under {self.toolchain.label}: {str(reply.get('message') or errors[0])[:500]}"
                )
            child.header, child.root = header, int(reply["env"])
        except (KeyError, TypeError, ValueError) as trouble:
            self.end(child)
            if isinstance(trouble, HeaderError):
                raise
            raise Fault("garbage", f"a reply to the header that is none: {trouble!r}") from None
        except Fault as fault:
            end = self.end(child)
            raise Fault(
                "start", f"the child did not import its header ({fault}); it ended with {end.code} {end.why}: {end.stderr[-300:]}"
            ) from None
        except BaseException:
            self.end(child)
            raise
        return child

    def _spawn(self) -> Child:
        limits = {
            "memory": self.limits.memory_bytes,
            "address_space": self.limits.address_space_bytes,
            "file": self.limits.file_bytes,
        }
        how = {
            "command": list(self.toolchain.command),
            "environment": dict(self.toolchain.environment),
            "directory": self.toolchain.directory,
        }
        while True:
            channel, number = self._next()
            try:
                answer, fds = channel.ask({"op": "spawn", "id": number} | how | limits, "spawned").result(_ANSWER_S)
                return Child(number, answer["pid"], *fds)
            except Fault:
                if self.counts["supervisors"] > _MOST_SUPERVISORS:
                    raise
            except TimeoutError:
                raise Fault("start", f"the supervisor did not start a child within {_ANSWER_S} s") from None

    def _next(self) -> tuple[_Channel, int]:
        """A living supervisor, a new one where the last is gone, and a number for a child."""
        with self._ready:
            if self._closed:
                raise LeanError("the pool is closed")
            if self._channel and self._channel.lost:
                self._channel.close()
                self._channel = None
            if self._channel is None:
                self._channel = _Channel()
                self.counts["supervisors"] += 1
            self._numbers += 1
            self.counts["starts"] += 1
            return self._channel, self._numbers

    def end(self, child: Child) -> End:
        """Kills a child and what it has started, waits until all are gone, and says how it ended."""
        channel = self._channel
        child.header = None
        if child.stdin < 0:
            return End(0, "ended before", 0, "")
        self.counts["killed"] += 1
        try:
            if channel is None:
                raise Fault("died", "the pool is closed")
            answer, _ = channel.ask({"op": "kill", "id": child.number}, "gone").result(_ANSWER_S)
            return End(answer["code"], answer["why"], answer["peak"], answer["stderr"])
        except (Fault, TimeoutError) as trouble:
            return End(-9, "supervisor", 0, str(trouble))
        finally:
            child.close()
