r"""Expressions: a precedence parser from tokens to trees (and to values, for tuples, sets and matrices inside brackets).

Plus-minus signs are read with the signs that `signs` gives, so that the reader can run the parser once for each choice.
"""

from __future__ import annotations

from align.verify import _brackets as brackets
from align.verify import _names as names
from align.verify import _numerals as numerals
from align.verify import _operate as op
from align.verify import _tree as tree
from align.verify._budget import MAX_DEPTH, OverBudget, Unreadable, spend
from align.verify._lex import Token
from align.verify._tree import Node
from align.verify._units import BARE as UNIT_WORDS
from align.verify._values import Value, number_set

TYPE_CHECKING = False  # typing is not imported: it is a tenth of the import
if TYPE_CHECKING:
    from align.verify._values import Read

_OPENING = frozenset(["frac", "sqrt", "pi", "infty", "binom", "angle", "triangle", "{", "lfloor", "lceil", "sum", "prod", "langle"])
_END = Token("end", "", False)
_SET_OPERATORS = {"cup": "union", "cap": "cap", "setminus": "minus"}


class Grammar:
    """One pass over the tokens of one item."""

    def __init__(self, tokens: list[Token], signs: tuple[int, ...] = ()):
        self.tokens = list(tokens)  # a number may be split in place: \\frac12
        self.at = 0
        self.depth = 0
        self.bars = 0
        self.signs = signs
        self.plus_minus = 0
        self.apply_at = -1  # a bracket here holds arguments: f(x) = …
        self.factor = 1  # of a word of number after the expression: million
        self.index = ""  # the index of a sum, which may be named i

    # Tokens.

    def peek(self, ahead: int = 0) -> Token:
        at = self.at + ahead
        return self.tokens[at] if at < len(self.tokens) else _END

    def is_op(self, *values: str) -> bool:
        token = self.peek()
        return token.kind == "op" and token.value in values

    def is_cmd(self, *values: str) -> bool:
        token = self.peek()
        return token.kind == "cmd" and token.value in values

    def expect(self, kind: str, value: str) -> None:
        token = self.peek()
        if token.kind != kind or token.value != value:
            raise Unreadable(f"{value!r} expected, {token.value!r} found")
        self.at += 1

    def enter(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise OverBudget

    # Sums, products, set operations.

    def expression(self, binding: int = 0) -> Read:
        """An expression whose operators bind tighter than `binding`: 5 sets, 10 sums, 20 products."""
        left = self.prefix(binding)
        while True:
            token = self.peek()
            kind, value = token.kind, token.value
            if (kind == "op" and value in "+-") or (kind == "cmd" and value in ("pm", "mp")):
                if binding >= 10:
                    return left
                sign = self.sign()
                right = self.expression(10)
                left = op.plus(left, right if sign > 0 else op.negative(right))
            elif (kind == "op" and value in ("*", "/", "**")) or (kind == "cmd" and value == "mod"):
                if binding >= 20:
                    return left
                self.at += 1
                if value == "**":
                    left = self.raise_to(left)
                    continue
                left = op.combine(value, left, self.expression(20))
            elif kind == "cmd" and value in _SET_OPERATORS:
                if binding >= 5:
                    return left
                self.at += 1
                left = Value("set", items=(op.as_value(left), op.as_value(self.expression(5))), info=_SET_OPERATORS[value])
            elif kind == "cmd" and value in ("over", "choose") and not binding:
                self.at += 1
                right = self.expression()
                left = op.combine("/", left, right) if value == "over" else tree.binomial(op.plain(left), op.plain(right))
            elif self.starts_factor():
                if binding >= 20:
                    return left
                left = op.times(left, self.postfix(self.primary()))
            else:
                return left

    def sign(self) -> int:
        """Consumes + - ± ∓."""
        token = self.peek()
        self.at += 1
        if token.value == "+":
            return 1
        if token.value == "-":
            return -1
        if token.value == "mp" and self.plus_minus:
            return -self.signs[self.plus_minus - 1] if self.plus_minus <= len(self.signs) else -1
        index = self.plus_minus
        self.plus_minus += 1
        sign = self.signs[index] if index < len(self.signs) else 1
        return sign if token.value == "pm" else -sign

    def prefix(self, binding: int) -> Read:
        sign, signed = 1, False
        while self.is_op("+", "-") or self.is_cmd("pm", "mp"):
            sign *= self.sign()
            signed = True
        if not signed:
            return self.postfix(self.primary())
        operand = self.expression(max(binding, 15))
        return operand if sign > 0 else op.negative(operand)

    def starts_factor(self) -> bool:
        """Whether the next token begins a factor that multiplies what stands before it."""
        token = self.peek()
        kind, value = token.kind, token.value
        if kind in ("num", "sym"):
            return True
        if kind == "op":
            return value == "(" or value == "[" or (value == "|" and not self.bars) or value == "{"
        if kind == "word":
            return not self.ends_item(token)
        if kind == "cmd":
            return (
                value in _OPENING or value in names.FUNCTIONS or value in names.GREEK or value in names.STYLES or value.startswith("begin:")
            )
        return False

    def ends_item(self, token: Token) -> bool:
        """A word that is no factor: and, or, in, a unit, a thing that is counted (5 apples)."""
        value = token.value
        return value in names.JOINERS or value in names.BREAKS or value in UNIT_WORDS or names.counted(value, token.spaced)

    # Factors.

    def postfix(self, left: Read) -> Read:
        """Powers, subscripts, factorials, percent and degree signs."""
        count = 0
        while True:
            token = self.peek()
            if token.kind != "op":
                return left
            value = token.value
            if value == "^":
                self.at += 1
                left = self.raise_to(left)
            elif value == "!":
                self.at += 1
                if self.is_op("=") and not self.peek().spaced:
                    self.at -= 1
                    return left
                left = numerals.factorial(self, left)
            elif value == "%":
                self.at += 1
                left = ("f", "pct", op.node_of(left))
            elif value == "'" and op.node_or_none(left):
                self.at += 1
                left = op.renamed(left, "'")
            elif value == "_":
                self.at += 1
                left = self.subscript(left)
            else:
                return left
            count += 1
            if count > 24:
                raise OverBudget

    def raise_to(self, left: Read) -> Read:
        if self.is_cmd("circ"):
            self.at += 1
            return self.degrees(left)
        if self.is_op("*", "'") or self.is_cmd("prime", "star", "dagger"):
            self.at += 1
            return op.renamed(left, "'")
        if self.is_op("{") and self.peek(2).value == "}":
            inner = self.peek(1)
            if inner.value in ("circ", "prime", "star", "dagger", "'", "*"):
                self.at += 3
                return self.degrees(left) if inner.value == "circ" else op.renamed(left, "'")
        return op.raised(left, self.exponent())

    def degrees(self, left: Read) -> Read:
        """An angle, or with C or F at the end a temperature, whose letter is left to the reader of units."""
        if self.peek().kind == "sym" and self.peek().value in ("C", "F") and self.peek(1).kind == "end":
            self.tokens[self.at] = Token("text", self.peek().value, False)
        return ("f", "deg", op.node_of(left))

    def exponent(self) -> Read:
        """The exponent of ^ or **: a group, or one factor with its sign, and what it is raised to itself."""
        self.enter()
        sign = 1
        while self.is_op("-", "+"):
            sign = sign if self.peek().value == "+" else -sign
            self.at += 1
        token = self.peek()
        if token.kind == "num":
            self.at += 1
            value = tree.literal(token.value)
        else:
            value = op.plain(self.primary())
        if self.is_op("^"):
            self.at += 1
            value = op.raised(value, self.exponent())
        self.depth -= 1
        return value if sign > 0 else tree.neg(value)

    def subscript(self, left: Read) -> Read:
        """What stands after _: part of a name, or the base of the number in front (204_5), whose digits are the token before."""
        digits = self.tokens[self.at - 2].value
        text = self.subscript_text()
        node = op.node_or_none(left)
        if node is None:
            raise Unreadable("a subscript without a letter")
        return op.in_base(digits, text) if node[0] in "qd" else op.renamed(node, "_" + text)

    def subscript_text(self) -> str:
        """The subscript as text."""
        if not self.is_op("{"):
            token = self.peek()
            self.at += 1
            if token.kind in ("end", "op"):
                raise Unreadable("an empty subscript")
            return token.value
        self.at += 1
        depth, parts = 1, []
        while depth:
            token = self.peek()
            if token.kind == "end":
                raise Unreadable("a subscript that is not closed")
            self.at += 1
            depth += token.kind == "op" and token.value == "{"
            depth -= token.kind == "op" and token.value == "}"
            if depth and token.value not in "{}":
                parts.append(token.value)
        return "".join(parts)

    def primary(self) -> Read:
        spend(12)
        token = self.peek()
        kind, value = token.kind, token.value
        if kind == "num":
            return numerals.number(self)
        if kind == "sym":
            self.at += 1
            return self.letter(value)
        if kind == "word":
            return self.word(value)
        if kind == "op":
            return brackets.bracket(self, value)
        if kind == "cmd":
            return self.command(value)
        if kind == "text" and (len(value) == 1 or value in UNIT_WORDS):  # \\frac{\\text{km}}{\\text{h}}
            self.at += 1
            return ("s", value)
        raise Unreadable("an operand is missing" if kind == "end" else f"words inside a formula: {value}")

    def letter(self, name: str) -> Read:
        if name == "e":
            return tree.E if not self.is_op("_") else ("s", "e")
        if name == "i" and self.index != "i":
            return tree.I if not self.is_op("_") else ("s", "i")
        return self.applied(name)

    def applied(self, name: str) -> Read:
        """A symbol, or f(…) for the letters that are usually functions."""
        if name in names.APPLIED and self.is_op("^") and [self.peek(k).value for k in range(1, 6)] == ["{", "-", "1", "}", "("]:
            self.at += 5  # the inverse function
            name += "^{-1}"
        while self.is_op("_", "'") or (self.is_op("^") and self.peek(1).value in ("prime", "'")):
            mark = self.peek().value
            self.at += 1
            if mark == "_":
                name += "_" + self.subscript_text()
            else:
                self.at += mark == "^"
                name += "'"
        applied = self.at == self.apply_at or name.rstrip("'").split("_")[0].removesuffix("^{-1}") in names.APPLIED
        if (applied and self.is_op("(")) or (
            name.isupper() and self.is_op("(") and self.peek(1).kind == "sym" and self.peek(2).value in (")", ",")
        ):
            arguments = brackets.bracket(self, "(")
            items = arguments.items if isinstance(arguments, Value) and arguments.kind in ("tuple", "interval") else (arguments,)
            return ("f", "@" + name, *(op.node_of(item) for item in items))
        return ("s", name)

    def word(self, value: str) -> Read:
        """A run of letters outside of \\text: a function, a constant, a Greek letter, else a product of letters."""
        if value in names.FUNCTIONS or value in names.WORD_FUNCTIONS:
            self.at += 1
            return self.function(names.WORD_FUNCTIONS.get(value, value))
        self.at += 1
        if len(value) == 2 and value[0] == "d" and self.is_op("/") and self.peek(1).kind == "word" and self.peek(1).value[0] == "d":
            self.at += 2
            return ("s", f"{value}/{self.tokens[self.at - 1].value}")
        if self.is_op("_") and value.isupper() and set(value) <= set("ABCDEF"):  # FF_16
            saved = self.at
            self.at += 1
            if self.subscript_text() in ("16", "sixteen"):
                return op.in_base(value, "16")
            self.at = saved
        if value in ("pi", "Pi"):
            return tree.PI
        if value.lower() in ("infinity", "inf", "infty", "oo"):
            return tree.INF
        if value in names.GREEK:
            return self.applied(value)
        if value.lower() in ("nan", "none", "null", "true", "false", "undefined"):
            raise Unreadable(f"the word {value}")
        if len(value) > 6:
            raise Unreadable(f"the word {value}")
        self.tokens[self.at - 1 : self.at] = [Token("sym", letter, False) for letter in value]
        self.at -= 1
        return self.primary()

    def command(self, value: str) -> Read:
        self.at += 1
        if value == "frac":
            quotient = numerals.derivative(self) if self.peek(1).value[:1] in ("d", "p", "D") else None
            return quotient if quotient else op.combine("/", self.group(), self.group())
        if value in names.FUNCTIONS or value in names.WORD_FUNCTIONS:
            return self.function(names.WORD_FUNCTIONS.get(value, value))
        if value == "pi":
            return tree.PI
        if value == "infty":
            return tree.INF
        if value in names.GREEK:
            return self.applied(value)
        if value == "binom":
            return tree.binomial(op.plain(self.group()), op.plain(self.group()))
        if value in ("lfloor", "lceil"):
            self.enter()
            inner = op.plain(self.expression())
            self.expect("cmd", "rfloor" if value == "lfloor" else "rceil")
            self.depth -= 1
            return tree.call("floor" if value == "lfloor" else "ceil", inner)
        if value == "{":
            return brackets.braced_set(self)
        if value == "langle":
            return brackets.sequence(self, "(", "cmd", "rangle", ")")
        if value == "emptyset":
            return Value("set", info="finite")
        if value in names.STYLES:
            return self.styled(value)
        if value in ("angle", "triangle", "measuredangle"):
            return self.named(value)
        if value in ("R", "Z", "N", "Q", "C"):
            return number_set(value)
        if value.startswith("begin:") and value[6:] in names.MATRICES:
            return brackets.matrix(self, value[6:])
        if value in ("sum", "prod"):
            return brackets.series(self, value)
        raise Unreadable(f"unknown command \\{value}")

    def named(self, value: str) -> Read:
        """\\angle ABC: a name."""
        while self.peek().kind in ("sym", "word"):
            value += " " + self.peek().value
            self.at += 1
        return ("s", value)

    def styled(self, value: str) -> Read:
        text = self.subscript_text()
        if value == "mathbb" and text in names.NUMBER_SETS:
            return number_set(text)
        return self.applied(f"{value}({text})")

    def group(self) -> Read:
        """The argument of a command: a braced group, or a single token."""
        if self.is_op("{"):
            self.at += 1
            self.enter()
            inner = self.expression()
            self.expect("op", "}")
            self.depth -= 1
            return inner
        return self.single()

    def single(self) -> Read:
        token = self.peek()
        if token.kind == "num" and len(token.value) > 1 and token.value.isdigit():
            self.tokens[self.at : self.at + 1] = [Token("num", token.value[0], False), Token("num", token.value[1:], False)]
            token = self.peek()
        if token.kind == "num":
            self.at += 1
            return tree.literal(token.value)
        if token.kind == "sym":
            self.at += 1
            return self.letter(token.value) if not self.is_op("(") else ("s", token.value)
        if token.kind == "op" and token.value not in "([|":
            raise Unreadable(f"{token.value!r} where an argument should be")
        return self.primary()

    def function(self, name: str) -> Read:
        """A named function with its base, its power and its argument."""
        if name == "sqrt" or name == "cbrt":
            return self.square_root(3 if name == "cbrt" else 2)
        base = exponent = None
        for _ in range(2):
            if self.is_op("_") and base is None:
                self.at += 1
                base = op.plain(self.group())
            elif self.is_op("^") and exponent is None:
                self.at += 1
                exponent = self.exponent()
        self.enter()
        if self.is_op("(") or (name in ("max", "min", "gcd", "lcm") and (self.is_op("{") or self.is_cmd("{"))):
            argument = self.primary()
        elif self.braced_bracket():  # \ln{(25)}^2 is the square of the logarithm
            argument = self.group()
        else:
            argument = self.juxtaposed()
        self.depth -= 1
        if (
            isinstance(argument, Value)
            and argument.kind in ("tuple", "interval", "set", "list")
            and name in ("max", "min", "gcd", "lcm", "log")
        ):
            arguments = [op.node_of(item) for item in argument.items]
            if name == "log" and len(arguments) == 2:
                arguments, base = arguments[:1], arguments[1]
        else:
            arguments = [op.plain(argument)]
        if exponent == tree.MINUS_ONE and name in names.INVERSE:
            name, exponent = names.INVERSE[name], None
        result = op.applied(name, arguments, base)
        return tree.power(result, exponent) if exponent is not None else result

    def braced_bracket(self) -> bool:
        """Whether a braced group follows that holds one bracket and nothing else."""
        if not self.is_op("{") or self.peek(1).value != "(":
            return False
        depth, ahead = 0, 1
        while True:
            token = self.peek(ahead)
            if token.kind == "end":
                return False
            depth += (token.value == "(") - (token.value == ")")
            ahead += 1
            if not depth:
                spend(ahead >> 2)
                return self.peek(ahead).value == "}"

    def juxtaposed(self) -> Read:
        """The argument of a function without brackets: factors up to an operator or another function."""
        if self.is_op("-", "+"):
            negative = self.peek().value == "-"
            self.at += 1
            inner = self.juxtaposed()
            return op.negative(inner) if negative else inner
        left = self.postfix(self.primary())
        while self.starts_factor() and not (self.peek().kind in ("cmd", "word") and self.peek().value in names.FUNCTIONS - {"sqrt"}):
            if self.is_op("(", "["):
                break
            left = op.times(left, self.postfix(self.primary()))
        return left

    def square_root(self, index: int) -> Read:
        degree: Node = ("q", index)
        if self.is_op("["):
            self.at += 1
            degree = op.plain(self.expression())
            self.expect("op", "]")
        if self.is_op("("):
            inner = op.plain(self.primary())
        elif self.is_cmd("{"):
            raise Unreadable("a set under a root")
        else:
            inner = op.plain(self.group()) if self.is_op("{") else op.plain(self.root_operand())
        return tree.power(inner, tree.power(degree, tree.MINUS_ONE))

    def root_operand(self) -> Read:
        """What follows a root sign without braces: \\sqrt2 takes one digit; √12 takes the number."""
        token = self.peek()
        if token.kind == "num" and token.spaced and token.value.isdigit():
            self.at += 1
            return tree.literal(token.value)
        return self.single()
