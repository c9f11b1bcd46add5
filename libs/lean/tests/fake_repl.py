"""A scripted REPL for tests: `python -I -S fake_repl.py`. It knows names, statements and axioms as text, and breaks where a comment tells
it to.

A submission proves its statement when it holds `theorem NAME : STATEMENT := proof`; `uses NAME` needs a name of an environment below. A
comment `-- fake: WORD …` in any request makes it misbehave; the words are the branches of `misbehave`."""

import errno
import json
import os
import re
import signal
import sys
import time

THEOREM = re.compile(r"(?:theorem|lemma) (\S+) : (.*?) := (\w+)", re.DOTALL)
FINAL = re.compile(r"theorem _root_\.(final_\w+) : _root_\.(Target_\w+) := @_root_\.(\S+)")
TARGET = re.compile(r"abbrev (Target_\w+) : Prop := \(\n(.*)\n\)", re.DOTALL)


def elaborate(text: str, before: dict) -> tuple[dict, list[dict], list[dict]]:
    """(environment, messages, sorries) of a request on an environment: name to (statement, axioms)."""
    known, messages, sorries = dict(before), [], []

    def say(severity: str, data: str) -> None:
        messages.append({"severity": severity, "pos": {"line": 1, "column": 0}, "endPos": None, "data": data})

    if found := TARGET.search(text):
        known[found[1]] = (found[2], [])
    axioms = re.findall(r"-- fake: axiom (\S+)", text)
    for used in re.findall(r"uses (\w+)", text):
        if used not in before:
            say("error", f"unknown identifier '{used}'")
    for name, statement, proof in THEOREM.findall(text):
        if proof == "wrong":
            say("error", "type mismatch")
        if proof == "sorry":
            say("warning", "declaration uses 'sorry'")
            sorries.append({"goal": "⊢ False", "pos": {"line": 1, "column": 0}})
        known[name] = (statement, axioms)
    if found := FINAL.search(text):
        final, target, name = found.groups()
        statement, used = known.get(name, ("", []))
        if name not in known:
            say("error", f"unknown constant '{name}'")
        elif statement != known[target][0]:
            say("error", "type mismatch")
        else:
            say("info", f"{final} : {target}")
            rests = f"'{final}' depends on axioms: [{', '.join(used)}]" if used else f"'{final}' does not depend on any axioms"
            say("info", rests)
    if word := re.search(r"-- fake: say (.*)", text):
        say("info", word[1])
    return known, messages, sorries


def write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def misbehave(words: list[str], reply: bytes) -> bytes:
    """Does what the comment says before the reply is written; returns what is to be written in its place."""
    word = words[0]
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif word == "abort":
        os.write(2, b"Stack overflow detected. Aborting.\n")
        os.abort()
    elif word == "exit":
        os._exit(int(words[1]))
    elif word == "threads":
        os.write(2, b"failed to create thread\n")
        os._exit(134)
    elif word == "hang":
        time.sleep(3600)
    elif word == "flood":
        while True:
            write(b"x" * 65536)
    elif word == "big":
        return json.dumps({"env": 0, "messages": [{"severity": "info", "data": "y" * int(words[1])}]}).encode() + b"\n\n"
    elif word == "memory":
        kept = []
        while True:
            kept.append(bytearray(os.urandom(1) * (4 << 20)))
    elif word == "slowly":
        for at in range(len(reply)):
            write(reply[at : at + 1])
        return b""
    elif word == "half":
        write(reply[: len(reply) // 2])
        os._exit(0)
    elif word == "cut":
        write(reply[: int(words[1])])
        os._exit(0)
    elif word == "behind":
        return reply + b'{"env": 1}\n\n'
    elif word == "later":
        write(reply)
        time.sleep(0.05)
        return b'{"env": 1}\n\n'
    elif word == "garbage":
        return b"\x00\xff{]" + os.urandom(int(words[1])).replace(b"\n", b"") + b"\n\n"
    elif word == "raw":
        return json.loads(" ".join(words[1:])).encode() + b"\n\n"
    elif word == "stderr":
        for _ in range(int(words[1])):
            os.write(2, b"e" * 65536)
    elif word == "children":
        for _ in range(int(words[1])):
            if not os.fork():
                os.setsid()
                if not os.fork():
                    time.sleep(3600)
                os._exit(0)
    elif word == "file":
        with open(words[1], "wb") as file:
            file.write(b"z" * int(words[2]))
    elif word == "escape":  # what a confined process may not do, each with what came of it
        import socket

        for attempt in (
            lambda: os.open(words[1], os.O_WRONLY | os.O_CREAT),
            lambda: os.unlink(__file__),
            lambda: os.mkdir(words[1] + ".d"),
            lambda: os.truncate(words[2], 0),
            lambda: os.kill(int(words[3]), 0),
            lambda: os.open(f"/proc/{words[3]}/mem", os.O_RDONLY),
            lambda: socket.create_connection(("127.0.0.1", int(words[4])), 1),
        ):
            try:
                attempt()
                os.write(2, b"done ")
            except OSError as error:
                os.write(2, f"{errno.errorcode[error.errno or 0]} ".encode())
        os._exit(3)
    elif word == "sleep":
        time.sleep(float(words[1]))
    elif word == "error":
        return b'{"message": "Unknown environment."}\n\n'
    return reply


def main() -> None:
    environments: list[dict] = []
    buffer = b""
    while data := os.read(0, 1 << 16):
        buffer += data
        while (end := buffer.find(b"\n\n")) >= 0:
            request, buffer = json.loads(buffer[:end]), buffer[end + 2 :]
            before = {} if request.get("env") is None else environments[request["env"]]
            known, messages, sorries = elaborate(request["cmd"], before)
            environments.append(known)
            reply: dict = {"env": len(environments) - 1}
            reply |= {"messages": messages} if messages else {}
            reply |= {"sorries": sorries} if sorries else {}
            out = json.dumps(reply, indent=1, ensure_ascii=False).encode() + b"\n\n"
            for line in re.findall(r"-- fake: (.*)", request["cmd"]):
                out = misbehave(line.split(), out)
            write(out)


if __name__ == "__main__":
    main()
    sys.exit(0)
