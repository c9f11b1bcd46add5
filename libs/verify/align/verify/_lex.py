r"""From an answer's text to tokens: Unicode signs become LaTeX, spacing and styling vanish, \text{…} becomes one token.

Every pattern here is a plain alternation without nested repetition, so the scan is linear.
"""

import re

from align.verify._budget import MAX_TOKENS, OverBudget, Unreadable, spend
from align.verify._names import FUNCTIONS
from align.verify._units import is_unit

# Signs that models write in place of LaTeX.
_SIGNS = {
    "−": "-", "–": "-", "—": "-", "﹣": "-", "-": "-", "＋": "+", "×": r"\times ", "·": r"\cdot ", "∙": r"\cdot ", "⋅": r"\cdot ",
    "÷": r"\div ", "∕": "/", "⁄": "/", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
    "∞": r"\infty ", "π": r"\pi ", "√": r"\sqrt ", "∛": r"\sqrt[3]", "±": r"\pm ", "∓": r"\mp ", "°": r"^\circ ", "∪": r"\cup ",
    "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ", "∖": r"\setminus ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "′": "'", "’": "'",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ", "φ": r"\varphi ", "ω": r"\omega ",
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅕": r"\frac{1}{5}",
    "⅖": r"\frac{2}{5}", "⅗": r"\frac{3}{5}", "⅘": r"\frac{4}{5}", "⅙": r"\frac{1}{6}", "⅚": r"\frac{5}{6}", "⅛": r"\frac{1}{8}",
    "⅜": r"\frac{3}{8}", "⅝": r"\frac{5}{8}", "⅞": r"\frac{7}{8}", "²": "^{2}", "³": "^{3}", "¹": "^{1}", "⁴": "^{4}", "⁻": "^-",
    "₀": "_{0}", "₁": "_{1}", "₂": "_{2}", "₃": "_{3}", "₄": "_{4}", "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ",
    "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2002": " ", "\u2003": " ",
    "，": ",", "（": "(", "）": ")", "：": ":", "；": ";", "％": "%", "＝": "=",
    "€": r"\text{euro}", "£": r"\text{sterling}", "¥": r"\text{yen}", "₹": r"\text{rupee}", "¢": r"\text{ cent}", "、": ",",
    "∶": ":", "∣": r"\mid ", "…": r"\ldots ", "“": '"', "”": '"',
}  # fmt: skip
_TRANSLATE = str.maketrans(_SIGNS)

# Commands that only style, space or size.
_NOTHING = frozenset(
    [
        "left",
        "right",
        "big",
        "Big",
        "bigg",
        "Bigg",
        "bigl",
        "bigr",
        "Bigl",
        "Bigr",
        "biggl",
        "biggr",
        "Biggl",
        "Biggr",
        "displaystyle",
        "textstyle",
        "scriptstyle",
        "limits",
        "nolimits",
        "bf",
        "it",
        "rm",
        "sf",
        "tt",
        "boldsymbol",
        "mathstrut",
        "strut",
        "hfill",
        "noindent",
        "ensuremath",
        "large",
        "Large",
        "LARGE",
        "huge",
        "Huge",
        "small",
        "normalsize",
    ]
)
_SPACES = frozenset(["quad", "qquad", ",", ";", ":", "!", " ", ">", "enspace", "thinspace", "hspace", "\n", "space", "nobreakspace"])
_TEXT = frozenset(
    [
        "text",
        "textbf",
        "textit",
        "textrm",
        "textnormal",
        "textsf",
        "texttt",
        "mbox",
        "hbox",
        "textup",
        "textmd",
        "emph",
        "mathtt",
        "mathsf",
        "mathit",
        "mathrm",
        "mathbf",
        "bm",
        "bold",
        "operatorname",
        "operatornamewithlimits",
        "mathop",
        "mathcal",
        "mathscr",
        "boldsymbol",
        "underline",
        "boxed",
        "fbox",
    ]
)
_RENAME = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "sfrac": "frac", "nicefrac": "frac", "dbinom": "binom", "tbinom": "binom",
    "leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge", "lt": "<", "gt": ">", "neq": "ne", "times": "*", "cdot": "*",
    "ast": "*", "div": "/", "varnothing": "emptyset", "lbrace": "{", "rbrace": "}", "lbrack": "[", "rbrack": "]", "colon": ":",
    "mid": "|", "vert": "|", "lvert": "|", "rvert": "|", "backslash": "setminus", "arcsin": "asin", "arccos": "acos", "arctan": "atan",
    "thickapprox": "approx", "simeq": "approx", "sim": "approx", "doteq": "=", "equiv": "=", "dots": "ldots", "cdots": "ldots",
    "dotsc": "ldots", "wedge": "and", "land": "and", "lor": "or", "vee": "or", "infin": "infty", "degree": "circ", "textdegree": "circ",
    "lparen": "(", "rparen": ")", "dotsb": "ldots", "cosec": "csc", "tg": "tan", "ctg": "cot", "varphi": "phi",
    "varepsilon": "epsilon", "Reals": "R", "reals": "R", "textdollar": "$", "percent": "%", "And": "and", "to": "rightarrow",
    "iff": "Leftrightarrow", "bmod": "mod", "textbar": "|", "overbrace": "overline", "bar": "overline",
}  # fmt: skip
_FORMULAS = ("hr", "mg")  # units that are also products: 2\\pi hr, 2mg
_AMBIGUOUS = frozenset([*_FORMULAS, "x", "in"])
_SINGLE = {"<", ">", "*", "/", "{", "}", "[", "]", ":", "|", "=", "(", ")", "%", "$"}

_TOKEN = re.compile(
    r"\\(?P<cmd>[A-Za-z]+)\*?[ \t\n]*"
    r"|\\(?P<esc>[^A-Za-z])"
    r"|(?P<num>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
    r"|(?P<word>[A-Za-z]+)"
    r"|(?P<space>\s+|~)"
    r"|(?P<op>>=|<=|!=|\*\*|==|:=|.)",
    re.S,
)
_EXPONENT = re.compile(r"[eE]([-+]?[0-9]{1,12})(?![0-9A-Za-z.])")
_GROUPS = re.compile(r"[0-9]{1,3}(?:(,|\{,\}|,\\! ?|\\,|\\;|\\ )[0-9]{3})(?:\1[0-9]{3})*(?:\.[0-9]+)?")
_GROUPS_SPACE = re.compile(r"[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?")
_RUN = re.compile(r"[0-9]+(?:(?:,|\{,\}|,\\! ?|\\,|\\;|\\ | )[0-9]+){0,40}(?:\.[0-9]+)?")
_BRACE = re.compile(r"\\.|[{}]", re.S)
_FUNCTIONS = frozenset(["lcm", "gcd", "sin", "cos", "tan", "log", "ln", "arcsin", "arccos", "arctan", "lg", "max"])  # min is a minute
_ONE_UNIT = r"[A-Za-z]{1,12}(?:\^\{?-?[0-9]\}?)?"
_UNIT = re.compile(rf"{_ONE_UNIT}(?:(?: */ *| *\\cdot *| ){_ONE_UNIT}){{1,3}}|[A-Za-z]{{1,12}}\^\{{?-?[0-9]\}}?")


class Token:
    """One token: kind "num", "sym" (a letter or a named letter), "word", "cmd", "text" or "op"; `spaced`: white space stood before it."""

    __slots__ = ("kind", "spaced", "value")

    def __init__(self, kind: str, value: str, spaced: bool):
        self.kind = kind
        self.value = value
        self.spaced = spaced

    def __repr__(self) -> str:
        return f"{self.kind}:{self.value}"


def clean(text: str) -> str:
    """The text with Unicode signs as LaTeX and the delimiters of math environments gone."""
    text = text.strip()
    if "\\\\" in text and "\\begin" not in text:
        text = text.replace("\\\\", "\\")  # doubled by an escape too many
    if not text.isascii():
        text = text.translate(_TRANSLATE)
    if "..." in text:
        text = text.replace("...", "\\ldots ")
    if "$" in text:
        text = text.replace("\\$", "\\textdollar ").replace("$", " ")
    if "\\(" in text or "\\[" in text or "\\)" in text or "\\]" in text:
        text = text.replace("\\(", " ").replace("\\)", " ").replace("\\[", " ").replace("\\]", " ")
    return text.strip().rstrip("\\。")


def balanced(text: str, at: int) -> int:
    """The index of the brace that closes the one at `at`. Raises: Unreadable."""
    depth = 0
    for found in _BRACE.finditer(text, at):
        token = found.group()
        if token == "{":
            depth += 1
        elif token == "}":
            depth -= 1
            if not depth:
                spend((found.start() - at) >> 4)
                return found.start()
    raise Unreadable("unbalanced braces")


def lex(text: str) -> list[Token]:
    """Tokens of a cleaned text. Raises: Unreadable, OverBudget."""
    tokens: list[Token] = []
    at, end, spaced, depth = 0, len(text), False, 0
    match = _TOKEN.match
    while at < end:
        spend(3)
        if len(tokens) > MAX_TOKENS:
            raise OverBudget
        found = match(text, at)
        if found is None or found.lastgroup is None:  # a dot matches whatever no other part does
            raise Unreadable("nothing")
        kind = found.lastgroup
        value = found.group(kind)
        at = found.end()
        if kind == "space":
            spaced = True
            continue
        if kind == "num":
            value, at = _number(text, found.start(), value, at, depth)
            tokens.append(Token("num", value, spaced))
        elif kind == "word":
            if value in _AMBIGUOUS:
                _word(text, value, at, tokens, spaced)
            else:
                tokens.append(Token("sym" if len(value) == 1 else "word", value, spaced))
        elif kind == "op":
            if value in "([":
                depth += 1
            elif value in ")]":
                depth -= 1
            if not value.isascii() or value in "`#@\x00":
                raise Unreadable(f"a sign without meaning here: {value!r}")
            tokens.append(Token("op", {"==": "=", ":=": "="}.get(value, value), spaced))
        elif kind == "esc":
            if value in _SPACES:
                spaced = True
                continue
            if value == "\\":
                tokens.append(Token("cmd", "\\", spaced))
            elif value in "{}%|$&#_":
                if value == "{":
                    depth += 1
                elif value == "}":
                    depth -= 1
                tokens.append(Token("cmd" if value in "{}" else "op", value, spaced))
            else:
                raise Unreadable(f"unknown command \\{value}")
        else:
            at = _command(text, value, at, tokens, spaced)
            depth += value == "langle"
            depth -= value == "rangle"
        spaced = False
    return tokens


def _word(text: str, value: str, at: int, tokens: list[Token], spaced: bool) -> None:
    """A run of letters up to `at`; \\pi hr^2 and 2mg are products of letters, 1.2 x 10^4 of numbers, and in^2 is square inches."""
    before = tokens[-1] if tokens else None
    if value in _FORMULAS and before and (before.kind in ("sym", "cmd") or (value == "mg" and before.kind == "num" and not spaced)):
        tokens.extend(Token("sym", letter, False) for letter in value)
    elif value == "x" and spaced and before and before.kind == "num" and text.startswith(" 10^", at):
        tokens.append(Token("op", "*", True))
    elif value == "in" and text[at : at + 1] == "^":
        tokens.append(Token("text", value, spaced))
    else:
        tokens.append(Token("sym" if len(value) == 1 else "word", value, spaced))


def _command(text: str, name: str, at: int, tokens: list[Token], spaced: bool) -> int:
    """Appends the tokens of the command `name`, whose arguments begin at `at`; returns where to go on."""
    if name in _NOTHING:
        if name in ("left", "right") and text[at : at + 1] == ".":
            at += 1
        return at
    if name in ("color", "textcolor", "colorbox", "tag"):
        return balanced(text, at) + 1 if text[at : at + 1] == "{" else at
    if name in _SPACES:
        return text.find("}", at) + 1 or at if name == "hspace" else at
    if name in _TEXT:
        if text[at : at + 1] != "{":
            return at
        close = balanced(text, at)
        body = text[at + 1 : close]
        _text_tokens(name, body, tokens, spaced)
        return close + 1
    if name == "begin" or name == "end":
        if text[at : at + 1] != "{":
            raise Unreadable("an environment without a name")
        close = balanced(text, at)
        tokens.append(Token("cmd", f"{name}:{text[at + 1 : close].rstrip('*')}", spaced))
        at = close + 1
        if tokens[-1].value == "begin:array" and text[at : at + 1] == "{":
            at = balanced(text, at) + 1
        return at
    if name.startswith(("quad", "qquad")):  # \\quadx: the blank is missing
        rest = name.partition("quad")[2]
        tokens.append(Token("sym" if len(rest) == 1 else "word", rest, True))
        return at
    name = _RENAME.get(name, name)
    tokens.append(Token("op" if name in _SINGLE and name not in "{}" else "cmd", name, spaced))
    return at


def _text_tokens(name: str, body: str, tokens: list[Token], spaced: bool) -> None:
    r"""\text{…} as one token, as a letter, or, when it holds mathematics, as the tokens of that."""
    bare = body.replace("~", " ").replace("\\ ", " ").replace("\\,", " ").strip().strip("{}").strip()
    if not bare:
        return
    if bare in _FUNCTIONS or (name == "operatorname" and bare in FUNCTIONS):
        tokens.append(Token("word", bare, spaced))
    elif _UNIT.fullmatch(bare) and is_unit(bare):
        tokens.append(Token("text", bare.replace("\\cdot", " "), spaced))
    elif len(bare) == 1 and bare.isalpha() and not name.startswith("text") and name not in ("mbox", "hbox"):
        tokens.append(Token("sym", bare, spaced))
    elif any(c in "0123456789\\^_{" for c in bare) or name in ("boxed", "fbox") or all(not c.isalpha() for c in bare):
        tokens.extend(lex(clean(bare)))
    else:
        tokens.append(Token("text", bare, spaced or body[:1] == " "))


def _number(text: str, start: int, value: str, at: int, depth: int) -> tuple[str, int]:
    """A number with its thousands groups or its exponent; inside brackets a comma separates."""
    following = text[at : at + 1]
    if following in ("e", "E"):
        exponent = _EXPONENT.match(text, at)
        if exponent:
            return f"{value}e{exponent.group(1)}", exponent.end()
    if following in (",", "{", "\\", " ") and "." not in value:
        run = _RUN.match(text, start)
        if run and run.end() > at:
            groups = _GROUPS.fullmatch(text, start, run.end())
            if groups and not (depth and groups.group(1) == ","):
                joined = text[start : run.end()].replace(groups.group(1), "")
                return joined.replace(" ", ""), run.end()
            if not groups and _GROUPS_SPACE.fullmatch(text, start, run.end()):
                return text[start : run.end()].replace(" ", ""), run.end()
    return value, at
