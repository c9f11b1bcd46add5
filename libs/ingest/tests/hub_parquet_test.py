"""Parquet on a hub: read by range, the token at home."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import REPO, TOKEN, Server

from align.ingest import main, parquet_rows, to_jsonl

FILE = Path(__file__).parent / "data" / "gsm8k_test_none_rg60.parquet"


@pytest.fixture
def server(tmp_path, monkeypatch):
    made = Server()
    made.files["data/test.parquet"] = FILE.read_bytes()
    monkeypatch.setenv("HF_ENDPOINT", made.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("ALIGN_CACHE", str(tmp_path / "cache"))
    yield made
    made.close()


def test_the_rows_are_those_of_the_file_and_the_token_goes_to_the_hub_alone(server, tmp_path):
    server.faults["storage"] = [None, ("drop", 100), None, ("drop", 3)]
    done = to_jsonl(f"hub:{REPO}/data/test.parquet", tmp_path / "out.jsonl")
    assert done == to_jsonl(FILE, None)
    assert not server.leaks() and any(entry["token"] for entry in server.log)


def test_some_columns_are_some_of_the_bytes(server, tmp_path):
    """The footer, which pyarrow looks for in the last 64 KiB, and the chunks of the column."""
    columns = {"id": list(range(2000)), "text": [f"{i}" * 300 for i in range(2000)]}
    pq.write_table(pa.table(columns), tmp_path / "big.parquet", compression="none", use_dictionary=False, row_group_size=500)
    server.files["big.parquet"] = (tmp_path / "big.parquet").read_bytes()
    assert to_jsonl(f"hub:{REPO}/big.parquet", tmp_path / "out.jsonl", columns=["id"]).rows == 2000
    assert [row["id"] for row in parquet_rows(tmp_path / "big.parquet")] == columns["id"]
    assert len(server.files["big.parquet"]) > 2_000_000 and server.sent() < (64 << 10) + 2000 * 8 + 5000


def test_what_the_hub_refuses_is_one_line(server, capsys):
    assert main([f"hub:{REPO}/data/nothing.parquet"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("to_jsonl: ") and "there is no such file at this revision" in told and told.count("\n") == 1
