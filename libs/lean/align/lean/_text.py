"""From a model's text to a submission, and from a data set's theorem to a statement."""

import re

from align.lean._errors import StatementError
from align.lean._lexer import Ambiguous, Token, Unreadable, tokens

_FENCE = re.compile(r"^[ \t]*```[ \t]*(?:lean4?|Lean4?)?[ \t]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_IMPORT = re.compile(r"\s*import[ \t]+(\S+)[ \t]*(?:\n|\Z)")
_OPEN, _CLOSE = "([{⟨⦃", ")]}⟩⦄"


def extract_code(completion: str) -> str:
    """The last fenced block of a completion; the whole text where there is none."""
    blocks = _FENCE.findall(completion)
    return blocks[-1] if blocks else completion


def split_imports(text: str) -> tuple[str, str]:
    """(the import lines a file begins with, the rest). Comments before the first import stay in front of the rest."""
    at, lines = 0, []
    while found := _IMPORT.match(text, at):
        lines.append(f"import {found[1]}\n")
        at = found.end()
    return "".join(lines), text[at:]


def without_header(submission: str, header: str) -> str:
    """A submission that repeats the header loses it: the whole of it, or leading imports of modules that it imports and then the rest of
    it."""
    imports, declarations = split_imports(header)
    own, rest = split_imports(submission)
    if own and not set(own.splitlines()) <= set(imports.splitlines()):
        return submission
    declarations = declarations.strip()
    return rest.lstrip()[len(declarations) :] if declarations and rest.lstrip().startswith(declarations) else rest


def statement_of(theorem: str) -> tuple[str, str]:
    """(name, proposition) of a theorem's text up to its `:=`, as data sets store it: binders become ∀. Of several the last. Raises
    StatementError."""
    return _cut(theorem)[1:]


def preamble_of(theorem: str) -> str:
    """What a data set's text declares before its (last) theorem: definitions that belong to the header. Raises StatementError."""
    return _cut(theorem)[0]


def _cut(theorem: str) -> tuple[str, str, str]:
    try:
        found = tokens(theorem)
    except (Ambiguous, Unreadable) as trouble:
        raise StatementError(f"the theorem cannot be read: {trouble}") from None
    begin = max((k for k, t in enumerate(found) if t.kind == "word" and t.text in ("theorem", "lemma")), default=None)
    if begin is None or begin + 1 >= len(found) or found[begin + 1].kind not in ("word", "quoted"):
        raise StatementError("no `theorem NAME` in the text; give a theorem, or a bare proposition and its name")
    name, k = found[begin + 1].text, begin + 2
    if k + 1 < len(found) and found[k].text == "." and found[k + 1].text == "{":
        while k < len(found) and found[k].text != "}":
            k += 1
        k += 1
    colon = _find(found, k, ":")
    end = _find(found, colon + 1, ":=") if colon is not None else None
    if colon is None:
        raise StatementError(f"theorem {name} has no `:` before its proposition")
    type_begin, type_end = found[colon].start + 1, found[end].start if end is not None else len(theorem)
    binders = theorem[found[k].start : found[colon].start].strip() if k < colon else ""
    proposition = theorem[type_begin:type_end].strip()
    if not proposition:
        raise StatementError(f"theorem {name} has no proposition behind its `:`")
    before = theorem[: found[begin - 1].start + len(found[begin - 1].text)] if begin else ""
    return before, name, f"∀ {binders}\n, ({proposition}\n)" if binders else proposition


def _find(found: list[Token], begin: int, what: str) -> int | None:
    """Index of the first `:` or `:=` outside brackets; a `:=` that belongs to a let or have is passed over."""
    depth = bound = 0
    for k in range(begin, len(found)):
        text, touching = found[k].text, k + 1 < len(found) and found[k + 1].start == found[k].start + 1
        if text in _OPEN:
            depth += 1
        elif text in _CLOSE:
            depth -= 1
        elif depth == 0 and text in ("let", "have", "letI", "haveI") and found[k].kind == "word":
            bound += 1
        elif depth == 0 and text == ":" and found[k].kind == "symbol":
            define = touching and found[k + 1].text == "="
            if define and bound:
                bound -= 1
            elif define == (what == ":="):
                return k
    return None
