"""What is wrong with what a field names is told with the field's name, once, and only what is a user's mistake."""

import json

import pytest
from _fields import ANSWERS, GENERATED, check_most, of_field

from align.config import ConfigError
from align.data import DataError
from align.tracking import RunDirError


def told(error: Exception) -> str:
    with pytest.raises(ConfigError) as caught, of_field("data.source"):
        raise error
    return str(caught.value)


def test_the_field_s_name_stands_in_front_once():
    assert told(DataError("x.jsonl:2: not JSON")) == "data.source: x.jsonl:2: not JSON"
    assert told(ConfigError("~x: there is no such home directory")) == "data.source: ~x: there is no such home directory"
    assert told(ConfigError("data.source x.jsonl: no rows")) == "data.source x.jsonl: no rows"
    assert told(ConfigError("data.sources.jsonl:2: not JSON")) == "data.source: data.sources.jsonl:2: not JSON"


def test_what_the_disk_refuses_is_told_in_its_words(tmp_path):
    with pytest.raises(ConfigError) as caught, of_field("run_dir"):
        tmp_path.read_bytes()
    assert str(caught.value) == f"run_dir: {tmp_path}: Is a directory"
    assert told(OSError(5, "Input/output error")) == "data.source: Input/output error"  # a read tells no file name
    assert told(RunDirError("x: no run directory")) == "data.source: x: no run directory"


class Refused(Exception):
    exit_code = 3


@pytest.mark.parametrize("error", [ValueError("a bug"), Refused("host memory")])
def test_what_is_no_mistake_of_the_user_passes_as_it_is(error):
    with pytest.raises(type(error)) as caught, of_field("data.source"):
        raise error
    assert caught.value is error and not isinstance(error, ConfigError)


def test_json_that_is_none_is_left_to_who_knows_the_file():
    with pytest.raises(json.JSONDecodeError), of_field("data.source"):
        json.loads("{")


def test_the_largest_number_is_the_last_that_is_taken():
    check_most("data.rows", GENERATED.number, GENERATED)
    with pytest.raises(ConfigError, match=r"^data\.rows is 1000001; it must be at most 1000000 problems .*take rows of a file for more$"):
        check_most("data.rows", GENERATED.number + 1, GENERATED)
    check_most("samples", ANSWERS.number, ANSWERS)
    with pytest.raises(ConfigError, match=r"^samples is 100001; it must be at most 100000 answers to a prompt; "):
        check_most("samples", ANSWERS.number + 1, ANSWERS)
