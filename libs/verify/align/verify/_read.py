"""From an answer to a value: lists, relations, units, words around the items that `_grammar` reads."""

from __future__ import annotations

import re
from fractions import Fraction

from align.verify import _names as names
from align.verify import _tree as tree
from align.verify import _units as units
from align.verify._budget import OverBudget, Unreadable, restart, spend
from align.verify._grammar import Grammar
from align.verify._lex import Token, balanced, clean, lex
from align.verify._operate import plain, plus, times
from align.verify._values import Value, number_set, of_node

TYPE_CHECKING = False  # typing is not imported: it is a tenth of the import
if TYPE_CHECKING:
    from align.verify._tree import Node
    from align.verify._values import Read

_INTEGER = re.compile(r"-?[0-9]{1,18}")
_CHOICE = re.compile(r"\(?\s*([A-Z])\s*\)?\s*\.?")
_CHOICES = re.compile(r"\(?[A-Z]\)?(?:\s*(?:,|;|&|,?\s*\band\b|,?\s*\bor\b)\s*\(?[A-Z]\)?){1,25}\.?")
_CHOICE_TEXT = re.compile(r"\(([A-Z])\)\s*(?![\s,;]|and\b|or\b)\S.*|([A-Z])[:.)]\s+\S.*", re.S)
_CHOICE_MATH = re.compile(r"(?:\(([A-J])\)|([A-J])[.)])\s+(?!\\(?:cup|cap|setminus|cdot|times|in|le|ge|to|or|and)\b)[0-9\\].*", re.S)
_OTHER_CHOICE = re.compile(r"\([A-Z]\)|\b[A-Z]\)|[,;] *[A-J]\Z|\b[A-Z]:\s")
_INFINITE = re.compile(r"(?:(positive|\+) ?|(negative|minus|-) ?)?infinity", re.I)
_LEAD = re.compile(r"(?:(?:the|final|correct|answer|option|choice|is|so|thus|therefore|approximately|about)\b[\s:]*)+", re.I)
_TIME = re.compile(r"([0-9]{1,2}):([0-9]{2})\s*(?:([ap])\.?\s*m\b\.?)?", re.I)
_STYLED = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|hbox|textsf|texttt|bf|rm|emph|operatorname)\s*(?=\{)")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'\-., ]*")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9 .,:'-]*")
_ORDINAL = re.compile(r"([0-9]{1,18})\s*\^?\s*(st|nd|rd|th)")
_NEGATIVE = re.compile(r"(?:\\text *\{ *)?(?:negative|minus)(?: *\} *| +)(?=[0-9.$]|\\[a-z]*(?:frac|sqrt|pi)(?![A-Za-z]))", re.I)
_MAX_SIGNS = 4
_MONEY = frozenset(
    ["$", "euro", "sterling", "yen", "rupee", "USD", "EUR", "GBP", "INR", "RMB", "Rs"]
)  # the first as the lexer writes signs
_MAX_CLEAN = 32_768  # characters of an answer whose signs are written as LaTeX
_ALL = re.compile(r"(?:the set of )?(?:all )?(?:the )?real numbers|all reals", re.I)
_EMPTY = re.compile(r"(?:there (?:are|is) )?no (?:real |such |integer )?(?:solutions?|values?|roots?)(?: exists?)?|none|empty set", re.I)


def condition(tokens: list[Token]) -> Value:
    """The condition of a set builder. Raises: Unreadable."""
    return _Reader(tokens).answer()


def parse(answer: str) -> Value:
    r"""The value that an answer denotes; kind "raw" when it cannot be read.

    Raises: OverBudget when it has too many tokens, too deep brackets or too large a constant.
    """
    before = restart()
    try:
        return read(answer)
    except RecursionError:
        raise OverBudget from None
    finally:
        restart(before)


def read(answer: str) -> Value:
    """`parse` as a part of a verdict, whose steps it spends."""
    answer = answer.strip()
    if _INTEGER.fullmatch(answer):
        return Value("number", ("q", int(answer)), source=answer)
    text = clean(answer)
    spend(len(text) >> 5)
    if len(text) > _MAX_CLEAN:
        raise OverBudget
    if text.startswith(("n", "N", "m", "M", "\\text")):
        text = _NEGATIVE.sub("-", text, count=1) if _NEGATIVE.match(text) else text
    source = plain_text(text)
    value = _special(source)
    if value is None:
        text = text.rstrip(". ") if not text.endswith(("..", "\\.")) else text
        try:
            value = _Reader(lex(text)).answer()
        except Unreadable as trouble:
            value = _words(text, source, trouble)
    value.source = source
    return value


def plain_text(text: str) -> str:
    r"""Text without styling commands, braces and repeated blanks: what texts are compared by."""
    if "\\" in text:
        text = _STYLED.sub("", text)
        for command in ("\\left", "\\right", "\\!", "\\,", "\\;", "\\ ", "\\quad", "~"):
            text = text.replace(command, " " if command != "\\!" else "")
    return " ".join(text.replace("{", " ").replace("}", " ").split()).strip(" .")


def _special(source: str) -> Value | None:
    """Answers that are no formula: a choice letter, a time of day, an empty set in words."""
    if len(source) > 400:
        return None
    lead = _LEAD.match(source)
    if lead and lead.end() < len(source):
        source = source[lead.end() :]
    choice = _CHOICE.fullmatch(source)
    if choice:
        return Value("choice", ("s", choice.group(1)), info=choice.group(1))
    if "(" in source and _CHOICES.fullmatch(source):
        letters = [c for c in source if c.isupper()]
        return Value(
            "list", items=tuple(Value("choice", ("s", letter), info=letter) for letter in letters), info="or" if "or" in source else ","
        )
    choice = _CHOICE_TEXT.fullmatch(source) if "\\" not in source and "=" not in source else _CHOICE_MATH.fullmatch(source)
    if choice and not _OTHER_CHOICE.search(source, choice.end(1 if choice.group(1) else 2) + 1):
        return Value("choice", ("s", choice.group(1) or choice.group(2)), info=choice.group(1) or choice.group(2))
    time = _TIME.fullmatch(source)
    if time and int(time.group(1)) < 25 and int(time.group(2)) < 60:
        return Value("time", info=(int(time.group(1)), int(time.group(2)), (time.group(3) or "").lower()))
    ordinal = _ORDINAL.fullmatch(source) if source.endswith(("th", "st", "nd", "rd")) else None
    if ordinal and ordinal.group(2) == _ending(ordinal.group(1)):
        return Value("number", ("q", int(ordinal.group(1))))
    infinite = _INFINITE.fullmatch(source)
    if infinite:
        return Value("number", tree.NEG_INF if infinite.group(2) else tree.INF)
    if _EMPTY.fullmatch(source):
        return Value("set", info="finite")
    if _ALL.fullmatch(source):
        return number_set("R")
    return None


def _ending(digits: str) -> str:
    """The ending of an ordinal: 21st, but 11th."""
    return "th" if digits[-2:-1] == "1" else {"1": "st", "2": "nd", "3": "rd"}.get(digits[-1], "th")


def _words(text: str, source: str, trouble: Unreadable) -> Value:
    """Text when it is words, else raw with the reason."""
    lead = _LEAD.match(source)
    if lead and lead.end() < len(source):
        source = source[lead.end() :]
    if _WORDS.fullmatch(source) and any(len(word) > 1 for word in source.split()):
        return Value("text", info=source.lower())
    if "\\text" in text or "\\mbox" in text:
        try:
            whole = balanced(text, text.index("{")) == len(text) - 1 and text.startswith(("\\text", "\\mbox"))
        except (Unreadable, ValueError):
            whole = False
        if whole:
            return Value("text", info=source.lower())
    if _PLAIN.fullmatch(source) and any(c.isalpha() for c in source) and len(source) < 80:
        return Value("text", info=source.lower())  # 4:30p, Fig. 3
    return Value("raw", info=str(trouble))


def _meaningful(word: str) -> bool:
    known = word in names.FUNCTIONS or word in names.WORD_FUNCTIONS or word in names.GREEK or word in units.BARE
    return known or word.lower() == "infinity" or units.is_name(word)


class _Reader:
    """Splits the tokens of an answer into items and reads each."""

    def __init__(self, tokens: list[Token]):
        self.tokens = tokens

    def answer(self) -> Value:
        tokens = self.tokens
        if not tokens:
            raise Unreadable("nothing")
        if sum(token.kind == "word" and len(token.value) > 3 and not _meaningful(token.value) for token in tokens) > 1:
            raise Unreadable("words")
        if all(token.kind in ("text", "word") or token.value in ",.-'" for token in tokens):
            raise_words = [token.value for token in tokens if token.kind != "op"]
            if not all(
                word in names.FUNCTIONS or word in names.GREEK or len(word) <= 3 or word.lower().startswith("inf") for word in raise_words
            ):
                raise Unreadable("words")
            if any(token.kind == "text" and token.value not in names.JOINERS for token in tokens):
                raise Unreadable("words")
        parts, joined = _split(tokens)
        items = [self.item(part) for part in parts]
        flat: list[Value] = []
        for item in items:
            flat.extend(item.items if item.kind == "list" and item.info == "pm" else (item,))
        if len(flat) == 1:
            return flat[0]
        if len(items) > 1 and items[0].name and all(item.kind == "number" and not item.name for item in flat[1:]):
            for item in flat[1:]:
                item.name = items[0].name  # n = 1, 2, 3
        return Value("list", items=tuple(flat), info="pm" if len(items) == 1 else joined)

    def item(self, tokens: list[Token]) -> Value:
        """One item; with ± signs the list of its values."""
        if not tokens:
            raise Unreadable("an item is missing")
        count = sum(token.kind == "cmd" and token.value in ("pm", "mp") for token in tokens)
        if not count:
            return _relation(Grammar(tokens))
        if count > _MAX_SIGNS:
            raise OverBudget
        first = Grammar(tokens, (1,) * count)
        values = [_relation(first)]
        for mask in range(1, 1 << first.plus_minus):
            signs = tuple(-1 if mask >> k & 1 else 1 for k in range(count))
            values.append(_relation(Grammar(tokens, signs)))
        if all(value.kind == "set" and value.info == "finite" for value in values):
            return Value("set", items=tuple(member for value in values for member in value.items), info="finite", name=values[0].name)
        return Value("list", items=tuple(values), info="pm")


def _split(tokens: list[Token]) -> tuple[list[list[Token]], str]:
    """Items between commas, semicolons, and, or, outside of brackets; and which word joins them ("and", "or", else ",")."""
    joined = ","
    parts: list[list[Token]] = [[]]
    depth = 0
    separated = True
    for token in tokens:
        kind, value = token.kind, token.value
        if kind in ("op", "cmd"):
            if value in ("(", "[", "{", "langle", "lfloor", "lceil") or value.startswith("begin:"):
                depth += 1
            elif value in (")", "]", "}", "rangle", "rfloor", "rceil") or value.startswith("end:"):
                depth -= 1
        joins = (kind in ("text", "word") and value.lower().strip(" ,") in ("and", "or", "")) or (kind == "cmd" and value in ("and", "or"))
        if depth == 0 and (joins or (kind == "op" and value in ",;")):
            word = value.lower().strip(" ,")
            joined = word if word in ("and", "or") else joined
            if not separated:
                parts.append([])
            separated = True
            continue
        if kind == "text" and separated and value.lower().rstrip(":") in names.LEADS:
            continue
        parts[-1].append(token)
        separated = False
    if not parts[-1]:
        parts.pop()
    if not parts or depth:
        raise Unreadable("brackets that do not match" if depth else "nothing")
    return parts, joined


def _relation(grammar: Grammar) -> Value:
    """An item: an expression with its unit, a chain of relations, a ratio, a membership."""
    currency = None
    while (sign := grammar.peek()).value in _MONEY and (
        sign.kind != "word" or grammar.peek(1).kind == "num" or grammar.peek(1).value == "$"
    ):
        currency = units.unit("dollar" if sign.value == "$" else sign.value)
        grammar.at += 1
    if grammar.is_op("=") or grammar.is_cmd("approx"):
        grammar.at += 1
    said = None
    if grammar.peek().kind == "text" and grammar.peek(1).value == "=":  # \\text{Area} = 5
        said = "\\" + "".join(c for c in grammar.peek().value.lower() if c.isalnum())
        grammar.at += 2
    grammar.apply_at = _application(grammar.tokens, grammar.at)
    start = grammar.at
    sides, signs = [grammar.expression()], []
    spans = [(start, grammar.at)]
    unit = _unit(grammar, sides[0])
    if unit and unit.known and not currency and grammar.peek().kind == "num":
        sides[0] = _compound(grammar, sides[0], unit)
    if currency and unit and len(unit.words) == 1 and unit.words.isalpha():
        raise Unreadable(f"the letter {unit.words} after an amount of money")  # $12K, $5m
    unit = currency or unit
    while True:
        token = grammar.peek()
        if token.kind == "end":
            break
        if token.kind in ("op", "cmd") and token.value in names.RELATIONS:
            grammar.at += 1
            sign = names.RELATIONS[token.value]
            if grammar.is_op("=") and sign in "<>":
                grammar.at += 1
                sign += "="
        elif token.kind == "op" and token.value == ":":
            grammar.at += 1
            sign = ":"
        elif token.kind == "cmd" and token.value == "pmod":
            grammar.at += 1
            unit = units.modulus(tree.text(plain(grammar.group())))
            continue
        else:
            raise Unreadable(f"{token.value!r} after the end of an expression")
        while grammar.is_op("$"):
            grammar.at += 1
            currency = units.unit("dollar")
        sides[-1] = _multiplied(grammar, sides[-1])
        signs.append(sign)
        start = grammar.at
        sides.append(grammar.expression())
        spans.append((start, grammar.at))
        unit = _unit(grammar, sides[-1]) or currency or unit
    sides[-1] = _multiplied(grammar, sides[-1])
    if not signs:
        value = _with_unit(sides[0], unit)
        value.name = value.name or said
        return value
    return _chain([_with_unit(side, None) for side in sides], signs, unit, _worked_out([grammar.tokens[a:b] for a, b in spans]))


def _worked_out(written: list[list[Token]]) -> bool:
    """Whether the last side of a chain is a number as it stands, and one before it something to reckon: 2 + 3 = 5, not 5 = 5."""
    shown = [[token.value for token in side if token.value not in "{}()[]"] for side in written]
    plain_last = all(token.kind == "num" or token.value in ("-", "frac", "/", "%", "{", "}") for token in written[-1])
    return plain_last and any(len(side) > 1 and side != shown[-1] and side[0] != "-" for side in shown[:-1])


def _multiplied(grammar: Grammar, side: Read) -> Read:
    """A side times the word of number that followed it."""
    factor, grammar.factor = grammar.factor, 1
    return side if factor == 1 else times(side, ("q", factor))


def _application(tokens: list[Token], start: int) -> int:
    """Where the bracket of "name(x, y) =" opens, when the tokens begin so; else -1."""
    for equals in range(start, min(len(tokens), start + 24)):
        if tokens[equals].value == "=" and tokens[equals].kind == "op":
            break
    else:
        return -1
    at = equals - 1
    if at <= start or tokens[at].value != ")":
        return -1
    while at > start and tokens[at].value != "(":
        at -= 1
        if tokens[at].kind not in ("sym", "num", "cmd") and tokens[at].value not in "(,":
            return -1
    before = tokens[start:at]
    named = before and (before[0].kind == "sym" or before[0].value in names.GREEK)
    return at if named and (len(before) == 1 or before[1].value in ("_", "'", "^")) else -1


def _compound(grammar: Grammar, side: Read, unit: units.Unit) -> Read:
    """2 hours 30 minutes, 5 ft 6 in: what stands in ever smaller units of one kind, in the first of them."""
    smallest = unit.scale
    while grammar.peek().kind == "num":
        more = grammar.expression(10)
        part = _unit(grammar, more)
        if part is None or part.dimensions != unit.dimensions or part.scale >= smallest or len(unit.dimensions) != 1:
            raise Unreadable("a second number")
        smallest = part.scale
        side = plus(side, times(more, ("q", tree.value_of(tree.rational(part.scale / unit.scale)))))
    return side


def _unit(grammar: Grammar, number: Read) -> Read:
    """The unit after an expression, or None."""
    words: list[str] = []
    while True:
        token = grammar.peek()
        if (token.kind == "text" and token.value.lower() not in names.JOINERS) or (
            token.kind == "word"
            and (token.value in units.BARE or names.counted(token.value, token.spaced) or (words and token.value not in names.RELATIONS))
        ):
            words.append(token.value)
        elif words and token.kind == "op" and token.value == "^" and grammar.peek(1).kind == "num":
            grammar.at += 1
            words.append("^" + grammar.peek().value)
        elif words and token.kind == "op" and token.value == "^" and grammar.peek(1).value == "{" and grammar.peek(2).kind == "num":
            words.append("^" + grammar.peek(2).value)
            grammar.at += 3
        elif words and token.kind == "op" and token.value == "/" and grammar.peek(1).kind in ("text", "word"):
            words.append("/")
        elif token.kind == "op" and token.value == "$":
            words.append("dollar")
        else:
            break
        grammar.at += 1
    words = " ".join(words).split()
    while words and (factor := units.multiplier(words[0])):  # 5 million is a number, not five of a thing
        grammar.factor *= factor
        del words[0]
    if len(words) == 1 and words[0][0] == "(" and number.__class__ is tuple:  # 5 (five)
        said = units.NUMERALS.get(words[0].strip("()").lower())
        if said is not None and said == tree.value_of(number):
            return None
    phrase = " ".join(words)
    if len(words) > 6:
        raise Unreadable("a sentence after the number")
    return units.unit(phrase) if phrase else None


def _with_unit(item: Read, unit: Read) -> Value:
    if item.__class__ is tuple:
        if item[0] == "f" and item[1] == "deg":
            item, unit = item[2], units.TEMPERATURES.get(unit.words if unit else "", units.DEGREE)
        elif item[0] == "f" and item[1] == "pct":
            item, unit = item[2], units.PERCENT._replace(words=f"percent {unit.words}") if unit else units.PERCENT
        return of_node(item, unit=unit)
    value: Value = item
    if unit and value.kind in ("number", "expression"):
        value.unit = unit
    return value


def _chain(sides: list[Value], signs: list[str], unit: Read, worked_out: bool) -> Value:
    """a = b = c, a < b, x in S, a : b."""
    if set(signs) == {":"}:
        return Value("ratio", items=tuple(sides))
    if ":" in signs:  # S:T = 7:32
        cut = next(k for k, sign in enumerate(signs) if sign != ":")
        if signs[cut] != "=" or any(sign != ":" for sign in signs[cut + 1 :]):
            raise Unreadable("a ratio in a chain")
        return Value("ratio", items=tuple(sides[cut + 1 :]), name=":")
    if signs[-1] == "in" and len(signs) == 1:
        if sides[1].kind not in ("set", "interval", "tuple", "list"):
            raise Unreadable("membership in something that is no set")
        if sides[1].kind == "tuple" and len(sides[1].items) == 2 and sides[1].info == "()":
            sides[1].kind = "interval"
        sides[1].name = _name(sides[0]) or "?"
        return sides[1]
    if any(sign in ("in", "notin") for sign in signs):
        raise Unreadable("a membership in a chain")
    if "~" in signs:
        cut = signs.index("~")
        if any(sign not in "=~" for sign in signs):
            raise Unreadable("approximately, in an inequality")
        kept = sides[: cut + 1] if sides[cut].kind == "number" else sides[: cut + 2]
        signs = ["="] * (len(kept) - 1)
        if not signs:
            kept[0].unit = kept[0].unit or unit
            return kept[0]
        sides = kept
    if set(signs) == {"="}:
        return _equation(sides, unit, worked_out)
    if any(side.kind not in ("number", "expression") for side in sides):
        raise Unreadable("an inequality between things that are no numbers")
    return Value("inequality", items=tuple(plain(side.node) for side in sides), info=tuple(signs))


def _equation(sides: list[Value], unit: Read, worked_out: bool = False) -> Value:
    """An equation; with a name on the left that does not recur on the right, an assignment of the right side."""
    last, name = sides[-1], _name(sides[0])
    nodes = tuple(side.node if side.node is not None else side for side in sides)
    if len(sides) > 2 or all(side.kind == "number" for side in sides):  # P = 3/4 = 75%: the sign counts where sides stand beside each other
        nodes = tuple(_without_percent(side) if side.node is not None else side for side in sides)
    if name and not _recurs(sides[0], last):
        value = Value(last.kind, last.node, last.items, last.info, name, last.unit or unit)
        value.sides = nodes
        return value
    # 2 + 3 = 5 and 3/4 = 0.75, not 5 = 5: forms of one value, if they agree
    if all(side.kind == "number" for side in sides) and (worked_out or len(set(nodes)) > 1):
        exact = next((side for side in sides if side.node[0] != "d"), last)
        value = Value("number", exact.node, unit=exact.unit or unit)
        value.sides = (tree.ZERO, *nodes)
        return value
    return Value("equation", items=nodes)


def _without_percent(side: Value) -> Node:
    return tree.mul(side.node, ("q", Fraction(1, 100))) if side.unit and side.unit.dimensions == units.PERCENT.dimensions else side.node


def _name(side: Value) -> str | None:
    """The name that an assignment gives: a letter, f(x), |AB|, (x, y)."""
    if side.kind == "tuple" or side.kind == "interval":
        inner = [name for name in map(_name, side.items) if name is not None]
        return "(" + ",".join(inner) + ")" if len(inner) == len(side.items) else None
    node = side.node
    if node is None:
        return None
    if node[0] == "s":
        return f"{node[1]}"
    if node[0] == "f" and node[1].startswith("@"):
        return f"{node[1][1:]}({','.join(map(tree.text, node[2:]))})"  # f(2) = 5 is not f(3) = 5, nor P(A) P(B)
    if node == tree.E or (node[0] == "c" and node[1] == "i"):
        return None
    if node[0] == "*" and all(part[0] == "s" and part[1].isupper() and len(part[1]) == 1 for part in node[1:]):
        return "".join(part[1] for part in node[1:])  # AB = 5
    if node[0] == "f" and node[1] == "abs" and tree.symbols(node):
        return "|" + "".join(sorted(tree.symbols(node))) + "|"
    return None


def _recurs(left: Value, right: Value) -> bool:
    if left.node is None or right.node is None:
        return False
    return (left.node[0] == "s" and left.node[1] in tree.symbols(right.node)) or tree.contains(right.node, left.node)


def normalise(text: str) -> str:
    """An answer without what carries no meaning: math delimiters, styling, sizes, spacing, Unicode variants of signs."""
    text = text.strip()
    return plain_text(clean(text)) if len(text) <= 16_384 else text
