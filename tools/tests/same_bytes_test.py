"""Two logs of a build, as Bazel writes them: objects one after the other."""

import json

import pytest
from same_bytes import compare, main, outputs


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


def test_the_command_line_takes_two_logs_and_gives_help(tmp_path, capsys):
    for name, digest in (("one.json", "1"), ("other.json", "2")):
        (tmp_path / name).write_text(log(("a", digest)))
    one, other = str(tmp_path / "one.json"), str(tmp_path / "other.json")
    assert main([one, one]) == 0 and main([one, other]) == 1
    assert capsys.readouterr().out.endswith("a differs between two builds of the same inputs\n1 outputs compared, 1 differ\n")
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith("usage: same_bytes.py")
