"""What the tests of limits share: the bound on CPU time, and a generator of LaTeX strings."""
# ruff: noqa: E501 (literals that are long)

import random
import time

from align.verify import equivalent

PIECES = [
    r"\frac",
    r"\frac{",
    r"}{",
    r"}",
    r"{",
    r"\sqrt",
    r"\sqrt[3]{",
    r"\boxed{",
    r"\text{",
    r"\text{and}",
    r"\text{or}",
    r"\pm",
    r"\mp",
    r"\cdot",
    r"\times",
    r"\div",
    r"\pi",
    r"\infty",
    r"\left(",
    r"\right)",
    r"\left[",
    r"\right]",
    r"\{",
    r"\}",
    r"\le",
    r"\ge",
    r"\ne",
    r"<",
    r">",
    r"=",
    r"\in",
    r"\cup",
    r"\cap",
    r"\setminus",
    r"\emptyset",
    r"\mathbb{R}",
    r"\begin{pmatrix}",
    r"\end{pmatrix}",
    r"&",
    r"\\",
    r"\sum_{k=1}^{",
    r"\prod",
    r"\binom{",
    r"\log_",
    r"\ln",
    r"\sin",
    r"\cos^{-1}",
    r"\tan",
    r"\arcsin",
    r"\exp",
    r"e",
    r"i",
    r"x",
    r"y",
    r"n",
    r"f(x)",
    r"a_",
    r"_{",
    r"^",
    r"^{",
    r"^2",
    r"!",
    r"%",
    r"\%",
    r"^\circ",
    r"'",
    r"|",
    r":",
    r";",
    r",",
    r".",
    r"-",
    r"+",
    r"*",
    r"/",
    r"(",
    r")",
    r"[",
    r"]",
    r"0",
    r"1",
    r"2",
    r"3",
    r"7",
    r"9",
    r"10",
    r"12",
    r"100",
    r"999",
    r"1,000",
    r"0.5",
    r".25",
    r"1e9",
    r"0.\overline{3}",
    r"\ldots",
    r"\lfloor",
    r"\rfloor",
    r"\lceil",
    r"\rceil",
    r"\mod",
    r"\gcd",
    r"\max",
    r"\overline{",
    r"\vec{",
    r"\mathrm{",
    r"cm",
    r"km",
    r"\$",
    r"$",
    r"####",
    r"\quad",
    r"\,",
    r"\!",
    r"\unknown",
    r"\mid",
    r"and",
    r"or",
]


LEAVES = [
    r"x",
    r"y",
    r"n",
    r"a_1",
    r"\pi",
    r"e",
    r"i",
    r"0",
    r"1",
    r"2",
    r"3",
    r"7",
    r"12",
    r"100",
    r"0.5",
    r".25",
    r"1e9",
    r"10^{40}",
    r"\infty",
    r"\sqrt2",
    r"1\frac{1}{2}",
    r"0.\overline{3}",
    r"52_8",
    r"30^\circ",
    r"5\%",
    r"\theta",
    r"f(2)",
]
SHAPES = (
    "{0}+{1}", "{0}-{1}", "{0}\\cdot {1}", "{0}{1}", "\\frac{{{0}}}{{{1}}}", "({0})", "\\sqrt{{{0}}}", "\\sqrt[3]{{{0}}}", "{0}^{{{1}}}", "({0})^2",
    "({0})^{{-1}}", "\\sin({0})", "\\cos {0}", "\\tan^{{-1}} {0}", "\\ln({0})", "\\log_{{{0}}}({1})", "e^{{{0}}}", "2^{{{0}}}", "|{0}|", "{0}!", "-{0}",
    "\\lfloor {0}\\rfloor", "\\binom{{{0}}}{{{1}}}", "{0} \\pm {1}", "\\max({0},{1})", "\\sum_{{k=1}}^{{5}} {0}", "\\gcd({0},{1})", "{0} \\bmod {1}",
)  # fmt: skip
FORMS = (
    "{0}", "{0}", "{0}, {1}", "({0}, {1})", "[{0}, {1})", "\\{{{0}, {1}\\}}", "{0} = {1}", "x = {0}", "{0} < {1}", "{0} \\le {1} < {2}", "x \\ne {0}",
    "({0},{1}) \\cup [{1},{2}]", "{0} : {1}", "\\{{x \\mid x > {0}\\}}", "x \\in [{0}, {1}]", "{0} \\text{{ or }} {1}", "{0} \\text{{ cm}}", "\\${0}",
    "\\begin{{pmatrix}} {0} & {1} \\\\ {2} & 1 \\end{{pmatrix}}", "\\text{{{0}}}", "{0} \\approx {1}", "x < {0} \\text{{ or }} x \\ge {1}",
)  # fmt: skip


def expression(source: random.Random, depth: int) -> str:
    if depth == 0 or source.random() < 0.25:
        return source.choice(LEAVES)
    return source.choice(SHAPES).format(expression(source, depth - 1), expression(source, depth - 1))


def fuzzed(source: random.Random) -> str:
    """A LaTeX string: a random answer of the grammar, a real one with pieces cut and put in, or a soup of pieces."""
    draw = source.random()
    if draw < 0.6:
        return source.choice(FORMS).format(*(expression(source, source.randrange(4)) for _ in range(3)))
    if draw < 0.8:
        text = list(source.choice(REAL))
        for _ in range(source.randrange(1, 4)):
            at = source.randrange(len(text) + 1)
            text[at : at + source.randrange(2)] = [source.choice(PIECES)]
        return "".join(text)
    return source.choice(["", "", " "]).join(source.choice(PIECES) for _ in range(source.randrange(1, 24)))


REAL = (
    r"\frac{1}{2}", r"3\sqrt{13}", r"\left( 3, \frac{\pi}{2} \right)", r"x \in [-2,7]", r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}",
    r"1 \pm \sqrt{19}", r"(-\infty, 2) \cup (3, \infty)", r"52_8", r"10,\!080", r"\{1\pm\sqrt{5},-2\}", r"864 \mbox{ inches}^2", r"1\frac{4}{5}",
    r"y = -\frac{1}{2}x + \frac{3}{4}", r"e^{2\pi i/3}", r"\frac{(n-1)!}{k!} \frac{n}{(n-k)!}", r"\{x \mid 0<x<1\}", r"0.\overline{3}", r"7:32",
)  # fmt: skip


BOUND = 0.050  # seconds of CPU time
WORK = 0.0100  # seconds that `_work` takes on the machine the bound was set on, idle (2 cores, x86-64, Python 3.11)


def seconds(function, *arguments) -> float:
    start = time.process_time()
    function(*arguments)
    return time.process_time() - start


def _work() -> None:
    total = 0
    for k in range(100_000):
        total += k * k % 7


def within_bound(function, *arguments) -> bool:
    """Whether a call keeps the bound on the reference machine: the best of three, against the same of a known piece of work."""
    best = float("inf")
    for _ in range(3):
        best = min(best, seconds(function, *arguments))
        if best < BOUND:
            return True
    return best < BOUND * max(1.0, max(seconds(_work) for _ in range(3)) / WORK)


def run_fuzz(count: int, seed: int) -> tuple[float, str]:
    """Judges `count` fuzzed pairs; the longest CPU time of one in seconds, and its input. What exceeds the bound is tried again."""
    source, worst = random.Random(seed), (0.0, "")
    equivalent("x", "y")  # what is imported late
    for _ in range(count):
        previous, text = fuzzed(source), fuzzed(source)
        start = time.process_time()
        verdict = equivalent(previous, text)
        spent = time.process_time() - start
        assert verdict.reason != "error", (previous, text, verdict.value.info)
        assert spent < BOUND or within_bound(equivalent, previous, text), (previous, text)
        if spent > worst[0]:
            worst = (spent, f"{previous!r} {text!r}")
    return worst
