"""The bundled files, and what their readers make of them."""

import gzip
import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from align.data import DataError, bundled, bundled_rows, dedupe_rows, gsm8k_rows, solution_pairs

# From PROVENANCE.md beside the files: (rows, sha256 unzipped).
FILES = {
    "gsm8k_train": (7473, "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"),
    "gsm8k_test": (1319, "71b1b76093dd84df7a8c86767cfb33f4cfa908a04b271d713b2b8d970f15a874"),
    "gsm8k_solutions": (2429, "4bc62db838f8418365d51c627bd66294cbdca9fb7f01519cb13f0dce8c51580b"),
    "math500": (500, "3fe68ca2c1b94f9381a16527afdebf60247d7d364657d11e3d8d8db539cabac3"),
}


@pytest.mark.parametrize("name", FILES)
def test_the_bundled_files_are_the_published_ones(name):
    count, digest = FILES[name]
    assert hashlib.sha256(gzip.decompress(bundled(name).read_bytes())).hexdigest() == digest
    provenance = (bundled(name).parent / "PROVENANCE.md").read_text()
    assert digest in provenance and hashlib.sha256(bundled(name).read_bytes()).hexdigest() in provenance
    assert "MIT License" in provenance and "Permission is hereby granted" in provenance
    found = bundled_rows(name)
    assert (len(found), found.digest) == (count, digest)


def test_math500():
    rows = bundled_rows("math500").rows
    assert rows[0]["answer"] == "\\left( 3, \\frac{\\pi}{2} \\right)" and rows[0]["id"] == "test/precalculus/807.json"
    assert {row["level"] for row in rows} == {1, 2, 3, 4, 5} and len({row["prompt"] for row in rows}) == 500
    assert Counter(row["subject"] for row in rows)["Intermediate Algebra"] == 97


def test_the_labelled_solutions_give_2429_pairs_of_731_questions():
    """The counts of right and wrong by hand: 1,319 questions with four labelled solutions each."""
    rows, dropped = solution_pairs(bundled("gsm8k_solutions"))
    assert len(rows) == 2429 and len({row["prompt"] for row in rows}) == 731 and dropped.total() == 1319 - 731
    pairs = sum(right * (4 - right) for right in map(right_of, gzip.decompress(bundled("gsm8k_solutions").read_bytes()).splitlines()))
    assert pairs == 2429
    assert {row["prompt"] for row in rows} <= {row["prompt"] for row in bundled_rows("gsm8k_test").rows}
    assert all(row["chosen"] != row["rejected"] and "<<" not in row["chosen"] + row["rejected"] for row in rows)
    assert len(dedupe_rows(rows).copies) == 3  # two solvers gave one and the same solution


def right_of(line):
    return sum(value["is_correct"] for value in json.loads(line).values() if isinstance(value, dict))


@pytest.mark.parametrize("name", ["gsm8k_train", "gsm8k_test"])
def test_gsm8k(name):
    content = gzip.decompress(bundled(name).read_bytes())
    rows = gsm8k_rows(bundled(name))
    raw = [json.loads(line) for line in content.splitlines()]
    for row, source in zip(rows, raw, strict=True):
        solution = source.get("solution", source["answer"])
        assert row["prompt"] == source.get("question", source.get("problem"))
        assert row["answer"] == solution.split("#### ")[1] and "<<" not in row["completion"] and "####" not in row["completion"]
        assert row["completion"].endswith(f"\n\\boxed{{{row['answer']}}}")
        if name == "gsm8k_test":  # the reshaped file says the answer itself
            assert row["answer"] == source["answer"]


def test_the_annotations_go_and_the_answer_is_boxed():
    row = gsm8k_rows(bundled("gsm8k_train"))[1]
    assert row == {
        "prompt": "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes of babysitting. How much did she earn?",
        "completion": "Weng earns 12/60 = $0.2 per minute.\nWorking 50 minutes, she earned 0.2 x 50 = $10.\n\\boxed{10}",
        "answer": "10",
    }
    assert re.fullmatch(r".*gsm8k_train\.jsonl\.gz:2", row.place)


def test_other_names_and_rows_are_refused(tmp_path):
    with pytest.raises(DataError, match="'gsm8k' is not bundled; gsm8k_train, gsm8k_test, gsm8k_solutions, math500 are"):
        bundled("gsm8k")
    path = Path(tmp_path, "rows.jsonl")
    for row, message in (
        ({"question": "q"}, "a GSM8K row has the strings question and answer"),
        ({"question": "q", "answer": "72"}, "does not end with a line '#### answer'"),
    ):
        path.write_text(json.dumps(row))
        with pytest.raises(DataError, match=f"rows.jsonl:1: .*{message}"):
            gsm8k_rows(path)
