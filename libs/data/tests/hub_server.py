"""A hub with a storage and faults, on loopback: for the tests of everything that reads from one.

`python3 hub_server.py` serves it for another client.
"""

import contextlib
import hashlib
import http.server
import json
import socket
import sys
import threading
import zlib

REPO, COMMIT, TOKEN = "org/name", "c0ffee" + "0" * 34, "hf_secret"
LINES = [json.dumps({"prompt": f"{i}+{i}", "answer": str(2 * i)}).encode() + b"\n" for i in range(3000)]
LARGE = b"".join(LINES)
FILES = {"train.jsonl": LARGE, "data/train.jsonl.gz": b"", "README.md": b"# A set\n", "empty.txt": b""}
_packer = zlib.compressobj(wbits=31)
FILES["data/train.jsonl.gz"] = _packer.compress(LARGE[:70_000]) + _packer.flush()
_packer = zlib.compressobj(wbits=31)
FILES["data/train.jsonl.gz"] += _packer.compress(LARGE[70_000:]) + _packer.flush()  # a second member
CHUNK = 4096


class Server:
    """A hub on one port and its storage on another: listing in pages of two, large files by redirect, single ranges, If-Range, faults.

    `faults` are taken one a request, by what the request is for: "api", "hub" or "storage"; see `Handler.misbehave`.
    """

    def __init__(self):
        self.files, self.faults, self.log, self.ranges = dict(FILES), {"api": [], "hub": [], "storage": []}, [], True
        self.version, self.stall, self.stop = "v1", 0.6, threading.Event()
        self.ports = {}
        self.servers = []
        for role in ("hub", "storage", "other"):
            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("H", (Handler,), {"hub": self, "role": role}))
            server.daemon_threads = True
            self.ports[role] = server.server_address[1]
            self.servers.append(server)
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.ports['hub']}"

    def close(self):
        self.stop.set()
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def leaks(self):
        return [entry for entry in self.log if entry["role"] != "hub" and entry["token"]]

    def sent(self, role="storage"):
        return sum(entry["sent"] for entry in self.log if entry["role"] == role)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.entry = {"role": self.role, "path": self.path, "token": "Authorization" in self.headers, "sent": 0}
        self.entry |= {"range": self.headers.get("Range"), "if_range": self.headers.get("If-Range")}
        self.hub.log.append(self.entry)
        # A model repository has other addresses, and the same files here.
        path = self.path.partition("?")[0].replace("/api/models/", "/api/datasets/")
        path = f"/datasets{path}" if path.startswith(f"/{REPO}/resolve/") else path
        what = "api" if path.startswith("/api/") else self.role
        fault = self.hub.faults[what].pop(0) if self.hub.faults.get(what) else None
        with contextlib.suppress(OSError):
            if isinstance(fault, (int, dict)):
                self.status(fault)
            elif what == "api":
                self.api(path, fault)
            else:
                self.content(path, fault)

    def status(self, fault):
        fault = fault if isinstance(fault, dict) else {"status": fault}
        self.reply(fault.pop("status"), b"busy", **fault)

    def reply(self, status, body, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.write(body)

    def write(self, body):
        self.entry["sent"] += len(body)  # before: the client may look as soon as it has the bytes
        try:
            self.wfile.write(body)
            self.wfile.flush()
        except OSError:
            self.entry["sent"] -= len(body)
            raise

    def api(self, path, fault):
        if path == f"/api/datasets/{REPO}/revision/main":
            return self.reply(200, json.dumps({"sha": COMMIT}).encode())
        if path in [f"/api/datasets/{REPO}/tree/{revision}" for revision in ("main", COMMIT)]:
            page = int(dict(p.split("=") for p in self.path.partition("?")[2].split("&")).get("cursor", 0))
            names = sorted(self.hub.files)
            entries = [{"type": "directory", "path": "data", "size": 0, "oid": "d"}] if page == 0 else []
            for name in names[2 * page : 2 * page + 2]:
                body = self.hub.files[name]
                entries.append({"type": "file", "path": name, "size": len(body), "oid": git_blob(body)})
                if len(body) > 1000:
                    entries[-1]["lfs"] = {"oid": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 131}
            host = f"http://127.0.0.1:{self.hub.ports['other' if fault == 'page elsewhere' else 'hub']}"
            following = page if fault == "page again" else page + 1
            more = {"Link": f'<{host}{path}?recursive=true&cursor={following}>; rel="next"'} if 2 * page + 2 < len(names) else {}
            return self.reply(200, json.dumps(entries).encode(), **more)
        return self.reply(404, b"{}", X_Error_Code="RepoNotFound")

    def content(self, path, fault):
        prefix = f"/datasets/{REPO}/resolve/"
        if self.role == "hub" and path.startswith("/datasets/old/name/"):
            return self.reply(307, b"", Location=path.replace("/old/name/", f"/{REPO}/"))
        name = path.removeprefix(prefix).partition("/")[2] if self.role == "hub" else path.removeprefix("/")
        body = self.hub.files.get(name)
        if body is None:
            return self.reply(404, b"", X_Error_Code="EntryNotFound")
        if fault == "change":
            body = self.hub.files[name] = body[::-1]
            self.hub.version += "+"
        if self.role == "hub" and len(body) > 1000:
            port = self.hub.ports["other" if fault == "redirect elsewhere" else "storage"]
            headers = {"Location": f"http://127.0.0.1:{port}/{name}?signature=secret", "X-Linked-Size": str(len(body))}
            return self.reply(302, b"", X_Repo_Commit=COMMIT, X_Linked_Etag=f'"{hashlib.sha256(body).hexdigest()}"', **headers)
        etag = f'"{git_blob(body)}"' if self.role == "hub" else f'"{self.hub.version}-{len(body)}"'
        headers = {"ETag": etag} | ({"X-Repo-Commit": COMMIT} if self.role == "hub" else {})
        start, stop, status = 0, len(body), 200
        wanted = self.headers.get("Range")
        if wanted and self.hub.ranges and fault != "no range" and self.headers.get("If-Range", etag) == etag:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop, status = int(first), min(int(last) + 1, len(body)) if last else len(body), 206
            if start >= len(body):
                return self.reply(416, b"", Content_Range=f"bytes */{len(body)}")
            if fault == "wrong range":
                start -= 1 if start else -1
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(body)}"
        self.misbehave(fault, status, body[start:stop], headers)
        return None

    def misbehave(self, fault, status, part, headers):
        kind, at = fault if isinstance(fault, tuple) else (fault, None)
        if kind == "gzip":
            headers = headers | {"Content-Encoding": "gzip", "ETag": "W/" + headers["ETag"]}
            part = zlib.compress(part, wbits=31)
        if kind == "flip" and part:
            part = bytes([part[0] ^ 1]) + part[1:]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if kind in ("drop", "reset", "stall"):
            self.write(part[:at])
            if kind == "stall":
                self.hub.stop.wait(self.hub.stall)
            if kind == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_WR) if kind == "drop" else self.connection.close()
        else:
            self.write(part)


def git_blob(body):
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


if __name__ == "__main__":
    print(Server().url, flush=True)
    sys.stdin.read()
