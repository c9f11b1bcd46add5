"""Two logs of a build, as Bazel writes them: objects one after the other."""

import json

from same_bytes import compare, outputs


def log(*outs: tuple[str, str], mnemonic: str = "Genrule") -> str:
    return "\n".join(
        json.dumps({"mnemonic": mnemonic, "actualOutputs": [{"path": path, "digest": {"hash": digest}}]}, indent=2) for path, digest in outs
    )


def test_the_same_digests_pass():
    assert compare(log(("a", "1"), ("b", "2")), log(("b", "2"), ("a", "1"))) == []


def test_a_clock_in_an_output_is_found():
    assert compare(log(("a", "1"), ("b", "2")), log(("a", "1"), ("b", "3"))) == ["b differs between two builds of the same inputs"]


def test_what_one_build_alone_made_is_found():
    assert compare(log(("a", "1")), log(("a", "1"), ("c", "3"))) == ["c was made by the second build alone"]


def test_logs_of_tests_hold_times_and_are_left_out():
    assert outputs(log(("t/test.log", "1"), mnemonic="TestRunner")) == {}
