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


def _words(text: str) -> list[str]:
    return text.split()


def _define(dimension: str, entries: str) -> None:
    for entry in entries.split(";"):
        names, _, scale = entry.partition("=")
        for name in names.split():
            _TABLE[name] = (dimension, Fraction(scale.strip()))


_define(
    "length",
    "m meter metre=1;km kilometer kilometre=1000;cm centimeter centimetre=1/100;mm millimeter millimetre=1/1000;"
    "dm decimeter=1/10;nm nanometer=1/1000000000;um micrometer micron=1/1000000;"
    "in inch inche=127/5000;ft foot feet=381/1250;yd yard=1143/1250;mi mile=201168/125",
)
_define("mass", "g gram=1;kg kilogram=1000;mg milligram=1/1000;lb lbs pound=45359237/100000;oz ounce=45359237/1600000;ton tonne t=1000000")
_define(
    "time",
    "s sec second=1;min minute=60;h hr hour=3600;day=86400;week=604800;ms millisecond=1/1000;month=2629746;year yr=31556952;"
    "decade=315569520;century centurie=3155695200",
)
_define(
    "volume",
    "L liter litre l=1;mL ml milliliter=1/1000;gallon gal=473176473/125000000;quart=473176473/500000000;pint=473176473/1000000000;"
    "cup=473176473/2000000000;tablespoon tbsp=473176473/32000000000;teaspoon tsp=473176473/96000000000",
)
_define("area", "acre=316160658/78125;ha hectare=10000")
_define("dollar", "dollar $ usd USD buck=1;cent penny pennie=1/100;nickel=1/20;dime=1/10")
_define("euro", "euro EUR=1")
_define("sterling", "sterling GBP=1;pence=1/100")
_define("yuan", "yuan rmb RMB CNY=1")
_define("yen", "yen JPY=1")
_define("rupee", "rupee Rs INR=1")
_define("angle", "deg degree=1")
_define("radian", "rad radian=1")
_define("morning", "am=1")
_define("evening", "pm=1")
_define("percent", "percent pct=1")
_define("temperature", "celsius=1")
_define("kelvin", "K kelvin=1")
_define("fahrenheit", "fahrenheit F=1")
_define("force", "N newton=1;kN=1000")
_define("energy", "J joule=1;kJ kilojoule=1000;MJ=1000000;eV=1/6241509074460762608;cal calorie=523/125;kcal kilocalorie=4184;kWh=3600000")
_define("power", "W watt=1;kW kilowatt=1000;mW milliwatt=1/1000;MW megawatt=1000000;GW gigawatt=1000000000")
_define("pressure", "Pa pascal=1;kPa=1000;atm=101325;bar=100000")
_define("charge", "C coulomb=1")
_define("current", "A ampere amp=1;mA milliampere=1/1000")
_define("voltage", "V volt=1;mV millivolt=1/1000;kV kilovolt=1000")
_define("resistance", "ohm=1;kilohm=1000")
_define("frequency", "Hz hertz=1;kHz=1000;MHz=1000000;GHz=1000000000;rpm=1/60")
_define("amount", "mol mole=1;mmol=1/1000")
_define("field", "T tesla=1")
_define("level", "dB decibel=1")

_NEVER_BARE = _words("am pm in day min ms gal um ha rad cal bar mol mW MW MJ GW mA mV kV dB")
BARE = frozenset(name for name in _TABLE if len(name) > 1 and name not in _NEVER_BARE) | {"mph", "kph", "miles", "hours"}
"""Words that name a unit even outside of \\text."""

_COMPOUND = {"mph": "mile per hour", "kph": "km per hour", "kmh": "km per hour", "mpg": "mile per gallon"}
_TEENS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
)
_TENS = _words("twenty thirty forty fifty sixty seventy eighty ninety")
NUMERALS = {word: k for k, word in enumerate(_TEENS)} | {word: 20 + 10 * k for k, word in enumerate(_TENS)}
_NUMERALS = frozenset(NUMERALS) | frozenset(_words("hundred hundreds thousand thousands million millions billion billions"))
# A phrase after a number may count things, and no more: a word of this list takes the number back, hedges it, bounds it, or reckons on
# with it.
_REFUSED = _NUMERALS | frozenset(
    _words(
        "or nor not is are was were be been wrong incorrect invalid false impossible undefined negative opposite rejected reject discarded "
        "discard extraneous excluded exclude excluding except maybe perhaps possibly probably might could cannot else if unless but either "
        "neither no never than least most below plus minus multiplied divided over factorial mod modulo base choose power root "
        "doubled tripled halved half quarter quadrillion gross mil tenth hundredth thousandth millionth"
    )
)
_SPOKEN = re.compile(r"[a-z]+(?:['-][a-z]+)*")
_WORD = re.compile(r"[A-Za-z$]+|\^\{?-?[0-9]+\}?|/")
_IGNORED = frozenset(["unit", "units", "of", "the", "in", "a", "an", "total", "each", "about", "approximately", "roughly"])
_MULTIPLIERS = {
    "hundred": 100, "thousand": 1_000, "million": 10**6, "mn": 10**6, "billion": 10**9, "bn": 10**9, "trillion": 10**12, "dozen": 12,
    "lakh": 10**5, "crore": 10**7,
}  # fmt: skip
_PARTS = {
    "halves": 2, "thirds": 3, "fourths": 4, "fifths": 5, "sixths": 6, "sevenths": 7, "eighths": 8, "ninths": 9, "tenths": 10,
    "twelfths": 12,
    "hundredths": 100, "thousandths": 1_000, "millionths": 10**6,
}  # fmt: skip
_LONG = frozenset(["square", "sq", "cubic", "cu"])


def _look_up(word: str) -> tuple[str, str, Fraction] | None:
    for form in (word, word.lower()) if len(word) > 1 else (word,):  # 5 M is not 5 m
        for name in (form, form[:-1] if form.endswith("s") and len(form) > 2 else form, form[:-2] if form.endswith("es") else form):
            if name in _TABLE:
                return (name, *_TABLE[name])
    return None


def multiplier(word: str) -> int | Fraction | None:
    """What a word of number after a number multiplies it by: 5 million, 3 tenths."""
    word = word.lower().strip(",.")
    if word in _PARTS:
        return Fraction(1, _PARTS[word])
    return _MULTIPLIERS.get(word.removesuffix("s"))


def _refused(words: str) -> bool:
    """Whether a phrase does more than name what was counted."""
    spoken = _SPOKEN.findall(words.lower())
    if not _REFUSED.isdisjoint(spoken) or any(word.endswith("n't") or _NUMERALS.issuperset(word.split("-")) for word in spoken):
        return True
    return any(pair in (["and", "a"], ["and", "an"]) for pair in (spoken[k : k + 2] for k in range(len(spoken) - 1)))


def unit(words: str) -> Unit | None:
    """`_unit`, remembered for the phrases met first: a data set has few."""
    if words in _KNOWN:
        return _KNOWN[words]
    found = _unit(words)
    if len(_KNOWN) < _MAX_KNOWN and len(words) < 100:
        _KNOWN[words] = found
    return found


_KNOWN: dict[str, Unit | None] = {}
_MAX_KNOWN = 2_000


def _unit(words: str) -> Unit | None:
    """The unit that a phrase names ("square cm", "miles per hour", "apples"), or None when it says nothing.

    Raises: Unreadable for words that take back, hedge or change the number before them, and for a letter that names no unit.
    """
    if _refused(words):
        raise Unreadable(f"the words {words!r:.60} after a number")
    words = _COMPOUND.get(words.strip().lower(), words)
    scale, known = Fraction(1), True
    exponents: dict[str, int] = {}
    sign, pending, last = 1, 1, None
    found_words = _WORD.findall(words.replace(".", "").replace("'s", ""))
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
        elif word in ("squared", "cubed"):
            if last is None:
                raise Unreadable(f"{word} after a number")
            extra = 1 if word == "squared" else 2
            exponents[last[0]] += extra
            scale *= last[1] ** extra
        elif word.lower() in _IGNORED and word != "A":
            continue
        else:
            found = _look_up(word)
            if found:
                _, dimension, factor = found
            elif len(word) == 1:  # 12k, 5M and 5x are no counts
                raise Unreadable(f"the letter {word} after a number")
            else:
                dimension, factor, known = "#" + word.lower().rstrip("s"), Fraction(1), False
            exponents[dimension] = exponents.get(dimension, 0) + sign * pending
            scale *= factor ** (sign * pending)
            last, pending = (dimension, factor), 1
    for name, power, metric in (("volume", 3, Fraction(1, 1000)), ("area", 2, Fraction(1))):
        count = exponents.pop(name, 0)
        if count:  # a volume is a length cubed
            exponents["length"] = exponents.get("length", 0) + power * count
            scale *= metric**count
    if len(exponents) > 1:  # rad/s is 1/s
        exponents.pop("radian", None)
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


def is_name(word: str) -> bool:
    """Whether a word is the name of one unit, or its plural."""
    return _look_up(word) is not None


def is_unit(words: str) -> bool:
    """Whether every word of a phrase names a unit."""
    try:
        found = unit(words)
    except Unreadable:
        return False
    return found is not None and found.known


DEGREE = unit("degree")
ANGLES = {DEGREE.dimensions, unit("radian").dimensions}
_CELSIUS, _FAHRENHEIT = unit("celsius"), unit("fahrenheit")
TEMPERATURES = dict.fromkeys(["C", "Celsius", "celsius"], _CELSIUS) | dict.fromkeys(["F", "Fahrenheit", "fahrenheit"], _FAHRENHEIT)
_DEGREES = frozenset(["angle", "temperature", "fahrenheit"])
PERCENT = unit("percent")


def conflict(a: Unit, b: Unit) -> bool:
    """Whether two stated units cannot both be right: both are known and measure different things."""
    if DEGREE in (a, b) and {name for name, _ in (*a.dimensions, *b.dimensions)} <= _DEGREES:
        return False  # 20° and 20 °C
    return (a.known and b.known and a.dimensions != b.dimensions) or _opposed(a.words, b.words)


_OPPOSITES = [
    frozenset(_words(pair))
    for pair in (
        "increase decrease", "increased decreased", "up down", "north south", "east west", "left right", "more less", "more fewer",
        "above below", "gain loss", "profit loss", "bc ad", "bce ce", "clockwise counterclockwise", "clockwise anticlockwise",
        "higher lower", "before after", "boys girls", "men women", "heads tails", "wins losses", "ahead behind", "deposit withdrawal",
        "faster slower", "longer shorter", "taller shorter", "heavier lighter", "older younger",
    )
]  # fmt: skip


def _opposed(a: str, b: str) -> bool:
    """Whether two phrases name opposite things: 20% increase is not 20% decrease."""
    if a == b:
        return False
    first, second = set(a.lower().split()), set(b.lower().split())
    return any(len(pair & first) == len(pair & second) == 1 and pair & first != pair & second for pair in _OPPOSITES)
