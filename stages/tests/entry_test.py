"""How a stage ends by a signal before it trains: while its libraries are imported, in a rank, in a rank that waits for another one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import _entry
import pytest

STAGES = Path(_entry.__file__).parent
OF_TORCH = ["chat", "dpo", "evaluate", "generate", "grpo", "path_bias", "ppo", "pretrain", "prm", "reference", "serve", "sft"]


def started(program: Path, *, first: Path | None = None, **environment: str) -> subprocess.Popen:
    """A process that has said a line. first: where Python looks for modules first."""
    paths = [str(path) for path in (first, STAGES, os.environ.get("PYTHONPATH")) if path]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
    process = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=given)
    said = process.stdout.readline()
    assert said == "here\n", process.communicate()[1]
    return process


@pytest.fixture
def slow_torch(tmp_path):
    """A torch whose import takes longer than anybody waits."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    return tmp_path


@pytest.mark.parametrize("stage", OF_TORCH)
def test_ctrl_c_while_torch_is_imported_is_one_line_and_130(slow_torch, stage):
    process = started(STAGES / f"{stage}.py", first=slow_torch)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[1] == f"{stage}: stopped by Ctrl-C; nothing was begun\n" and process.returncode == 130


@pytest.mark.parametrize(("rank", "told"), [("0", "sft: stopped by SIGTERM; nothing was begun\n"), ("1", "")])
def test_a_scheduler_s_signal_then_is_the_code_of_a_stop_and_the_first_rank_speaks(slow_torch, rank, told):
    for number in (signal.SIGTERM, signal.SIGUSR1):
        process = started(STAGES / "sft.py", first=slow_torch, RANK=rank)
        process.send_signal(number)
        assert process.communicate(timeout=20)[1] == told.replace("SIGTERM", number.name) and process.returncode == 5


def test_a_signal_that_is_ignored_stays_so(slow_torch):
    """As nohup and a shell's & have it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = started(STAGES / "sft.py", first=slow_torch)
    finally:
        signal.signal(signal.SIGINT, before)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.3)
    process.kill()
    process.communicate()


STAGE = """
import ctypes
import sys
import time
from dataclasses import dataclass

import _entry

_entry.PATIENCE_S = 0.3


@dataclass(frozen=True)
class Config:
    pass


def waiting(call):
    try:
        print("here", flush=True)
        {}
    finally:
        print("left in order", flush=True)


sys.exit(_entry.run_stage("mine", Config, waiting, "", []))
"""
IN_PYTHON = "time.sleep(60)"
# A mutex that is locked twice: like a collective that waits for another rank it comes back for no signal.
WITHOUT_PYTHON = "lock = (ctypes.c_char * 64)(); [ctypes.CDLL(None).pthread_mutex_lock(lock) for _ in range(2)]"


def hangs(pid: int) -> bool:
    """Whether a process's main thread uses no time."""
    states = []
    for _ in range(2):
        states.append(Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])
        time.sleep(0.2)
    return states[0] == states[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_before_it_trains_a_stage_ends_in_order_with_5(tmp_path, rank, number):
    """A rank died of the signal, without a word and with the launcher's 143."""
    (tmp_path / "mine.py").write_text(STAGE.format(IN_PYTHON))
    process = started(tmp_path / "mine.py", **({} if rank is None else {"RANK": rank}))
    process.send_signal(number)
    out, told = process.communicate(timeout=20)
    by = "Ctrl-C" if number == signal.SIGINT else number.name
    assert (process.returncode, out) == (5, "left in order\n")
    assert told == ("" if rank == "1" else f"mine: stopped by {by}; what was written is whole, and a run goes on with --resume\n")


def test_a_rank_that_waits_where_no_python_runs_ends_too(tmp_path):
    (tmp_path / "mine.py").write_text(STAGE.format(WITHOUT_PYTHON))
    process = started(tmp_path / "mine.py", RANK="0")
    while not hangs(process.pid):  # it has come to the second lock
        pass
    process.send_signal(signal.SIGTERM)
    out, told = process.communicate(timeout=20)
    assert (process.returncode, out) == (5, "") and told.startswith("mine: stopped by SIGTERM; what was written is whole")


def test_a_rank_that_saves_on_the_signal_itself_is_left_alone(tmp_path):
    """As the Trainer does; and what comes after it is watched again."""
    saving = """\
import signal
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.8)
        signal.signal(signal.SIGTERM, before)
        signal.raise_signal(signal.SIGTERM)"""
    (tmp_path / "mine.py").write_text(STAGE.format(saving))
    process = started(tmp_path / "mine.py", RANK="0")
    out, told = process.communicate(timeout=20)
    assert (process.returncode, out) == (5, "left in order\n") and told.count("\n") == 1


@pytest.mark.parametrize("stage", OF_TORCH)
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_the_null_device(tmp_path, stage, closed):
    """No file that is opened later takes its number, and whoever reads or writes it finds something."""
    told = tmp_path / "told"
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(
        "import os, sys\n"
        "null = os.stat(os.devnull).st_rdev\n"
        "seen = [os.fstat(number).st_rdev == null for number in range(3)], sys.stdin.read(), sys.stdout.write('x'), sys.stderr.write('y')\n"
        f"file = open({str(told)!r}, 'w')\n"
        "file.write(repr((*seen, file.fileno() > 2)))\n"
        "file.close()\n"
        "os._exit(7)\n"
    )
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, STAGES, os.environ.get("PYTHONPATH", ""))))}
    words = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, str(STAGES / f"{stage}.py")]
    ended = subprocess.run(words, input="", capture_output=True, text=True, env=paths, check=False)
    null = [mark in closed.split() for mark in ("<&-", ">&-", "2>&-")]
    assert (ended.returncode, told.read_text()) == (7, repr((null, "", 1, 1, True))), ended.stderr


def test_an_output_that_takes_nothing_is_one_line(tmp_path):
    program = tmp_path / "stage.py"
    program.write_text(
        STAGE.format("_entry.say('x' * 10_000)")
        .replace('print("here", flush=True)', "pass")
        .replace('print("left in order", flush=True)', "pass")
    )
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join([str(STAGES), os.environ.get("PYTHONPATH", "")])}
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, str(program)], stdout=full, stderr=subprocess.PIPE, text=True, env=paths, check=False)
    told = "mine: standard output cannot be written (No space left on device); look at what reads it, or free space there\n"
    assert (ended.returncode, ended.stderr) == (2, told)


def test_a_stage_leaves_the_handlers_as_they_were(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    with _entry._told_of_signals("x"):
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert [signal.getsignal(number) for number in numbers] == before and signal.set_wakeup_fd(-1) == -1
