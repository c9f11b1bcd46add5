"""Readers, each on five rows that were written by hand after the published form (tests/data/readers)."""

import json
from pathlib import Path

import pytest

from align.data import (
    DataError,
    dedupe_rows,
    gsm8k_rows,
    lean_rows,
    math500_rows,
    preference_rows,
    prm800k_rows,
    read_rows,
    solution_pairs,
)

DATA = Path(__file__).parent / "data" / "readers"
READERS = {
    "gsm8k": (gsm8k_rows, "completion"),
    "math500": (math500_rows, "answer"),
    "prm800k": (lambda path: prm800k_rows(path)[0], "steps"),
    "ultrafeedback": (lambda path: preference_rows(path)[0], "preference"),
    "labelled_solutions": (lambda path: solution_pairs(path)[0], "preference"),
    "lean": (lean_rows, "answer"),
}


@pytest.mark.parametrize("name", READERS)
def test_what_is_read_is_a_row_of_its_kind_with_a_place(name, tmp_path):
    read, kind = READERS[name]
    rows = read(DATA / f"{name}.jsonl")
    assert rows and all(row.place.startswith(str(DATA / f"{name}.jsonl:")) for row in rows)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert read_rows(path).rows == rows and read_rows(path).kind == kind
    assert not dedupe_rows(rows).copies


@pytest.mark.parametrize("name", READERS)
def test_files_of_another_form_are_refused_with_their_place(name, tmp_path):
    path = tmp_path / "rows.jsonl"
    for content, message in (('{"text": "a"}', "rows.jsonl:1: "), ("", "no rows; the file is empty"), ("[1]", "a row is an object")):
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            READERS[name][0](path)


def test_gsm8k():
    assert [(row["completion"], row["answer"]) for row in gsm8k_rows(DATA / "gsm8k.jsonl")] == [
        ("She has 3+4=7 pens.\n\\boxed{7}", "7"),
        ("It is 5/2=2.5.\n\\boxed{2.5}", "2.5"),
        ("It costs 1000+80=$1,080.\n\\boxed{1,080}", "1,080"),
        ("-3-4=-7\n\\boxed{-7}", "-7"),
        ("First 1+1=2.\nThen 2*2=4.\n\\boxed{4}", "4"),
    ]


def test_math500():
    rows = math500_rows(DATA / "math500.jsonl")
    assert rows[0] == {"prompt": "What is $1+1$?", "answer": "2", "subject": "Prealgebra", "level": 1, "id": "test/prealgebra/1.json"}
    assert [row["answer"] for row in rows[1:]] == ["\\frac{1}{2}", "-2,2", "\\left(1,\\frac{\\pi}{2}\\right)", "\\text{one}"]


def test_prm800k():
    """Chosen completions; the step at which labelling stopped; a human's step; what is left out."""
    rows, dropped = prm800k_rows(DATA / "prm800k.jsonl")
    assert rows == [
        {"prompt": "What is 2+2?", "steps": ["We add.", "2+2=4.\n\n# Answer\n\n4"], "labels": [0, 1]},
        {"prompt": "What is 1+3?", "steps": ["We add.", "1+3=5."], "labels": [1, -1]},
        {"prompt": "What is 2*2?", "steps": ["2*2=4."], "labels": [1]},
    ]
    assert dropped == {"quality_control": 1, "give_up": 1}


def test_preferences():
    rows, dropped = preference_rows(DATA / "ultrafeedback.jsonl")
    assert rows[0] == {"prompt": "Name a fruit.", "chosen": "An apple.", "rejected": "A stone."}
    assert [turn["content"] for turn in rows[1]["prompt"]] == ["Hi", "Hello.", "Name a colour."]
    assert (rows[1]["chosen"], rows[1]["rejected"], len(rows)) == ("Blue.", "No.", 2)
    assert dropped == {"same": 1, "tie": 1, "empty": 1}
    assert preference_rows(rows)[0] == rows  # our own form too


def test_solution_pairs():
    rows, dropped = solution_pairs(DATA / "labelled_solutions.jsonl")
    assert [row["prompt"] for row in rows] == ["One right?"] * 3 + ["Two right?"] * 4 + ["Three right?"] * 3
    assert rows[0]["chosen"] == "175b_finetuning: 2+2=4\n\\boxed{4}" and rows[0]["rejected"] == "6b_finetuning: 2+2=5\n\\boxed{5}"
    assert dropped == {"all_right": 1, "all_wrong": 1}


def test_lean():
    rows = lean_rows(DATA / "lean.jsonl")
    assert [row["answer"] for row in rows] == [
        "theorem one : 1 + 1 = 2",
        "theorem two (n : ℕ) :\n  n + 0 = n",
        "theorem three : True",
        "theorem four : 2 + 2 = solution",
        "def five (h : 0 < 5) : ∃ n, n = 5",
    ]
    assert rows[0]["header"] == rows[2]["header"] and rows[0]["header"].startswith("import Mathlib\nimport Aesop\n")
    assert rows[3]["header"] == "import Mathlib\n\nabbrev solution : ℕ := 4"
    assert rows[1]["prompt"] == "import Mathlib\n\nopen Nat\n\n/-- Add zero.-/\ntheorem two (n : ℕ) :\n  n + 0 = n := by\n"
    assert rows[2]["prompt"].count("True.-/") == 1 and rows[4]["prompt"] == "def five (h : 0 < 5) : ∃ n, n = 5 := by\n"


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("prm800k", {"question": {"problem": "x"}, "label": {"steps": [{"completions": []}]}}, r"label.steps\[0\] has no completion"),
        (
            "prm800k",
            {"question": {"problem": "x"}, "label": {"steps": [{"completions": [{"text": "a", "rating": 2}], "chosen_completion": 0}]}},
            r"label.steps\[0\] has rating 2; it must be -1, 0 or 1",
        ),
        ("ultrafeedback", {"chosen": [{"role": "user"}], "rejected": []}, "chosen must be messages with role and content"),
        ("ultrafeedback", {"chosen": [], "rejected": []}, "chosen must be a question and end with the assistant's turn"),
        ("ultrafeedback", {"chosen": "a", "rejected": "b"}, "a preference row needs the string prompt"),
        ("labelled_solutions", {"question": "q", "6b_finetuning": {}}, "6b_finetuning must be an object with is_correct and solution"),
        ("lean", {"name": "n", "formal_statement": "#eval 1"}, "formal_statement has no theorem: '#eval 1'"),
        ("math500", {"problem": "p", "answer": 4}, "MATH-500 needs the string answer, this has problem, answer"),
    ],
)
def test_bad_rows_are_named(tmp_path, name, row, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(DataError, match=f"rows.jsonl:1: {message}"):
        READERS[name][0](path)
