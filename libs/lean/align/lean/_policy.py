"""The first layer: what a submission may not say, decided without Lean. It keeps user code from adding syntax, attributes, axioms or
elaborators, on which the other layers rest (docs/LEAN_VERIFIER.md)."""

import re
from dataclasses import dataclass, field

from align.lean._errors import LeanError, StatementError
from align.lean._lexer import Ambiguous, Token, Unreadable, line_of, tokens
from align.lean._words import AESOP_RULES, DECLARATIONS, HASH_ALLOWED, HASH_REFUSED, OPTIONS, REFUSED, SORRY

_NAME = re.compile(r"[^\W\d][\w'!?₀-₉]*(\.[^\W\d][\w'!?₀-₉]*)*")
_NO_THEOREM = frozenset({"def", "abbrev"})


@dataclass(frozen=True)
class Policy:
    """What submissions may say.

    `allow` lifts the refusal of single words ("instance", "#eval", "@[simp]" as "@["); `options` are the names set_option may set
    ("linter" stands for all linter.* options); `axioms` is the whole set that an accepted proof may rest on; `max_characters` bounds a
    submission."""

    allow: frozenset[str] = frozenset()
    options: frozenset[str] = OPTIONS
    axioms: frozenset[str] = frozenset({"propext", "Classical.choice", "Quot.sound"})
    max_characters: int = 500_000


@dataclass(frozen=True)
class Refusal:
    """Why a text was refused before Lean saw it: a reason code, and a sentence with the line."""

    reason: str
    detail: str


@dataclass
class _Reader:
    text: str
    name: str
    policy: Policy
    found: list[Token] = field(default_factory=list)

    def refuse(self, reason: str, token: Token, what: str) -> Refusal | None:
        return Refusal(reason, f"line {line_of(self.text, token.start)}: {what}")

    def read(self) -> Refusal | None:
        try:
            self.found = tokens(self.text)
        except Ambiguous as doubt:
            return Refusal("ambiguous", str(doubt))
        except Unreadable as trouble:
            return Refusal("unreadable", str(trouble))
        for k, token in enumerate(self.found):
            refusal = self._token(k, token)
            if refusal:
                return refusal
        return None

    def _token(self, k: int, token: Token) -> Refusal | None:
        if token.kind == "word":
            return self._word(k, token) or next((r for w in token.hidden if (r := self._keyword(w, token))), None)
        if token.kind == "symbol":
            return self._symbol(k, token) or next((r for w in token.hidden if (r := self._keyword(w, token))), None)
        return None

    def _next(self, k: int, touching: bool = False) -> Token | None:
        following = self.found[k + 1] if k + 1 < len(self.found) else None
        if following and touching and following.start != self.found[k].start + len(self.found[k].text):
            return None
        return following

    def _keyword(self, word: str, token: Token) -> Refusal | None:
        if word in self.policy.allow:
            return None
        if word in SORRY or word.endswith(".sorryAx"):
            return self.refuse("sorry", token, f"{word} leaves the proof open")
        if word in REFUSED:
            return self.refuse("forbidden", token, f"{word} {REFUSED[word]}")
        return None

    def _word(self, k: int, token: Token) -> Refusal | None:
        following = self._next(k)
        percent = self._next(k, touching=True)
        if percent and percent.text == "%" and (refusal := self._keyword(token.text + "%", token)):
            return refusal
        if token.text == "set_option":
            return self._option(token, following)
        if token.text == "open" and following and following.text == "private" and "open private" not in self.policy.allow:
            return self.refuse("forbidden", token, "open private reaches into the library")
        if token.text in _NO_THEOREM and following and self._is_target(following.text):
            return self.refuse("not_a_theorem", token, f"{self.name} is declared by {token.text}, not as a theorem")
        if token.text == "unsafe" and following and (following.kind == "number" or following.text in AESOP_RULES):
            return None
        return self._keyword(token.text, token)

    def _is_target(self, declared: str) -> bool:
        declared = declared.replace("«", "").replace("»", "").removeprefix("_root_.")
        return self.name == declared or self.name.endswith("." + declared)

    def _option(self, token: Token, following: Token | None) -> Refusal | None:
        option = following.text if following else ""
        allowed = self.policy.options
        if option in allowed or (option.startswith("linter.") and "linter" in allowed):
            return None
        return self.refuse("forbidden_option", token, f"set_option {option or '?'} is not on the list of options")

    def _symbol(self, k: int, token: Token) -> Refusal | None:
        following = self._next(k, touching=True)
        if token.text == "@" and following and following.text == "[" and "@[" not in self.policy.allow:
            return self.refuse("forbidden", token, "@[…] sets attributes")
        if token.text == "#" and following and following.kind in ("word", "quoted"):
            word = following.text.rstrip("!?")
            before = self.found[k - 1]
            alone = k == 0 or "\n" in self.text[before.start + len(before.text) : token.start]
            refused = word in HASH_REFUSED or (alone and word not in HASH_ALLOWED)
            if refused and f"#{word}" not in self.policy.allow:
                return self.refuse("forbidden", token, f"#{following.text} is a command that is not part of a proof")
        return None


def check_name(name: str) -> None:
    """Raises LeanError unless the name is a plain dotted identifier."""
    if not _NAME.fullmatch(name) or any(part in REFUSED or part in DECLARATIONS or part == "_root_" for part in name.split(".")):
        raise LeanError(f"name {name[:80]!r} is no plain Lean identifier; give the declared name, such as my_theorem or Foo.bar")


def inspect(submission: str, *, name: str, policy: Policy) -> Refusal | None:
    """The first layer's answer: None lets the submission through to Lean."""
    try:
        submission.encode("utf-8")
    except UnicodeEncodeError as trouble:
        return Refusal("encoding", f"character {trouble.start} is half of a surrogate pair and cannot be sent")
    if len(submission) > policy.max_characters:
        return Refusal("too_long", f"{len(submission)} characters, at most {policy.max_characters}")
    control = re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufeff]", submission)
    if control:
        return Refusal("encoding", f"line {line_of(submission, control.start())}: control character U+{ord(control[0]):04X}")
    return _Reader(submission, name, policy).read()


def check_statement(statement: str) -> None:
    """Raises StatementError unless the text can be one term: readable, balanced, no command in it."""
    refusal = inspect(statement, name="", policy=Policy())
    if refusal:
        raise StatementError(f"the statement cannot be used: {refusal.detail}")
    depth: list[str] = []
    closing = {")": "(", "]": "[", "}": "{", "⟩": "⟨"}
    found = tokens(statement)
    if not found:
        raise StatementError("the statement is empty; give a proposition such as ∀ n : Nat, n + 0 = n")
    for token in found:
        if token.kind == "word" and token.text in DECLARATIONS:
            raise StatementError(
                f"the statement holds the command word {token.text}; give the proposition alone (statement_of cuts a theorem)"
            )
        if token.text in closing.values():
            depth.append(token.text)
        elif token.text in closing and (not depth or depth.pop() != closing[token.text]):
            raise StatementError(f"line {line_of(statement, token.start)}: the statement closes a bracket that it did not open")
    if depth:
        raise StatementError(f"the statement leaves {depth[-1]} open")
