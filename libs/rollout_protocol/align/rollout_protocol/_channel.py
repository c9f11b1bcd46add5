"""Messages over file descriptors: one end of a socket, or a pair of pipes. Every wait has an end."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from align.rollout_protocol._errors import ChannelClosed, ChannelTimeout, MessageError, RolloutProtocolError
from align.rollout_protocol._messages import MAX_LINE, Message, decode, encode

T = TypeVar("T")
_CHUNK = 1 << 18


class Framer:
    """Cuts a stream of bytes into lines. Holds at most `limit` bytes of an unfinished one."""

    def __init__(self, limit: int = MAX_LINE) -> None:
        self._limit, self._parts, self._size = limit, [b""], 0

    @property
    def unfinished(self) -> int:
        """Bytes of a line whose end has not come."""
        return self._size

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are whole now, without their ends. Raises MessageError: one is longer than the limit; the stream is lost then."""
        *whole, rest = data.split(b"\n")
        lines = []
        for end in whole:
            self._keep(end)
            lines.append(b"".join(self._parts))
            self._parts, self._size = [b""], 0
        self._keep(rest)
        return lines

    def _keep(self, part: bytes) -> None:
        self._size += len(part)
        if self._size >= self._limit:
            raise MessageError(f"a line of more than {self._limit} bytes; no message is that long")
        if part:
            self._parts.append(part)


class Channel:
    """One end of a connection. Reading and writing may be done by two threads, each of them by one at a time."""

    def __init__(self, reader: int, writer: int, *, limit: int = MAX_LINE, release: Callable[[], None] = lambda: None) -> None:
        """reader, writer: file descriptors, made non-blocking here; the same one for a socket. release: called once, by `close`."""
        self._reader, self._writer, self._limit, self._release = reader, writer, limit, release
        self._framer, self._lines = Framer(limit), list[bytes]()
        self._lock = threading.Lock()  # a descriptor is not used once it is closed: its number may be another's then
        self.closed = False
        for descriptor in {reader, writer}:
            os.set_blocking(descriptor, False)

    @classmethod
    def of_socket(cls, connected: socket.socket, *, limit: int = MAX_LINE) -> Channel:
        """The channel owns the socket from now on."""
        descriptor = connected.detach()

        def release() -> None:
            with socket.socket(fileno=descriptor) as own, contextlib.suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in the other direction

        return cls(descriptor, descriptor, limit=limit, release=release)

    def send(self, message: Message, *, timeout_s: float) -> None:
        """Raises MessageError: the message is none; ChannelTimeout: nobody takes it, and the channel is closed; ChannelClosed."""
        rest, end = memoryview(encode(message, limit=self._limit)), time.monotonic() + timeout_s
        while rest:
            self._wait(self._writer, select.POLLOUT, end, f"nobody took a {message.TYPE} for {timeout_s:g} s")
            rest = rest[self._use(partial(os.write, self._writer, rest[:_CHUNK])) or 0 :]

    def receive(self, allowed: tuple[type[Message], ...], *, timeout_s: float | None) -> Message:
        """The next message; None waits for ever. Only a whole message ends the wait: bytes that drip do not.

        Raises ChannelTimeout, ChannelClosed, MessageError; the channel is closed then.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._lines:
            part = f", {self._framer.unfinished} bytes of one" if self._framer.unfinished else ""
            self._wait(self._reader, select.POLLIN, end, f"no whole message for {timeout_s or 0:g} s{part}")
            data = self._use(partial(os.read, self._reader, _CHUNK))
            if data is None:
                continue
            if not data:
                half = f", in the middle of a message ({self._framer.unfinished} bytes)" if self._framer.unfinished else ""
                self.close()
                raise ChannelClosed(f"the other end closed the connection{half}")
            try:
                self._lines += self._framer.feed(data)
            except MessageError:
                self.close()
                raise
        try:
            return decode(self._lines.pop(0), allowed, limit=self._limit)
        except MessageError:
            self.close()
            raise

    def close(self) -> None:
        with self._lock:
            closed, self.closed = self.closed, True
        if not closed:
            self._release()

    def __del__(self) -> None:
        if hasattr(self, "closed"):
            self.close()

    def _use(self, call: Callable[[], T]) -> T | None:
        """A read or write that does not wait; None where it would have to."""
        try:
            with self._lock:
                if self.closed:
                    raise ChannelClosed("the connection is closed")
                return call()
        except BlockingIOError:
            return None
        except OSError as error:
            self.close()
            raise ChannelClosed(f"the other end is gone ({error.strerror})") from None

    def _wait(self, descriptor: int, event: int, end: float | None, told: str) -> None:
        """Until the descriptor can be used, or `end`."""
        if self.closed:
            raise ChannelClosed("the connection is closed")
        poll = select.poll()
        poll.register(descriptor, event)
        left = None if end is None else max(end - time.monotonic(), 0) * 1000
        if not poll.poll(left):
            self.close()
            raise ChannelTimeout(told)


def dial(address: str, *, timeout_s: float = 10.0, wait_s: float = 0.0, limit: int = MAX_LINE) -> Channel:
    """Connects to unix:PATH or tcp:HOST:PORT. wait_s: seconds within which somebody may yet begin to listen there.

    Raises ChannelClosed: nobody answers there; RolloutProtocolError: no address.
    """
    family, place = _place(address)
    end = time.monotonic() + wait_s
    while True:
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(place)
            return Channel.of_socket(connection, limit=limit)
        except OSError as error:
            connection.close()
            if time.monotonic() >= end:
                raise ChannelClosed(f"nobody answers at {address} ({error.strerror or error})") from None
        time.sleep(min(0.1, wait_s))


def listen(address: str) -> socket.socket:
    """A socket that others can dial. Raises RolloutProtocolError: no address, or one that is taken, by another's socket or by a file."""
    family, place = _place(address)
    if family == socket.AF_UNIX:
        _remove_stale(str(place))
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(place)
        listener.listen()
    except OSError as error:
        listener.close()
        raise RolloutProtocolError(f"nothing can listen at {address} ({error.strerror or error})") from None
    return listener


def _remove_stale(path: str) -> None:
    """Removes the socket of a process that is no more; one that somebody listens at, and whatever else lies there, stays."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            probe.settimeout(1.0)
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)


def _place(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    kind, _, place = address.partition(":")
    host, _, port = place.rpartition(":")
    if kind == "unix" and place and "\0" not in place:
        if len(os.fsencode(place)) > 100:
            raise RolloutProtocolError(f"{address}: a Unix socket's path has at most 100 bytes; choose a shorter one")
        return socket.AF_UNIX, place
    if kind == "tcp" and host and "\0" not in host and port.isdecimal() and int(port) < 1 << 16:
        return socket.AF_INET, (host, int(port))
    raise RolloutProtocolError(f"{address!r} is no address; write unix:PATH or tcp:HOST:PORT")
