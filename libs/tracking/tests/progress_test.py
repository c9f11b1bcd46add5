"""Progress: the exact lines of a log and of a terminal, by a clock of our own."""

import io

import pytest

from align.tracking import Progress
from align.tracking._progress import show_duration, show_number


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(stream, steps, *, total, every=100, seconds=0.5, first=1):
    clock = Clock()
    progress = Progress(total, every=every, stream=stream, clock=clock)
    for step in range(first, steps + 1):
        clock.now += seconds
        progress.update(step, loss=2.0 / step, tokens_per_s=67200.0)
    return progress


def test_plain_lines_for_the_first_every_and_last_step():
    stream = io.StringIO()
    run(stream, 250, total=250)
    assert stream.getvalue().splitlines() == [
        "step 1/250  loss 2  67.2k tok/s  2.0 steps/s  eta 2:04",
        "step 100/250  loss 0.02  67.2k tok/s  2.0 steps/s  eta 1:15",
        "step 200/250  loss 0.01  67.2k tok/s  2.0 steps/s  eta 0:25",
        "step 250/250  loss 0.008  67.2k tok/s  2.0 steps/s",
    ]


def test_a_resumed_run_counts_its_rate_from_where_it_is():
    stream = io.StringIO()
    run(stream, 201, total=300, seconds=4.0, first=200)
    assert stream.getvalue().splitlines() == ["step 200/300  loss 0.01  67.2k tok/s  4.0 s/step  eta 6:40"]


def test_the_rate_is_that_of_late_steps():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(1000, every=500, stream=stream, clock=clock)
    for step in range(1, 501):
        clock.now += 10.0 if step < 100 else 0.1
        progress.update(step)
    assert stream.getvalue().splitlines()[-1] == "step 500/1000  10.0 steps/s  eta 0:50"


def test_one_live_line_on_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = run(stream, 3, total=5)
    progress.line("evaluating")
    progress.close()
    assert stream.getvalue() == (
        "\rstep 1/5  loss 2  67.2k tok/s  2.0 steps/s  eta 0:02\x1b[K"
        "\rstep 2/5  loss 1  67.2k tok/s  2.0 steps/s  eta 0:02\x1b[K"
        "\rstep 3/5  loss 0.6667  67.2k tok/s  2.0 steps/s  eta 0:01\x1b[K"
        "\r\x1b[Kevaluating\n"
        "\rstep 3/5  loss 0.6667  67.2k tok/s  2.0 steps/s  eta 0:01\x1b[K\n"
    )


def test_a_terminal_is_redrawn_at_most_ten_times_a_second_and_never_wraps(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    run(stream, 1000, total=1000, seconds=0.001)
    draws = stream.getvalue().split("\r")[1:]
    assert 9 <= len(draws) <= 13 and all(len(draw.replace("\x1b[K", "").rstrip("\n")) <= 19 for draw in draws)
    assert draws[-1].startswith("step 1000/1000") and stream.getvalue().endswith("\n")


def test_nothing_for_no_stream_and_no_death_by_a_closed_one():
    run(None, 3, total=3).line("x")
    closed = io.StringIO()
    closed.close()
    run(closed, 3, total=3).line("x")

    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    run(Broken(), 3, total=3)


def test_text_that_the_stream_cannot_encode():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    Progress(1, every=1, stream=stream).line("é")
    assert raw.getvalue() == b"\\xe9\n"


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("loss", 0.203, "loss 0.203"),
        ("lr", 3e-4, "lr 3.000e-04"),
        ("loss", 0, "loss 0"),
        ("reward", -1.5, "reward -1.5"),
        ("tokens_per_s", 950.0, "950 tok/s"),
        ("memory_gb", 3.14, "memory 3.1 GiB"),
        ("loss", float("nan"), "loss nan"),
        ("note", None, "note None"),
    ],
)
def test_numbers(name, value, text):
    assert show_number(name, value) == text


def test_durations():
    assert [show_duration(s) for s in (0, 9.4, 103, 7509)] == ["0:00", "0:09", "1:43", "2:05:09"]
