"""Goldens against the closures that Bazel sees. Without Bazel there is nothing to compare."""

import difflib
from pathlib import Path

import pytest
import requires

HERE = Path(__file__).parents[1]
GOLDENS = sorted((HERE / "goldens").glob("*.txt"))


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda path: path.stem)
def test_reaches_what_the_golden_says(golden: Path):
    closure = HERE / f"{golden.stem}.closure"
    if not closure.exists():
        requires.bazel()
    now, then = sorted(closure.read_text().split()), golden.read_text().split()
    difference = "\n".join(difflib.unified_diff(then, now, f"firewall/goldens/{golden.name}", "now", lineterm=""))
    assert now == then, f"{difference}\nIf this is meant: firewall/update_goldens.sh, and a line in docs/DEPENDENCY_POLICY.md"


def test_every_closure_has_a_golden():
    assert {path.stem for path in HERE.glob("*.closure")} <= {path.stem for path in GOLDENS}


def test_torch_is_absent_from_layer_0_and_data():
    for name in ("config", "data", "guard", "ingest", "tokenizer", "tracking", "verify"):
        assert "torch" not in (HERE / "goldens" / f"{name}.txt").read_text(), name


def test_pyarrow_is_within_reach_of_ingest_alone():
    assert [golden.stem for golden in GOLDENS if "pyarrow" in golden.read_text()] == ["ingest"]


def test_the_default_stage_reaches_the_house():
    reached = (HERE / "goldens" / "stagessft.txt").read_text().split()
    wanted = {
        "//libs/tokenizer:tokenizer",
        "//libs/optim8bit:optim8bit",
        "//libs/train:train",
        "//libs/verify:verify",
        "//third_party/python:triton",
    }
    assert wanted <= set(reached)
