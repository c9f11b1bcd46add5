"""Lean 4's tokens, as far as soundness needs them: what is code, and what is a comment, a string or part of an identifier.

Lean's own tokenizer depends on a table of symbols that the imported library extends (`⁻¹'`, `→r`, `⟫_ℝ`). The table is not known here, so
where the two readings of a text could differ in what is code, the text is refused (`Ambiguous`) or both readings are shown to the policy:
a word that Lean may see as a keyword is always among the tokens returned. Identifiers follow Lean.Parser.Basic (v4.9.0-rc1): dotted
chains and `«…»` are one token, the longest match wins, so `not_sorry` and `axiom.x` are identifiers and no keywords."""

import re
from typing import NamedTuple

SPACE = " \t\r\n"
_OPENING = "([{⟨,;"  # no symbol of Lean or Mathlib continues past one of these with a quote, a dash or a slash
_APART = SPACE + _OPENING + ")]}⟩"
# Symbols that Mathlib continues with letters (`→r`, `≃o`, `↪g`, `∘r`, `~r`, `⟫_ℝ`): a keyword may hide behind such a tail.
_TAILED = "→↪≃≺≼∘~⟫⟶⥤⊗⇨‖ᵐ⁻"
_LONGEST_TAIL = 3
_COMMENT_MARK = re.compile("/-|-/")


class Unreadable(ValueError):
    """Lean would not read this either: an unterminated comment, string or identifier escape."""


class Ambiguous(ValueError):
    """What is code depends on Lean's symbol table; written with a space it would not."""


class Token(NamedTuple):
    """One token outside comments. `kind` "word" is an identifier or a keyword, "quoted" an identifier with «…»; the rest is what it
    says."""

    kind: str  # "word", "quoted", "number", "string", "character" or "symbol"
    text: str
    start: int  # index into the text
    hidden: tuple[str, ...] = ()  # words that another symbol table would show inside this token


def line_of(text: str, position: int) -> int:
    """1-based line of a position."""
    return text.count("\n", 0, position) + 1


def tokens(text: str) -> list[Token]:
    """The tokens of a Lean text, comments left out, doc comments too. Raises Unreadable or Ambiguous, each with the line."""
    return _Lexer(text).run()


# Lean.isIdFirst and isIdRest of v4.9.0-rc1, as character classes.
_LETTERS = (
    "a-zA-Z_\u03b1-\u03ba\u03bc-\u03c9\u0391-\u039f\u03a1\u03a2\u03a4-\u03a9\u03ca-\u03fb\u1f00-\u1ffe\u2100-\u214f\U0001d49c-\U0001d59f"
)
_PART = rf"[{_LETTERS}][{_LETTERS}0-9'!?\u2080-\u2089\u2090-\u209c\u1d62-\u1d6a]*"
_WORD = re.compile(rf"(?:{_PART}|«[^»]*»)(?:\.(?:{_PART}|«[^»]*»))*")
_WORDS_OF_COMMENT = re.compile(rf"#?{_PART}")
_BLANK = re.compile(rf"[{SPACE}]+")


class _Lexer:
    def __init__(self, text: str):
        self.text = text
        self.i = 0
        self.found: list[Token] = []

    def run(self) -> list[Token]:
        while self.i < len(self.text):
            c = self.text[self.i]
            if c in SPACE:
                self.i = _BLANK.match(self.text, self.i).end()  # type: ignore[union-attr]
            elif self.text.startswith("--", self.i):
                self._line_comment()
            elif self.text.startswith("/-", self.i):
                self._block_comment()
            elif c == '"':
                self._string()
            elif c == "'":
                self._quote()
            elif c.isascii() and c.isdigit():
                self._number()
            elif c == "r" and self._raw_start():
                self._raw_string()
            elif found := _WORD.match(self.text, self.i):
                self._word(found[0])
            elif c == "«":
                raise self._fail("unterminated «")
            else:
                self._add("symbol", self.i + 1)
        return self.found

    def _add(self, kind: str, end: int, hidden: tuple[str, ...] = ()) -> None:
        self.found.append(Token(kind, self.text[self.i : end], self.i, hidden))
        self.i = end

    def _glued(self) -> bool:
        """A symbol stands directly before: Lean's longest match may reach over this position."""
        return (
            self.i > 0 and bool(self.found) and self.found[-1].kind == "symbol" and self.text[self.i - 1] not in _APART and self._touches()
        )

    def _touches(self) -> bool:
        last = self.found[-1]
        return last.start + len(last.text) == self.i

    def _fail(self, what: str, at: int | None = None) -> Unreadable:
        return Unreadable(f"line {line_of(self.text, self.i if at is None else at)}: {what}")

    def _doubt(self, what: str) -> Ambiguous:
        return Ambiguous(f"line {line_of(self.text, self.i)}: {what}")

    # Comments. One that begins right behind a symbol (`<--x`, `//-x`) may be code for Lean: its words are shown as hidden ones.

    def _line_comment(self) -> None:
        end = self.text.find("\n", self.i)
        end = len(self.text) if end < 0 else end
        self._comment_as_code(end)
        self.i = end

    def _block_comment(self) -> None:
        begin = self.i
        if self.text.startswith("/-/-", begin):
            raise self._doubt("/-/- opens one comment or two, by version")
        depth, i = 1, begin + 2
        if self.text.startswith(("/--", "/-!"), begin):
            i = begin + 3
        elif i < len(self.text):
            i += 1  # Lean skips the character after /-
        while depth:
            mark = _COMMENT_MARK.search(self.text, i)
            if not mark:
                raise self._fail("unterminated comment", begin)
            depth, i = depth + (1 if mark[0] == "/-" else -1), mark.end()
        self._comment_as_code(i)
        self.i = i

    def _comment_as_code(self, end: int) -> None:
        if not self._glued():
            return
        body = self.text[self.i + 2 : end]
        if any(mark in body for mark in ('"', "«", "/-", "'")):
            raise self._doubt("a comment right behind a symbol; write a space before it")
        last = self.found[-1]
        self.found[-1] = last._replace(hidden=last.hidden + tuple(_WORDS_OF_COMMENT.findall(body)))

    # Quotes.

    def _string(self) -> None:
        i, brace = self.i + 1, False
        while True:
            if i >= len(self.text):
                raise self._fail("unterminated string")
            c = self.text[i]
            if c == '"':
                break
            brace |= c == "{"
            i = self._escape(i + 1) if c == "\\" else i + 1
        # s!"{…}" holds code, as do the strings of throwError and trace[…]. Behind plain punctuation a string is a string.
        if brace and self.found and not (self.found[-1].kind == "symbol" and self.found[-1].text in "=(,:+[<|·"):
            raise self._doubt("a string with { may hold code here; put it in parentheses")
        if self.found and self._touches() and self.found[-1].kind == "word" and self.found[-1].text.endswith("r") and self.found[-1].hidden:
            raise self._doubt("a string right behind a symbol's tail may be a raw one")
        self._add("string", i + 1)

    def _raw_start(self) -> bool:
        i = self.i + 1
        while i < len(self.text) and self.text[i] == "#":
            i += 1
        return self.text.startswith('"', i)

    def _raw_string(self) -> None:
        if self.i and self.text[self.i - 1] not in SPACE + _OPENING:
            raise self._doubt("a raw string right behind another token; write a space before it")
        quote = self.text.index('"', self.i)
        closing = '"' + "#" * (quote - self.i - 1)
        end = self.text.find(closing, quote + 1)
        if end < 0:
            raise self._fail("unterminated raw string")
        self._add("string", end + len(closing))

    def _escape(self, i: int) -> int:
        """Where an escape sequence ends whose backslash stands before i. Behind an unknown one Lean would read the string's rest as
        code."""
        c = self.text[i : i + 1]
        length = {"x": 2, "u": 4}.get(c, 0)
        digits = self.text[i + 1 : i + 1 + length]
        if not c or c not in "\\\"'rntxu\n" or len(digits) < length or not all(d in "0123456789abcdefABCDEF" for d in digits):
            raise self._fail("unknown escape sequence", i)
        return i + 1 + length

    def _quote(self) -> None:
        text, i = self.text, self.i
        following, after, glued = text[i + 1 : i + 2], text[i + 2 : i + 3], self._glued()
        if glued and (following in ("'", "\\", '"', "«") or (after == "'" and not (text[i - 1].isascii() and following.isalnum()))):
            raise self._doubt("a quote right behind a symbol; write a space before it")
        if glued and not text[i - 1].isascii():
            self._add("symbol", i + 1)  # the end of a symbol such as ⁻¹'
        elif following == "'":  # the image symbol
            self._add("symbol", i + 2)
        elif following == "\\":
            end = self._escape(i + 2)
            if text[end : end + 1] != "'":
                raise self._fail("unterminated character")
            self._add("character", end + 1)
        elif after == "'":
            self._add("character", i + 3)
        else:
            raise self._fail("unterminated character")

    # Numbers and words.

    def _number(self) -> None:
        text, i = self.text, self.i
        base = {"x": "0123456789abcdefABCDEF_", "b": "01_", "o": "01234567_"}.get(text[i + 1 : i + 2].lower()) if text[i] == "0" else None
        i += 2 if base else 0
        digits = base or "0123456789_"
        i = self._run(i, digits)
        if not base:
            if text.startswith(".", i):  # 1. is a number: what follows the dot is no field
                i = self._run(i + 1, "0123456789_")
            if text[i : i + 1] in ("e", "E") and text[i + 1 : i + 3].lstrip("+-")[:1].isdigit():
                i = self._run(i + 1 + (text[i + 1] in "+-"), "0123456789_")
        self._add("number", i)

    def _run(self, i: int, allowed: str) -> int:
        while i < len(self.text) and self.text[i] in allowed:
            i += 1
        return i

    def _word(self, word: str) -> None:
        hidden: tuple[str, ...] = ()
        if self._glued() and self.text[self.i - 1] in _TAILED:
            hidden = tuple(word[k:] for k in range(1, min(_LONGEST_TAIL, len(word)) + 1))
        self._add("quoted" if "«" in word else "word", self.i + len(word), hidden)
