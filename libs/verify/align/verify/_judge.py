"""From two texts to a verdict."""

from __future__ import annotations

from collections import namedtuple

from align.verify._budget import OverBudget, VerifyError, restart, used
from align.verify._extract import MAX_ANSWER, Extraction, extract
from align.verify._read import parse, read
from align.verify._values import Value

TYPE_CHECKING = False  # typing is not imported: it is a tenth of the import
if TYPE_CHECKING:
    from collections.abc import Callable


class Verdict(namedtuple("Verdict", "correct reason gold_value value steps", defaults=(None, None, 0))):
    """What the judge says.

    correct: True, False, or None when the gold cannot be read (leave such a row out; it is never a reward).
    reason: equal, different, bare (decided on an answer that stood without a marker), no_answer, unreadable_answer, unreadable_gold,
        undecided (no proof and no refutation found), undecided_budget (too large to be looked at), error (a bug of ours; never correct).
    gold_value, value: the parsed answers, None where parsing was not reached.
    steps: what the comparison has cost.
    """

    __slots__ = ()
    correct: bool | None
    reason: str
    gold_value: Value | None
    value: Value | None
    steps: int

    def __bool__(self) -> bool:
        return self.correct is True


def grade(gold: str, text: str, *, mode: str = "final") -> Verdict:
    """Judges a model's whole output against a gold answer.

    gold: the reference answer, bare or with its own marker (a solution text that ends in a box, "#### 72").
    text: the output; `mode` says what counts as an answer in it (see `extract`).

    Raises: VerifyError for another mode, or when gold or text is no string.
    """
    if not isinstance(gold, str):
        raise VerifyError(f"gold {gold!r:.40} is no string; give the reference answer as str")
    found = extract(text, mode=mode)
    gold_answer = _gold_answer(gold)
    if gold_answer is None:
        return Verdict(None, "unreadable_gold")
    if found is None:
        return _readable(gold_answer) or Verdict(False, "no_answer")
    if found.oversize:
        return _readable(gold_answer) or _oversize(gold_answer, text, found)
    if found.answer is None:
        return _readable(gold_answer) or Verdict(False, "no_answer")
    verdict = _judge(gold_answer, found.answer)
    if found.bare and verdict.reason in ("equal", "different"):
        return verdict._replace(reason="bare")
    return verdict


def equivalent(gold: str, answer: str) -> Verdict:
    """Judges a bare answer against a bare gold answer; symmetric in the two wherever both can be read.

    Raises: VerifyError when one of them is no string.
    """
    for name, given in (("gold", gold), ("answer", answer)):
        if not isinstance(given, str):
            raise VerifyError(f"{name} {given!r:.40} is no string; give it as str")
    return _judge(gold, answer)


def _gold_answer(gold: str) -> str | None:
    """The answer of a gold: of its last explicit marker, else all of it."""
    if "\\boxed" in gold or "\\fbox" in gold or "####" in gold:
        found = extract(gold, mode="marked")
        return found.answer if found else None
    return gold


def _readable(gold: str) -> Verdict | None:
    """A verdict of None when the gold cannot be read."""
    try:
        value = parse(gold[: MAX_ANSWER + 1])
    except OverBudget:
        return None
    return Verdict(None, "unreadable_gold", value) if value.kind == "raw" else None


def _oversize(gold: str, text: str, found: Extraction) -> Verdict:
    """An answer too long to be cut out is right only when it is the gold to the letter, up to the closing brace or the end."""
    gold = gold.strip()
    if len(gold) <= MAX_ANSWER:
        return Verdict(False, "undecided_budget")
    start = found.start
    while text[start : start + 1].isspace() and start < found.start + 100:
        start += 1
    ended = text[start + len(gold) : start + len(gold) + 1] in ("", "}", "\n", "<")
    same = ended and text.startswith(gold, start)
    return Verdict(same, "equal" if same else "undecided_budget")


def _judge(gold: str, answer: str) -> Verdict:
    if len(gold) > MAX_ANSWER or len(answer) > MAX_ANSWER:
        same = gold.strip() == answer.strip()
        return Verdict(same, "equal" if same else "undecided_budget")
    from align.verify._compare import equal  # late: importing the judge stays cheap; not inside of the count, which it would begin with

    before = restart()
    try:
        return _verdict(gold, answer, equal)
    finally:
        restart(before)


def _verdict(gold: str, answer: str, equal: Callable[[Value, Value], bool | None]) -> Verdict:
    gold_value = value = None
    try:
        gold_value = read(gold)
        if gold_value.kind == "raw":
            return Verdict(None, "unreadable_gold", gold_value, None, used())
        value = read(answer)
        if value.kind == "raw":
            return Verdict(False, "unreadable_answer", gold_value, value, used())
        found = equal(gold_value, value)
    except (OverBudget, RecursionError):
        if gold.strip() == answer.strip():
            return Verdict(True, "equal", gold_value, value, used())
        return Verdict(False, "undecided_budget", gold_value, value, used())
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as bug:
        # A training run must not end here. The tests count this reason as a failure.
        return Verdict(None if gold_value is None else False, "error", gold_value, value or Value("raw", info=repr(bug)), used())
    reason = "undecided" if found is None else "equal" if found else "different"
    return Verdict(found is True, reason, gold_value, value, used())
