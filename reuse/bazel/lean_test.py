"""A proof is checked, by a REPL that knows one theorem; the caller's own program stands in for Lean."""

import os
import sys
import tempfile
from pathlib import Path

from align.lean import LeanPool, Toolchain, check

# Reads requests ended by a blank line, as Lean's repl does: a target, a submission, a closing theorem whose axioms are asked for.
REPL = r"""
import json, os, re
known, environments, buffer = {}, 0, b""
while data := os.read(0, 65536):
    buffer += data
    while b"\n\n" in buffer:
        request, _, buffer = buffer.partition(b"\n\n")
        text, messages = json.loads(request)["cmd"], []
        say = lambda severity, data: messages.append({"severity": severity, "data": data})
        if found := re.search(r"abbrev (Target_\w+) : Prop := \(\n(.*)\n\)", text, re.DOTALL):
            known[found[1]] = found[2]
        for name, statement in re.findall(r"^theorem (\w+) : (.*?) := rfl", text, re.MULTILINE):
            known[name] = statement
            left, _, right = statement.partition(" = ")
            if sum(map(int, left.split(" + "))) != int(right):
                say("error", "type mismatch")
        if found := re.search(r"theorem _root_\.(final_\w+) : _root_\.(Target_\w+) := @_root_\.(\w+)", text):
            final, target, name = found.groups()
            if known.get(name) != known[target]:
                say("error", "type mismatch")
            else:
                say("info", f"{final} : {target}")
                say("info", f"'{final}' does not depend on any axioms")
        reply = json.dumps({"env": environments, "messages": messages})
        environments += 1
        os.write(1, reply.encode() + b"\n\n")
"""

program = Path(tempfile.mkdtemp(), "repl.py")
program.write_text(REPL)
toolchain = Toolchain((sys.executable, "-I", "-S", str(program)), {"PATH": os.defpath}, {"lean": {"version": "a stranger's"}})
with LeanPool(toolchain, workers=1) as pool:
    proved = check("2 + 2 = 4", "theorem sum : 2 + 2 = 4 := rfl", name="sum", pool=pool)
    assert proved.accepted and proved.axioms == (), proved
    wrong = check("2 + 2 = 5", "theorem sum : 2 + 2 = 5 := rfl", name="sum", pool=pool)
    assert (wrong.status, wrong.reason) == ("reject", "elaboration"), wrong
    other = check("2 + 2 = 4", "theorem sum : 1 + 1 = 2 := rfl", name="sum", pool=pool)
    assert (other.status, other.reason) == ("reject", "statement_mismatch"), other
