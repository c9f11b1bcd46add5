"""One REPL child as the pool sees it: a request written, a reply read, within a deadline and a size. Framing is that of
leanprover-community/repl: a JSON object, then an empty line, in both directions."""

import json
import os
import select
import time
from typing import Any

_CHUNK = 1 << 16


class Fault(Exception):
    """The child did not answer as it should. `kind`: timeout, output (over the cap), died, garbage (unreadable, or bytes nobody asked
    for)."""

    def __init__(self, kind: str, detail: str):
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


class Child:
    """Owns the two pipe ends of a child. `number` is its id with the supervisor."""

    def __init__(self, number: int, pid: int, stdin: int, stdout: int):
        self.number, self.pid = number, pid
        self.stdin, self.stdout = stdin, stdout
        self.uses = 0
        self.header: str | None = None
        self.root: int | None = None  # the environment id of the header
        os.set_blocking(stdin, False)
        os.set_blocking(stdout, False)

    def close(self) -> None:
        """Closes the pipe ends; the child reads the end of its input."""
        for fd in (self.stdin, self.stdout):
            if fd >= 0:
                os.close(fd)
        self.stdin = self.stdout = -1

    def memory(self) -> tuple[int, int]:
        """(resident bytes, those of them that are not shared with a file) of the child now; zeros if it is gone."""
        try:
            with open(f"/proc/{self.pid}/statm", "rb") as file:
                fields = file.read().split()
        except OSError:
            return 0, 0
        page = os.sysconf("SC_PAGE_SIZE")
        return int(fields[1]) * page, (int(fields[1]) - int(fields[2])) * page

    def request(self, message: dict[str, Any], *, deadline: float, cap: int) -> dict[str, Any]:
        """Sends one request and returns its reply. `deadline` is a time.monotonic() value, `cap` the most bytes of the reply. Raises
        Fault."""
        self._nothing_waits()
        frame = self._exchange(json.dumps(message, ensure_ascii=False).encode("utf-8") + b"\n\n", deadline, cap)
        try:
            reply = json.loads(frame)
        except (ValueError, RecursionError) as trouble:
            raise Fault("garbage", f"a reply that is no JSON ({type(trouble).__name__}): {frame[:80]!r}") from None
        if not isinstance(reply, dict):
            raise Fault("garbage", f"a reply that is no object: {frame[:80]!r}")
        self._nothing_waits()
        return reply

    def _nothing_waits(self) -> None:
        """Bytes before a request or behind a reply were written by someone else than the REPL's loop."""
        try:
            early = os.read(self.stdout, _CHUNK)
        except BlockingIOError:
            return
        except OSError as trouble:
            raise Fault("died", str(trouble)) from None
        if not early:
            raise Fault("died", "closed its output")
        raise Fault("garbage", f"bytes that nobody asked for: {early[:80]!r}")

    def _exchange(self, outgoing: bytes, deadline: float, cap: int) -> bytes:
        poller = select.poll()
        poller.register(self.stdout, select.POLLIN)
        poller.register(self.stdin, select.POLLOUT)
        unsent = memoryview(outgoing)
        got = bytearray()
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Fault("timeout", "no whole reply in time")
            for fd, events in poller.poll(left * 1000 + 1):
                if fd == self.stdin:
                    unsent = self._send(unsent, events)
                    if not unsent:
                        poller.unregister(self.stdin)
                    continue
                seen = max(0, len(got) - 1)
                got += self._receive()
                end = got.find(b"\n\n", seen)
                if len(got) > cap:
                    raise Fault("output", f"a reply over {cap} bytes")
                if end >= 0:
                    if unsent or end + 2 < len(got):
                        raise Fault(
                            "garbage", f"bytes behind the reply, or a reply before the whole request: {bytes(got[end : end + 80])!r}"
                        )
                    return bytes(got[:end])

    def _send(self, unsent: memoryview, events: int) -> memoryview:
        if not events & select.POLLOUT:
            raise Fault("died", "closed its input")
        try:
            return unsent[os.write(self.stdin, unsent[:_CHUNK]) :]
        except BlockingIOError:
            return unsent
        except OSError as trouble:
            raise Fault("died", str(trouble)) from None

    def _receive(self) -> bytes:
        try:
            data = os.read(self.stdout, _CHUNK)
        except BlockingIOError:
            return b""
        except OSError as trouble:
            raise Fault("died", str(trouble)) from None
        if not data:
            raise Fault("died", "closed its output")
        return data
