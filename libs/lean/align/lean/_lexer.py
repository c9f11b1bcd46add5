"""Lean 4's tokens, as far as soundness needs them: what is code, and what is a comment, a string or part of an identifier.

Lean's own tokenizer depends on a table of symbols that the imported library extends (`⁻¹'`, `→r`, `⟫_ℝ`). The table is not known here, so where
the two readings of a text could differ in what is code, the text is refused (`Ambiguous`) or both readings are shown to the policy: a
word that Lean may see as a keyword is always among the tokens returned. Identifiers follow Lean.Parser.Basic (v4.9.0-rc1): dotted chains and
`«…»` are one token, the longest match wins, so `not_sorry` and `axiom.x` are identifiers and no keywords.
"""

from dataclasses import dataclass
from typing import Literal

SPACE = " \t\r\n"
_OPENING = "([{⟨,;"  # no symbol of Lean or Mathlib continues past one of these with a quote, a dash or a slash
_APART = SPACE + _OPENING + ")]}⟩"
# Symbols that Mathlib continues with letters (`→r`, `≃o`, `↪g`, `∘r`, `~r`, `⟫_ℝ`): a keyword may hide behind such a tail.
_TAILED = "→↪≃≺≼∘~⟫⟶⥤⊗⇨‖ᵐ⁻"
_LONGEST_TAIL = 3


class Unreadable(ValueError):
    """Lean would not read this either: an unterminated comment, string or identifier escape."""


class Ambiguous(ValueError):
    """What is code depends on Lean's symbol table; written with a space it would not."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token outside comments. `kind` "word" is an identifier or a keyword, "quoted" an identifier with «…»; the rest is what it says."""

    kind: Literal["word", "quoted", "number", "string", "character", "symbol"]
    text: str
    start: int  # index into the text
    hidden: tuple[str, ...] = ()  # words that another symbol table would show inside this token


def line_of(text: str, position: int) -> int:
    """1-based line of a position."""
    return text.count("\n", 0, position) + 1


def tokens(text: str) -> list[Token]:
    """The tokens of a Lean text, comments left out, doc comments too. Raises Unreadable or Ambiguous, each with the line."""
    return _Lexer(text).run()


def _first(c: str) -> bool:
    return (c.isascii() and c.isalpha()) or c == "_" or _letter_like(c)


def _rest(c: str) -> bool:
    return (c.isascii() and c.isalnum()) or c in "_'!?" or _letter_like(c) or _subscript(c)


def _letter_like(c: str) -> bool:
    n = ord(c)
    return (
        (0x3B1 <= n <= 0x3C9 and n != 0x3BB)
        or (0x391 <= n <= 0x3A9 and n not in (0x3A0, 0x3A3))
        or 0x3CA <= n <= 0x3FB
        or 0x1F00 <= n <= 0x1FFE
        or 0x2100 <= n <= 0x214F
        or 0x1D49C <= n <= 0x1D59F
    )


def _subscript(c: str) -> bool:
    n = ord(c)
    return 0x2080 <= n <= 0x2089 or 0x2090 <= n <= 0x209C or 0x1D62 <= n <= 0x1D6A


class _Lexer:
    def __init__(self, text: str):
        self.text = text
        self.i = 0
        self.found: list[Token] = []

    def run(self) -> list[Token]:
        while self.i < len(self.text):
            c = self.text[self.i]
            if c in SPACE:
                self.i += 1
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
            elif c == "«" or _first(c):
                self._word()
            else:
                self._add("symbol", self.i + 1)
        return self.found

    def _add(self, kind: str, end: int, hidden: tuple[str, ...] = ()) -> None:
        self.found.append(Token(kind, self.text[self.i : end], self.i, hidden))  # type: ignore[arg-type]
        self.i = end

    def _glued(self) -> bool:
        """A symbol stands directly before: Lean's longest match may reach over this position."""
        return self.i > 0 and bool(self.found) and self.found[-1].kind == "symbol" and self.text[self.i - 1] not in _APART and self._touches()

    def _touches(self) -> bool:
        last = self.found[-1]
        return last.start + len(last.text) == self.i

    def _fail(self, what: str, at: int | None = None) -> Unreadable:
        return Unreadable(f"line {line_of(self.text, self.i if at is None else at)}: {what}")

    def _doubt(self, what: str) -> Ambiguous:
        return Ambiguous(f"line {line_of(self.text, self.i)}: {what}; write a space before it")

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
            close, open_ = self.text.find("-/", i), self.text.find("/-", i)
            if close < 0:
                raise self._fail("unterminated comment", begin)
            if 0 <= open_ < close:
                depth, i = depth + 1, open_ + 2
            else:
                depth, i = depth - 1, close + 2
        self._comment_as_code(i)
        self.i = i

    def _comment_as_code(self, end: int) -> None:
        if not self._glued():
            return
        body = self.text[self.i + 2 : end]
        if any(mark in body for mark in ('"', "«", "/-", "'")):
            raise self._doubt("a comment right behind a symbol")
        words = "".join(c if _rest(c) or c in ".#" else " " for c in body).split()
        last = self.found[-1]
        parts = tuple(part for word in words for part in (word, *word.split(".")))
        self.found[-1] = Token(last.kind, last.text, last.start, last.hidden + parts)

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
            i += 2 if c == "\\" else 1
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
            raise self._doubt("a raw string right behind another token")
        quote = self.text.index('"', self.i)
        closing = '"' + "#" * (quote - self.i - 1)
        end = self.text.find(closing, quote + 1)
        if end < 0:
            raise self._fail("unterminated raw string")
        self._add("string", end + len(closing))

    def _quote(self) -> None:
        text, i = self.text, self.i
        following, after = text[i + 1 : i + 2], text[i + 2 : i + 3]
        if self._glued():  # the end of a symbol such as ⁻¹', or a character
            if following in ("'", "\\") or (after == "'" and following in '"-/«#'):
                raise self._doubt("a quote right behind a symbol")
            self._add("symbol", i + 1)
        elif following == "'":  # the image symbol
            self._add("symbol", i + 2)
        elif following == "\\":
            end = text.find("'", i + 3)
            if end < 0 or end > i + 8:
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

    def _word(self) -> None:
        text, i, quoted = self.text, self.i, False
        while True:
            if text[i] == "«":
                quoted = True
                end = text.find("»", i)
                if end < 0:
                    raise self._fail("unterminated «")
                i = end + 1
            else:
                i += 1
                while i < len(text) and _rest(text[i]):
                    i += 1
            if not (text.startswith(".", i) and i + 1 < len(text) and (_first(text[i + 1]) or text[i + 1] == "«")):
                break
            i += 1
        word = text[self.i : i]
        hidden: tuple[str, ...] = ()
        if self._glued() and text[self.i - 1] in _TAILED:
            hidden = tuple(word[k:] for k in range(1, min(_LONGEST_TAIL, len(word)) + 1))
        self._add("quoted" if quoted else "word", i, hidden)
