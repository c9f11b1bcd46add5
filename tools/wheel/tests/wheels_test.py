"""The wheels as Bazel made them: only the package, whole metadata, hashes that hold, sizes that a change must mean."""

import base64
import hashlib
import re
import zipfile
from pathlib import Path

import pytest
import requires

HERE = Path(__file__).parents[1]
WHEELS = sorted(HERE.glob("align_*.whl"))
# KiB. Assets that are meant: vocabularies and Unicode tables; GSM8K and MATH-500.
CAPS = {"tokenizer": 3900, "data": 2800}
CAP = 400
WANTED = (
    "Metadata-Version: 2.4",
    "Name: align-",
    "Version: ",
    "Summary: ",
    "License-Expression: Apache-2.0",
    "License-File: LICENSE",
    "Requires-Python: >=3.11",
    "Classifier: Typing :: Typed",
    "Description-Content-Type: text/markdown",
)


def library(wheel: Path) -> str:
    return wheel.name.split("-")[0].removeprefix("align_")


def test_there_are_wheels():
    if not WHEELS:
        requires.bazel()
    assert len(WHEELS) >= 17


@pytest.mark.parametrize("wheel", WHEELS, ids=library)
def test_is_whole_and_holds_nothing_else(wheel: Path):
    name = library(wheel)
    with zipfile.ZipFile(wheel) as file:
        members = {entry.filename: file.read(entry) for entry in file.infolist()}
        assert {entry.date_time for entry in file.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    info = next(arc for arc in members if arc.endswith("/METADATA")).rpartition("/")[0]
    assert [arc for arc in members if not arc.startswith((f"align/{name}/", f"{info}/"))] == []
    assert [arc for arc in members if re.search(r"tests?/|_test\.py|\.pyc|__pycache__|benchmarks/", arc)] == []
    assert "align/__init__.py" not in members
    assert {f"align/{name}/__init__.py", f"align/{name}/py.typed"} <= set(members)
    assert wheel.stat().st_size <= CAPS.get(name, CAP) * 1024, "bigger than its cap; is what came in meant?"
    said = members[f"{info}/METADATA"].decode()
    head, _, description = said.partition("\n\n")
    assert [line for line in WANTED if line not in head] == []
    assert description.strip(), f"libs/{name}/README.md is missing"
    for line in members[f"{info}/RECORD"].decode().splitlines():
        arc, digest, size = line.rsplit(",", 2)
        if not arc.endswith("/RECORD"):
            found = base64.urlsafe_b64encode(hashlib.sha256(members[arc]).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={found}", len(members[arc]))


@pytest.mark.parametrize("wheel", WHEELS, ids=library)
def test_libraries_are_required_exactly(wheel: Path):
    with zipfile.ZipFile(wheel) as file:
        said = file.read(next(arc for arc in file.namelist() if arc.endswith("/METADATA"))).decode()
    version = re.search(r"^Version: (.*)$", said, re.MULTILINE)[1]
    needed = re.findall(r"^Requires-Dist: (align-\S+)", said, re.MULTILINE)
    assert [line for line in needed if not line.endswith(f"=={version}")] == []
    others = {f"align_{library(other)}" for other in WHEELS}
    assert {line.partition("==")[0].replace("-", "_") for line in needed} <= others
