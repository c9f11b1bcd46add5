r"""Laws that hold for every input: symmetry, reflexivity, the eighteen rewrites, exact arithmetic, threads."""

import random
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.verify import equivalent, grade, parse

INTEGERS = st.integers(-999, 9999)
RATIONALS = st.fractions(max_denominator=60).filter(lambda f: abs(f) < 500)


def latex(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


@st.composite
def arithmetic(draw, depth=3):
    """A LaTeX expression of rational operations and its exact value."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        value = Fraction(draw(st.integers(1, 40)), draw(st.sampled_from([1, 1, 2, 3, 5, 8])))
        return latex(value), value
    (a, x), (b, y) = draw(arithmetic(depth=depth - 1)), draw(arithmetic(depth=depth - 1))
    operation = draw(st.sampled_from(["+", "-", "*", "/", "^"]))
    if operation == "+":
        return f"{a}+\\left({b}\\right)", x + y
    if operation == "-":
        return f"{a} - ({b})", x - y
    if operation == "*":
        return f"({a})\\cdot({b})", x * y
    if operation == "/" and y:
        return f"\\frac{{{a}}}{{{b}}}", x / y
    return f"\\left({a}\\right)^{{2}}", x * x


ATOMS = st.sampled_from(["x", "y", "n", "2", "3", "7", r"\pi", "e", "i", r"\sqrt{2}", r"\sqrt{3}", r"\frac{1}{2}", "0.25", "10"])
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: f"({p[0]}+{p[1]})"),
        st.tuples(inner, inner).map(lambda p: f"({p[0]}) \\cdot ({p[1]})"),
        st.tuples(inner, inner).map(lambda p: f"\\frac{{{p[0]}}}{{{p[1]}}}"),
        inner.map(lambda a: f"\\sqrt{{{a}}}"),
        inner.map(lambda a: f"({a})^{{2}}"),
        inner.map(lambda a: f"-({a})"),
        inner.map(lambda a: f"\\sin({a})"),
    ),
    max_leaves=6,
)
ANSWERS = st.one_of(
    EXPRESSIONS,
    st.lists(EXPRESSIONS, min_size=2, max_size=4).map(", ".join),
    st.lists(EXPRESSIONS, min_size=2, max_size=3).map(lambda items: f"({', '.join(items)})"),
    st.lists(EXPRESSIONS, min_size=1, max_size=3).map(lambda items: f"\\{{{', '.join(items)}\\}}"),
    st.tuples(EXPRESSIONS, st.sampled_from(["=", "<", r"\le", r"\ne"]), EXPRESSIONS).map(" ".join),
    st.tuples(INTEGERS, INTEGERS, st.sampled_from(["()", "[]", "[)", "(]"])).map(lambda t: f"{t[2][0]}{t[0]},{t[1]}{t[2][1]}"),
    st.text(alphabet="0123456789+-*/^_(){}[]\\,.=<>|!%xyie ", max_size=20),
)


@given(ANSWERS, ANSWERS)
@settings(max_examples=25)
def test_symmetry(a, b):
    forward, back = equivalent(a, b), equivalent(b, a)
    assert (forward.correct is True) == (back.correct is True)
    if forward.correct is not None and back.correct is not None:
        assert forward.reason == back.reason or {forward.reason, back.reason} <= {"undecided", "undecided_budget"}


@given(EXPRESSIONS)
@settings(max_examples=25)
def test_reflexivity_on_parsed_values(a):
    verdict = equivalent(a, a)
    if verdict.gold_value.kind in ("number", "expression") and "undef" not in str(verdict.gold_value.node):
        assert verdict.correct, a


@given(arithmetic())
@settings(max_examples=25)
def test_rational_arithmetic_is_exact(pair):
    text, value = pair
    assert equivalent(latex(value), text).correct
    assert equivalent(latex(value + Fraction(1, 10**12)), text).correct is False


def rewrites(value: Fraction):
    """The eighteen rewrites of the synthetic rows, each for the golds that it applies to."""
    gold = latex(value)
    n, d = abs(value.numerator), value.denominator
    sign = "-" if value < 0 else ""
    yield "dfrac", gold.replace("\\frac", "\\dfrac")
    yield "frac", gold
    yield "timesone", f"\\frac{{2\\left({gold}\\right)}}{{2}}"
    yield "plus", f"{latex(value - 7)}+7"
    yield "addzero", f"0+{gold}"
    yield "x=", f"x={gold}"
    yield "unit", f"{gold}\\text{{ cm}}"
    yield "leftright", f"\\left({gold}\\right)"
    yield "noleft", f"({gold})"
    yield "braces", f"\\{{{gold}\\}}"
    if d > 1:
        yield "slash", f"{sign}{n}/{d}"
        yield "unreduced", f"{sign}\\frac{{{4 * n}}}{{{4 * d}}}"
        if n > d:
            yield "mixed", f"{sign}{n // d}\\frac{{{n % d}}}{{{d}}}"
        if Fraction(10**6, d).denominator == 1:
            yield "decimal", f"{sign}{n * 10**6 // d // 10**6}.{n * 10**6 // d % 10**6:06d}"
    else:
        yield ".0", f"{gold}.0"
        yield "commas", f"{value.numerator:,}"
        yield "{,}", f"{value.numerator:,}".replace(",", "{,}")


@given(st.one_of(RATIONALS, st.integers(-(10**7), 10**7).map(Fraction)))
@settings(max_examples=25)
def test_the_rewrites_keep_the_verdict(value):
    gold = latex(value)
    for name, text in rewrites(value):
        assert equivalent(gold, text).correct, (name, gold, text)
        assert grade(gold, f"so \\boxed{{{text}}}.").correct, (name, gold, text)
        assert equivalent(latex(value + 1), text).correct is False, (name, gold, text)


@given(st.lists(INTEGERS, min_size=2, max_size=6, unique=True).filter(lambda x: not 100 <= abs(x[1]) <= 999 or True), st.randoms())
def test_a_list_may_be_permuted_and_nothing_else(members, shuffler):
    gold = ", ".join(map(str, members))
    shuffled = members[:]
    shuffler.shuffle(shuffled)
    assert equivalent(gold, ", ".join(map(str, shuffled))).correct
    assert equivalent(gold, "\\{" + ", ".join(map(str, shuffled)) + "\\}").correct
    assert equivalent(gold, ", ".join(map(str, [*shuffled, 10_001]))).correct is False
    assert equivalent(f"({gold})", f"({', '.join(map(str, shuffled))})").correct is (shuffled == members)


@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 6))
def test_polynomials(a, b, c, power):
    factored = f"(x-({a}))(x-({b}))(x-({c}))^{{{power}}}"
    expanded = f"(x^2+({-a - b})x+({a * b}))(x-({c}))^{{{power}}}"
    assert equivalent(factored, expanded).correct
    assert equivalent(factored, expanded + "+1").correct is False


@given(st.integers(-9, 9), st.integers(1, 9), st.integers(2, 30))
def test_surds(a, b, n):
    assert equivalent(f"({a}+{b}\\sqrt{{{n}}})^2", f"{a * a + n * b * b}+({2 * a * b})\\sqrt{{{n}}}").correct
    assert equivalent(f"\\sqrt{{{a * a + n * b * b}+{2 * abs(a) * b}\\sqrt{{{n}}}}}", f"{abs(a)}+{b}\\sqrt{{{n}}}").correct
    assert equivalent(f"{a}+{b}\\sqrt{{{n}}}", f"{a}+{b}\\sqrt{{{n + 1}}}").correct is False


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (r"\sin(x+y)", r"\sin x\cos y+\cos x\sin y"),
        (r"\cos 2x", r"1-2\sin^2 x"),
        (r"\tan x", r"\frac{\sin 2x}{1+\cos 2x}"),
        (r"\cos\frac{\pi}{5}", r"\frac{1+\sqrt{5}}{4}"),
        (r"\cos\frac{2\pi}{7}+\cos\frac{4\pi}{7}+\cos\frac{6\pi}{7}", r"-\frac{1}{2}"),
        (r"e^{x+y}", r"e^x e^y"),
        (r"\ln 12", r"2\ln 2+\ln 3"),
        (r"\log_2 3\cdot\log_3 2", "1"),
        (r"4^x", r"2^{2x}"),
        (r"\sqrt[3]{2+\sqrt5}+\sqrt[3]{2-\sqrt5}", "1"),
        (r"(1+i)^8", "16"),
        (r"\frac{n!}{(n-2)!}", "n^2-n"),
        (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
        (r"\sum_{k=1}^{10} k^2", "385"),
        (r"\arctan\frac{1}{\sqrt3}", r"30^\circ"),
    ],
)
def test_identities(a, b):
    assert equivalent(a, b).reason == "equal"
    assert equivalent(a, f"{b}+10^{{-20}}").correct is False


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("x(x-1)(x-2)(x-3)", "0"),
        ("|x|", "x"),
        (r"\sqrt{x^2}", "x"),
        ("x+10^{-30}", "x"),
        (r"e^{\pi\sqrt{163}}", "640320^3+744"),
        (r"\left(\frac{\ln(640320^3+744)}{\pi}\right)^2", "163"),
        (r"x^{1000000}+1", "x^{1000000}"),
        (r"x+2305843009213693951", "x"),
        (r"\lfloor\sqrt{n-1}\rfloor", r"\lfloor\sqrt{n-2}\rfloor"),
        ("2^{1000}", "2^{1000}+1"),
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
    ],
)
def test_near_misses_are_refuted(a, b):
    assert equivalent(a, b).correct is False


def test_threads_and_order_do_not_matter():
    pairs = [(a, b) for a in (r"\frac{1}{2}", r"\sqrt{8}", "(a+b)^2", "1,2", "x>3", r"e^{i\pi}") for b in
             ("0.5", r"2\sqrt2", "a^2+2ab+b^2", r"\{2,1\}", r"(3,\infty)", "-1")]  # fmt: skip
    expected = {pair: equivalent(*pair)[:2] + (equivalent(*pair).steps,) for pair in pairs}
    shuffled = pairs * 6
    random.Random(0).shuffle(shuffled)
    with ThreadPoolExecutor(8) as pool:
        for pair, verdict in zip(shuffled, pool.map(lambda pair: equivalent(*pair), shuffled), strict=True):
            assert (*verdict[:2], verdict.steps) == expected[pair]


@given(st.text(max_size=40))
def test_parse_never_fails_on_text(text):
    assert parse(text).kind
