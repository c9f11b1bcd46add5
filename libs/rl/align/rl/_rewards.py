"""From an answer to a number: the verifier, or a function of the user's."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from align import lean
from align.rl._errors import RewardError
from align.verify import equivalent, grade


class Scored(NamedTuple):
    """A reward, and in a word what it was given for."""

    reward: float
    reason: str


class Reward(Protocol):
    """Judges answers, a batch at a time: `score(rows, completions)` gives a Scored to each, in order."""

    def score(self, rows: Sequence[Mapping[str, Any]], completions: Sequence[str]) -> list[Scored]: ...

    def close(self) -> None: ...


class VerifyReward:
    """1 for a right answer that is marked (\\boxed{…}, ####), else 0, with the verifier's reason (align.verify.grade, mode "marked")."""

    def score(self, rows: Sequence[Mapping[str, Any]], completions: Sequence[str]) -> list[Scored]:
        """Raises RewardError: a row whose gold answer can't be read. It is never a reward; leave such rows out (`readable`)."""
        found, verdicts = [], {}
        for row, completion in zip(rows, completions, strict=True):
            asked = (row["answer"], completion)
            if asked not in verdicts:  # a group often says the same twice
                verdicts[asked] = grade(*asked, mode="marked")
            verdict = verdicts[asked]
            if verdict.correct is None:
                raise RewardError(
                    f"{_place(row)}: the gold answer {row['answer']!r:.60} can't be read ({verdict.reason}); leave the row out"
                )
            found.append(Scored(float(verdict.correct), verdict.reason))
        return found

    def close(self) -> None:
        pass


def readable(row: Mapping[str, Any]) -> bool:
    """Whether the verifier can read the row's gold answer: only then a right answer can be told from a wrong one."""
    return equivalent(row["answer"], row["answer"]).correct is True


class LeanReward:
    """1 for a proof that the Lean kernel accepts, else 0, with the verdict's reason (align.lean).

    A row is one of `align.data.lean_rows`: its answer is the theorem up to ":=", its header comes before it; a completion goes on after
    ":= by", or states the whole theorem again. A crash of the checker, twice in a row, gives 0: nothing was proved.
    """

    def __init__(self, judge: lean.LeanReward) -> None:
        """judge: over a pool, which `close` closes."""
        self._judge = judge

    @classmethod
    def started(cls, workers: int | None = None) -> LeanReward:
        """With a pool of its own over the installed toolchain. Raises ToolchainNotFound, naming the set-up command."""
        return cls(lean.LeanReward(lean.LeanPool(lean.find_toolchain(), workers)))

    def score(self, rows: Sequence[Mapping[str, Any]], completions: Sequence[str]) -> list[Scored]:
        """Raises RewardError: a row's statement is none that Lean reads (bad_statement, bad_header)."""
        pairs = []
        for row, completion in zip(rows, completions, strict=True):
            theorem = f"{row['answer']} := by"
            problem = lean.Problem.of_theorem(f"{theorem} sorry", header=row.get("header", ""))
            whole = problem.name in completion and ":=" in completion
            pairs.append((problem, completion if whole else f"{theorem}\n{completion}"))
        distinct = list(dict.fromkeys(pairs))  # a group often says the same twice, and a check is dear
        verdicts = dict(zip(distinct, self._judge(distinct), strict=True))
        found = []
        for row, pair in zip(rows, pairs, strict=True):
            verdict = verdicts[pair]
            if verdict.reason in ("bad_statement", "bad_header"):
                raise RewardError(f"{_place(row)}: Lean refuses the row ({verdict.reason}: {verdict.detail:.200}); leave it out")
            found.append(Scored(self._judge.score(verdict) or 0.0, verdict.reason))
        return found

    def close(self) -> None:
        """Ends every child."""
        self._judge.pool.close()


class FunctionReward:
    """`reward(prompt, completion, row) -> float`, a function in the user's own file.

    It runs in a process of its own under this interpreter, so the file may import what it likes, and a crash of it is an error here and no
    more. The process is started at the first call and ended by `close`, or by the end of this process.
    """

    def __init__(self, spec: str, *, timeout_s: float = 60.0, locate: Callable[[str], Path] = Path) -> None:
        """spec: "path/file.py:function". timeout_s: for one batch. locate: makes an absolute path of the path.

        Raises:
            RewardError: not of that form, no such file, no such function.
        """
        name, separator, function = spec.rpartition(":")
        if not separator or not name.endswith(".py") or not function.isidentifier():
            raise RewardError(f"reward {spec!r} must be verify, lean, or path/file.py:function")
        self._path, self._function, self._timeout = locate(name), function, timeout_s
        if not self._path.is_file():
            raise RewardError(f"reward {spec!r}: there is no file {self._path}")
        self._process: subprocess.Popen[str] | None = None
        self._ask({"rows": []}, max(timeout_s, 60.0))  # loads the file: what is wrong with it is told before the first rollout

    def score(self, rows: Sequence[Mapping[str, Any]], completions: Sequence[str]) -> list[Scored]:
        """Raises RewardError: the function raised, gave None, NaN or anything that is no number (the row is named), or took too long."""
        batch = [{"row": dict(row), "completion": completion} for row, completion in zip(rows, completions, strict=True)]
        answers = self._ask({"rows": batch}, self._timeout)
        found = []
        for row, completion, answer in zip(rows, completions, answers, strict=True):
            if "error" in answer:
                raise RewardError(f"{self._name} failed on {_place(row)}, completion {completion!r:.80}: {answer['error']}")
            value = answer["reward"]
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise RewardError(f"{self._name} gave {value} on {_place(row)}, completion {completion!r:.80}; it must be a finite number")
            found.append(Scored(float(value), f"{value:g}"))
        return found

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    stream.close()  # type: ignore[union-attr]
            self._process = None

    @property
    def _name(self) -> str:
        return f"{self._path.name}:{self._function}"

    def _ask(self, request: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        if self._process is None:
            words = [sys.executable, "-c", _WORKER, str(self._path), self._function]
            self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request, default=str) + "\n")
            self._process.stdin.flush()
            line = _read_line(self._process, timeout_s)
        except OSError:
            line = ""
        if not line:
            why = f"took more than {timeout_s:g} s" if line is None else f"ended its process (exit code {self._process.wait(10)})"
            self.close()
            raise RewardError(f"{self._name} {why} on a batch of {len(request['rows'])}")
        answer: dict[str, Any] = json.loads(line)
        if "fatal" in answer:
            self.close()
            raise RewardError(f"reward {self._path}:{self._function}: {answer['fatal']}")
        results: list[dict[str, Any]] = answer["results"]
        return results


def _read_line(process: subprocess.Popen[str], timeout_s: float) -> str | None:
    """The next line of the process, "" when it ended, None when the time is over."""
    from threading import Thread

    got: list[str] = []
    assert process.stdout is not None
    reader = Thread(target=lambda stream=process.stdout: got.append(stream.readline()), daemon=True)
    reader.start()
    reader.join(timeout_s)
    return got[0] if got else None


def _place(row: Mapping[str, Any]) -> str:
    return str(getattr(row, "place", None) or f"prompt {row.get('prompt', row.get('messages'))!r:.80}")


# In the other process: what the function prints goes to stderr, so that it can't be taken for an answer.
_WORKER = r"""
import importlib.util, json, os, sys, traceback
out = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)
path, name = sys.argv[1:]
def tell(answer):
    out.write(json.dumps(answer) + "\n")
    out.flush()
def last(error):
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    where = f" (line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
try:
    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location("users_reward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name)
except BaseException as error:
    tell({"fatal": last(error)})
    sys.exit(0)
for line in sys.stdin:
    results = []
    for item in json.loads(line)["rows"]:
        row = item["row"]
        try:
            value = function(row.get("prompt", row.get("messages")), item["completion"], row)
            value = value.item() if hasattr(value, "item") else value
            results.append({"reward": value if isinstance(value, (bool, int, float, type(None))) else repr(value)})
        except Exception as error:
            results.append({"error": last(error)})
    tell({"results": results})
"""


def make_reward(spec: str, *, locate: Callable[[str], Path] = Path) -> Reward:
    """The reward that a configuration names: "verify", "lean", or "path/file.py:function". Raises RewardError for anything else."""
    if spec == "lean":
        return LeanReward.started()
    return VerifyReward() if spec == "verify" else FunctionReward(spec, locate=locate)
