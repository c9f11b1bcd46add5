"""What is code and what is not, what a submission may say, and texts cut from data sets. No Lean is started."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.lean import LeanError, Policy, Problem, StatementError, extract_code, inspect, split_imports, statement_of, without_header
from align.lean._lexer import Ambiguous, Unreadable, tokens
from align.lean._policy import check_name, check_statement
from align.lean._words import REFUSED

DATA = Path(__file__).parent / "data"
CASES = [json.loads(line) for line in (DATA / "cases.jsonl").read_text(encoding="utf-8").splitlines()]
FEW_SHOT = [json.loads(line) for line in (DATA / "dsp15_minif2f_valid_few_shot.jsonl").read_text(encoding="utf-8").splitlines()]

# Rows of cases.jsonl that say nothing refusable to a lexer: Lean must catch them (kernel_test.py), or time and memory must.
FOR_LEAN = {
    "inc_unsolved",
    "inc_parse_tail",
    "inc_redecl",
    "inc_example",
    "ax_ofReduceBool",
    "st_weaker",
    "st_hyp",
    "st_variable",
    "st_section_inst",
    "st_shadow_ns",
    "st_open_in",
    "st_nat_vs_real",
    "st_universe",
    "st_open_ns_left",
    "st_cyrillic",
    "res_loop",
    "res_pow",
}


def reason(text: str, name: str = "t", **policy) -> str | None:
    refusal = inspect(text, name=name, policy=Policy(**policy))
    return refusal.reason if refusal else None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_shared_cases(case: dict):
    refused = reason(case["code"], case["theorem"]) is not None
    assert refused == (case["expected"] != "accept" and case["id"] not in FOR_LEAN)


@pytest.mark.parametrize("row", FEW_SHOT, ids=lambda row: row["name"])
def test_honest_proofs_of_minif2f_pass(row: dict):
    assert reason(row["informal_prefix"] + row["formal_statement"] + row["formal_proof"], row["name"]) is None
    name, statement = statement_of(row["formal_statement"])
    assert name == row["name"]
    check_statement(statement)


HIDDEN = [  # each has the keyword in code for Lean, whatever the reader thinks of the text around it
    "theorem t : True := trivial axiom cheat : False",
    "theorem t (h : True ∧ True) : True := h.1axiom cheat : False",
    "theorem t : True := by exact 1.axiom cheat : False",
    "/- a /- b -/ c -/ axiom cheat : False",
    "/-- doc -/ axiom cheat : False",
    "/-! section -/ axiom cheat : False",
    "/-/ axiom in : False -/ axiom cheat : False",
    'def s := "\\\\" axiom cheat : False',
    'def s := "\\"" axiom cheat : False',
    "def c := '\"' axiom cheat : False --\"",
    "def c := '\\'' axiom cheat : False",
    'def s := r"\\" axiom cheat : False --"',
    'def s := r#"""# axiom cheat : False',
    "theorem «a.b /-» : True := trivial axiom cheat : False --»",
    "-- end of line\naxiom cheat : False",
    "--\raxiom no : False\naxiom cheat : False",
    "theorem t : True := trivial\n  axiom\n  cheat : False",
    "theorem x'axiom : True := trivial /- -/axiom cheat : False",
    "private noncomputable axiom cheat : False",
    "open Nat in axiom cheat : False",
    "set_option maxHeartbeats 1 in axiom cheat : False",
]


@pytest.mark.parametrize("text", HIDDEN)
def test_a_keyword_in_code_is_seen(text: str):
    assert reason(text) == "forbidden"


DOUBTFUL = [  # Lean's symbol table decides what is code; the other reading hides a command
    "example (a b : Nat) := a<--axiom cheat : False",
    "example := {x //-axiom cheat : False -/",
    "example := f ⁻¹''\"' axiom cheat : False --\"",
    'example := a →r"\\" axiom cheat : False --"',
    "example := a →raxiom cheat : False",
    "example := ⟪x, y⟫_ℝaxiom cheat : False",
    "/-/- a -/ axiom cheat : False -/",
    'def s := s!"{by run_tac x}"',
    'def s := s!"{f "} axiom cheat : False --"}"',
    'def s := "\\q axiom cheat : False"',
    "def c := ='\"' axiom cheat : False --\"",
    "example := →'a'axiom cheat : False",
]


@pytest.mark.parametrize("text", DOUBTFUL)
def test_a_text_with_two_readings_is_refused(text: str):
    assert reason(text) in ("ambiguous", "unreadable", "forbidden")


@pytest.mark.parametrize(
    "text",
    [
        "-- axiom sorry #eval\ntheorem t : True := trivial",
        "/- axiom /- instance -/ macro -/ theorem t : True := trivial",
        "/-- for instance, no axiom here -/\ntheorem t : True := trivial",
        'theorem t : "axiom {sorry} /-".length = 16 := rfl',
        "theorem t : 'a' = 'a' := rfl",
        "theorem not_sorry : True := trivial\ntheorem axiom_free : True := not_sorry\ntheorem t : True := axiom_free",
        "theorem axiom.x : True := trivial\ntheorem t : True := axiom.x",
        "theorem «axiom» : True := trivial\ntheorem t : True := «axiom»",
        "theorem t (f : α → β) (s : Set α) : f '' s = f '' s := rfl",
        "theorem t (s : Set β) : f ⁻¹' s = f ⁻¹' s := rfl",
        "theorem t : x' = x'' := by rw [←my_instance, ←foo.instance]",
        "theorem t : p := by aesop (add unsafe 50% apply foo, safe cases Or)",
        "theorem t : p := by aesop (add unsafe apply foo)",
        "#check Nat\n#print axioms t\ntheorem t : True := trivial",
        "theorem t : #s = 3 := by simp",
        "set_option maxHeartbeats 400000 in\ntheorem t : True := trivial",
        "set_option linter.unusedVariables false\ntheorem t : True := trivial",
        "theorem t : True :=-- a comment right here\n  trivial",
        "theorem t (x : ℝ) : 2 * x⁻¹ = 2/x := by field_simp",
        "private theorem aux : True := trivial\nprotected lemma Foo.bar : True := aux\ntheorem t : True := aux",
        "namespace A\nsection\nvariable (n : ℕ)\nopen scoped Nat in\ntheorem b : n = n := rfl\nend\nend A\ntheorem t : True := trivial",
        "theorem t : True := by\n  · trivial\r\n",
        "theorem t : ∃ x, x = 1.5e3 ∧ y = 0x1F ∧ z = 0b101 := by norm_num",
    ],
)
def test_honest_words_pass(text: str):
    assert reason(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def t : 1 = 1 := rfl", "not_a_theorem"),
        ("abbrev t := 1", "not_a_theorem"),
        ("def _root_.t := 1", "not_a_theorem"),
        ("open private mk from Lean.Environment", "forbidden"),
        ("theorem t : True := by run_tac foo", "forbidden"),
        ('theorem t : x = include_str "/etc/passwd" := rfl', "forbidden"),
        ("@[simp] theorem t : True := trivial", "forbidden"),
        ("attribute [local simp] foo", "forbidden"),
        ("local instance : Foo := bar", "forbidden"),
        ('scoped notation "x" => y', "forbidden"),
        ("deriving instance Repr for Foo", "forbidden"),
        ("#eval! 1", "forbidden"),
        ("theorem t : True := trivial #eval 1", "forbidden"),
        ("#unknown_command", "forbidden"),
        ("set_option pp.all true in theorem t : True := trivial", "forbidden_option"),
        ("set_option «debug.skipKernelTC» true", "forbidden_option"),
        ("set_option debug.skipKernelTC true", "forbidden_option"),
        ("theorem t : False := sorryAx _ true", "sorry"),
        ("theorem t : False := _root_.sorryAx _ true", "sorry"),
        ("theorem t : True := trivial /- open", "unreadable"),
        ('def s := "open', "unreadable"),
        ("theorem «t : True", "unreadable"),
        ("theorem t : True := trivial \x00", "encoding"),
        ("theorem t : True := trivial -- \ud800", "encoding"),
        ("\ufefftheorem t : True := trivial", "encoding"),
        ("x" * 500_001, "too_long"),
    ],
)
def test_refusals_have_their_reason(text: str, expected: str):
    assert reason(text) == expected


@pytest.mark.parametrize("word", sorted(REFUSED))
def test_every_refused_word_is_refused_and_can_be_allowed(word: str):
    assert reason(f"theorem a : True := trivial {word} b") == "forbidden"
    assert reason(f"theorem a : True := trivial {word} b", allow=frozenset({word})) is None
    assert reason(f"-- {word}\ntheorem a : True := trivial") is None


def test_the_options_and_the_length_are_the_policys():
    assert reason("set_option pp.all true", options=frozenset({"pp.all"})) is None
    assert reason("set_option maxHeartbeats 1", options=frozenset()) == "forbidden_option"
    assert reason("theorem t : True := trivial", max_characters=5) == "too_long"


def test_long_and_deep_texts_take_linear_time():
    deep = "theorem t : True := " + "(" * 20_000 + "trivial" + ")" * 20_000
    assert reason(deep) is None
    assert reason("/- " * 20_000) == "unreadable"
    assert reason("/- " * 20_000 + "-/ " * 20_000) is None
    assert reason("#a " * 20_000) == "forbidden"
    assert reason("x #a " * 20_000) is None
    assert reason("x." * 20_000 + "x") is None


PIECES = st.sampled_from(
    [
        "/-",
        "-/",
        "--",
        "/--",
        '"',
        "\\",
        "'",
        "«",
        "»",
        'r"',
        'r#"',
        '"#',
        "{",
        "}",
        "\n",
        " ",
        "x",
        "1",
        "0x",
        ".",
        "<",
        "-",
        "→",
        "⁻¹",
        "#",
        "@",
        "axiom",
    ]
)


@given(st.lists(PIECES, max_size=12).map("".join), st.lists(PIECES, max_size=12).map("".join))
def test_tokens_are_slices_in_order_and_only_its_errors_are_raised(before: str, after: str):
    text = before + " axiom " + after
    try:
        found = tokens(text)
    except (Ambiguous, Unreadable):
        return
    end = 0
    for token in found:
        assert token.text and text[token.start : token.start + len(token.text)] == token.text
        assert token.start >= end
        end = token.start + len(token.text)


@given(st.text(max_size=60))
def test_any_text_has_an_answer(text: str):
    inspect(text, name="t", policy=Policy())
    extract_code(text)
    split_imports(text)


def test_names():
    for good in ("t", "Foo.bar", "mathd_algebra_1", "x'", "α₁", "IMO.p1_2"):
        check_name(good)
    for bad in ("", "a b", "t := x", "«t»", "1t", "a..b", "a.", "theorem", "t\n", "_root_.t", "Foo.axiom"):
        with pytest.raises(LeanError, match="identifier"):
            check_name(bad)


@pytest.mark.parametrize(
    "text", ["", "-- only", "1 = 1) ∧ (True", "(1 = 1", "1 = 1 /-", "True := trivial theorem x : True", "sorry", "axiom"]
)
def test_a_statement_is_one_term(text: str):
    with pytest.raises(StatementError):
        check_statement(text)


def test_statement_of_a_theorem():
    assert statement_of("theorem foo : 1 + 1 = 2 := by sorry") == ("foo", "1 + 1 = 2")
    assert (
        statement_of("/-- x : y := z -/ lemma A.b.{u} (n : ℕ) {m : ℕ} [Foo n] : n = m :=\n by")[1]
        == "∀ (n : ℕ) {m : ℕ} [Foo n]\n, (n = m\n)"
    )
    assert statement_of("theorem t : let x := 2; x = 2 := by")[1] == "let x := 2; x = 2"
    assert statement_of("def f := 1\ntheorem a : True := trivial\ntheorem b : f = 1")[0] == "b"
    for bad in ("def x := 1", "theorem", "theorem t := 1", "theorem t : := 1", "theorem t : 1 /-"):
        with pytest.raises(StatementError):
            statement_of(bad)


def test_a_data_sets_preamble_joins_the_header():
    problem = Problem.of_theorem("import Mathlib\n\ndef f := 1 -- one\n\n/-- doc -/\ntheorem t : f = 1 := by sorry", "open Nat\n")
    assert problem == Problem("f = 1", "t", "import Mathlib\nopen Nat\n\ndef f := 1\n")


def test_code_is_the_last_fenced_block():
    assert extract_code("Say\n```lean4\na\n```\nor\n```lean4\nb\n```\nend") == "b\n"
    assert extract_code("```lean\na") == "a"
    assert extract_code("theorem t : True := trivial") == "theorem t : True := trivial"


def test_a_repeated_header_is_taken_off():
    header = "import Mathlib\nopen Nat\n"
    assert without_header("import Mathlib\nopen Nat\ntheorem t", header).strip() == "theorem t"
    assert without_header("import Mathlib\ntheorem t", header) == "theorem t"
    assert without_header("import Other\ntheorem t", header) == "import Other\ntheorem t"
    assert without_header("theorem t", "") == "theorem t"


def test_the_readmes_table_has_every_shared_case_once():
    table = (DATA.parents[1] / "README.md").read_text(encoding="utf-8").partition("## Cases")[2].partition("The expected status")[0]
    assert sorted(re.findall(r"\b(?:inc|ax|env|out|st|res|ok)_\w+", table)) == sorted(case["id"] for case in CASES)
