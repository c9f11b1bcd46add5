from slowest import slowest

WORDS = """INFO: Elapsed time: 9.1s
//libs/a:a_test                                                          PASSED in 4.2s
//libs/b:b_test                                                 (cached) PASSED in 9.9s
//libs/c:c_test                                                          PASSED in 10.5s
//libs/d:d_test                                                         TIMEOUT in 60.1s
"""


def test_the_slowest_come_first_and_the_cached_are_counted():
    assert slowest(WORDS, 2) == ["   60.1 s  //libs/d:d_test", "   10.5 s  //libs/c:c_test", "3 tests ran, 1 came from the cache"]
