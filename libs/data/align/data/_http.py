"""HTTP for a hub, with the standard library: redirects without leaking the token, retries, bodies whose length is checked.

`urllib` alone would forward the token to other hosts, and read a body that was cut as if it were whole.
"""

import email.utils
import http.client
import logging
import random
import re
import socket
import ssl
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Any

from ._errors import DataError

RETRIED = {408: 0, 429: 60, 500: 0, 502: 0, 503: 0, 504: 20}  # status to the least wait, in seconds, where the server names none
REDIRECTS = (301, 302, 303, 307, 308)
NO_NETWORK_ATTEMPTS = 3  # for a host name that nobody knows, while nothing was ever reached
LONGEST_WAIT = 900  # seconds; a server that asks for more has said no
log = logging.getLogger("align.data")


class HubError(DataError):
    """The hub, or what it sent, is not as it should be; or it does not have what was asked for."""


class Failure(Exception):
    """What may go away when it is tried again."""

    def __init__(self, why: str, *, asked: float | None = None, least: float = 0, no_network: bool = False):
        super().__init__(why)
        self.asked, self.least, self.no_network = asked, least, no_network


@dataclass(frozen=True)
class Reply:
    """A response whose status is final. `linked` are the headers of the hub's own redirect to the storage, or the response's own."""

    status: int
    headers: Message
    linked: Message
    body: http.client.HTTPResponse


class Client:
    """Requests to one hub and to where it redirects; `token` goes to the origin of `endpoint` and nowhere else."""

    def __init__(
        self,
        endpoint: str,
        *,
        token: str | None = None,
        timeout: float = 30,
        attempts: int = 8,
        sleep: Callable[[float], object] = time.sleep,
        now: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
    ):
        self.endpoint, self.home = endpoint.rstrip("/"), origin(endpoint)
        self._reached = False  # whether anybody ever answered
        self._token, self._timeout, self._attempts, self._sleep, self._now, self._jitter = token, timeout, attempts, sleep, now, jitter
        # Neither a redirect handler nor one that raises for statuses: both are done here.
        self._opener = urllib.request.OpenerDirector()
        for handler in (urllib.request.ProxyHandler(), urllib.request.HTTPHandler(), urllib.request.HTTPSHandler()):
            self._opener.add_handler(handler)

    def open(self, url: str, headers: Mapping[str, str] | None = None) -> Reply:
        """One attempt, redirects followed. Raises Failure for what may pass, HubError for what will not."""
        linked: Message | None = None
        name = shown(url)
        for _ in range(10):
            home = origin(url) == self.home
            where = name if home else f"{name} (redirected to {origin(url)[1]})"
            request = urllib.request.Request(url, headers={"User-Agent": "align-data", "Accept-Encoding": "identity", **(headers or {})})
            if self._token and home:
                request.add_unredirected_header("Authorization", f"Bearer {self._token}")
            try:
                body = self._opener.open(request, timeout=self._timeout)
            except (OSError, http.client.HTTPException) as error:
                raise _failure(where, error) from error
            self._reached = True
            if linked is None and home and (body.status not in REDIRECTS or body.headers.get("X-Linked-Etag")):
                linked = body.headers
            if body.status not in REDIRECTS:
                return self._final(where, home, body, linked or body.headers)
            url = self._next(url, body.headers.get("Location", ""))
            body.close()
        raise HubError(f"{name}: redirected ten times in a row; the hub is misconfigured")

    def get(self, url: str) -> tuple[bytes, Message]:
        """A small body, whole, tried again until it is; and the headers."""
        for attempt in range(1, self._attempts + 2):
            try:
                reply = self.open(url)
                with reply.body:
                    parts = list(body_parts(reply.body, 1 << 16))
                    length = reply.headers.get("Content-Length")
                    if length is not None and sum(map(len, parts)) != int(length):
                        raise Failure(f"{shown(url)}: the body ended after {sum(map(len, parts))} of {length} bytes")
                    return b"".join(parts), reply.headers
            except Failure as failure:
                self.pause(attempt, failure)
        raise AssertionError("pause raises after the last attempt")

    def pause(self, attempt: int, failure: Failure) -> None:
        """Waits before attempt number `attempt` + 1: as long as the server asked, else 1, 2, 4, ... 60 s; always a little more, so that
        many ranks do not come back at once. Raises HubError after the last attempt, or the third where no name is known and none was."""
        if failure.no_network and not self._reached and attempt >= NO_NETWORK_ATTEMPTS:
            raise HubError(f"{failure}; is there a network? HF_ENDPOINT names another hub, and HTTPS_PROXY a proxy") from failure
        if attempt > self._attempts:
            raise HubError(f"{failure}; given up after {attempt} attempts without progress: try again later") from failure
        wait = failure.asked if failure.asked is not None else max(failure.least, min(2.0 ** (attempt - 1), 60))
        if wait > LONGEST_WAIT:
            raise HubError(f"{failure}; it asks to wait {wait:.0f} s: try again then") from failure
        wait += self._jitter() * max(1, wait / 4)
        log.warning("%s; attempt %d of %d in %.1f s", failure, attempt + 1, self._attempts + 1, wait)
        self._sleep(wait)

    def _final(self, where: str, home: bool, body: http.client.HTTPResponse, linked: Message) -> Reply:
        if body.status in (200, 206, 416):
            return Reply(body.status, body.headers, linked, body)
        body.close()
        if body.status in RETRIED:
            asked = asked_wait(body.headers, self._now())
            raise Failure(f"{where}: the server answers {body.status}", asked=asked, least=RETRIED[body.status])
        if not home:
            raise HubError(f"{where}: the hub's storage refuses the address that the hub gave ({body.status}); try again later")
        raise HubError(f"{where}: {_refusal(body.status, body.headers.get('X-Error-Code', ''), bool(self._token))}")

    def _next(self, url: str, location: str) -> str:
        target = urllib.parse.urljoin(url, location)
        scheme = urllib.parse.urlsplit(target).scheme
        if not location or scheme not in ("http", "https") or (url.startswith("https:") and scheme == "http"):
            raise HubError(f"{shown(url)}: redirects to {shown(target)!r}, which is not followed (no address, or https to less)")
        return target


def body_parts(body: http.client.HTTPResponse, size: int) -> Iterator[bytes]:
    """What arrives, at most `size` bytes at a time; an end that came too early is for the caller to see by its length."""
    while True:
        try:
            part = body.read1(size)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Failure(f"the connection broke ({type(error).__name__}: {error})") from error
        if not part:
            return
        yield part


def origin(url: str) -> tuple[str, str, int]:
    """(scheme, host, port): what has to be equal for a token to be sent."""
    parts = urllib.parse.urlsplit(url)
    scheme = parts.scheme.lower()
    try:
        port = parts.port
    except ValueError:
        port = None
    return scheme, (parts.hostname or "").lower(), port or {"http": 80, "https": 443}.get(scheme, 0)


def shown(url: str) -> str:
    """A URL without its query: signed addresses are secrets."""
    return url.partition("?")[0]


def asked_wait(headers: Mapping[str, Any] | Message, now: float) -> float | None:
    """Seconds that the server asks for: RateLimit's t and one more, or Retry-After as seconds or as a date; None where it says nothing."""
    if found := re.search(r";\s*t=(\d+)", headers.get("RateLimit") or ""):
        return int(found[1]) + 1.0
    after = (headers.get("Retry-After") or "").strip()
    if after.isdecimal():
        return float(after)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(after).timestamp() - now)
    except (ValueError, TypeError):
        return None


def _failure(where: str, error: Exception) -> Exception:
    cause = getattr(error, "reason", error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return HubError(f"{where}: its certificate is not trusted ({cause.verify_message}); set SSL_CERT_FILE for your own authority")
    if isinstance(error, http.client.InvalidURL):
        return HubError(f"{where!r}: is no address ({error}); look at HF_ENDPOINT")
    return Failure(f"{where}: no answer ({type(cause).__name__}: {cause})", no_network=isinstance(cause, socket.gaierror))


def _refusal(status: int, code: str, has_token: bool) -> str:
    token = "the token in use may not read it" if has_token else "or it is private: set HF_TOKEN"
    known = {
        "RepoNotFound": f"there is no such repository, {token}",
        "GatedRepo": f"the repository is gated: accept its terms on its page, {'as the owner of the token' if has_token else token}",
        "RevisionNotFound": "there is no such revision; look at the branch or commit",
        "EntryNotFound": "there is no such file at this revision; list the repository's files",
    }
    by_status = {401: f"not permitted (401), {token}", 403: f"not permitted (403), {token}", 404: f"not found (404), {token}"}
    return known.get(code) or by_status.get(status) or f"the server answers {status}; nothing more is known"
