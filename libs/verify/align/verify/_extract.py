r"""Where in a model's output the answer stands.

Only searches of bounded windows and single passes at C speed: the text may be a megabyte of anything. Nothing here reads mathematics;
a box that cannot be read is still the answer, and the judge calls it wrong.
"""

import re
from collections import namedtuple

from align.verify._budget import VerifyError

MAX_ANSWER = 16_384  # characters; a longer answer is undecided unless it is the gold to the letter
MAX_BOXES = 200  # adjacent boxes read as one list
_TAIL = 4_000  # how far back a bare answer is looked for

_BRACE = re.compile(r"\\.|[{}]", re.S)
_ONE_TOKEN = re.compile(r"[ \t]*([0-9A-Za-z])")  # TeX: \\boxed 12 boxes the 1
# Between two boxes that form one list: punctuation, math delimiters, "and", "or", at most one word before an "and", the name of a value.
_JOIN = re.compile(
    r"(?:[\s,;$~&]|[A-Za-z](?:_\{?[0-9A-Za-z]\}?)? ?=|\\[\[\]()]|\\[,;:! ]|\\q?quad|\\text\{|\}|(?:[A-Za-z]+ )?and\b|\bor\b)*\Z"
)
_FINAL = re.compile(r"final[ \t]+answer", re.I)
_WEAK = re.compile(
    r"\b(?:correct )?(?:option|choice)[ \t]+is\b|\banswer(?:[ \t]+is\b|[ \t]*:)|\banswer(?=[ \t]*(?:\$|\\[(\[]))|^A:", re.I | re.M
)
_WEAK_HINTS = ("answer", "option", "choice", "a:")  # without one of these the search is spared
_LEAD = re.compile(r"(?:[\s*:_\"'#]|\\\"|(?:the|my|our|so|final|correct|answer|is|should|be)\b(?![ \t]*=))*", re.I)
_STOP = re.compile(r"I hope|<\||</s>|\n[ \t]*\n|(?<=[0-9})$\]*])\.[ \n]+(?=[A-Z(])")
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.,\\])[-+]?\$?(?:[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?(?:/[0-9]+)?(?:\\?%)?"
)
_SHORT = re.compile(r"(?!.*\*\*)(?!.*[A-Za-z]:)[\x20-\x7e\u00b0-\u00be\u03c0\u2200-\u22ff]+")  # one line that may be an answer by itself
_SAID = re.compile(r"\b(?:it|is|was|are|the|they|he|she|get|so|thus|hence|there|we|have|has)\b", re.I)
_BECAUSE = re.compile(r"\b(?:because|since)\b")
# Before the number of a sentence: what says that it is not the answer, or not the only one.
_HEDGE = re.compile(
    r"(?:\bnot|n't)\W+(?:\w{1,20}\W+){0,3}\Z|[0-9$)\]][^.\n]{0,40}\bor\b|\bbetween\W+[0-9]"
    r"|\b(?:cannot|can't|unable to|impossible to|don't know|not sure|unclear|undetermined|maybe|perhaps|possibly)\b"
    r"|\b(?:may|might|could)(?: also)? be\b",
    re.I,
)
_SAYS = re.compile(r"\s*(?:the )?(?:final |correct )?answer is:?(?=[\s$\\])", re.I)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_PROSE = re.compile(r"(?<!\\)\b[a-z]{3,}\s+[a-z]{3,}\b|\?")
_CONTROLS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>")
_TURN = re.compile(r"(?:\s*(?:<\|(?:im_start|im_end|endoftext|eot_id|end_of_text)\|>|</s>)(?:assistant)?){0,20}")
_CHOICE = re.compile(r"\(?([A-Z])\)?(?:[.:](?=\s)|\s*\Z|(?=,?\s+(?:because|since|as)\b))")


class Extraction(namedtuple("Extraction", "answer marker start oversize", defaults=(0, False))):
    """An answer and the marker it was found by.

    answer: the text to be read; several adjacent boxes are joined by "; ". None: the marker is there and holds nothing.
    marker: "boxed", "hash" (####), "final_answer", "answer_tag", "answer", "math" (a math environment) or "number".
    oversize: the answer is longer than MAX_ANSWER characters and was not cut out; `start` says where it begins.
    """

    __slots__ = ()
    answer: str | None
    marker: str
    start: int
    oversize: bool

    @property
    def bare(self) -> bool:
        """No explicit marker: the last math environment or number."""
        return self.marker in ("math", "number")


def extract(text: str, *, mode: str = "final") -> Extraction | None:
    r"""The last explicitly marked answer of a model's output, or None.

    Markers: \boxed, \fbox (balanced braces; adjacent boxes are one list), ####, "final answer", <answer>. Text inside <think> … </think>
    does not count. In mode "final" an "answer is", an "Answer:", the last math environment and the last number follow, in this order;
    mode "marked" stops at the explicit markers.

    Raises: VerifyError for another mode, or when `text` is no string.
    """
    if mode not in ("final", "marked"):
        raise VerifyError(f'mode {mode!r} is not one of "final", "marked"')
    if not isinstance(text, str):
        raise VerifyError(f"text {text!r:.40} is no string; give the model's output as str")
    text = _spoken(text)
    found = _explicit(text)
    if found or mode == "marked":
        return found
    end = len(text)
    window = text[-_TAIL:]
    lower = window.lower()
    weak = _last(_WEAK, window) if any(hint in lower for hint in _WEAK_HINTS) else None
    if weak:
        tail = _of_sentence(window[weak.end() :])
        if tail:
            return Extraction(tail, "answer", end - len(window) + weak.end())
    stripped = window.strip()
    short = len(window) == end and len(stripped) <= 80 and len(stripped.split()) <= 3 and _SHORT.fullmatch(stripped)
    if short and not _SAID.search(stripped):
        return Extraction(stripped, "number" if _NUMBER.fullmatch(stripped) else "math")
    return _last_math_or_number(window)


def _last(pattern: re.Pattern[str], text: str, start: int = 0) -> re.Match[str] | None:
    found = None
    for match in pattern.finditer(text, start):
        found = match
    return found


def _spoken(text: str) -> str:
    """The text without thinking, and without what follows the end of the turn."""
    close = text.rfind("</think>")
    if close >= 0:
        text = text[close + 8 :]
    opened = text.find("<think>")
    if opened >= 0:
        text = text[:opened]
    turn = _TURN.match(text)
    start = turn.end() if turn else 0
    # Their common beginning first: a text of the bars alone would cost as much for each of them.
    begins = text.find("<|", start)
    ends = [text.find("</s>", start), *(text.find(control, begins) for control in (_CONTROLS if begins >= 0 else ()))]
    found = [at for at in ends if at >= 0]
    return text[: min(found)] if found else text


def _explicit(text: str) -> Extraction | None:
    box = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    mark = _hashes(text)
    tag = text.rfind("<answer>")
    phrase = -1
    if "inal" in text or "INAL" in text:
        for found in _FINAL.finditer(text, max(0, len(text) - 8 * _TAIL)):
            phrase = found.end()
    last = max(box, mark, tag, phrase)
    if last < 0:
        return None
    if last == phrase:
        tail = _of_sentence(text[phrase : phrase + _TAIL])
        if tail:
            return Extraction(tail, "final_answer", phrase)
        last = max(box, mark, tag)
        if last < 0:
            return None
    if last == box:
        return _boxes(text, box)
    if last == tag:
        stop = text.find("</answer>", tag)
        body = text[tag + 8 : stop if stop >= 0 else len(text)]
        marker, start = "answer_tag", tag + 8
    else:
        line_end = text.find("\n", mark)
        body = text[mark + 4 : line_end if line_end >= 0 else len(text)]
        marker, start = "hash", mark + 4
    if len(body) > MAX_ANSWER:
        return Extraction(None, marker, start, True)
    says = _SAYS.match(body) if marker == "answer_tag" else None
    body = body[says.end() if says else 0 :].strip()
    if marker == "hash":
        body = body.lstrip("# ")
    return Extraction(body or None, marker, start)


def _hashes(text: str) -> int:
    """The last #### that stands by itself, or -1."""
    at = len(text)
    for _ in range(50):
        at = text.rfind("####", 0, at)
        if at < 0:
            return -1
        if text[at + 4 : at + 5] != "#" and (at == 0 or text[at - 1].isspace()):
            return at
        at += 3
    return -1


def _boxes(text: str, at: int) -> Extraction:
    """The box at `at`, together with the boxes that stand directly before it."""
    start, stop = _box_content(text, at)
    if stop < 0:
        return Extraction(None, "boxed", start, len(text) - start > MAX_ANSWER)
    parts = [text[start:stop].strip()]
    length = stop - start
    while True:
        reach = max(0, at - MAX_ANSWER)
        before = max(text.rfind("\\boxed", reach, at), text.rfind("\\fbox", reach, at))
        if before < 0:
            break
        inner, end = _box_content(text, before)
        if end < 0 or end >= at:
            break
        gap = text[end + (text[end : end + 1] == "}") : at]
        if len(gap) > 60 or not _JOIN.match(gap):
            break
        parts.append(text[inner:end].strip())
        at = before
        length += end - inner
        if len(parts) > MAX_BOXES or length > MAX_ANSWER:
            return Extraction(None, "boxed", inner, True)
    if not all(parts):
        return Extraction(None, "boxed", start)
    return Extraction("; ".join(reversed(parts)), "boxed", start)


def _box_content(text: str, at: int) -> tuple[int, int]:
    """Where the content of the box at `at` begins and ends; the end is -1 when its brace is not closed within reach."""
    start = at + (6 if text.startswith("\\boxed", at) else 5)
    brace = start
    while text[brace : brace + 1] in (" ", "\n"):
        brace += 1
    if text[brace : brace + 1] != "{":
        one = _ONE_TOKEN.match(text, start)
        return (one.start(1), one.end(1)) if one else (start, start)
    depth = 0
    for found in _BRACE.finditer(text, brace, brace + MAX_ANSWER + 2):
        token = found.group()
        if token == "{":
            depth += 1
        elif token == "}":
            depth -= 1
            if not depth:
                return brace + 1, found.start()
    return brace + 1, -1


def _of_sentence(tail: str) -> str:
    """The answer of a sentence that began with "the final answer is" or "Answer:"."""
    lead = _LEAD.match(tail)
    tail = tail[lead.end() if lead else 0 :]
    stop = _STOP.search(tail)
    if stop:
        tail = tail[: stop.start()]
    because = _BECAUSE.search(tail)
    if because and because.start():
        tail = tail[: because.start()]
    tail = tail.strip().rstrip('*" \\')
    if tail.endswith(".") and not tail.endswith(".."):
        tail = tail[:-1].rstrip('*" \\')
    choice = _CHOICE.match(tail)
    if choice:
        return choice.group(1)
    line = tail.split("\n", 1)[0]
    if "$" not in line and "\\(" not in line and "\\[" not in line and (len(line.split()) <= 3 or not _WORD.search(line)):
        return line[: MAX_ANSWER + 1]
    found = _last_math_or_number(tail)
    if found and _HEDGE.search(tail, max(0, found.start - 400), found.start):
        return line[:MAX_ANSWER]
    return found.answer if found and found.answer else line[:MAX_ANSWER]


def _last_math_or_number(text: str) -> Extraction | None:
    """The last math environment or the last number, whichever ends later; adjacent environments are one list."""
    environments = _environments(text)
    after = environments[-1][1] if environments else 0
    number = _last(_NUMBER, text, after)
    if number:
        start = number.start()
        if (
            text[max(start - 1, 0) : start] in ("+", "-", "*", "/", "^") and text[max(start - 2, 0) : start] != "**"
        ):  # the end of x^2+1 is no answer
            start = max(text.rfind(blank, 0, start) for blank in " \n") + 1
        return Extraction(text[start : number.end()], "number", start)
    if not environments:
        return None
    parts = [environments[-1]]
    for earlier in reversed(environments[:-1]):
        if not _JOIN.match(text[earlier[1] : parts[-1][0]]):
            break
        parts.append(earlier)
    answer = "; ".join(text[a:b].strip("$ \n\\[]()") if a == b else _inner(text[a:b]) for a, b in reversed(parts))
    return Extraction(answer or None, "math", parts[-1][0])


_DELIMITER = re.compile(r"\\[\[\]()]|\\?\$\$?|\n[ \t]*\n")


def _inner(environment: str) -> str:
    for opening, closing in (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$")):
        if environment.startswith(opening) and environment.endswith(closing):
            return environment[len(opening) : -len(closing)].strip()
    return environment.strip("$ \n")


def _environments(text: str) -> list[tuple[int, int]]:
    r"""Spans of $…$, $$…$$, \(…\) and \[…\]; a dollar before a digit does not close one (prices), nor does an empty line stand inside."""
    spans: list[tuple[int, int]] = []
    opened: tuple[str, int] | None = None
    for found in _DELIMITER.finditer(text):
        token = found.group()
        if token in ("\\(", "\\["):
            opened = (token, found.start())
        elif token in ("\\)", "\\]"):
            if opened and opened[0] == ("\\(" if token == "\\)" else "\\["):
                spans.append((opened[1], found.end()))
            opened = None
        elif token.startswith("\n"):
            opened = None
        elif token.startswith("\\") and not text[found.end() : found.end() + 1].isspace():
            continue  # \$5: money
        elif opened and opened[0] == "$":
            digit = text[found.end() : found.end() + 1].isdigit()
            inside = text[opened[1] : found.end()]
            if digit or not inside.strip("\\$ \n") or (_PROSE.search(inside) and "\\text" not in inside):
                opened = ("$", found.start())
            else:
                spans.append((opened[1], found.end()))
                opened = None
        elif not opened:
            opened = ("$", found.start())
    if opened and spans and opened[0] == "$" and text[spans[-1][1] : opened[1]].lstrip().startswith("="):
        spans = [(spans[-1][1], opened[1])]  # $a \$ = b $: the middle sign closes and opens
    return spans
