"""Rows: every kind read, every malformed row refused with its place."""

import gzip
import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.data import DataError, check_rows, parse_lines, read_objects, read_rows, stream_rows, text_rows

GOOD = {
    "messages": {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]},
    "completion": {"prompt": "2+2=", "completion": "4"},
    "text": {"text": "four"},
    "preference": {"prompt": [{"role": "user", "content": "2+2?"}], "chosen": "4", "rejected": "5"},
    "answer": {"prompt": "2+2?", "answer": "4"},
    "steps": {"prompt": "2+2?", "steps": ["2+2=4.", "4."], "labels": [1, -1]},
}


@pytest.fixture
def write(tmp_path):
    def write(content, name="rows.jsonl"):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.mark.parametrize("kind", GOOD)
def test_each_kind_is_told_by_its_fields_and_keeps_other_fields(write, kind):
    row = GOOD[kind] | {"id": 7, "meta": {"x": None}}
    read = read_rows(write(json.dumps(row) + "\n"))
    assert (read.kind, read.rows, len(read)) == (kind, [row], 1)
    assert read_rows(read.path, kind=kind).rows == [row]
    assert read.rows[0].place == f"{read.path}:1"


def test_a_row_that_has_two_kinds_is_the_richer_one_or_the_one_asked_for(write):
    path = write('{"prompt": "2+2=", "completion": "4", "answer": "4"}')
    assert read_rows(path).kind == "completion"
    assert read_rows(path, kind="answer").kind == "answer"


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl"])
def test_gzip_is_told_by_its_bytes_and_may_have_members(write, name):
    lines = [json.dumps({"text": str(i)}) + "\n" for i in range(5)]
    zipped = gzip.compress("".join(lines[:2]).encode()) + gzip.compress("".join(lines[2:]).encode())
    read = read_rows(write(zipped, name))
    assert [row["text"] for row in read.rows] == list("01234")
    assert read.digest == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_only_the_line_feed_ends_a_line(write):
    texts = ["a\u2028b\u2029c\x85d\x0be\x0cf", "g", "h"]
    content = "\ufeff" + "\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts) + "\r\n\r\n  \n"
    read = read_rows(write(content))
    assert [row["text"] for row in read.rows] == texts
    assert [row.place.rpartition(":")[2] for row in read.rows] == ["1", "2", "3"]


@given(st.lists(st.text(), min_size=1, max_size=8), st.booleans(), st.booleans())
def test_any_text_comes_back(tmp_path_factory, texts, ascii_only, zipped):
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    path = tmp_path_factory.mktemp("any") / "rows"
    content = "\n".join(json.dumps({"text": text}, ensure_ascii=ascii_only) for text in texts).encode()
    path.write_bytes(gzip.compress(content) if zipped else content)
    assert [row["text"] for row in read_rows(path).rows] == texts


GOOD_LINE = json.dumps(GOOD["answer"])
BAD_LINES = {
    "not json": ('{"prompt": "a", "answer": ', "not JSON at column"),
    "two objects": ('{"prompt": "a", "answer": "b"}{}', "not JSON at column 31 (Extra data)"),
    "a list": ('["a"]', "a row is an object {...}, this is a list, ['a']"),
    "NaN": ('{"prompt": "a", "answer": "b", "x": NaN}', "NaN is not JSON"),
    "infinity": ('{"prompt": "a", "answer": "b", "x": [-Infinity]}', "-Infinity is not JSON"),
    "duplicate key": ('{"prompt": "a", "answer": "b", "answer": "c"}', "key 'answer' is there twice"),
    "duplicate key inside": ('{"prompt": "a", "answer": "b", "m": [{"k": 1, "k": 1}]}', "key 'k' is there twice"),
    "deep": ('{"x": ' + "[" * 100_000, "nested too deeply"),
    "deep and escaped": ('{"prompt": "\\u0041", "answer": "b", "x": ' + "[" * 400 + "]" * 400 + "}", None),
    "huge integer": ('{"prompt": "a", "answer": "b", "x": ' + "1" * 5000 + "}", "4300 digits"),
    "lone surrogate": ('{"prompt": "\\ud83d", "answer": "b"}', "lone surrogate"),
    "not utf-8": (b'{"prompt": "caf\xe9", "answer": "b"}', "byte 15 (0xe9) is not UTF-8"),
    "utf-16": ("\ufeff{}".encode("utf-16-le"), "byte 0 (0xff) is not UTF-8"),
    "number": ('{"prompt": "a", "answer": 4}', 'answer must be a string, this is a number, 4; write it as a string, "4"'),
    "null": ('{"prompt": "a", "answer": null}', "answer must be a string, this is null or absent"),
    "empty answer": ('{"prompt": "a", "answer": " "}', "answer is empty"),
    "typo": ('{"prompt": "a", "anwser": "b"}', "field 'answer' is missing (did you mean 'anwser'?)"),
    "other kind": ('{"text": "a"}', "field 'prompt' is missing; rows of kind answer have prompt, answer, this one has 'text'; one"),
    "boolean": ('{"prompt": true, "answer": "b"}', "prompt must be a string, this is a boolean, True"),
    "prompt of numbers": ('{"prompt": [1], "answer": "b"}', 'prompt[0] must be an object {"role", "content"}, this is a number, 1'),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named(write, name):
    line, message = BAD_LINES[name]
    line = line.encode() if isinstance(line, str) else line
    path = write(GOOD_LINE.encode() + b"\n\n" + line + b"\n" + GOOD_LINE.encode())
    if message is None:  # deep, but a row
        assert len(read_rows(path)) == 3
        return
    with pytest.raises(DataError) as caught:
        read_rows(path)
    assert str(caught.value).startswith(f"{path}:3: ") and message in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400 + len(str(path))
    assert caught.value.exit_code == 2


BAD_ROWS = {
    "role": ({"messages": [{"role": "asistant", "content": ""}]}, "messages[0].role is 'asistant' (did you mean 'assistant'?)"),
    "no role": ({"messages": [{"content": ""}]}, "messages[0].role is None; the roles are system"),
    "no messages": ({"messages": []}, "messages must be a list of messages that is not empty, this is a list, []"),
    "string": ({"messages": "hi"}, "messages must be a list of messages that is not empty, this is a string, 'hi'"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content must be a string, this is null or absent"),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content is a list of parts"),
    "labels": ({"prompt": "", "steps": ["a", "b"], "labels": [1]}, "2 steps but 1 labels; give one label a step"),
    "label": ({"prompt": "", "steps": ["a"], "labels": [True]}, "labels[0] must be -1, 0 or 1, this is a boolean, True"),
    "label 2": ({"prompt": "", "steps": ["a"], "labels": [2]}, "labels[0] must be -1, 0 or 1, this is a number, 2"),
    "no steps": ({"prompt": "", "steps": [], "labels": []}, "steps must be a list that is not empty"),
    "step": ({"prompt": "", "steps": [None], "labels": [1]}, "steps[0] must be a string, this is null"),
    "sharegpt": ({"conversations": []}, "fields 'conversations' make no known kind; needed is one of: messages: messages;"),
    "near": ({"mesages": []}, "make no known kind (did you mean 'messages'?)"),
    "nothing": ({}, "fields none make no known kind"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named(write, name):
    row, message = BAD_ROWS[name]
    with pytest.raises(DataError) as caught:
        read_rows(write(json.dumps(row)))
    assert ":1: " in str(caught.value) and message in str(caught.value)


def test_a_tool_call_needs_no_content(write):
    row = {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]}
    assert read_rows(write(json.dumps(row))).rows == [row]


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf", gzip.compress(b"", mtime=0)])
def test_an_empty_file_is_refused(write, content):
    with pytest.raises(DataError, match="no rows; the file is empty"):
        read_rows(write(content))


def test_a_gzip_file_cut_anywhere_never_ends_quietly(write):
    """Every cut behind the magic bytes: also the ones in the header and in the checksum at the end."""
    whole = gzip.compress(b"".join(b'{"text": "%d"}\n' % i for i in range(50)), mtime=0)
    for size in range(2, len(whole)):
        with pytest.raises(DataError, match=r"rows.jsonl:\d+: the gzip stream"):
            read_rows(write(whole[:size]))


def test_a_damaged_gzip_file_is_refused(write):
    whole = bytearray(gzip.compress(b'{"text": "0123456789"}\n' * 50, mtime=0))
    for at in (20, len(whole) - 6):  # the data, the checksum
        damaged = bytearray(whole)
        damaged[at] ^= 0x55
        with pytest.raises(DataError):
            read_rows(write(bytes(damaged)))


def test_what_is_no_readable_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"nothing.jsonl: no such file; give the path"):
        read_rows(tmp_path / "nothing.jsonl")
    with pytest.raises(DataError, match=r"cannot be read \(Is a directory\)"):
        read_rows(tmp_path)
    with pytest.raises(DataError, match=r"kind 'mesages' is not known \(did you mean 'messages'\?\)"):
        read_rows(tmp_path / "nothing.jsonl", kind="mesages")


def test_streaming_gives_the_rows_before_a_bad_one(write):
    rows = stream_rows(write('{"text": "a"}\n{"text": 1}\n'))
    assert next(rows) == ({"text": "a"}, "text")
    with pytest.raises(DataError, match=":2: text must be a string"):
        next(rows)


def test_objects_of_other_fields_come_with_their_place_and_can_be_checked_later(write):
    path = write('{"q": "2+2?"}\n\n{"q": "3+3?"}\n')
    rows = list(read_objects(path))
    assert [(row, row.place) for row in rows] == [({"q": "2+2?"}, f"{path}:1"), ({"q": "3+3?"}, f"{path}:3")]
    for row in rows:
        row["text"] = row.pop("q")
    assert [kind for _, kind in check_rows(rows)] == ["text", "text"]
    with pytest.raises(DataError, match=r"rows.jsonl:1: field 'prompt' is missing"):
        list(check_rows(rows, kind="answer"))
    assert [row.place for row in parse_lines([b"{}\n", b'{"a": 1}'], "pipe")] == ["pipe:1", "pipe:2"]


TEXT = "\ufeffOne\r\n two\n\n \nThree\u2028four\n\n"


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("file", [("One\r\n two\n\n \nThree\u2028four", 1)]),
        ("line", [("One", 1), (" two", 2), ("Three\u2028four", 5)]),
        ("paragraph", [("One\r\n two", 1), ("Three\u2028four", 5)]),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_text_files(write, by, expected, zipped):
    path = write(gzip.compress(TEXT.encode()) if zipped else TEXT, "a.txt")
    assert [(row, row.place) for row in text_rows(path, by=by)] == [({"text": text}, f"{path}:{line}") for text, line in expected]


def test_text_that_is_none_is_refused(write):
    damaged = (b"a\nb\xff\n", r"a.txt:2: byte 1 \(0xff\) is not UTF-8")
    for content, message in (("", "a.txt: no text"), (" \n\t\n", "a.txt: no text"), damaged):
        with pytest.raises(DataError, match=message):
            list(text_rows(write(content, "a.txt"), by="line"))
    with pytest.raises(DataError, match="by 'word' is not known; it is file, line or paragraph"):
        list(text_rows(write("a"), by="word"))


@given(st.text(alphabet="ab \n\r", max_size=40))
def test_no_character_of_a_text_is_lost_but_blank_lines_and_ends(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("t") / "a.txt"
    path.write_bytes(text.encode())
    for by in ("file", "line", "paragraph"):
        try:
            got = "".join(row["text"] for row in text_rows(path, by=by))
        except DataError:
            got = ""
        assert got.split() == "".join(got).split() and "".join(got.split()) == "".join(text.split())
