"""The lists that must agree: the policy document and the lock, Bazel's tags and pytest's markers, the banned and the poisoned."""

import re
import tomllib
from pathlib import Path

from scan import BANNED

ROOT = Path(__file__).absolute().parents[2]
POLICY = (ROOT / "docs/DEPENDENCY_POLICY.md").read_text(encoding="utf-8")
LOCK = (ROOT / "third_party/python/lock.bzl").read_text(encoding="utf-8")
TAGS = {"slow", "gpu", "oracle", "weights"}


def table(heading: str) -> dict[str, str]:
    """Rows of the two-column-or-more table below a heading: first cell to second, without code marks."""
    section = POLICY.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip(" `*") for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    return {row[0]: row[1] for row in rows[2:]}


def test_the_policy_pins_what_the_lock_pins():
    locked = {name: version.partition("+")[0] for name, version in re.findall(r"^([a-z][\w-]*)==(\S+)", LOCK, re.MULTILINE)}
    assert table("Pins") == locked, "docs/DEPENDENCY_POLICY.md, section Pins, and third_party/python/lock.bzl differ"


def test_every_locked_line_has_a_hash():
    lines = [line for line in LOCK.splitlines() if re.match(r"[a-z][\w-]*==", line)]
    assert lines
    assert [line for line in lines if not re.search(r"--hash=sha256:[0-9a-f]{64}", line)] == []


def test_the_policy_names_every_banned_package():
    assert set(BANNED) <= {name for cell in table("What was removed, and what replaced it") for name in re.split(r"[ ,+/]+", cell)}


def test_every_section_of_the_founding_document_is_there():
    for heading in (
        "What was removed, and what replaced it",
        "Rules",
        "External binary: Lean 4 toolchain",
        "Vendored assets",
        "Pins",
        "Licences",
        "Test and tool dependencies",
        "Dated entries",
        "Status",
    ):
        assert f"\n## {heading}\n" in POLICY, heading


def test_entries_are_dated_and_in_order():
    dates = re.findall(r"^### (\d{4}-\d\d-\d\d)", POLICY, re.MULTILINE)
    assert dates
    assert dates == sorted(dates)


def test_tags_are_the_same_in_bazel_and_pytest():
    rc = (ROOT / ".bazelrc").read_text(encoding="utf-8")
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]["markers"]
    assert {marker.partition(":")[0] for marker in markers} == TAGS
    excluded = re.search(r"^test --test_tag_filters=(\S+)", rc, re.MULTILINE)
    assert excluded is not None
    assert set(excluded[1].split(",")) == {f"-{tag}" for tag in TAGS | {"lint"}}  # lint runs no pytest
    assert {tag for tag in TAGS if re.search(rf"^test:{tag} --test_tag_filters={tag}", rc, re.MULTILINE)} == TAGS


def test_the_path_lists_are_one_list():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert tools["pytest"]["ini_options"]["pythonpath"][1:] == tools["mypy"]["mypy_path"]
