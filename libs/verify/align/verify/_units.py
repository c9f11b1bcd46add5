"""Units of measure: what is the same, what converts, what is in conflict."""

from __future__ import annotations

import re
from collections import namedtuple
from fractions import Fraction

from align.verify._budget import Unreadable


class Unit(namedtuple("Unit", "scale dimensions known words")):
    """A product of powers of base dimensions with a scale; `known` when every word of it was in the table."""

    __slots__ = ()
    scale: Fraction
    dimensions: tuple[tuple[str, int], ...]  # ((dimension, exponent), …), sorted
    known: bool
    words: str

    def __str__(self) -> str:
        return self.words


_TABLE: dict[str, tuple[str, Fraction]] = {}


def _define(dimension: str, entries: str) -> None:
    for entry in entries.split(";"):
        names, _, scale = entry.partition("=")
        for name in names.split():
            _TABLE[name] = (dimension, Fraction(scale.strip()))


_define(
    "length",
    "m meter metre=1;km kilometer kilometre=1000;cm centimeter centimetre=1/100;mm millimeter millimetre=1/1000;"
    "dm decimeter=1/10;nm nanometer=1/1000000000;in inch inche=127/5000;ft foot feet=381/1250;yd yard=1143/1250;mi mile=201168/125",
)
_define("mass", "g gram=1;kg kilogram=1000;mg milligram=1/1000;lb lbs pound=45359237/100000;oz ounce=45359237/1600000;ton tonne=1000000")
_define("time", "s sec second=1;min minute=60;h hr hour=3600;day=86400;week=604800;ms millisecond=1/1000;month=2629746;year yr=31556952")
_define(
    "volume", "L liter litre=1;mL ml milliliter=1/1000;gallon gal=473176473/125000000;quart=473176473/500000000;cup=473176473/2000000000"
)
_define("dollar", "dollar $ usd USD buck=1;cent=1/100")
_define("euro", "euro=1")
_define("sterling", "sterling=1;pence=1/100")
_define("yuan", "yuan rmb RMB=1")
_define("yen", "yen=1")
_define("rupee", "rupee Rs=1")
_define("angle", "deg degree=1")
_define("morning", "am=1")
_define("evening", "pm=1")
_define("percent", "percent pct=1")
_define("temperature", "celsius=1")
_define("fahrenheit", "fahrenheit=1")
_define("force", "N newton=1;kN=1000")
_define("energy", "J joule=1;kJ=1000;eV=1/6241509074460762608")
_define("power", "W watt=1;kW kilowatt=1000")
_define("pressure", "Pa pascal=1;kPa=1000;atm=101325")
_define("charge", "C coulomb=1")
_define("current", "A ampere amp=1")
_define("voltage", "V volt=1")
_define("frequency", "Hz hertz=1;kHz=1000;MHz=1000000")

_NEVER_BARE = ("am", "pm", "in", "day", "min", "ms", "gal")
BARE = frozenset(name for name in _TABLE if len(name) > 1 and name not in _NEVER_BARE) | {"mph", "kph", "miles", "hours"}
"""Words that name a unit even outside of \\text."""

_COMPOUND = {"mph": "mile per hour", "kph": "km per hour", "kmh": "km per hour", "mpg": "mile per gallon"}
_REFUSED = frozenset(
    ["or", "not", "is", "are", "was", "wrong", "incorrect", "maybe", "perhaps", "possibly", "else", "if", "unless", "but", "either"]
    + ["neither", "no", "never"]
)
_WORD = re.compile(r"[A-Za-z$]+|\^\{?-?[0-9]+\}?|/")
_IGNORED = frozenset(["unit", "units", "of", "the", "in", "a", "an", "total", "each", "about", "approximately", "roughly"])
MULTIPLIERS = {"hundred": 100, "thousand": 1_000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_LONG = frozenset(["square", "sq", "cubic", "cu"])


def _look_up(word: str) -> tuple[str, str, Fraction] | None:
    for form in (word, word.lower()):
        for name in (form, form[:-1] if form.endswith("s") and len(form) > 2 else form, form[:-2] if form.endswith("es") else form):
            if name in _TABLE:
                return (name, *_TABLE[name])
    return None


def unit(words: str) -> Unit | None:
    """The unit that a phrase names ("square cm", "miles per hour", "apples"), or None when it says nothing.

    Raises: Unreadable for words that take back or hedge the number before them.
    """
    if not _REFUSED.isdisjoint(words.lower().split()):
        raise Unreadable(f"the words {words!r:.60} after a number")
    words = _COMPOUND.get(words.strip().lower(), words)
    scale, known = Fraction(1), True
    exponents: dict[str, int] = {}
    sign, pending, last = 1, 1, None
    found_words = _WORD.findall(words.replace(".", ""))
    for at, word in enumerate(found_words):
        if word == "in" and found_words[at + 1 : at + 2] in ([], ["^2"], ["^{2}"], ["^3"], ["^{3}"], ["/"]):
            word = "inch"  # in a sentence it is none: 5 in total
        if word in ("/", "per"):
            sign = -1
        elif word[0] == "^":
            if last:
                if len(word) > 5:
                    raise Unreadable(f"the exponent {word:.20} of a unit")
                extra = int(word.strip("^{}")) - 1
                exponents[last[0]] += sign * extra
                scale *= last[1] ** (sign * extra)
        elif word.lower() in _LONG:
            pending = 3 if word.lower().startswith("cu") else 2
        elif word in ("squared", "cubed") and last:
            extra = 1 if word == "squared" else 2
            exponents[last[0]] += extra
            scale *= last[1] ** extra
        elif word.lower() in _IGNORED:
            continue
        else:
            found = _look_up(word)
            if found:
                _, dimension, factor = found
            else:
                dimension, factor, known = "#" + word.lower().rstrip("s"), Fraction(1), False
            exponents[dimension] = exponents.get(dimension, 0) + sign * pending
            scale *= factor ** (sign * pending)
            last, pending = (dimension, factor), 1
    litres = exponents.pop("volume", 0)
    if litres:  # a volume is a length cubed
        exponents["length"] = exponents.get("length", 0) + 3 * litres
        scale *= Fraction(1, 1000) ** litres
    if not exponents:
        return None
    return Unit(scale, tuple(sorted((d, e) for d, e in exponents.items() if e)), known, words.strip())


def of_letters(powers: list[tuple[str, int]]) -> Unit | None:
    """The unit that a product of powers of letters names, when all are units; else None."""
    if not powers or not all(name in _TABLE for name, _ in powers):
        return None
    above = [f"{name}^{n}" for name, n in powers if n > 0]
    below = [f"{name}^{-n}" for name, n in powers if n < 0]
    return unit(" ".join([*above, "/", *below]))


def modulus(number: str) -> Unit:
    """ "(mod 7)" after a number: like a unit it may be left out, and two that differ are in conflict."""
    return Unit(Fraction(1), ((f"modulo {number}", 1),), True, f"modulo {number}")


def is_unit(words: str) -> bool:
    """Whether every word of a phrase names a unit."""
    try:
        found = unit(words)
    except Unreadable:
        return False
    return found is not None and found.known


DEGREE = unit("degree")
_CELSIUS, _FAHRENHEIT = unit("celsius"), unit("fahrenheit")
TEMPERATURES = dict.fromkeys(["C", "Celsius", "celsius"], _CELSIUS) | dict.fromkeys(["F", "Fahrenheit", "fahrenheit"], _FAHRENHEIT)
_DEGREES = frozenset(["angle", "temperature", "fahrenheit"])
PERCENT = unit("percent")


def conflict(a: Unit, b: Unit) -> bool:
    """Whether two stated units cannot both be right: both are known and measure different things."""
    if DEGREE in (a, b) and {name for name, _ in (*a.dimensions, *b.dimensions)} <= _DEGREES:
        return False  # 20° and 20 °C
    return a.known and b.known and a.dimensions != b.dimensions
