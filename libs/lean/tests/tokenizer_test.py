"""The lexer against Lean's own tokenizer: texts of quotes, comments and symbols around a command. Where Lean declares the constant,
whatever errors it reports besides, the first layer must have refused the text."""

import ctypes
import os
import random
import subprocess
import tempfile

import pytest
import real_repl
import requires
from lean_harness import ENVIRONMENT, HERE

from align.lean import Policy, inspect

pytestmark = pytest.mark.slow

_QUOTES = '/- -/ -- /-- /-! " " \\" \\\\ \\ \' \'"\' \'a\' \'\' « » r" r#" "# s!" { }'
_OTHERS = "x 1 0x 1. . <- < - / // | # ! → t trivial ( ) rfl := a é ⁻¹ ` /-/ -/- r e 1e5 _ ? ∀ @ $ <;> |- -> x' 'x ⟫_ℝ →r"
PIECES = [*_QUOTES.split(), *_OTHERS.split(), "\n", "\n", "\r\n", " ", " ", "; "]
HEADS = [
    "theorem t : True := trivial ",
    "theorem t : True := True.intro\n",
    "def s := ",
    "theorem t (h : 1 = 1 ∧ True) : True := h.",
    "example : True := trivial ",
    "theorem t : True := by exact ",
    "theorem t (a b : Nat) (h : a<",
]
ENDS = [" -/", '"', "'", "»", '"#', "--", " axiom cheat : True"]
COMMAND = "axiom cheat : False"


def text(random_: random.Random) -> str:
    soup = ["".join(random_.choice(PIECES) for _ in range(random_.randrange(5))) for _ in range(2)]
    gaps = [random_.choice(["", " ", "\n"]) for _ in range(2)]
    end = random_.choice(ENDS) if random_.random() < 0.3 else ""
    return random_.choice(HEADS) + soup[0] + gaps[0] + COMMAND + gaps[1] + soup[1] + end


def test_whatever_lean_declares_the_lexer_has_seen(tmp_path):
    library = requires.lean_library()
    scratch = tempfile.mkdtemp(dir=tmp_path)
    build = ["python3", "-I", "-S", str(HERE / "real_repl.py"), str(library), scratch, "--build"]
    subprocess.run(
        [*build, *(str(HERE / "prelude" / f"{name}.lean") for name in ("AlignInit", "AlignSyntax"))], check=True, env=ENVIRONMENT
    )
    lean = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    os.environ["LEAN_PATH"] = scratch
    lean.lean_initialize()
    random_ = random.Random(int(os.environ.get("ALIGN_SEED", "0")))
    declared = 0
    for _ in range(3000):
        code = text(random_)
        messages = real_repl.run(lean, f"prelude\nimport AlignSyntax\n{code}\n/- -/ #check @cheat\n")
        if any(m["severity"] == "information" and m["data"].startswith("cheat :") for m in messages):
            declared += 1
            assert inspect(code, name="t", policy=Policy()) is not None, repr(code)
    assert declared > 1000
