"""Parquet: the same rows whatever codec and encoding, and a clear error for what has no form in JSON."""

import datetime
import decimal
import gzip
import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.data import bundled, gsm8k_rows, read_rows
from align.ingest import IngestError, main, parquet_rows, to_jsonl

DATA = Path(__file__).parent / "data"
FILES = sorted(DATA.glob("*.parquet"))
NESTED = [path for path in FILES if "flat" not in path.name]


def digest_of(rows):
    return hashlib.sha256("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows).encode()).hexdigest()


def written(path, columns, **options):
    pq.write_table(pa.table(columns), path, **options)
    return path


def test_nine_files_give_the_rows_of_the_json_lines():
    assert len(FILES) == 9
    expected = digest_of(gsm8k_rows(bundled("gsm8k_test"))[:60])
    assert {digest_of(gsm8k_rows(parquet_rows(path))) for path in FILES} == {expected}
    provenance = (DATA / "PROVENANCE.md").read_text()
    assert all(f"`{path.name}`" in provenance and hashlib.sha256(path.read_bytes()).hexdigest() in provenance for path in FILES)


def test_eight_files_with_all_columns_give_one_digest_and_the_published_texts():
    """Nested lists and structs, nulls: against the published solution, taken apart here by hand."""
    assert len({to_jsonl(path, None).digest for path in NESTED}) == 1
    published = [json.loads(line) for line in gzip.decompress(bundled("gsm8k_test").read_bytes()).splitlines()[:60]]
    rows = list(parquet_rows(NESTED[0]))
    for index, (row, source) in enumerate(zip(rows, published, strict=True)):
        assert row["id"] == index and row.place == f"{NESTED[0]}:{index + 1}"
        turns = [{"role": "user", "content": source["problem"]}, {"role": "assistant", "content": source["solution"]}]
        assert row["messages"] == turns
        assert row["meta"] == {"answer": source["answer"], "steps": source["solution"].split("\n")[:-1]}
    assert {row["score"] for row in rows[:2]} == {None, 0.1}


def test_full_size_in_every_codec(tmp_path):
    published = gsm8k_rows(bundled("gsm8k_test"))
    columns = {name: [row[name] for row in published] for name in ("prompt", "completion", "answer")}
    codecs = ("snappy", "zstd", "gzip", "brotli", "lz4", "none")
    done = {to_jsonl(written(tmp_path / codec, columns, compression=codec, row_group_size=100), None) for codec in codecs}
    (only,) = done
    assert (
        only.rows == 1319
        and only.digest == hashlib.sha256("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in published).encode()).hexdigest()
    )


def test_what_is_written_reads_back_and_is_there_whole_or_not_at_all(tmp_path):
    for name in ("rows.jsonl", "rows.jsonl.gz"):
        done = to_jsonl(NESTED[0], tmp_path / name)
        found = read_rows(tmp_path / name)
        assert (found.kind, len(found), found.digest) == ("messages", done.rows, done.digest) == ("messages", 60, done.digest)
    assert (tmp_path / "rows.jsonl.gz").read_bytes()[4:8] == b"\0" * 4  # no time: the same rows are the same file
    bad = written(tmp_path / "bad.parquet", {"a": [0.0] * 600 + [math.nan]})
    with pytest.raises(IngestError, match="NaN"):
        to_jsonl(bad, tmp_path / "bad.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.parquet", "rows.jsonl", "rows.jsonl.gz"]
    with pytest.raises(IngestError, match=r"x\.jsonl: cannot be written"):
        to_jsonl(NESTED[0], tmp_path / "absent/x.jsonl")


def test_types_that_json_has_not(tmp_path):
    when = datetime.datetime(2026, 11, 30, 17, 5, 6, 250000)
    path = written(
        tmp_path / "a.parquet",
        {
            "time": pa.array([when, None], pa.timestamp("ns")),
            "day": pa.array([when.date(), None]),
            "amount": pa.array([decimal.Decimal("1.50"), None]),
            "kind": pa.array(["a", None]).dictionary_encode(),
            "map": pa.array([[("k", when), ("l", None)], None], pa.map_(pa.string(), pa.timestamp("us"))),
            "nested": pa.array([[{"d": decimal.Decimal("0.1")}], []], pa.list_(pa.struct([("d", pa.decimal128(3, 1))]))),
            "big": pa.array([2**63 - 1, -(2**63)]),
            "empty": pa.nulls(2),
            "half": pa.array([0.5, None], pa.float32()),
            "yes": [True, False],
        },
    )
    first, second = parquet_rows(path)
    assert first == {
        "time": "2026-11-30 17:05:06.250000000", "day": "2026-11-30", "amount": "1.50", "kind": "a",
        "map": {"k": "2026-11-30 17:05:06.250000", "l": None}, "nested": [{"d": "0.1"}], "big": 2**63 - 1, "empty": None, "half": 0.5,
        "yes": True,
    }  # fmt: skip
    assert second["big"] == -(2**63) and second["nested"] == [] and second["time"] is second["map"] is None
    assert json.loads(json.dumps(first)) == first


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"a": [1]}, {"columns": ["b"]}, "has no column 'b'; it has a"),
        ({"question": ["x"]}, {"columns": ["qestion"]}, r"has no column 'qestion' \(did you mean 'question'\?\)"),
        ({"a": [b"\xff"]}, {}, "column 'a' is of type binary, which has no form in JSON; leave it out"),
        ({"a": [[datetime.timedelta(1)]]}, {}, r"column 'a' is of type duration\[us\]"),
        ({"a": pa.array([[(1, "x")]], pa.map_(pa.int64(), pa.string()))}, {}, "column 'a' has a map with keys of int64"),
        ({"a": [1.0, math.inf]}, {}, ":2: column 'a' holds NaN or an infinity"),
        ({"a": [{"x": [1.0, None]}, {"x": [math.nan]}]}, {}, ":2: column 'a' holds NaN"),
        ({"a": pa.array([[("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int64()))}, {}, "a map in rows 1 to 1 has a key twice"),
        ({"a": pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())}, {}, "a string in rows 1 to 1 is not UTF-8"),
        ({"a": [1]}, {"columns": []}, "no columns are left; it has a"),
    ],
)
def test_what_cannot_be_a_row_is_named(tmp_path, columns, options, message):
    path = written(tmp_path / "a.parquet", columns)
    with pytest.raises(IngestError, match=f"^{path}.*{message}"):
        list(parquet_rows(path, **options))
    good = [0] * len(next(iter(columns.values())))
    assert list(parquet_rows(written(path, {**columns, "good": good}), columns=["good"])) == [{"good": 0}] * len(good)


@given(st.integers(0, 9999), st.binary(min_size=1, max_size=8))
def test_a_damaged_file_is_an_error_or_still_gives_whole_rows(tmp_path_factory, at, junk):
    """Parquet has no digest of its own: some damage cannot be seen, but none makes a crash or a row of another form."""
    content = bytearray(FILES[0].read_bytes())
    at = at * len(content) // 10000
    content[at : at + len(junk)] = junk
    path = tmp_path_factory.mktemp("p") / "a.parquet"
    path.write_bytes(content)
    try:
        for row in parquet_rows(path):
            json.dumps(row)
    except IngestError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)


@pytest.mark.parametrize("share", [0, 0.3, 0.9])
def test_a_cut_file_is_an_error(tmp_path, share):
    content = FILES[0].read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[: int(len(content) * share)])
    with pytest.raises(IngestError, match=r"a\.parquet: is no whole parquet file .*; get it again"):
        list(parquet_rows(tmp_path / "a.parquet"))
    with pytest.raises(IngestError, match=r"nowhere\.parquet: no such file"):
        list(parquet_rows(tmp_path / "nowhere.parquet"))


def test_an_open_file_and_its_name():
    with open(FILES[0], "rb") as file:
        assert next(parquet_rows(file, name="hub:x")).place == "hub:x:1"


def test_the_command(tmp_path, capsysbinary, monkeypatch):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    (tmp_path / "in.parquet").write_bytes(FILES[0].read_bytes())
    assert main(["in.parquet", "out.jsonl", "--columns", "messages"]) == 0
    assert read_rows(tmp_path / "out.jsonl").rows[0].keys() == {"messages"}
    assert capsysbinary.readouterr().out.decode() == f"60 rows, sha256 {read_rows(tmp_path / 'out.jsonl').digest}, of in.parquet\n"
    assert main(["in.parquet", "-", "--columns", "messages"]) == 0
    assert capsysbinary.readouterr().out == (tmp_path / "out.jsonl").read_bytes()
    wrong = {"absent.parquet": "no such file", "hub:x": "names no file of a hub", "in.parquet --columns=x": "has no column 'x'"}
    for words, message in wrong.items():
        assert main(words.split()) == 2
        told = capsysbinary.readouterr().err.decode()
        assert message in told and told.startswith("to_jsonl: ") and told.count("\n") == 1


def test_the_readme_s_example_runs(tmp_path):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    program = readme.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "data.parquet").write_bytes(NESTED[0].read_bytes())
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=os.environ, check=True)
    assert read_rows(tmp_path / "data.jsonl.gz").digest == to_jsonl(NESTED[0], None).digest


def without_pyarrow(program):
    """Runs a program in which pyarrow is not there."""
    code = f"import sys; sys.modules['pyarrow'] = None\n{program}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)


def test_without_pyarrow_the_import_works_and_the_error_names_the_extra():
    done = without_pyarrow(f"from align.ingest import main; sys.exit(main([{str(FILES[0])!r}]))")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("to_jsonl: reading parquet needs pyarrow") and "pip install 'align-ingest[parquet]'" in done.stderr


def test_the_import_does_not_load_pyarrow():
    code = "import sys, align.ingest; print('pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.stdout == "False\n"
