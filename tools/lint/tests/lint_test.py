"""The command line of lint; what its checks find is checks_test's."""

import lint
import pytest


def test_help_names_every_check(capsys):
    with pytest.raises(SystemExit) as end:
        lint.main(["--help"])
    told = capsys.readouterr().out
    assert end.value.code == 0 and told.startswith("usage: lint.py") and "--update" in told
    assert ", ".join(lint.CHECKS) in " ".join(told.split()) and "known.txt" in told


def test_a_check_that_there_is_not_is_refused_by_name(capsys):
    with pytest.raises(SystemExit) as end:
        lint.main(["docstring"])
    assert end.value.code == 2 and "there is no check 'docstring'; the checks are ruff, format" in capsys.readouterr().err


def test_the_named_checks_alone_run_and_complaints_decide_the_code(monkeypatch, capsys):
    monkeypatch.setattr(lint, "CHECKS", {"one": lambda: ["a.py:3: wrong"], "other": lambda: pytest.fail("was not asked")})
    monkeypatch.setattr(lint, "read", lambda path: "")
    assert lint.main(["one"]) == 1 and "a.py:3: wrong\nlint one: 1 complaints, 0 known ones" in capsys.readouterr().out
    monkeypatch.setattr(lint, "read", lambda path: "one: a.py: wrong\n")
    assert lint.main(["one"]) == 0 and "lint one: 0 complaints, 1 known ones" in capsys.readouterr().out
