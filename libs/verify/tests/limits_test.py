r"""Whatever comes in: no exception, no long run, no large memory; and an import that costs little.

The bounds are those of the README: 50 ms of CPU time and 64 MB (`verify_limits.within_bound`).
"""
# ruff: noqa: E501 (literals that are long)

import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from verify_limits import PIECES, within_bound

from align.verify import VerifyError, equivalent, explain, grade, grade_batch, parse, summary

UNITS = [
    r"\boxed{", r"\boxed{1},", "{", "}", "\\", "$", "$1$ ", r"\(1\)", "#### 5\n", "final answer is 5. ", "Answer: ", "<think>", "</think>", "<|im_end|>", "1", "1 ",
    "1,", "- ", "(", "((1", r"\text{a}", r"\frac{1}{", r"\sqrt{", "^{", "2^", "9^9", "x!", "|", "abc ", "1e9", r"\pm ", "x=", "(1,2),", r"\cup ", "(x+1)",
    "x/", r"\sin ", r"\frac", "\n", "中", "\x00", r"\quadx", "½", "\r\n", "{}", r"1\frac{", r"\mathrm{", "9" * 999 + " ", r"\boxed{" + "9" * 999 + "},", "²", "٠",
    r"\hspace", r"\begin{pmatrix}", "the answer is ", "a and ", r"\boxed{5} or ", "0.", r"\ldots", "'", "<answer>", "\u200b", "\U0001f600",
]  # fmt: skip


def megabyte(unit: str) -> list[str]:
    """A megabyte of one thing: as it stands, in a box, after a box, before one, cut to the longest answer, and after each marker."""
    text = (unit * (1_000_000 // len(unit) + 1))[:1_000_000]
    return [
        text, f"\\boxed{{{text}}}", f"x \\boxed{{5}} {text}", f"{text} \\boxed{{5}}", f"{text[:980_000]} \\boxed{{{text[:16_000]}}}",
        f"final answer is {text}", f"{text[:996_500]} final answer is {text[:3_000]}", f"\n#### {text[:16_000]}",
    ]  # fmt: skip


def check_megabyte(unit: str) -> None:
    for text in megabyte(unit):
        for gold, answer in (("5", text), (text, r"\boxed{5}"), (text, text)):
            assert within_bound(grade, gold, answer), (unit, text[:20], gold[:20])
        assert within_bound(equivalent, "x+1", text), (unit, text[:20])


@pytest.mark.parametrize("unit", [UNITS[0], "{", "1", "½"])
def test_a_megabyte_of_boxes_and_braces(unit):
    check_megabyte(unit)


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS + PIECES)
def test_a_megabyte_of_anything(unit):
    check_megabyte(unit)


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS + PIECES)
def test_a_megabyte_takes_little_memory(unit):
    for text in megabyte(unit):
        tracemalloc.start()
        try:
            grade("5", text)
            grade(text, r"\boxed{5}")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 64 << 20


@pytest.mark.parametrize("unit", UNITS)
def test_long_answers(unit):
    text = unit * (2_000 // len(unit))
    assert within_bound(equivalent, "x+1", text)


# One input for each way in which work grows out of proportion to its text.
GROWTH = {
    "a mixed number that is none": "1\\frac{" * 60 + "x" + "}{2}" * 60, "functions of functions": "\\sin(" * 60 + "x" + ")" * 60,
    "arcs of arcs": "\\arcsin(" * 20 + "x" + ")" * 20, "exponentials of exponentials": "\\sinh(" * 30 + "x" + ")" * 30,
    "powers of a matrix": r"\begin{pmatrix}x&y&a\\z&w&b\\c&d&e\end{pmatrix}^{16}", "a root of unity": r"\cos\frac{\pi}{10^{40}+9}",
    "a power of a unit": r"5\text{ cm}^{999999999}", "long decimals": "+".join(f"{k}e-{8000 + k}" for k in range(1, 200)),
    "long fractions": "+".join(f"3^{{-{k}}}" for k in range(1, 300)), "factorials": "+".join(f"{k}!" for k in range(700, 990)),
    "products": "\\cdot ".join(["10^{2000}"] * 200), "signs": r"(1\pm2)(1\pm3)(1\pm5)(1\pm7)" + "+".join(f"x^{{{k}}}" for k in range(2, 200)),
    "steps in many symbols": r"\lfloor a+b+c+d+f+g+h+j+k+l\rfloor-\lfloor l+k+j+h+g+f+d+c+b+a+1/7\rfloor", "text in text": "\\text{" * 2000 + "1" + "}" * 2000,
    "high roots": "+".join(f"\\sqrt[64]{{{k}}}" for k in range(2, 60)), "nested roots": "\\sqrt[3]{2+" * 40 + "2" + "}" * 40,
    "large angles": r"\tan(10^{9000})", "large exponents": r"e^{3999}+e^{-3999}+e^{3998.5}", "close logarithms": r"\ln(10^{9000}+1)-\ln(10^{9000})",
    "long lists": ", ".join(f"\\sqrt{{{k}}}" for k in range(2, 120)), "unions": "\\cup ".join(f"(\\sqrt{{{k}}},\\sqrt{{{k}}}+0.1)" for k in range(2, 90)),
    "sums of sums": r"\sum_{k=1}^{299}\sum_{j=1}^{299} jk", "remainders": "+".join(f"3^{{20000}} \\bmod 7^{{{5000 + k}}}" for k in range(60)),
    "modular powers": r"3^{10^{3000}} \bmod (10^{3000}+7)", "cosines of sums": r"\cos(" + "+".join(f"x_{{{k}}}" for k in range(1, 200)) + ")",
    "chains": "=".join(f"x+{k}" for k in range(300)), "many equations": ", ".join(f"x_{k}+{k}y={k}" for k in range(80)),
    "builders in builders": r"\{x \mid " * 30 + "x>0" + r"\}" * 30, "powers of complex numbers": "(1+\\sqrt2 i)^{1000}",
    "powers as arguments": "9^{9^{9^{9}}}", "inequalities": "<".join(f"x+{k}" for k in range(300)),
}  # fmt: skip


@pytest.mark.parametrize("name", GROWTH)
def test_work_that_grows_is_bounded(name):
    text = GROWTH[name]
    for gold, answer in (("x+1", text), (text, "5"), (text, text), (text, text + "+1")):
        assert within_bound(equivalent, gold, answer)
        assert equivalent(gold, answer).reason != "error"


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


SCRIPT = """
import os, resource, signal, sys
from align.verify import VerifyError, _report, grade_batch
worker, case = __name__ != "__main__", sys.argv[1]
if worker and case == "exits":
    os._exit(7)
if worker and case == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if worker and case == "at work":
    _report.grade = lambda *words, **more: os.kill(os.getpid(), signal.SIGKILL)
if worker and case == "raises":
    _report.grade = lambda *words, **more: 1 / 0
if not worker and case == "no files left":
    resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))
if case == "unguarded" or not worker:
    try:
        grade_batch(["5"] * 8, ["more than a pipe takes " * 10000] * 8, processes=4)
    except (VerifyError, ZeroDivisionError) as error:
        sys.stdout.write(f"{'worker' if worker else 'parent'} {error}\\n")  # at once: several workers write
        if worker:
            raise
"""


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("unguarded", "of 4 of grade_batch ended with exit code 1 at its start: a script file calls grade_batch with processes under `if"),
        ("exits", "of 4 of grade_batch ended with exit code 7 at its start: a script file calls"),
        ("killed", "of 4 of grade_batch was ended by signal 9; where memory was short, take fewer processes"),
        ("at work", "of 4 of grade_batch was ended by signal 9; where"),
        ("raises", "division by zero"),
        ("no files left", "of 4 of grade_batch cannot be started ([Errno 24] Too many open files); take fewer processes"),
    ],
)
def test_a_worker_that_dies_ends_the_batch_and_leaves_no_process(tmp_path, case, told):
    (tmp_path / "script.py").write_text(SCRIPT)
    root = str(Path(parse.__code__.co_filename).parents[2])
    program = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), case], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    try:
        out = program.communicate(timeout=20)[0].splitlines()  # to the end of all that holds the pipes: no worker is left
    finally:
        if program.returncode is None:
            os.killpg(program.pid, signal.SIGKILL)
            program.communicate()
    assert program.returncode == 0 and out[-1].startswith("parent ") and told in out[-1]
    assert all(line.startswith("worker ") and 'if __name__ == "__main__":' in line for line in out[:-1])
    assert (len(out) > 1) == (case == "unguarded")


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
