"""Chat templates: the parser of our subset of Jinja.

The rules are those of Jinja 3.1 as Hugging Face sets it up (trim_blocks, lstrip_blocks, loop controls, {% generation %}). A template
becomes a tree of tuples ("kind", line, …). Syntax outside the subset raises ChatError with its line.
"""

import re
from functools import lru_cache
from typing import Any, NoReturn

from align.tokenizer._errors import ChatError
from align.tokenizer._template_lexer import Token, lex

_MAX_DEPTH = 100


@lru_cache(maxsize=32)
def parse_template(source: str) -> list[Any]:
    """The template's tree. Raises ChatError with the line of what is not supported."""
    source = re.sub(r"\r\n|\r", "\n", source)
    if source.endswith("\n"):
        source = source[:-1]
    parser = _Parser(lex(source))
    try:
        return parser.body(())
    except RecursionError:
        parser.fail("the template is nested too deeply")


class _Parser:
    def __init__(self, items: list[Any]) -> None:
        self.items, self.index = items, 0
        self.tokens: list[Token] = []
        self.at, self.line, self.depth, self.loops = 0, 1, 0, 0

    # --- statements

    def fail(self, what: str) -> NoReturn:
        line = self.tokens[self.at].line if self.at < len(self.tokens) else self.line
        raise ChatError(f"template line {line}: {what}")

    def body(self, until: tuple[str, ...]) -> list[Any]:
        """Statements up to a block that begins with one of `until` (left as the current tokens), or to the end."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            self.fail("the template is nested too deeply")
        out: list[Any] = []
        opened = self.line
        while self.index < len(self.items):
            kind, content, line = self.items[self.index]
            self.index += 1
            if kind == "data":
                out.append(("data", line, content))
                continue
            self.tokens, self.at, self.line = content, 0, line
            if kind == "print":
                out.append(("print", line, self.tuple_()))
                self.done()
                continue
            word = self.word("the name of a statement")
            if word in until:
                self.depth -= 1
                return out
            out.append(self.statement(word, line))
        if until:
            self.tokens = []
            self.line = opened
            self.fail(f"a block without its {until[-1]}")
        self.depth -= 1
        return out

    def statement(self, word: str, line: int) -> Any:
        if word == "if":
            return self.if_(line)
        if word == "for":
            return self.for_(line)
        if word == "set":
            return self.set_(line)
        if word == "macro":
            return self.macro(line)
        if word == "generation":
            self.done()
            inner = self.body(("endgeneration",))
            self.done()
            return ("generation", line, inner)
        if word in ("break", "continue"):
            if not self.loops:
                self.fail(f"{word} outside a loop")
            self.done()
            return (word, line)
        self.at -= 1
        return self.fail(f"the statement {word!r} is not supported")

    def if_(self, line: int) -> Any:
        branches = []
        condition = self.tuple_()
        self.done()
        while True:
            inner = self.body(("elif", "else", "endif"))
            word = self.tokens[0].text
            branches.append((condition, inner))
            if word == "elif":
                condition = self.tuple_()
                self.done()
                continue
            self.done()
            otherwise = []
            if word == "else":
                otherwise = self.body(("endif",))
                self.done()
            return ("if", line, branches, otherwise)

    def for_(self, line: int) -> Any:
        target = self.targets()
        self.expect("name", "in")
        iterable = self.tuple_(condition=False)
        only = self.expression() if self.accept("name", "if") else None
        if self.accept("name", "recursive"):
            self.fail("a recursive loop is not supported")
        self.done()
        self.loops += 1
        inner = self.body(("else", "endfor"))
        self.loops -= 1
        otherwise = []
        if self.tokens[0].text == "else":
            self.done()
            otherwise = self.body(("endfor",))
        self.done()
        return ("for", line, target, iterable, only, inner, otherwise)

    def set_(self, line: int) -> Any:
        if self.at + 1 < len(self.tokens) and self.tokens[self.at + 1].text == ".":
            name = self.word("a name")
            self.expect("op", ".")
            target = ("attribute", name, self.word("a name"))
        else:
            target = self.targets()
        if self.accept("op", "="):
            value = self.tuple_()
            self.done()
            return ("set", line, target, value)
        filters = self.filters(("captured", line))
        self.done()
        inner = self.body(("endset",))
        self.done()
        return ("capture", line, target, inner, filters)

    def macro(self, line: int) -> Any:
        name = self.word("the macro's name")
        self.expect("op", "(")
        parameters: list[Any] = []
        while not self.accept("op", ")"):
            if parameters:
                self.expect("op", ",")
            parameter = self.word("a parameter")
            parameters.append((parameter, self.expression() if self.accept("op", "=") else None))
        self.done()
        loops, self.loops = self.loops, 0
        inner = self.body(("endmacro",))
        self.loops = loops
        self.done()
        return ("macro", line, name, parameters, inner)

    def targets(self) -> Any:
        bracketed = self.accept("op", "(")
        names = [self.word("a name")]
        several = False
        while self.accept("op", ","):
            several = True
            names.append(self.word("a name"))
        if bracketed:
            self.expect("op", ")")
        return ("names", names) if several else ("name", names[0])

    # --- tokens

    def done(self) -> None:
        if self.at < len(self.tokens):
            self.fail(f"{self.tokens[self.at].text!r} is not expected here")

    def peek(self, kind: str, *texts: str) -> bool:
        if self.at >= len(self.tokens):
            return False
        token = self.tokens[self.at]
        return token.kind == kind and (not texts or token.text in texts)

    def accept(self, kind: str, *texts: str) -> str | None:
        if self.peek(kind, *texts):
            self.at += 1
            return self.tokens[self.at - 1].text
        return None

    def expect(self, kind: str, text: str) -> None:
        if not self.accept(kind, text):
            self.fail(f"{text!r} is expected" + (f", not {self.tokens[self.at].text!r}" if self.at < len(self.tokens) else ""))

    def word(self, what: str) -> str:
        return self.accept("name") or self.fail(f"{what} is expected")

    # --- expressions, from the loosest to the tightest binding

    def tuple_(self, condition: bool = True) -> Any:
        parse = self.expression if condition else self.or_
        first = parse()
        if not self.peek("op", ","):
            return first
        items = [first]
        while self.accept("op", ","):
            if self.at >= len(self.tokens) or self.peek("op", ")"):
                break
            items.append(parse())
        return ("tuple", self.line, items)

    def expression(self) -> Any:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            self.fail("the expression is nested too deeply")
        value = self.or_()
        while self.accept("name", "if"):
            condition = self.or_()
            otherwise = self.expression() if self.accept("name", "else") else None
            value = ("choice", self.line, condition, value, otherwise)
        self.depth -= 1
        return value

    def or_(self) -> Any:
        left = self.and_()
        while self.accept("name", "or"):
            left = ("or", self.line, left, self.and_())
        return left

    def and_(self) -> Any:
        left = self.not_()
        while self.accept("name", "and"):
            left = ("and", self.line, left, self.not_())
        return left

    def not_(self) -> Any:
        count = 0
        while self.accept("name", "not"):
            count += 1
        value = self.compare()
        for _ in range(min(count, 2 + count % 2)):
            value = ("not", self.line, value)
        return value

    def compare(self) -> Any:
        left = self.binary(0)
        links: list[Any] = []
        while True:
            op = self.accept("op", "==", "!=", "<", "<=", ">", ">=") or self.accept("name", "in")
            if not op and self.peek("name", "not") and self.at + 1 < len(self.tokens) and self.tokens[self.at + 1].text == "in":
                self.at += 2
                op = "not in"
            if not op:
                return ("compare", self.line, left, links) if links else left
            links.append((op, self.binary(0)))

    _LEVELS = (("+", "-"), ("~",), ("*", "/", "//", "%"), ("**",))

    def binary(self, level: int) -> Any:
        if level == len(self._LEVELS):
            return self.unary(True)
        left = self.binary(level + 1)
        while op := self.accept("op", *self._LEVELS[level]):
            left = ("binary", self.line, op, left, self.binary(level + 1))
        return left

    def unary(self, with_filters: bool) -> Any:
        sign = self.accept("op", "-", "+")
        if sign:
            self.depth += 1
            if self.depth > _MAX_DEPTH:
                self.fail("the expression is nested too deeply")
            value = ("sign", self.line, sign, self.unary(False))
            self.depth -= 1
        else:
            value = self.primary()
        value = self.postfix(value)
        return self.filters(value) if with_filters else value

    def primary(self) -> Any:
        if self.at >= len(self.tokens):
            self.fail("the expression ends too early")
        kind, text, line = self.tokens[self.at]
        self.at += 1
        if kind == "name":
            constants = {"true": True, "True": True, "false": False, "False": False, "none": None, "None": None}
            return ("constant", line, constants[text]) if text in constants else ("variable", line, text)
        if kind == "string":
            parts = [text]
            while more := self.accept("string"):
                parts.append(more)
            return ("constant", line, "".join(map(self.unquoted, parts)))
        if kind in ("int", "float"):
            if len(text) > 300:
                self.fail("a number of this length")
            return ("constant", line, int(text.replace("_", "")) if kind == "int" else float(text))
        if text == "(":
            value = ("tuple", line, []) if self.peek("op", ")") else self.tuple_()
            self.expect("op", ")")
            return value
        if text == "[":
            return ("list", line, self.items_until("]"))
        if text == "{":
            return self.dictionary(line)
        self.at -= 1
        return self.fail(f"{text!r} is not expected here")

    def unquoted(self, text: str) -> str:
        try:
            return text[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape")
        except UnicodeDecodeError:
            self.fail(f"the escapes in {text[:40]} are not readable")

    def items_until(self, closing: str) -> list[Any]:
        items: list[Any] = []
        while not self.accept("op", closing):
            if items:
                self.expect("op", ",")
                if self.accept("op", closing):
                    break
            items.append(self.expression())
        return items

    def dictionary(self, line: int) -> Any:
        pairs: list[Any] = []
        while not self.accept("op", "}"):
            if pairs:
                self.expect("op", ",")
                if self.accept("op", "}"):
                    break
            key = self.expression()
            self.expect("op", ":")
            pairs.append((key, self.expression()))
        return ("dict", line, pairs)

    def postfix(self, value: Any) -> Any:
        while True:
            if self.accept("op", "."):
                number = self.accept("int")
                value = (
                    ("item", self.line, value, ("constant", self.line, int(number)))
                    if number
                    else ("attribute", self.line, value, self.word("a name"))
                )
            elif self.accept("op", "["):
                value = ("item", self.line, value, self.subscript())
            elif self.peek("op", "("):
                value = ("call", self.line, value, *self.arguments())
            else:
                return value

    def subscript(self) -> Any:
        parts: list[Any] = [None]
        colons = 0
        while not self.accept("op", "]"):
            if self.accept("op", ":"):
                colons += 1
                parts.append(None)
            elif parts[-1] is None:
                parts[-1] = self.expression()
            else:
                self.fail("']' is expected")
        if colons > 2 or (not colons and parts[0] is None):
            self.fail("this subscript is not supported")
        return ("slice", self.line, *(parts + [None, None])[:3]) if colons else parts[0]

    def arguments(self) -> tuple[list[Any], list[Any]]:
        """Positional and keyword arguments of "(…)"."""
        positional: list[Any] = []
        named: list[Any] = []
        self.expect("op", "(")
        while not self.accept("op", ")"):
            if positional or named:
                self.expect("op", ",")
                if self.accept("op", ")"):
                    break
            if self.peek("name") and self.at + 1 < len(self.tokens) and self.tokens[self.at + 1].text == "=":
                name = self.word("a name")
                self.at += 1
                named.append((name, self.expression()))
            elif named:
                self.fail("a positional argument after a named one")
            else:
                positional.append(self.expression())
        return positional, named

    def filters(self, value: Any) -> Any:
        while True:
            if self.accept("op", "|"):
                name = self.word("a filter")
                value = ("filter", self.line, name, value, *(self.arguments() if self.peek("op", "(") else ([], [])))
            elif self.accept("name", "is"):
                value = self.test(value)
            elif self.peek("op", "("):
                value = ("call", self.line, value, *self.arguments())
            else:
                return value

    def test(self, value: Any) -> Any:
        negated = bool(self.accept("name", "not"))
        name = self.word("a test")
        positional: list[Any] = []
        named: list[Any] = []
        if self.peek("op", "("):
            positional, named = self.arguments()
        elif (
            (self.peek("name") and not self.peek("name", "else", "or", "and", "is", "if", "in", "not"))
            or self.peek("string")
            or self.peek("int")
            or self.peek("op", "[")
        ):
            positional = [self.postfix(self.primary())]
        result = ("test", self.line, name, value, positional, named)
        return ("not", self.line, result) if negated else result
