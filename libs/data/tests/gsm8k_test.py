"""The bundled GSM8K files, and what the reader makes of them."""

import gzip
import hashlib
import json
import re
from pathlib import Path

import pytest

from align.data import DataError, bundled, gsm8k_rows

# From PROVENANCE.md beside the files: (rows, sha256 unzipped).
FILES = {
    "gsm8k_train": (7473, "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"),
    "gsm8k_test": (1319, "71b1b76093dd84df7a8c86767cfb33f4cfa908a04b271d713b2b8d970f15a874"),
}


@pytest.mark.parametrize("name", FILES)
def test_the_bundled_files_are_the_published_ones(name):
    count, digest = FILES[name]
    content = gzip.decompress(bundled(name).read_bytes())
    assert hashlib.sha256(content).hexdigest() == digest
    provenance = (bundled(name).parent / "PROVENANCE.md").read_text()
    assert digest in provenance and hashlib.sha256(bundled(name).read_bytes()).hexdigest() in provenance
    rows = gsm8k_rows(bundled(name))
    assert len(rows) == count
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
    with pytest.raises(DataError, match="'gsm8k' is not bundled; gsm8k_train, gsm8k_test are"):
        bundled("gsm8k")
    path = Path(tmp_path, "rows.jsonl")
    for row, message in (
        ({"question": "q"}, "a GSM8K row has the strings question and answer"),
        ({"question": "q", "answer": "72"}, "does not end with a line '#### answer'"),
    ):
        path.write_text(json.dumps(row))
        with pytest.raises(DataError, match=f"rows.jsonl:1: .*{message}"):
            gsm8k_rows(path)
