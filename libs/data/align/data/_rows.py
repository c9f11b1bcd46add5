"""Rows of JSON Lines: reading, kinds, validation with file and line."""

import difflib
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ._errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
MAX_LINE = 256 << 20  # bytes; beyond this a file is not JSON Lines


class Row(dict[str, Any]):
    """A row as it was read; `place` is its "file:line", for the messages of later steps."""

    __slots__ = ("place",)
    place: str


@dataclass(frozen=True)
class RowSet:
    """The rows of one file.

    `digest` is the sha256 of the file's decompressed bytes, so that a file and its .gz agree.
    """

    rows: list[dict[str, Any]]
    kind: str
    path: Path
    digest: str

    def __len__(self) -> int:
        return len(self.rows)


def read_rows(path: str | Path, *, kind: str = "auto") -> RowSet:
    """Reads a JSON Lines file (UTF-8; plain or gzip, told by its first bytes, not by its name).

    Kinds, by their fields: `messages` {"messages"}, `completion` {"prompt", "completion"}, `text` {"text"}, `preference` {"prompt",
    "chosen", "rejected"}, `answer` {"prompt", "answer"}, `steps` {"prompt", "steps", "labels"}. Other fields are kept and not looked at.
    "auto" takes the kind of the first row; one file holds one kind. Empty lines are passed over.

    Raises DataError: no such file, no rows, a row that is malformed or of another kind (file:line, value and way out).
    """
    digest = hashlib.sha256()
    rows: list[dict[str, Any]] = []
    for row, found in stream_rows(path, kind=kind, digest=digest.update):
        rows.append(row)
        kind = found
    return RowSet(rows, kind, Path(path), digest.hexdigest())


def stream_rows(path: str | Path, *, kind: str = "auto", digest: Callable[[bytes], object] | None = None) -> Iterator[tuple[Row, str]]:
    """Yields (row, kind) one at a time; `digest` is called with each line's bytes. Raises DataError as `read_rows` does, at the row."""
    return check_rows(read_objects(path, digest=digest), kind=kind)


def read_objects(path: str | Path, *, digest: Callable[[bytes], object] | None = None) -> Iterator[Row]:
    """Objects of a JSON Lines file of any fields, each with its place. Raises DataError for a line that is none, and a file without any."""
    count = 0
    for row in parse_lines(read_lines(path), str(path), digest=digest):
        count += 1
        yield row
    if not count:
        raise DataError(f"{path}: no rows; the file is empty or has blank lines only")


def check_rows(rows: Iterable[Row], *, kind: str = "auto") -> Iterator[tuple[Row, str]]:
    """Yields (row, kind) of rows with a place, whatever they come from; refuses what is not of `kind`, or not of the first row's."""
    if kind != "auto" and kind not in KINDS:
        raise DataError(f"kind {kind!r} is not known{_nearest(kind, KINDS)}; the kinds are auto, {', '.join(KINDS)}")
    for row in rows:
        if kind == "auto":
            kind = _kind_of(row, row.place)
        _check(row, kind, row.place)
        yield row, kind


def parse_lines(lines: Iterable[bytes], name: str, *, digest: Callable[[bytes], object] | None = None) -> Iterator[Row]:
    """Objects of JSON Lines in any published form, each with its place "name:line"."""
    for number, line in enumerate(lines, 1):
        if digest:
            digest(line)
        if number == 1 and line.startswith(b"\xef\xbb\xbf"):
            line = line[3:]
        if line.strip():
            row = Row(_parse(line, place := f"{name}:{number}"))
            row.place = place
            yield row


def text_rows(path: str | Path, *, by: Literal["file", "line", "paragraph"] = "file") -> Iterator[Row]:
    """Rows {"text"} of a text file (UTF-8; plain or gzip): the whole file, its lines, or what stands between blank lines.

    Pieces of white space alone are passed over; line ends inside a piece stay, the last one goes. `place` is that of a piece's first
    line. Raises DataError: no text, bytes that are not UTF-8 (file:line and byte).
    """
    if by not in ("file", "line", "paragraph"):
        raise DataError(f"by {by!r} is not known; it is file, line or paragraph")
    piece: list[str] = []
    first = count = 0

    def made() -> Iterator[Row]:
        if text := "".join(piece).strip("\r\n"):
            row = Row(text=text)
            row.place = f"{path}:{first}"
            yield row
        piece.clear()

    for number, line in enumerate(read_lines(path), 1):
        try:
            decoded = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(_not_utf8(f"{path}:{number}", line, error)) from None
        if by != "file" and (by == "line" or not decoded.strip()):
            for row in made():
                count += 1
                yield row
        if decoded.strip() or (by == "file" and piece):
            first = first if piece else number
            piece.append(decoded)
    for row in made():
        count += 1
        yield row
    if not count:
        raise DataError(f"{path}: no text; the file is empty or holds white space only")


def read_lines(path: str | Path) -> Iterator[bytes]:
    """Lines of a file, unzipped when it begins like gzip. A line ends at b"\\n" alone: U+2028 and U+0085 are part of a string."""
    number = 0
    try:
        with open(path, "rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            stream: io.BufferedIOBase = gzip.GzipFile(fileobj=raw) if zipped else raw
            while line := stream.readline(MAX_LINE):
                number += 1
                if len(line) == MAX_LINE:
                    raise DataError(f"{path}:{number}: a line of more than {MAX_LINE >> 20} MiB; is this JSON Lines, one object a line?")
                yield line
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; give the path of a .jsonl or .jsonl.gz file") from None
    except EOFError:
        raise DataError(f"{path}:{number + 1}: the gzip stream ends in the middle; the file is truncated, get it again") from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}:{number + 1}: the gzip stream is damaged ({error}); get the file again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); give the path of a readable .jsonl file") from None


def file_digest(path: str | Path) -> str:
    """sha256 of a file's content, decompressed, as `RowSet.digest` has it."""
    digest = hashlib.sha256()
    for line in read_lines(path):
        digest.update(line)
    return digest.hexdigest()


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = _decode(line.decode("utf-8"))
        surrogate = _SURROGATE.search(line) and _has_surrogate(row)
    except UnicodeDecodeError as error:
        raise DataError(_not_utf8(place, line, error)) from None
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON at column {error.colno} ({error.msg}): {_shown(line[:60])}; one object a line") from None
    except RecursionError:
        raise DataError(f"{place}: nested too deeply to be a row; flatten it") from None
    except ValueError as error:
        raise DataError(f"{place}: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: a row is an object {{...}}, this is {_a(row)}")
    if surrogate:
        raise DataError(f"{place}: a lone surrogate (\\ud800-\\udfff) is not a character; write the pair or the character itself")
    return row


def _not_utf8(place: str, line: bytes, error: UnicodeDecodeError) -> str:
    return f"{place}: byte {error.start} (0x{line[error.start]:02x}) is not UTF-8; convert the file to UTF-8"


def _unique(pairs: list[tuple[str, object]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} is there twice in one object; keep one")
    return made


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON; write null, or leave the field out")


# One decoder: json.loads with hooks makes a new one for each line.
_decode = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant).decode
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def _has_surrogate(value: object) -> bool:
    if isinstance(value, str):
        return any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, dict):
        return any(_has_surrogate(part) for pair in value.items() for part in pair)
    return isinstance(value, list) and any(map(_has_surrogate, value))


def _kind_of(row: dict[str, Any], place: str) -> str:
    for kind, fields in KINDS.items():
        if all(field in row for field in fields):
            return kind
    given = ", ".join(map(repr, row)) or "none"
    known = "; ".join(f"{kind}: {', '.join(needed)}" for kind, needed in KINDS.items())
    near = next((f" (did you mean {hit[0]!r}?)" for key in row if (hit := difflib.get_close_matches(key, NAMES, 1, 0.75))), "")
    raise DataError(f"{place}: fields {_cut(given)} make no known kind{near}; needed is one of: {known}")


def _check(row: dict[str, Any], kind: str, place: str) -> None:
    for field in KINDS[kind]:
        if field not in row:
            given = ", ".join(map(repr, row)) or "none"
            raise DataError(
                f"{place}: field {field!r} is missing{_nearest(field, row)}; rows of kind {kind} have {', '.join(KINDS[kind])}, this one "
                f"has {_cut(given)}; one file holds one kind"
            )
        value = row[field]
        if field == "messages" or (field == "prompt" and kind in ("preference", "answer") and isinstance(value, list)):
            _check_messages(value, f"{place}: {field}")
        elif field in ("steps", "labels"):
            _check_list(value, field, place)
        elif not isinstance(value, str):
            raise DataError(f"{place}: {field} must be a string, this is {_a(value)}{_quote_it(value)}")
    if kind == "answer" and not row["answer"].strip():
        raise DataError(f"{place}: answer is empty; nothing can be judged by it: fill it in, or remove the row")
    if kind == "steps" and len(row["steps"]) != len(row["labels"]):
        raise DataError(f"{place}: {len(row['steps'])} steps but {len(row['labels'])} labels; give one label a step")


def _check_list(value: object, field: str, place: str) -> None:
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: {field} must be a list that is not empty, this is {_a(value)}")
    for index, part in enumerate(value):
        if field == "steps" and not isinstance(part, str):
            raise DataError(f"{place}: steps[{index}] must be a string, this is {_a(part)}")
        if field == "labels" and (type(part) is not int or part not in (-1, 0, 1)):
            raise DataError(f"{place}: labels[{index}] must be -1, 0 or 1, this is {_a(part)}")


def _check_messages(value: object, place: str) -> None:
    if not isinstance(value, list) or not value:
        raise DataError(f"{place} must be a list of messages that is not empty, this is {_a(value)}")
    for index, message in enumerate(value):
        at = f"{place}[{index}]"
        if not isinstance(message, dict):
            raise DataError(f'{at} must be an object {{"role", "content"}}, this is {_a(message)}')
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            near = _nearest(role, ROLES) if isinstance(role, str) else ""
            raise DataError(f"{at}.role is {_shown(role)}{near}; the roles are {', '.join(ROLES)}")
        content = message.get("content")
        if isinstance(content, list):
            raise DataError(f"{at}.content is a list of parts; only text is handled: join the parts into one string")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise DataError(f"{at}.content must be a string, this is {_a(content)}")


# In the order in which "auto" tries them: a row with more of the fields is the richer kind.
KINDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "preference": ("prompt", "chosen", "rejected"),
    "steps": ("prompt", "steps", "labels"),
    "completion": ("prompt", "completion"),
    "answer": ("prompt", "answer"),
    "text": ("text",),
}
NAMES = sorted({field for fields in KINDS.values() for field in fields})


def _nearest(name: str, names: Iterable[str]) -> str:
    hit = difflib.get_close_matches(name, list(names), 1)
    return f" (did you mean {hit[0]!r}?)" if hit else ""


def _quote_it(value: object) -> str:
    return f'; write it as a string, "{value}"' if isinstance(value, (int, float)) and not isinstance(value, bool) else ""


def _a(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number", type(None): "null"}
    return f"{names[type(value)]}, {_shown(value)}" if value is not None else "null or absent"


def _shown(value: object) -> str:
    return _cut(value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else repr(value))


def _cut(text: str, limit: int = 60) -> str:
    """At most `limit` characters, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
