"""The hub's client against a real server with faults: byte-identical or a clear error, no token elsewhere, little read twice."""

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import zlib
from io import BufferedReader
from pathlib import Path

import pytest
from hub_server import CHUNK, COMMIT, FILES, LARGE, LINES, REPO, TOKEN, Server, git_blob
from hypothesis import given, settings
from hypothesis import strategies as st

from align.data import DataError, Hub, HubError
from align.data._http import Client, asked_wait, origin
from align.data._hub import split_lines, unzip


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


@pytest.fixture
def hub(server, tmp_path):
    return client(server, tmp_path)


def client(server, cache, **options):
    waits = []
    given_options = {"sleep": waits.append, "jitter": lambda: 0, "timeout": 20, "chunk": CHUNK} | options
    made = Hub(endpoint=server.url, token=TOKEN, cache=cache, **given_options)
    made.waits = waits
    return made


def test_files_are_listed_over_all_pages(server, hub):
    files = hub.files(REPO)
    assert [(file.path, file.size) for file in files] == [(name, len(FILES[name])) for name in sorted(FILES)]
    assert {file.path: file.sha256 for file in files}["train.jsonl"] == hashlib.sha256(LARGE).hexdigest()
    assert sum("/tree/" in entry["path"] for entry in server.log) == 2


def test_a_listing_is_whole_or_refused(server, hub):
    server.faults["api"] = [None, "page elsewhere"]
    with pytest.raises(HubError, match=r"next page is on another host, 127.0.0.1; it is not followed"):
        hub.files(REPO)
    server.faults["api"] = [None, None, "page again"]
    server.files |= {"z1": b"", "z2": b""}
    with pytest.raises(HubError, match="pages go round in a circle"):
        hub.files(REPO)
    server.files["../../evil"] = b""
    with pytest.raises(HubError, match=r"the path '../../evil' is not one inside a repository"):
        hub.files(REPO)
    assert not server.leaks()


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_downloaded_once_and_then_comes_from_the_cache(server, hub, name):
    path = hub.download(REPO, name)
    assert path.read_bytes() == FILES[name] and path.name == Path(name).name
    count = len(server.log)
    assert hub.download(REPO, name, COMMIT) == path and len(server.log) == count
    assert client(server, path.parents[5 if "/" in name else 4], offline=True).download(REPO, name) == path
    assert not list(path.parent.glob(".*"))


def test_the_token_goes_to_the_hub_alone(server, hub):
    server.faults["hub"] = ["redirect elsewhere"]
    with contextlib.suppress(HubError):
        hub.download(REPO, "train.jsonl")
    hub.download("old/name", "train.jsonl", COMMIT)  # a renamed repository: the same host, so the token goes along
    assert {entry["role"] for entry in server.log} == {"hub", "storage", "other"} and not server.leaks()
    assert all(entry["token"] for entry in server.log if entry["role"] == "hub")


def test_drops_are_gone_on_with_at_the_byte(server, hub):
    server.faults["storage"] = [("drop", 10_000), ("drop", 1), ("drop", 0), ("drop", 50_000)]
    assert hub.download(REPO, "train.jsonl").read_bytes() == LARGE
    assert server.sent() == len(LARGE)
    ranges = [entry["range"] for entry in server.log if entry["role"] == "storage"]
    assert ranges == [None, "bytes=10000-", "bytes=10001-", "bytes=10001-", "bytes=60001-"]
    etag = f'"v1-{len(LARGE)}"'
    assert [entry["if_range"] for entry in server.log if entry["role"] == "storage"] == [None, etag, etag, etag, etag]
    assert hub.waits == [1, 1, 2, 1]  # the count begins again after progress


def test_what_the_server_asks_is_waited_for(server, hub):
    server.faults["storage"] = [
        {"status": 429, "Retry-After": "7"},
        {"status": 429, "RateLimit": '"resolvers";r=0;t=55'},
        429,
        504,
        500,
        408,
    ]
    server.faults["api"] = [503]
    assert hub.download(REPO, "train.jsonl").read_bytes() == LARGE
    assert hub.waits == [1, 7, 56, 60, 20, 16, 32]
    server.faults["api"] = [{"status": 429, "Retry-After": "4000"}]
    with pytest.raises(HubError, match="it asks to wait 4000 s"):
        hub.commit(REPO)


def test_asked_waits_of_every_form():
    now = 1_700_000_000.0
    assert asked_wait({"Retry-After": "Tue, 14 Nov 2023 22:13:50 GMT"}, now) == 30
    assert asked_wait({"Retry-After": "Tue, 14 Nov 2000 22:13:50 GMT"}, now) == 0
    assert asked_wait({"Retry-After": "soon"}, now) is None and asked_wait({}, now) is None


def test_a_name_that_nobody_knows_is_given_up_after_three_attempts(tmp_path):
    waits = []
    nowhere = Hub(endpoint="http://hub.invalid", cache=tmp_path, sleep=waits.append)
    with pytest.raises(HubError, match=r"is there a network\? HF_ENDPOINT names another hub"):
        nowhere.commit("org/name")
    assert len(waits) == 2


def test_it_gives_up_with_a_clear_error(server, hub):
    server.faults["storage"] = [("drop", 100)] + [("drop", 0)] * 20
    with pytest.raises(HubError, match=r"train.jsonl: the body ended after 100 of \d+ bytes; given up after 9 attempts without progress"):
        hub.download(REPO, "train.jsonl")
    assert hub.waits == [1, 2, 4, 8, 16, 32, 60, 60]
    for missing, message in (
        ((REPO, "nothing"), "there is no such file at this revision"),
        (("no/repo", "x"), "there is no such repository, the token in use may not read it"),
        (("no repo", "x"), "'no repo' names no repository"),
        ((REPO, "../x"), "is not one inside a repository"),
    ):
        with pytest.raises(HubError, match=message):
            hub.download(*missing)
    unreachable = Hub(endpoint="http://127.0.0.1:9", cache=hub.cache, sleep=lambda wait: None, attempts=1)
    with pytest.raises(HubError, match=r"no answer \(ConnectionRefusedError"):
        unreachable.files(REPO)
    assert not server.leaks() and isinstance(HubError(""), DataError) and HubError.exit_code == 2


def test_a_server_without_ranges_is_read_again(server, hub):
    server.ranges = False
    server.faults["storage"] = [("drop", 10_000)]
    assert hub.download(REPO, "train.jsonl").read_bytes() == LARGE
    assert server.sent() == len(LARGE) + 10_000


def test_a_body_that_was_zipped_on_the_way_is_asked_for_again(server, hub):
    server.faults["hub"] = ["gzip"]
    assert hub.download(REPO, "README.md").read_bytes() == FILES["README.md"] and hub.waits == [1]


def test_damage_is_found_and_got_once_more(server, hub):
    server.faults["storage"] = ["flip"]
    assert hub.download(REPO, "train.jsonl").read_bytes() == LARGE
    server.faults["hub"] = ["flip", "flip"]
    with pytest.raises(HubError, match=rf"README.md: has the digest \w+, the hub says {git_blob(FILES['README.md'])}; it was got twice"):
        hub.download(REPO, "README.md")
    server.faults["storage"] = ["flip"]
    with pytest.raises(HubError, match="the lines that were read are not to be trusted"):
        list(client(server, hub.cache / "fresh").stream_lines(REPO, "train.jsonl"))


def test_a_change_in_the_middle(server, hub):
    """A download begins again with the new content; a stream, whose lines are out already, ends with an error."""
    server.faults |= {"storage": [("drop", 10_000)], "hub": [None, "change"]}
    assert hub.download(REPO, "train.jsonl").read_bytes() == LARGE[::-1]
    server.faults |= {"storage": [("drop", 10_000)], "hub": [None, "change"]}
    with pytest.raises(HubError, match=r"train.jsonl: changed while it was read \(\w+, \d+ bytes; now \w+, \d+\); begin again"):
        list(client(server, hub.cache / "fresh").stream_lines(REPO, "train.jsonl"))


@pytest.mark.parametrize("name", ["train.jsonl", "data/train.jsonl.gz"])
def test_rows_come_while_the_file_arrives(server, tmp_path, name):
    hub = client(server, tmp_path, timeout=0.3)  # less than the stall
    server.faults["storage"] = [("stall", 8000), ("drop", 3000)]
    rows = hub.stream_rows(REPO, name)
    first = next(rows)
    assert first == {"prompt": "0+0", "answer": "0"} and first.place == f"{REPO}/{name}:1"
    assert server.sent() < len(FILES[name]) and [first, *rows] == [json.loads(line) for line in LINES]


def test_a_remote_file_reads_its_ranges_only(server, hub):
    server.faults["storage"] = [None, ("drop", 500), None, "no range", "wrong range"]
    file = hub.open(REPO, "train.jsonl")
    assert file.seek(-1000, os.SEEK_END) == len(LARGE) - 1000
    assert file.read(900) == LARGE[-1000:-100] and file.tell() == len(LARGE) - 100
    assert server.sent() == 1 + 900
    file.seek(100)
    assert file.read(50) == LARGE[100:150]
    assert file.read(10) == LARGE[150:160]
    file.seek(-5, os.SEEK_END)
    assert file.read() == LARGE[-5:] and file.read(1) == b""
    assert BufferedReader(hub.open(REPO, "train.jsonl")).readline() == LINES[0]
    assert hub.open(REPO, "empty.txt").read() == b""


def test_a_killed_download_is_gone_on_with(server, tmp_path):
    made = "Hub(endpoint=sys.argv[1], cache=sys.argv[2], chunk=4096, timeout=600)"
    code = f"import sys; from align.data import Hub; {made}.download(*sys.argv[3:])"
    server.faults["storage"], server.stall = [("stall", 40_000)], 600  # until the kill
    process = subprocess.Popen([sys.executable, "-c", code, server.url, tmp_path, REPO, "train.jsonl"])
    partial = []
    while process.poll() is None and not (partial and partial[0].stat().st_size >= 36_000):
        time.sleep(0.01)
        partial = list(tmp_path.glob("hub/*/*/partial/*.bin"))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept, before = partial[0].stat().st_size, server.sent()
    assert client(server, tmp_path).download(REPO, "train.jsonl").read_bytes() == LARGE
    assert server.sent() - before == len(LARGE) - kept and before - kept <= CHUNK


def test_two_that_want_one_file_get_it_once(server, tmp_path):
    threads = [threading.Thread(target=lambda: client(server, tmp_path).download(REPO, "train.jsonl")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.sent() == len(LARGE)


FAULTS = st.one_of(
    st.none(),
    st.tuples(st.sampled_from(["drop", "reset"]), st.integers(0, 20_000)),
    st.integers(0, 9).map(lambda n: ("drop", 1) if n else ("stall", 5000)),  # each costs a timeout
    st.sampled_from(["no range", "wrong range", "gzip", "flip", "change", 408, 500, 502, 503, 504, 403]),
    st.sampled_from([{"status": 429, "Retry-After": "3"}, {"status": 429}, {"status": 503, "Retry-After": "x"}]),
)
SCHEDULE = {
    "api": st.lists(st.sampled_from([None, 429, 500, 503, 408]), max_size=3),
    "hub": st.lists(st.sampled_from([None, 429, 500, 404, "redirect elsewhere", "change"]), max_size=6),
    "storage": st.lists(FAULTS, max_size=6),
}


def run_schedule(server, directory, seed, faults, ranges):
    """One run under faults; True when it ended with the content. Asserts what holds for every run."""
    server.files, server.ranges, server.log = dict(FILES), ranges, []
    server.faults = {key: [dict(fault) if isinstance(fault, dict) else fault for fault in some] for key, some in faults.items()}
    name = random.Random(seed).choice(["train.jsonl", "data/train.jsonl.gz"])
    hub = client(server, directory)
    try:
        if seed % 2:
            content = hub.download(REPO, name).read_bytes()
        else:
            content = b"".join(hub.stream_lines(REPO, name))
    except HubError as error:
        assert "\n" not in str(error) and REPO in str(error)
        content = None
    assert not server.leaks()
    whole = {FILES[name], FILES[name][::-1]} if seed % 2 else {LARGE, FILES[name][::-1]}
    assert content is None or content in whole
    clean = {"drop", "stall", "None"}
    kinds = [f[0] if isinstance(f, tuple) else str(f) for f in faults["storage"]]
    if ranges and content is not None and set(kinds) <= clean and not set(map(str, faults["hub"])) & {"change"}:
        assert server.sent() + server.sent("other") <= len(FILES[name]) + CHUNK * len(kinds)
    return content is not None


def run_schedules(server, tmp_path_factory, count):
    outcomes = set()

    @settings(max_examples=count)
    @given(st.integers(0, 99), st.fixed_dictionaries(SCHEDULE), st.booleans())
    def run(seed, faults, ranges):
        outcomes.add(run_schedule(server, tmp_path_factory.mktemp("cache"), seed, faults, ranges))

    run()
    assert outcomes == {True, False}  # the schedules are neither all harmless nor all hopeless


def test_under_forty_schedules_of_faults_it_ends_with_the_content_or_an_error(server, tmp_path_factory):
    run_schedules(server, tmp_path_factory, 40)


@pytest.mark.slow
def test_under_four_hundred_schedules_of_faults_it_ends_with_the_content_or_an_error(server, tmp_path_factory):
    run_schedules(server, tmp_path_factory, 400)


@given(st.lists(st.binary(max_size=9)), st.lists(st.sampled_from([b"\n", b"a\r\n", "\u2028".encode(), b"b"])))
def test_lines_do_not_depend_on_the_parts(parts, more):
    content = b"".join([*parts, *more])
    lines = list(split_lines([*parts, *more]))
    assert b"".join(lines) == content and all(line.endswith(b"\n") for line in lines[:-1])
    assert all(line.count(b"\n") <= 1 and line for line in lines)


def test_a_line_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("align.data._hub.MAX_LINE", 100)
    with pytest.raises(HubError, match="a line of more than 0 MiB came; is this JSON Lines"):
        list(split_lines([b"a\n", *[b"x" * 9] * 20]))


def test_a_full_disk_is_told(server, tmp_path):
    code = "import resource, sys; from align.data import Hub, HubError\nresource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))"
    code += "\ntry: Hub(endpoint=sys.argv[1], cache=sys.argv[2]).download(*sys.argv[3:])\nexcept HubError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code, server.url, tmp_path, REPO, "train.jsonl"], capture_output=True, text=True)
    assert f"train.jsonl: cannot be stored in {tmp_path / 'hub'} (File too large); free space, or set ALIGN_CACHE" in done.stdout
    assert client(server, tmp_path).download(REPO, "train.jsonl").read_bytes() == LARGE


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=3), st.integers(1, 7))
def test_gzip_members_in_any_parts_and_every_cut_is_seen(members, size):
    content = b"".join(zlib.compress(member, wbits=31) for member in members)

    def parts(content):
        return [content[at : at + size] for at in range(0, len(content), size)]

    assert b"".join(unzip(parts(content), "x")) == b"".join(members)
    assert b"".join(unzip(parts(content + b"\0" * 5), "x")) == b"".join(members)
    last = len(zlib.compress(members[-1], wbits=31))
    for cut in range(1, last - 1):
        with pytest.raises(HubError, match="x: the gzip stream ends in the middle"):
            list(unzip(parts(content[:-cut]), "x"))


@pytest.mark.parametrize("location", ["http://host/y", "", "file:///etc/passwd", "ftp://host/y"])
def test_a_redirect_to_less_than_it_was_is_refused(location):
    with pytest.raises(HubError, match=r"https://host/x: redirects to .* which is not followed"):
        Client("https://host")._next("https://host/x?signature=secret", location)


def test_addresses_and_settings(monkeypatch, tmp_path):
    assert origin("https://Host/x") == origin("HTTPS://host:443") != origin("http://host:443") != origin("http://host")
    monkeypatch.setenv("HF_ENDPOINT", "  ")  # blank is unset
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubError, match=r"is not in .*offline is set"):
        Hub(cache=tmp_path).download(REPO, "x")
    with pytest.raises(HubError, match="is no address; set HF_ENDPOINT"):
        Hub(endpoint="host", cache=tmp_path)
