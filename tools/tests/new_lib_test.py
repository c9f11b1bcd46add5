"""A new library passes what the house asks of the old ones."""

import os
import subprocess
import sys
from pathlib import Path

import build_format
import docstrings
import layers
import make_wheel
import pytest
from new_lib import create
from scan import scan

ROOT = Path(__file__).absolute().parents[2]
ABOUT = "Plays the lute"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The lists as they are, and a BUILD file for each library."""
    for name in ("libraries.bzl", "pyproject.toml", "docs/architecture.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    for place in layers.read_table((ROOT / "docs/architecture.md").read_text(encoding="utf-8")):
        if place != "stages":
            (tmp_path / "libs" / place).mkdir(parents=True)
            (tmp_path / "libs" / place / "BUILD").write_text("")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    assert scan(tmp_path) == []
    return tmp_path


@pytest.mark.parametrize("name", ["lute", "a_lute", "zither2"])
def test_a_new_library_is_in_the_house_s_form(tree: Path, name: str):
    written = create(tree, name, 1, ABOUT)
    assert scan(tree) == []
    assert build_format.check("BUILD", (tree / f"libs/{name}/BUILD").read_text()) == []
    assert docstrings.check(tree, name) == []
    place = layers.read_table((tree / "docs/architecture.md").read_text())[name]
    assert (place.layer, place.packages) == (1, frozenset())
    for path in written:
        if path.endswith(".py"):
            compile((tree / path).read_text(), path, "exec")


def test_its_own_test_and_its_wheel(tree: Path):
    create(tree, "lute", 0, ABOUT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree / "libs/lute"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tree}", f"--config-file={tree}/pyproject.toml"]
    done = subprocess.run([*command, "libs/lute"], cwd=tree, capture_output=True, text=True, check=False, env=environment)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    done = subprocess.run([sys.executable, tree / "reuse/bazel/lute_test.py"], check=False, env=environment)
    assert done.returncode == 0
    (tree / "LICENSE").write_text("")
    files = {str(path.relative_to(tree / "libs/lute")): str(path) for path in (tree / "libs/lute").rglob("*") if path.is_file()}
    spec = {"library": "lute", "version": "0.1.0", "direct": [], "packages": [], "files": files, "license": str(tree / "LICENSE")}
    make_wheel.make(spec, tree / "lute.whl")


@pytest.mark.parametrize(
    ("name", "layer", "words"),
    [
        ("Lute", 0, "is no module's name"),
        ("class", 0, "is no module's name"),
        ("verify", 0, "exists"),
        ("lute", 5, "no layer 5"),
        ("lute", 9, "no layer 9"),
    ],
)
def test_refused(tree: Path, name: str, layer: int, words: str):
    with pytest.raises(ValueError, match=words):
        create(tree, name, layer, ABOUT)
