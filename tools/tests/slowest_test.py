import io

import pytest
from slowest import main, slowest

WORDS = """INFO: Elapsed time: 9.1s
//libs/a:a_test                                                          PASSED in 4.2s
//libs/b:b_test                                                 (cached) PASSED in 9.9s
//libs/c:c_test                                                          PASSED in 10.5s
//libs/d:d_test                                                         TIMEOUT in 60.1s
"""


def test_the_slowest_come_first_and_the_cached_are_counted():
    assert slowest(WORDS, 2) == ["   60.1 s  //libs/d:d_test", "   10.5 s  //libs/c:c_test", "3 tests ran, 1 came from the cache"]


def test_the_command_line_takes_a_count_and_gives_help(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(WORDS))
    main(["1"])
    assert capsys.readouterr().out.splitlines() == ["   60.1 s  //libs/d:d_test", "3 tests ran, 1 came from the cache"]
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith("usage: slowest.py")
