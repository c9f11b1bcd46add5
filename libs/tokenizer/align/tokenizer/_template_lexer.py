"""Chat templates: the lexer of our subset of Jinja. See `_template` for the parser."""

import re
from typing import Any, NamedTuple

from align.tokenizer._errors import ChatError

_OPEN = re.compile(r"\{(?:\{|%|#)")
_END = {
    "{{": re.compile(r"-\}\}\s*|\}\}"),
    "{%": re.compile(r"\+%\}|-%\}\s*|%\}\n?"),
    "{#": re.compile(r"\+#\}|-#\}\s*|#\}\n?"),
}
_RAW = re.compile(r"([-+]?)\s*raw\s*(?:-%\}\s*|\+?%\})")
_ENDRAW = re.compile(r"\{%([-+]?)\s*endraw\s*(?:\+%\}|-%\}\s*|%\}\n?)")
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<float>\d+(?:_\d+)*(?:\.\d+(?:_\d+)*(?:[eE][+-]?\d+)?|[eE][+-]?\d+))
  | (?P<int>\d+(?:_\d+)*)
  | (?P<name>[^\W\d]\w*)
  | (?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
  | (?P<op>//|\*\*|==|!=|>=|<=|[-+*/%~<>=.:|,()\[\]{}])
  )""",
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    kind: str
    text: str
    line: int


def lex(source: str) -> list[Any]:
    """("data", text, line), ("print", tokens, line) and ("block", tokens, line), with white-space control applied."""
    out: list[Any] = []
    at, line_starting = 0, True
    while True:
        opening = _OPEN.search(source, at)
        if not opening:
            out.append(("data", source[at:], _line(source, at)))
            return [item for item in out if item[0] != "data" or item[1]]
        kind, start = opening[0], opening.end()
        sign = source[start : start + 1]
        out.append(("data", _left(source[at : opening.start()], kind, sign, line_starting), _line(source, at)))
        line = _line(source, start)
        raw = _RAW.match(source, start) if kind == "{%" else None
        if raw:
            end = _ENDRAW.search(source, raw.end())
            if not end:
                raise ChatError(f"template line {line}: raw without endraw")
            text = source[raw.end() : end.start()]
            out.append(("data", text.rstrip() if end[1] == "-" else text, line))
            at = end.end()
        elif kind == "{#":
            end = _comment_end(source, start, line)
            at = end.end()
        else:
            tokens, at = _expression(source, start + (sign in ("-", "+") and sign != ""), _END[kind], line)
            out.append(("print" if kind == "{{" else "block", tokens, line))
        line_starting = source[at - 1 : at] == "\n"


def _comment_end(source: str, start: int, line: int) -> Any:
    end = re.compile(r".*?(\+#\}|-#\}\s*|#\}\n?)", re.DOTALL).match(source, start)
    if not end:
        raise ChatError(f"template line {line}: a comment without its end")
    return end


def _left(text: str, kind: str, sign: str, line_starting: bool) -> str:
    """White space before a tag: `-` takes all of it, lstrip_blocks the indentation of a block or comment alone on its line."""
    if sign == "-":
        return text.rstrip()
    if kind != "{{" and sign != "+":
        start = text.rfind("\n") + 1
        if (start > 0 or line_starting) and not text[start:].strip():
            return text[:start]
    return text


def _expression(source: str, at: int, end: re.Pattern[str], line: int) -> tuple[list[Token], int]:
    tokens: list[Token] = []
    brackets: list[str] = []
    while True:
        while source[at : at + 1].isspace():
            at += 1
        closing = end.match(source, at) if not brackets else None
        if closing:
            return tokens, closing.end()
        found = _TOKEN.match(source, at)
        if not found:
            what = "an unfinished tag" if at >= len(source) else f"{source[at]!r}"
            raise ChatError(f"template line {_line(source, at)}: {what} is not supported here (the tag begins on line {line})")
        kind = str(found.lastgroup)
        text = found[kind]
        if text in ("(", "[", "{"):
            brackets.append({"(": ")", "[": "]", "{": "}"}[text])
        elif text in (")", "]", "}") and (not brackets or brackets.pop() != text):
            raise ChatError(f"template line {_line(source, at)}: an unopened {text!r}")
        tokens.append(Token(kind, text, _line(source, at)))
        at = found.end()


def _line(source: str, at: int) -> int:
    return source.count("\n", 0, at) + 1
