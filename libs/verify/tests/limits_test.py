r"""Whatever comes in: no exception, no long run, no large memory; and an import that costs little."""
# ruff: noqa: E501 (literals that are long)

import os
import random
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from align.verify import VerifyError, equivalent, explain, grade, grade_batch, parse, summary

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


def run_fuzz(count: int, seed: int) -> tuple[float, str]:
    """Judges `count` fuzzed pairs; the longest CPU time of one in seconds, and its input."""
    source, worst = random.Random(seed), (0.0, "")
    for _ in range(count):
        previous, text = fuzzed(source), fuzzed(source)
        start = time.process_time()
        verdict = equivalent(previous, text)
        spent = time.process_time() - start
        assert verdict.reason != "error", (previous, text, verdict.value.info)
        if spent > worst[0]:
            worst = (spent, f"{previous!r} {text!r}")
    return worst


def test_fuzzed_pairs_never_raise():
    run_fuzz(1_500, 1)


@pytest.mark.slow
def test_twenty_thousand_fuzzed_pairs():
    run_fuzz(20_000, 2)


UNITS = [
    r"\boxed{", r"\boxed{1},", "{", "}", "\\", "$", "$1$ ", r"\(1\)", "#### 5\n", "final answer is 5. ", "Answer: ", "<think>", "</think>", "<|im_end|>", "1", "1 ",
    "1,", "- ", "(", "((1", r"\text{a}", r"\frac{1}{", r"\sqrt{", "^{", "2^", "9^9", "x!", "|", "abc ", "1e9", r"\pm ", "x=", "(1,2),", r"\cup ", "(x+1)",
    "x/", r"\sin ", r"\frac", "\n", "中", "\x00", r"\quadx",
]  # fmt: skip


@pytest.mark.parametrize("unit", UNITS[:6])
def test_a_megabyte_of_boxes_and_braces(unit):
    _megabyte(unit)


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS[6:])
def test_a_megabyte_of_anything(unit):
    _megabyte(unit)


def _megabyte(unit):
    text = (unit * (1_000_000 // len(unit) + 1))[:1_000_000]
    for given in (text, f"\\boxed{{{text}}}", f"x \\boxed{{5}} {text}"):
        # The bound is 50 ms (README); a loaded test machine gets ten times that, which no quadratic scan of a megabyte would meet.
        assert _seconds(grade, "5", given) < 0.5 or _seconds(grade, "5", given) < 0.5


@pytest.mark.parametrize("unit", UNITS)
def test_long_answers(unit):
    text = unit * (2_000 // len(unit))
    assert _seconds(equivalent, "x+1", text) < 0.5 or _seconds(equivalent, "x+1", text) < 0.5


def _seconds(function, *arguments) -> float:
    start = time.process_time()
    function(*arguments)
    return time.process_time() - start


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9}}", "7^{123456789}", "1000000!", "((10!)!)!", r"\binom{10^9}{5\cdot 10^8}", r"\prod_{k=1}^{10^9} k", "10^{-10^{9}}", "1e999999999",
        r"\sum_{k=1}^{10^{12}} k", r"1.0000000001^{10000000000000}", "(x+1)^{9999999}", r"e^{e^{e^{e}}}", r"e^{10^9+\frac{1}{2}}",
        r"e^{\frac{10^{40}}{3}}", r"\sin(10^{10^{10}})", "x^{x^{x^x}}",
        "+".join(f"\\sqrt{{{p}}}" for p in (2, 3, 5, 7, 11, 13, 17, 19, 23)), r"\lfloor 10^{5000} \pi \rfloor", r"\gcd(10^{10^{8}},3)",
        "(" * 60 + "1" + ")" * 60, r"\frac{1}{" * 60 + "2" + "}" * 60, r"\cos\frac{\pi}{9973}",
    ],
)  # fmt: skip
def test_what_would_blow_up_is_bounded(text):
    tracemalloc.start()
    try:
        verdict = equivalent("5", text)
        mirrored = equivalent(text, text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert verdict.correct is False
    assert mirrored.correct is True
    assert peak < 64 << 20


def test_a_deep_caller_gets_a_verdict():
    def down(levels):
        return equivalent("5", "(" * 60 + "5" + ")" * 60) if not levels else down(levels - 1)

    assert down(800).reason in ("equal", "undecided_budget")


def test_an_answer_over_the_limit_counts_only_as_the_gold_to_the_letter():
    long = "1+" * 9_000 + "1"
    assert grade(long, f"\\boxed{{{long}}}").correct is True
    assert grade(long, f"\\boxed{{{long}+1}}").reason == "undecided_budget"
    assert equivalent(long, long).correct is True


def test_import_is_cheap():
    code = "import time; t = time.process_time(); import align.verify; print(time.process_time() - t)"
    root = str(Path(parse.__code__.co_filename).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    times = [
        float(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout)
        for _ in range(2)
    ]
    assert min(times) < 0.3  # 30 ms with bytecode on an idle machine (README); here the sources may have to be compiled
    code = "import sys; b = set(sys.modules); import align.verify; print(sorted((set(sys.modules) - b) & {'torch', 'numpy', 'multiprocessing', 'asyncio', 'unittest', 'inspect'}))"
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_batch_gives_the_same_verdicts_over_processes():
    golds, texts = ["1", r"\frac12", "x"] * 4, [r"\boxed{1}", "0.5", r"\boxed{y}"] * 4
    alone = grade_batch(golds, texts)
    spread = grade_batch(golds, texts, processes=2)
    assert [v[:2] for v in alone] == [v[:2] for v in spread]
    assert [v.correct for v in alone] == [True, True, False] * 4
    with pytest.raises(VerifyError, match="2 golds but 1 texts"):
        grade_batch(["1", "2"], ["1"])


def test_reports_for_a_person():
    verdict = grade(r"5\text{ cm}", r"\boxed{5\text{ km}}")
    assert explain(verdict).splitlines()[0] == "not correct: the answer differs from the gold"
    assert "was read as number in km" in explain(verdict)
    table = summary([verdict, grade("1", "no"), grade(r"\unknown", "1"), grade("1", r"\boxed{1}")])
    assert "accuracy 0.3333 of 3 rows with a readable gold" in table


def test_what_is_no_text_is_refused_by_name():
    with pytest.raises(VerifyError, match="gold 5 is no string"):
        grade(5, "5")
    with pytest.raises(VerifyError, match="answer None is no string"):
        equivalent("5", None)
