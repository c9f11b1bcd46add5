"""The bytes of one remote file: any range, over as many connections as it takes, all of one and the same content."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ._http import Client, Failure, HubError, Reply, body_parts, shown


class Changed(HubError):
    """The file is another one than when its reading began."""


@dataclass(frozen=True)
class Identity:
    """What tells one content from another: its size, the hub's name of it (a sha256, or git's blob sha1) and the storage's ETag."""

    size: int | None
    name: str | None
    etag: str | None

    @property
    def sha256(self) -> str | None:
        return self.name if self.name and re.fullmatch("[0-9a-f]{64}", self.name) else None

    @property
    def blob(self) -> str | None:
        return self.name if self.name and re.fullmatch("[0-9a-f]{40}", self.name) else None


class Transfer:
    """Reads `url`. `identity` is set by the first answer, or given by an earlier process; every later answer must agree with it."""

    def __init__(self, client: Client, url: str, *, identity: Identity | None = None, chunk: int = 1 << 18):
        self._client, self._url, self._chunk = client, url, chunk
        self.identity = identity

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yields bytes start..stop (the end, when None), each once and in order, over dropped connections.

        After a drop the next request asks for the rest by Range, with If-Range where the storage gives a strong ETag. A server that sends
        the whole file instead is read from its beginning and what is known passed over. Raises HubError when it gives up, `Changed`
        when the content is no longer that of the first answer.
        """
        position, attempt = start, 0
        while stop is None or position < stop:
            if self.identity and self.identity.size == position:
                return
            try:
                for part in self._rest(position, stop):
                    position, attempt = position + len(part), 0
                    yield part
                if stop is None and self.identity and self.identity.size is None:
                    return  # chunked coding, whose end is explicit
                if self.identity and position not in (stop, self.identity.size):
                    raise Failure(f"{shown(self._url)}: the body ended after {position} of {stop or self.identity.size} bytes")
            except Failure as failure:
                attempt += 1
                self._client.pause(attempt, failure)

    def size(self) -> int:
        """Bytes of the whole file; asks for one byte where nothing is known yet."""
        if self.identity is None:
            for _ in self.chunks(0, 1):
                pass
        if self.identity is None or self.identity.size is None:
            raise HubError(f"{shown(self._url)}: the server does not tell its size; download it instead")
        return self.identity.size

    def _rest(self, position: int, stop: int | None) -> Iterator[bytes]:
        """One connection's part of the bytes from `position` on."""
        headers = {}
        if position or stop is not None:
            headers["Range"] = f"bytes={position}-{'' if stop is None else stop - 1}"
            if position and self.identity and self.identity.etag:
                headers["If-Range"] = self.identity.etag
        reply = self._client.open(self._url, headers)
        with reply.body:
            begin = self._check(reply, position)
            if begin is None:
                return
            for part in body_parts(reply.body, self._chunk):
                begin, known = begin + len(part), position - begin
                new = part[max(known, 0) :] if stop is None else part[max(known, 0) : len(part) - max(begin - stop, 0)]
                if new:
                    position += len(new)
                    yield new
                if position == stop:
                    return

    def _check(self, reply: Reply, position: int) -> int | None:
        """Where the reply's body begins, once it is of the right content; None when there is nothing from `position` on."""
        name = shown(self._url)
        if reply.headers.get("Content-Encoding", "identity") != "identity":
            raise Failure(f"{name}: sent as {reply.headers['Content-Encoding']}, which was not asked for")
        begin, total = 0, _number(reply.headers.get("Content-Length"))
        if reply.status == 416:  # asked from the end on; only of an empty file is that not known before
            found = re.fullmatch(r"bytes \*/(\d+)", reply.headers.get("Content-Range", ""))
            if not found or int(found[1]) != position:
                raise Changed(f"{name}: has no byte {position} any more; it changed while it was read: begin again")
            self._identify(reply, position)
            return None
        if reply.status == 206:
            found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", reply.headers.get("Content-Range", ""))
            if not found or int(found[1]) != position:
                raise Failure(f"{name}: asked for bytes from {position} on, got {reply.headers.get('Content-Range')!r}")
            begin, total = position, _number(found[2])
        self._identify(reply, total)
        if self.identity and self.identity.size is None and "chunked" not in reply.headers.get("Transfer-Encoding", ""):
            raise HubError(f"{name}: the server tells no length, so a cut body could not be told from a whole one; get it another way")
        return begin

    def _identify(self, reply: Reply, total: int | None) -> None:
        etag = reply.headers.get("ETag")
        linked = reply.linked.get("X-Linked-Etag") or (etag if reply.linked is reply.headers and "X-Repo-Commit" in reply.headers else None)
        size = _number(reply.linked.get("X-Linked-Size"))
        if size is not None and total is not None and size != total:
            raise Failure(f"{shown(self._url)}: the storage has {total} bytes, the hub says {size}")
        seen = Identity(total if size is None else size, _unquoted(linked), etag if etag and not etag.startswith("W/") else None)
        if self.identity is None:
            self.identity = seen
            return
        known = self.identity
        # The hub's name is the content's; the storage's ETag counts only where there is no name.
        pairs = [(known.size, seen.size), (known.name, seen.name) if known.name and seen.name else (known.etag, seen.etag)]
        if any(one is not None and two is not None and one != two for one, two in pairs):
            was, now = known.name or known.etag, seen.name or seen.etag
            raise Changed(f"{shown(self._url)}: changed while it was read ({was}, {known.size} bytes; now {now}, {seen.size}); begin again")


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _unquoted(etag: str | None) -> str | None:
    return etag.removeprefix("W/").strip('"') if etag else None
