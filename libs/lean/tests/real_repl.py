"""A REPL on the real Lean 4.35 kernel, for tests: `python -I -S real_repl.py libleanshared.so OLEAN_DIR`, framed like
leanprover-community/repl.

The wheel has the kernel and the elaborator but no repl and no .olean files. Here the library is loaded and initialised once; a request
forks, and the fork runs `lean --stdin --json -j1 -s8192` on the text of the environment it builds on and its own. What kills the fork
kills the REPL too, as it would the real one. `--build FILE.lean …` compiles the prelude into OLEAN_DIR instead. A comment `-- fault:
kill`, `hang` or `garbage` in a request breaks the reply."""

import ctypes
import json
import os
import re
import select
import shutil
import signal
import sys
import time

FLAGS = [b"-j1", b"-s8192"]
MOST = 24 << 20  # bytes of a reply that are kept: above the pool's cap


def lean(library: ctypes.CDLL, arguments: list[bytes]) -> int:
    argv = (ctypes.c_char_p * (len(arguments) + 2))(b"lean", *arguments, None)
    return library.lean_main(len(arguments) + 1, argv)


def run(library: ctypes.CDLL, text: str) -> list[dict]:
    """Messages of a whole file, by a fork."""
    source = os.memfd_create("source")
    os.write(source, text.encode())
    os.lseek(source, 0, os.SEEK_SET)
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(source, 0)
        os.dup2(write, 1)
        os._exit(lean(library, [b"--stdin", b"--json", *FLAGS]))
    os.close(write)
    os.close(source)
    output = bytearray()
    while data := os.read(read, 1 << 16):
        output += data
        if len(output) > MOST:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return [{"severity": "info", "data": "x" * MOST, "pos": {"line": 1 << 30, "column": 0}}]
    os.close(read)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    messages = [json.loads(line) for line in output.splitlines()]
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    if code not in (0, 1) or (code == 1 and not any(m["severity"] == "error" for m in messages)):
        os.write(2, f"lean ended with {code} and no error\n".encode())
        os.abort()
    return messages


def answer(message: dict, first_line: int) -> dict:
    severity = {"information": "info"}.get(message["severity"], message["severity"])
    position = {"line": message["pos"]["line"] - first_line + 1, "column": message["pos"]["column"]}
    return {"severity": severity, "pos": position, "endPos": None, "data": message["data"]}


def requests():
    """Yields each JSON object that a blank line ends."""
    buffer = b""
    while data := os.read(0, 1 << 16):
        buffer += data
        while (end := buffer.find(b"\n\n")) >= 0:
            frame, buffer = buffer[:end], buffer[end + 2 :]
            yield json.loads(frame)


def misbehave(word: str) -> bytes:
    """What a comment `-- fault: WORD` in a request asks for, after Lean has answered."""
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "hang":
        time.sleep(3600)
    return os.urandom(64).replace(b"\n", b"") + b"\n\n"


def main() -> None:
    library = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
    os.environ["LEAN_PATH"] = sys.argv[2]
    if "--build" in sys.argv:
        for file in sys.argv[4:]:
            here = os.path.join(sys.argv[2], os.path.basename(file))  # Lean resolves links and wants the file below its root
            shutil.copyfile(file, here)
            target = here.removesuffix(".lean") + ".olean"
            pid = os.fork()
            if not pid:
                os._exit(lean(library, [b"-R", sys.argv[2].encode(), b"-o", target.encode(), here.encode()]))
            if os.waitpid(pid, 0)[1]:
                sys.exit(f"{file} does not compile")
        return
    library.lean_initialize()
    texts: list[str] = []
    for request in requests():
        if request.get("env") is not None and request["env"] >= len(texts):
            reply: dict = {"message": "Unknown environment."}
        else:
            before = "" if request.get("env") is None else texts[request["env"]]
            first_line = before.count("\n") + 1
            texts.append(before + request["cmd"] + "\n")
            found = [answer(m, first_line) for m in run(library, texts[-1]) if m["pos"]["line"] >= first_line]
            reply = {"env": len(texts) - 1} | ({"messages": found} if found else {})
        out = json.dumps(reply, indent=1).encode() + b"\n\n"
        if fault := re.search(r"-- fault: (\w+)", request["cmd"]):
            out = misbehave(fault[1])
        while out:
            select.select([], [1], [])
            out = out[os.write(1, out) :]


if __name__ == "__main__":
    main()
