"""A Hugging Face-style hub: list, download, stream, read by range. Standard library only."""

import fcntl
import hashlib
import io
import json
import os
import re
import urllib.parse
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ._http import Client, HubError, origin
from ._rows import MAX_LINE, Row, check_rows, parse_lines, read_lines
from ._shards import write_whole
from ._transfer import Changed, Identity, Transfer

ENDPOINT = "https://huggingface.co"
Repo = Literal["dataset", "model"]


@dataclass(frozen=True)
class HubFile:
    """One entry of a listing; `sha256` is None for small files, which the hub names by git's blob id."""

    path: str
    size: int
    sha256: str | None


class HubPath(NamedTuple):
    """Files in a repository: `path` may hold the wildcards of fnmatch."""

    repo: str
    revision: str
    path: str

    @classmethod
    def parse(cls, text: str) -> "HubPath":
        """Reads "hub:owner/name[@revision]/path"; a revision with slashes is written with %2F. Raises HubError."""
        found = re.fullmatch(r"hub:([^/@]+/[^/@]+)(?:@([^/@]+))?/(.+)", text)
        if not found:
            raise HubError(f"{text!r} names no file of a hub; it is hub:owner/name/path, or hub:owner/name@revision/path")
        return cls(found[1], urllib.parse.unquote(found[2] or "main"), found[3])


class Hub:
    """Files of a hub, pinned to one commit each, kept in a cache that every process may share.

    endpoint: HF_ENDPOINT, else the public hub. token: HF_TOKEN, else none; it goes to the endpoint's origin and nowhere else. cache:
    a directory; ALIGN_CACHE, else ~/.cache/align. offline: what is in the cache and nothing else; HF_HUB_OFFLINE=1.
    progress(path, bytes so far, size): called for each chunk. `http` are the options of the client: timeout, attempts, and for tests
    sleep, now, jitter. Raises HubError for an endpoint that is no address.
    """

    def __init__(
        self,
        *,
        endpoint: str | None = None,
        token: str | None = None,
        cache: str | Path | None = None,
        offline: bool | None = None,
        progress: Callable[[str, int, int | None], object] | None = None,
        chunk: int = 1 << 18,
        **http: Any,
    ):
        endpoint = endpoint or os.environ.get("HF_ENDPOINT", "").strip() or ENDPOINT
        if origin(endpoint)[0] not in ("http", "https") or not origin(endpoint)[1]:
            raise HubError(f"endpoint {endpoint!r} is no address; set HF_ENDPOINT to one like https://host")
        self._client = Client(endpoint, token=token or os.environ.get("HF_TOKEN", "").strip() or None, **http)
        self.cache = Path(cache or os.environ.get("ALIGN_CACHE", "").strip() or Path.home() / ".cache" / "align") / "hub"
        self._offline = os.environ.get("HF_HUB_OFFLINE", "") in ("1", "true", "True") if offline is None else offline
        self._progress, self._chunk = progress or (lambda path, done, size: None), chunk

    def commit(self, repo: str, revision: str = "main", *, kind: Repo = "dataset") -> str:
        """The commit (40 hex digits) that a branch, tag or commit names; everything else is asked for by it."""
        kept = self._folder(repo, kind) / "refs" / urllib.parse.quote(revision, safe="")
        if re.fullmatch("[0-9a-f]{40}", revision):
            return revision
        if self._offline:
            if kept.is_file():
                return kept.read_text().strip()
            raise HubError(f"{repo}: revision {revision} is not in {self.cache}, and offline is set; get it once while online")
        address = f"{self._client.endpoint}/api/{kind}s/{repo}/revision/{urllib.parse.quote(revision, safe='')}"
        found = _json(self._client.get(address)[0], address)
        sha = found.get("sha") if isinstance(found, dict) else None
        if not isinstance(sha, str) or not re.fullmatch("[0-9a-f]{40}", sha):
            raise HubError(f"{address}: names no commit; is this a hub?")
        with self._locked(repo, kind, f"refs/{revision}"):
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_whole(kept, sha.encode())
        return sha

    def files(self, repo: str, revision: str = "main", *, kind: Repo = "dataset") -> list[HubFile]:
        """All files at a revision, every page of them."""
        commit = self.commit(repo, revision, kind=kind)
        url: str | None = f"{self._client.endpoint}/api/{kind}s/{repo}/tree/{commit}?recursive=true&expand=false"
        files: list[HubFile] = []
        seen: set[str] = set()
        while url:
            if url in seen:
                raise HubError(f"{repo}: the listing's pages go round in a circle; nothing was listed: try again later")
            seen.add(url)
            body, headers = self._client.get(url)
            entries = _json(body, url)
            if not isinstance(entries, list):
                raise HubError(f"{repo}: a page of the listing is no list; is this a hub?")
            files += [_entry(entry, repo) for entry in entries if isinstance(entry, dict) and entry.get("type") == "file"]
            url = self._next_page(url, headers.get("Link", ""))
        return files

    def download(self, repo: str, path: str, revision: str = "main", *, kind: Repo = "dataset") -> Path:
        """The path of the file in the cache, got and checked if it was not there.

        What a killed process has got is gone on with. Size and digest are checked (the sha256 of large files, git's blob id of small
        ones); a file that fails is got once more from the beginning, then HubError names it and both digests.
        """
        commit = self.commit(repo, revision, kind=kind)
        target = self._folder(repo, kind) / commit / _safe(path, repo)
        if target.is_file():
            return target
        if self._offline:
            raise HubError(f"{repo}/{path}: is not in {self.cache}, and offline is set; get it once while online")
        with self._locked(repo, kind, f"{commit}/{path}") as scratch:
            if not target.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                self._fetch(self._address(repo, path, commit, kind), target, scratch, f"{repo}/{path}")
        return target

    def stream_lines(self, repo: str, path: str, revision: str = "main", *, kind: Repo = "dataset") -> Iterator[bytes]:
        """Lines while they arrive, unzipped when the file begins like gzip; from the cache when it is there. Nothing is stored.

        The digest is checked at the end: HubError then says that the lines that were given are not to be trusted.
        """
        commit = self.commit(repo, revision, kind=kind)
        target = self._folder(repo, kind) / commit / _safe(path, repo)
        if target.is_file():
            yield from read_lines(target)
            return
        if self._offline:
            raise HubError(f"{repo}/{path}: is not in {self.cache}, and offline is set; get it once while online")
        yield from split_lines(unzip(self._checked(self._address(repo, path, commit, kind), f"{repo}/{path}"), f"{repo}/{path}"))

    def stream_rows(self, repo: str, path: str, revision: str = "main", *, rows: str = "auto", kind: Repo = "dataset") -> Iterator[Row]:
        """Rows of a JSON Lines file (.gz too) while it arrives, checked as by `read_rows`; `rows` is their kind."""
        lines = self.stream_lines(repo, path, revision, kind=kind)
        return (row for row, _ in check_rows(parse_lines(lines, f"{repo}/{path}"), kind=rows))

    def open(self, repo: str, path: str, revision: str = "main", *, kind: Repo = "dataset") -> "RemoteFile":
        """A binary file object that reads by range: for formats with an index, such as parquet's row groups."""
        if self._offline:
            raise HubError(f"{repo}/{path}: cannot be read by range, offline is set; use download")
        commit = self.commit(repo, revision, kind=kind)
        return RemoteFile(Transfer(self._client, self._address(repo, path, commit, kind), chunk=self._chunk))

    def _folder(self, repo: str, kind: Repo) -> Path:
        if not re.fullmatch(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*", repo, re.ASCII):
            raise HubError(f"{repo!r} names no repository; it is owner/name")
        return self.cache / f"{kind}s" / repo.replace("/", "--")

    def _address(self, repo: str, path: str, commit: str, kind: Repo) -> str:
        prefix = "datasets/" if kind == "dataset" else ""
        return f"{self._client.endpoint}/{prefix}{repo}/resolve/{commit}/{urllib.parse.quote(path)}"

    def _next_page(self, url: str, link: str) -> str | None:
        found = re.search(r'<([^>]*)>\s*;[^,]*\brel="?next"?', link)
        if not found:
            return None
        target = urllib.parse.urljoin(url, found[1])
        if origin(target) != self._client.home:
            raise HubError(f"{url.partition('?')[0]}: its next page is on another host, {origin(target)[1]}; it is not followed")
        return str(target)

    def _checked(self, url: str, name: str) -> Iterator[bytes]:
        transfer, check, done = Transfer(self._client, url, chunk=self._chunk), _Check(), 0
        for part in transfer.chunks():
            check.add(part, transfer.identity)
            done += len(part)
            self._progress(name, done, transfer.identity.size if transfer.identity else None)
            yield part
        if wrong := check.wrong(transfer.identity):
            raise HubError(f"{name}: {wrong}; the lines that were read are not to be trusted: begin again")

    @contextmanager
    def _locked(self, repo: str, kind: Repo, what: str) -> Iterator[Path]:
        """Only one process at a time is in here for `what`; the lock goes with the process. Gives the stem of its scratch files."""
        scratch = self._folder(repo, kind) / "partial" / hashlib.sha256(what.encode()).hexdigest()[:32]
        try:
            scratch.parent.mkdir(parents=True, exist_ok=True)
            scratch.with_suffix(".lock").touch()
        except OSError as error:
            raise HubError(f"{scratch.parent}: cannot be written ({error.strerror}); set ALIGN_CACHE to a directory that can") from None
        with open(scratch.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield scratch

    def _fetch(self, url: str, target: Path, scratch: Path, name: str) -> None:
        partial, notes = scratch.with_suffix(".bin"), scratch.with_suffix(".json")
        wrong: str | None = None
        for _ in range(2):
            try:
                identity = self._append(url, partial, notes, name)
            except Changed as change:
                wrong = str(change)
            else:
                check = _Check()
                with open(partial, "rb") as file:
                    while part := file.read(1 << 20):
                        check.add(part, identity)
                wrong = check.wrong(identity)
                if wrong is None:
                    os.replace(partial, target)
                    notes.unlink(missing_ok=True)
                    return
            partial.unlink(missing_ok=True)
            notes.unlink(missing_ok=True)
        raise HubError(f"{name}: {wrong}; it was got twice from the beginning: the hub's copy is damaged, or is being changed")

    def _append(self, url: str, partial: Path, notes: Path, name: str) -> Identity | None:
        known = _noted(notes, url)
        transfer = Transfer(self._client, url, identity=known, chunk=self._chunk)
        try:
            with open(partial, "ab" if known else "wb") as file:
                done = file.tell()
                for part in transfer.chunks(done):
                    if known is None and transfer.identity is not None:
                        known = transfer.identity
                        write_whole(notes, json.dumps({"url": url, **asdict(known)}).encode())
                    file.write(part)
                    done += len(part)
                    self._progress(name, done, known.size if known else None)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # of the disk: those of the network are Failures
            raise HubError(f"{name}: cannot be stored in {self.cache} ({error.strerror}); free space, or set ALIGN_CACHE") from None
        return transfer.identity


class RemoteFile(io.RawIOBase):
    """Seekable, read-only; each read is one range request. Wrap it in io.BufferedReader for small reads."""

    def __init__(self, transfer: Transfer):
        self._transfer, self._position = transfer, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position}.get(whence)
        self._position = max(0, offset + (self._transfer.size() if base is None else base))
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        stop = min(self._position + len(view), self._transfer.size())
        count = 0
        for part in self._transfer.chunks(self._position, stop) if self._position < stop else ():
            view[count : count + len(part)] = part
            count += len(part)
        self._position += count
        return count


def unzip(parts: Iterable[bytes], name: str) -> Iterator[bytes]:
    """The content of gzip parts, of all its members; parts that do not begin like gzip come through as they are."""
    stream: Any = None
    first = b""
    pending = iter(parts)
    for part in pending:
        first += part
        if len(first) >= 2:
            break
    if first[:2] != b"\x1f\x8b":
        yield first
        yield from pending
        return
    for part in chain([first], pending):
        while part := part if stream else part.lstrip(b"\0"):  # zeros may follow a member
            stream = stream or zlib.decompressobj(wbits=31)
            try:
                yield stream.decompress(part)
            except zlib.error as error:
                raise HubError(f"{name}: the gzip stream is damaged ({error}); the file on the hub is broken") from None
            part = stream.unused_data
            if stream.eof:
                stream = None
    if stream is not None:
        raise HubError(f"{name}: the gzip stream ends in the middle; the file on the hub is broken")


def split_lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Lines that end at b"\\n" alone, whatever the parts' bounds."""
    rest: list[bytes] = []
    held = 0
    for part in parts:
        lines = part.split(b"\n")
        if len(lines) > 1:
            yield b"".join([*rest, lines[0], b"\n"])
            yield from (line + b"\n" for line in lines[1:-1])
            rest, held = [], 0
        rest.append(lines[-1])
        held += len(lines[-1])
        if held > MAX_LINE:
            raise HubError(f"a line of more than {MAX_LINE >> 20} MiB came; is this JSON Lines, one object a line?")
    if last := b"".join(rest):
        yield last


class _Check:
    """The digest that the hub names the content by."""

    def __init__(self) -> None:
        self._hash: Any = None
        self._count = 0

    def add(self, part: bytes, identity: Identity | None) -> None:
        if self._hash is None:
            self._hash = hashlib.sha256()
            if identity and identity.blob and identity.size is not None:
                self._hash = hashlib.sha1(b"blob %d\0" % identity.size, usedforsecurity=False)
        self._hash.update(part)
        self._count += len(part)

    def wrong(self, identity: Identity | None) -> str | None:
        """What is wrong, in words; None when nothing is."""
        if identity is None or (identity.size is not None and self._count != identity.size):
            return f"has {self._count} bytes, the hub says {identity.size if identity else 'nothing'}"
        expected = identity.sha256 or (identity.blob if identity.size is not None else None)
        if self._hash is None or expected is None or self._hash.hexdigest() == expected:
            return None
        return f"has the digest {self._hash.hexdigest()}, the hub says {expected}"


def _noted(notes: Path, url: str) -> Identity | None:
    """What an earlier process was reading into the partial file; None where that is not known, so it begins again."""
    try:
        noted = json.loads(notes.read_bytes())
        return Identity(noted["size"], noted["name"], noted["etag"]) if noted["url"] == url else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _entry(entry: dict[str, Any], repo: str) -> HubFile:
    path, size, lfs = entry.get("path"), entry.get("size"), entry.get("lfs")
    if not isinstance(path, str) or not isinstance(size, int):
        raise HubError(f"{repo}: an entry of the listing has no path or size: {str(entry)[:80]}")
    _safe(path, repo)
    return HubFile(path, size, lfs.get("oid") if isinstance(lfs, dict) else None)


def _safe(path: str, repo: str) -> str:
    """A path that stays inside the repository's folder."""
    if "\\" in path or "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise HubError(f"{repo}: the path {path!r} is not one inside a repository; nothing is written there")
    return path


def _json(body: bytes, url: str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise HubError(f"{url.partition('?')[0]}: the answer is not JSON; is HF_ENDPOINT a hub?") from None
