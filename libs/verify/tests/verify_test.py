r"""The public surface: markers, modes, GSM8K answers, the bundled arithmetic task."""

import doctest
import gzip
import json
from pathlib import Path

import pytest

from align.verify import equivalent, extract, grade, normalise, parse
from align.verify._cli import main

DATA = Path(__file__).parent / "data"


def test_every_labelled_gsm8k_output():
    wrong, count = [], 0
    with gzip.open(DATA / "gsm8k_labelled.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            count += 1
            if grade(row["gold"], row["text"]).correct is not row["label"]:
                wrong.append(row)
    assert count == 5276 and not wrong


@pytest.mark.parametrize(
    ("text", "correct", "reason"),
    [
        (r"7+12=19. 19-4=15. \boxed{15}", True, "equal"),
        (r"7+12=19. 19-4=14. \boxed{14}", False, "different"),
        ("7+12=19. 19-4=15.", False, "no_answer"),
        ("15", False, "no_answer"),
        (r"\boxed{}", False, "no_answer"),
        (r"\boxed{15", False, "no_answer"),
        (r"15 \boxed{?}", False, "unreadable_answer"),
    ],
)
def test_arithmetic_task_in_marked_mode(text, correct, reason):
    verdict = grade("15", text, mode="marked")
    assert (verdict.correct, verdict.reason) == (correct, reason)


def test_final_mode_takes_the_last_number_and_says_so():
    verdict = grade("18", "She makes 9 * 2 = 18 dollars")
    assert (verdict.correct, verdict.reason) == (True, "bare")


def test_a_gold_that_cannot_be_read_is_never_a_reward():
    verdict = equivalent(r"\unknown", r"\unknown")
    assert (verdict.correct, verdict.reason) == (None, "unreadable_gold")
    assert not verdict


def test_an_unreadable_last_box_does_not_fall_back():
    assert grade("5", r"I guess $5$. Final: \boxed{\unknown}").reason == "unreadable_answer"


def test_thinking_does_not_count():
    assert extract(r"<think>\boxed{5}</think> I do not know.", mode="marked") is None


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match=r'mode "loose" is not one of "final", "marked"'.replace('"loose"', "'loose'")):
        grade("1", "1", mode="loose")


def test_parse_and_normalise():
    assert parse("27,648").node == ("q", 27648)
    assert parse(r"\left( 3, \frac{\pi}{2} \right)").kind == "tuple"
    assert normalise(r"$\text{Evelyn}$") == "Evelyn"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("5", "number"), (r"\sqrt{2}+\pi", "number"), ("2x+1", "expression"), ("(1,2)", "tuple"), ("[1,2)", "interval"), ("1, 2", "list"),
        (r"\{1,2\}", "set"), (r"\emptyset", "set"), (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "matrix"), ("x+y=3", "equation"),
        ("x<3", "inequality"), ("3:4", "ratio"), ("4:30 pm", "time"), (r"\text{(C)}", "choice"),
        (r"\text{east}", "text"), (r"\unknown", "raw"),
    ],
)  # fmt: skip
def test_kinds(answer, kind):
    assert parse(answer).kind == kind


@pytest.mark.parametrize(
    ("text", "answer", "marker"),
    [
        (r"so $\boxed{5}$ apples", "5", "boxed"),
        (r"\boxed{1}, \boxed{2} and \boxed{3}", "1; 2; 3", "boxed"),
        (r"\fbox{\frac{1}{2}}", r"\frac{1}{2}", "boxed"),
        ("so\n#### 5", "5", "hash"),
        ("**Final Answer**: 5", "5", "final_answer"),
        (r"\boxed{3}. The final answer is $5$. I hope it is correct.", "5", "final_answer"),
        ("<answer>5</answer>", "5", "answer_tag"),
        ("The answer is B because A is wrong", "B", "answer"),
        (r"We find $x=3$, hence \(x+1 = 4\).", "x+1 = 4", "math"),
        ("Total: $70,000. Therefore he made $70,000.", "$70,000", "number"),
        ("It is the polynomial x^2+1.", "x^2+1", "number"),
    ],
)
def test_extraction(text, answer, marker):
    found = extract(text)
    assert (found.answer, found.marker) == (answer, marker)


def test_the_readme_runs():
    readme = Path(__file__).parents[1] / "README.md"
    assert doctest.testfile(str(readme), module_relative=False).attempted >= 4
    assert doctest.testfile(str(readme), module_relative=False).failed == 0


def test_the_command_line_judges_one_pair(capsys):
    assert main(["--gold", r"\frac12", "--pred", r"so \boxed{0.5}"]) == 0
    assert capsys.readouterr().out.startswith("correct: the answer equals the gold")


def test_the_command_line_judges_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    rows = [{"answer": "5", "output": "\\boxed{5}"}, {"answer": "5", "output": "\\boxed{6}"}]
    (tmp_path / "in.jsonl").write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert main(["--jsonl", "in.jsonl", "--gold-field", "answer", "--pred-field", "output", "--out", "out.jsonl"]) == 0
    assert "accuracy 0.5000 of 2 rows" in capsys.readouterr().out
    assert [json.loads(line)["correct"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [True, False]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"gold": "5"}\n', "in.jsonl:1: no field 'pred' (--pred-field); the line has 'gold'"),
        ('{"gold": "5", "pred": "5"}\n{"gold": 5, "pred": "5"}\n', "in.jsonl:2: 'gold' is 5, not a string"),
        ("not json\n", "in.jsonl:1: Expecting value: line 1 column 1 (char 0); each line is one JSON object"),
        ("[1]\n", "in.jsonl:1: '[1]' is no JSON object"),
        ("[" * 100_000 + "\n", "in.jsonl:1: maximum recursion depth exceeded"),
        ("\n\n", "in.jsonl: no rows"),
        (None, "in.jsonl: cannot be read as UTF-8 text"),
    ],
)
def test_the_command_line_names_file_line_and_field(tmp_path, capsys, monkeypatch, content, message):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    if content is not None:
        (tmp_path / "in.jsonl").write_text(content, encoding="utf-8")
    assert main(["--jsonl", "in.jsonl"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gold", "5"], "give --gold and --pred, or --jsonl FILE"),
        (["--jsonl", "in.jsonl", "--gold", "5"], "--jsonl and --gold/--pred exclude each other"),
        (["--jsonl", "in.jsonl", "--out", "absent/out.jsonl"], "absent/out.jsonl: cannot be written"),
        (["--jsonl", "in.jsonl", "--processes", "0"], "processes 0 is not a number from 1"),
    ],
)
def test_the_command_line_refuses_by_name(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    (tmp_path / "in.jsonl").write_text('{"gold": "5", "pred": "\u2028 \\\\boxed{5}"}\n', encoding="utf-8")
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert main(["--jsonl", "in.jsonl"]) == 0
    assert "equal                      1        1" in capsys.readouterr().out


def test_the_help_shows_examples(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "grade --jsonl outputs.jsonl" in capsys.readouterr().out
