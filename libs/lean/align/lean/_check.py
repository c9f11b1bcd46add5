"""The verdict: a trusted statement, elaborated before user code; the submission; a fresh theorem of exactly that statement, closed by the
submitted name, whose axioms are asked for. Three requests on the header's environment, under names that user code cannot know."""

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from align.lean._child import Child, Fault
from align.lean._errors import StatementError
from align.lean._policy import Policy, check_name, check_statement, inspect
from align.lean._pool import End, LeanPool

Status = Literal["accept", "reject", "timeout", "resource", "crash"]
_SORRY = re.compile(r"declaration uses ['`‘]sorry['`’]")  # v4.9 quotes, later versions use backticks
_UNIVERSE = re.compile(r"unknown universe level ['`‘]([^'`’\s]+)['`’]")
_MOST_UNIVERSES = 8
_SHAPE = re.compile(r"(\w+)(?:\.\{[^{}]*\})?\s+:\s+(\w+)(?:\.\{[^{}]*\})?")  # what #check says of a theorem without binders
_AXIOMS = re.compile(r"'(\w+)' depends on axioms:\s*\[(.*)\]", re.DOTALL)
_OUT_OF_MEMORY = ("failed to create thread", "out of memory", "bad_alloc", "Cannot allocate memory", "mmap")


@dataclass(frozen=True)
class Verdict:
    """What the toolchain says of one submission, relative to its pins.

    `status`: accept (the statement holds, under pin, by the axioms listed), reject (`reason` says why), timeout, resource, crash. The
    last three say nothing about the proof; crash includes every fault of the infrastructure. `reason` is a code of docs/LEAN_VERIFIER.md,
    `detail` a sentence for a human. `seconds` is wall time over all attempts, `rss_bytes` the child's resident memory (its peak where it
    was killed), `attempts` how often Lean was asked (0: refused before)."""

    status: Status
    reason: str
    detail: str = ""
    axioms: tuple[str, ...] = ()
    seconds: float = 0.0
    rss_bytes: int = 0
    attempts: int = 0
    pins: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def accepted(self) -> bool:
        """True for accept alone."""
        return self.status == "accept"


class _Rejected(Exception):
    def __init__(self, reason: str, detail: str):
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def check_in(pool: LeanPool, statement: str, submission: str, *, name: str, header: str = "", policy: Policy | None = None) -> Verdict:
    """As `align.lean.check`, on a given pool."""
    policy = policy or Policy()
    begin = time.monotonic()
    check_name(name)
    check_statement(statement)
    refusal = inspect(submission, name=name, policy=policy)
    if refusal:
        return Verdict("reject", refusal.reason, refusal.detail, seconds=time.monotonic() - begin, pins=pool.toolchain.pins)
    attempts = 0
    while True:
        attempts += 1
        verdict, worn = _attempt(pool, statement, submission, name, header, policy, fresh=attempts > 1)
        # A fault may be the child's age or a neighbour's doing. Once more, on a child that has seen nothing else.
        if attempts == 1 and (verdict.status == "crash" or (verdict.status == "resource" and worn)):
            pool.counts["retries"] += 1
            continue
        return replace(verdict, seconds=time.monotonic() - begin, attempts=attempts, pins=pool.toolchain.pins)


def _attempt(
    pool: LeanPool, statement: str, submission: str, name: str, header: str, policy: Policy, *, fresh: bool
) -> tuple[Verdict, bool]:
    """One try on one child, and whether the child had been used before."""
    worn, mistake = False, None
    try:
        with pool.borrow(header, fresh) as child:
            worn = child.uses > 0
            deadline = time.monotonic() + pool.limits.seconds
            try:
                axioms = _Proof(child, deadline, pool.limits.reply_bytes, policy).run(statement, submission, name)
                return Verdict("accept", "accepted", f"accepted under {pool.toolchain.label}", axioms, rss_bytes=child.memory()[0]), worn
            except _Rejected as rejected:
                return Verdict("reject", rejected.reason, rejected.detail, rss_bytes=child.memory()[0]), worn
            except StatementError as error:  # the caller's, not the child's: it stays
                mistake = error
            except Fault as fault:
                return _of_fault(fault, pool.end(child), pool), worn
    except Fault as fault:
        return Verdict("crash", "unavailable", fault.detail), worn
    raise mistake or AssertionError("unreachable")


def _of_fault(fault: Fault, end: End, pool: LeanPool) -> Verdict:
    """What a fault means. Nothing here is ever a rejected proof."""
    limits, said = pool.limits, end.stderr[-300:].strip()
    if end.why == "memory":
        return Verdict("resource", "memory", f"over {limits.memory_bytes} bytes of memory", rss_bytes=end.peak)
    if fault.kind == "timeout":
        return Verdict("timeout", "wall_clock", f"no answer within {limits.seconds} s", rss_bytes=end.peak)
    if fault.kind == "output":
        return Verdict("resource", "output", fault.detail, rss_bytes=end.peak)
    if fault.kind == "garbage":
        return Verdict("crash", "bad_reply", fault.detail, rss_bytes=end.peak)
    if end.code == -25 or "File too large" in said:  # SIGXFSZ
        return Verdict("resource", "file_size", f"wrote a file over {limits.file_bytes} bytes", rss_bytes=end.peak)
    if end.code == -8:  # SIGFPE is how GMP refuses a number beyond its own bounds
        return Verdict("resource", "number_size", "a number too large for the arithmetic library", rss_bytes=end.peak)
    if any(words in said for words in _OUT_OF_MEMORY):
        return Verdict("resource", "address_space", f"over {limits.address_space_bytes} bytes of address space: {said}", rss_bytes=end.peak)
    reason = "stack_overflow" if "tack overflow" in said else "process_died"
    return Verdict("crash", reason, f"the child ended with {end.code} {end.why} ({fault.detail}) {said}".strip(), rss_bytes=end.peak)


@dataclass
class _Proof:
    """The three requests of one proof on one child."""

    child: Child
    deadline: float
    cap: int
    policy: Policy

    def run(self, statement: str, submission: str, name: str) -> tuple[str, ...]:
        """The axioms of the accepted proof. Raises _Rejected, Fault, StatementError."""
        nonce = secrets.token_hex(16)
        target = f"Target_{nonce}"
        environment, universes = self._state(target, statement)
        environment = self._submit(environment, submission)
        # Drawn now, so that it was not in the process while user code ran.
        final = f"final_{secrets.token_hex(16)}"
        levels = "".join([".{", ", ".join(f"u_{final[6:14]}_{k}" for k in range(universes)), "}"]) if universes else ""
        text = (
            "set_option pp.fullNames true\nset_option pp.privateNames true\nset_option autoImplicit false\n"
            f"theorem _root_.{final}{levels} : _root_.{target}{levels} := @_root_.{name}\n"
            f"#check _root_.{final}\n#print axioms _root_.{final}\n"
        )
        return self._judge(self._ask({"cmd": text, "env": environment}), target, final, name)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        reply = self.child.request(message, deadline=self.deadline, cap=self.cap)
        if "message" in reply and "env" not in reply:
            raise Fault("garbage", f"the REPL refused the request: {str(reply['message'])[:200]}")
        if type(reply.get("env")) is not int:
            raise Fault("garbage", f"a reply without an environment: {str(reply)[:200]}")
        messages = reply.setdefault("messages", [])
        whole = isinstance(messages, list) and all(
            isinstance(m, dict)
            and isinstance(m.get("data"), str)
            and m.get("severity") in ("error", "warning", "info", "information", "trace")
            for m in messages
        )
        if not whole:
            raise Fault("garbage", f"messages that are none: {str(messages)[:200]}")
        return reply

    def _state(self, target: str, statement: str) -> tuple[int, int]:
        """Declares the trusted statement. Returns its environment and how many universe parameters it has."""
        universes: list[str] = []
        while True:
            levels = "".join([".{", ", ".join(universes), "}"]) if universes else ""
            reply = self._ask({"cmd": f"abbrev {target}{levels} : Prop := (\n{statement}\n)", "env": self.child.root})
            errors = _errors(reply)
            unknown = [found[1] for text in errors if (found := _UNIVERSE.search(text)) and found[1] not in universes]
            if unknown and len(universes) < _MOST_UNIVERSES:
                universes.append(unknown[0])
                continue
            if errors or _sorries(reply):
                raise StatementError(f"the statement does not elaborate: {(errors or ['it contains sorry'])[0][:500]}")
            return reply["env"], len(universes)

    def _submit(self, environment: int, submission: str) -> int:
        reply = self._ask({"cmd": submission, "env": environment})
        errors = _errors(reply)
        if errors:
            raise _Rejected("elaboration", errors[0][:2000])
        if _sorries(reply):
            raise _Rejected("sorry", "a declaration uses sorry")
        return int(reply["env"])

    def _judge(self, reply: dict[str, Any], target: str, final: str, name: str) -> tuple[str, ...]:
        errors = _errors(reply)
        if errors:
            missing = any("nknown" in text and name.rpartition(".")[2] in text for text in errors)
            raise _Rejected("name_missing" if missing else "statement_mismatch", errors[0][:2000])
        if _sorries(reply):
            raise _Rejected("sorry", "the proof rests on sorry")
        said = [m["data"].strip() for m in reply["messages"] if m["severity"] in ("info", "information")]
        checks = [text for text in said if text.startswith(final)]
        axioms = [found for text in said if (found := _axioms(text, final)) is not None]
        if len(checks) != 1 or len(axioms) != 1:  # no error and no answer: this is not the reply to the question
            raise Fault("garbage", f"a reply without the answers asked for: {said[:2]!r}"[:500])
        shape = _SHAPE.fullmatch(checks[0])
        if not shape or shape.groups() != (final, target):
            raise _Rejected("statement_mismatch", f"the closing theorem is not the statement itself: {checks[0]}"[:500])
        beyond = [axiom for axiom in axioms[0] if axiom not in self.policy.axioms]
        if beyond:
            raise _Rejected("sorry" if "sorryAx" in beyond else "axioms", f"rests on {', '.join(beyond)[:500]}")
        return axioms[0]


def _errors(reply: dict[str, Any]) -> list[str]:
    return [m["data"] for m in reply["messages"] if m["severity"] == "error"]


def _sorries(reply: dict[str, Any]) -> bool:
    return bool(reply.get("sorries")) or any(_SORRY.search(m["data"]) or m.get("kind") == "hasSorry" for m in reply["messages"])


def _axioms(answer: str, name: str) -> tuple[str, ...] | None:
    """The names in an answer of #print axioms; None for any other text. A name with «…» comes out in pieces, none of which is an allowed
    one."""
    if answer == f"'{name}' does not depend on any axioms":
        return ()
    found = _AXIOMS.fullmatch(answer)
    return tuple(part for part in re.split(r"[,\s]+", found[2]) if part) if found and found[1] == name else None
