import json
import subprocess
import sys
import zipfile
from pathlib import Path

import make_wheel
import pytest
from make_wheel import WheelError, make

PROJECT = """[project]
name = "align-own"
version = "0.1.0"
description = "What it is"
license = "Apache-2.0"
requires-python = ">=3.11"
dependencies = {dependencies}

[project.optional-dependencies]
fast = ["triton>=3.6"]
"""


@pytest.fixture
def spec(tmp_path: Path) -> dict:
    texts = {
        "align/own/__init__.py": "x = 1\n",
        "align/own/py.typed": "",
        "align/own/assets/table.bin": "t",
        "tests/own_test.py": "",
        "README.md": "# align.own\n",
        "BUILD": "",
        "pyproject.toml": PROJECT.format(dependencies='["align-tokenizer", "torch>=2.11"]'),
    }
    for arc, text in texts.items():
        (tmp_path / arc).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / arc).write_text(text)
    (tmp_path / "LICENSE").write_text("Apache\n")
    direct = ["libs/tokenizer:tokenizer", "third_party/python:torch", "third_party/python:triton"]
    return {
        "library": "own",
        "version": "0.1.0",
        "direct": direct,
        "packages": ["numpy", "torch", "torch_sympy", "triton"],
        "files": {arc: str(tmp_path / arc) for arc in texts},
        "license": str(tmp_path / "LICENSE"),
    }


def test_holds_the_package_and_its_metadata_alone(spec: dict, tmp_path: Path):
    make(spec, tmp_path / "a.whl")
    with zipfile.ZipFile(tmp_path / "a.whl") as file:
        info = "align_own-0.1.0.dist-info"
        package = ["align/own/__init__.py", "align/own/assets/table.bin", "align/own/py.typed"]
        assert file.namelist() == [*package, *(f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE"))]
        said = file.read(f"{info}/METADATA").decode()
        record = file.read(f"{info}/RECORD").decode().splitlines()
    for line in (
        "Name: align-own",
        "Requires-Dist: align-tokenizer==0.1.0",
        "Requires-Dist: torch>=2.11",
        'Requires-Dist: triton>=3.6; extra == "fast"',
        "License-Expression: Apache-2.0",
    ):
        assert line in said.splitlines()
    assert said.endswith("\n\n# align.own\n")
    # sha256 of nothing, from FIPS 180-4's test vectors
    assert "align/own/py.typed,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0" in record
    assert len(record) == 7


def test_the_same_bytes_whatever_the_times_and_the_place(spec: dict, tmp_path: Path):
    make(spec, tmp_path / "a.whl")
    other = tmp_path / "elsewhere"
    for arc, path in spec["files"].items():
        (other / arc).parent.mkdir(parents=True, exist_ok=True)
        (other / arc).write_bytes(Path(path).read_bytes())
        (other / arc).chmod(0o755)
    again = spec | {"files": {arc: str(other / arc) for arc in reversed(spec["files"])}}
    (other / "spec.json").write_text(json.dumps(again))
    subprocess.run([sys.executable, make_wheel.__file__, other / "spec.json", tmp_path / "b.whl"], check=True, env={"TZ": "Asia/Tokyo"})
    assert (tmp_path / "a.whl").read_bytes() == (tmp_path / "b.whl").read_bytes()


@pytest.mark.parametrize(
    ("dependencies", "words"),
    [
        ('["torch>=2.11"]', "add align_tokenizer, remove nothing"),
        ('["align-tokenizer", "torch>=2.11", "align-verify"]', "add nothing, remove align_verify"),
        ('["align-tokenizer"]', "add torch, remove nothing"),
        ('["align-tokenizer", "torch>=2.11", "requests"]', "add nothing, remove requests"),
    ],
)
def test_refuses_needs_that_are_not_those_of_build(spec: dict, tmp_path: Path, dependencies: str, words: str):
    Path(spec["files"]["pyproject.toml"]).write_text(PROJECT.format(dependencies=dependencies))
    with pytest.raises(WheelError, match=words):
        make(spec, tmp_path / "a.whl")


def test_a_package_s_unsaid_need_may_be_declared(spec: dict, tmp_path: Path):
    Path(spec["files"]["pyproject.toml"]).write_text(PROJECT.format(dependencies='["align-tokenizer", "torch>=2.11", "numpy>=2"]'))
    make(spec, tmp_path / "a.whl")


@pytest.mark.parametrize("gone", ["pyproject.toml", "align/own/py.typed"])
def test_refuses_a_library_that_is_not_whole(spec: dict, tmp_path: Path, gone: str):
    del spec["files"][gone]
    with pytest.raises(WheelError, match=f"{gone} is missing"):
        make(spec, tmp_path / "a.whl")
