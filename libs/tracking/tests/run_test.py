"""RunDir and its lines: what is on the disk after each call, after a kill, on a full disk, after a resume."""

import errno
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.tracking import RunDir, RunDirError, environment, read_history, write_report
from align.tracking._jsonl import Lines, cut_after, encode


def start(path, **more):
    return RunDir.create(path, config_toml="seed = 0\n", env={"python": "3"}, **more)


def child(code, *words):
    """A Python of its own; it inherits PYTHONPATH."""
    return subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_run_from_start_to_finish(tmp_path):
    path = tmp_path / "deep" / "run"
    run = start(path)
    assert run.path == path and run.checkpoints == path / "checkpoints" and run.checkpoints.is_dir()
    assert (path / "config.toml").read_text() == "seed = 0\n" and json.loads((path / "env.json").read_text()) == {"python": "3"}
    run.log(1, loss=2.5, lr=1e-3, tokens=70)
    run.eval(1, accuracy_1=0.5)
    run.sample(1, prompt="a\u2028b é", output="x\ny", correct=None)
    (line,) = read_history(path / "history.jsonl")  # readable while the run goes on
    assert abs(line.pop("time") - time.time()) < 60
    assert line == {"step": 1, "loss": 2.5, "lr": 1e-3, "tokens": 70}
    assert read_history(path / "eval.jsonl")[0]["accuracy_1"] == 0.5
    assert read_history(path / "samples.jsonl") == [{"step": 1, "prompt": "a\u2028b é", "output": "x\ny", "correct": None}]
    assert not (path / "stage_result.json").exists() and not (path / "report.html").exists()
    run.finish("done", stage="sft", steps=1, metrics={"before": {"accuracy_1": math.nan}, "after": {"accuracy_1": 1.0}})
    assert json.loads((path / "stage_result.json").read_text()) == {
        "status": "done",
        "stage": "sft",
        "steps": 1,
        "metrics": {"before": {"accuracy_1": "nan"}, "after": {"accuracy_1": 1.0}},
    }
    assert (path / "report.html").stat().st_mtime_ns <= (path / "stage_result.json").stat().st_mtime_ns
    assert sorted(p.name for p in path.iterdir()) == [
        "checkpoints",
        "config.toml",
        "env.json",
        "eval.jsonl",
        "history.jsonl",
        "report.html",
        "samples.jsonl",
        "stage_result.json",
    ]
    run.close()


class Tensor:
    """What a 0-d tensor offers."""

    def item(self):
        return 0.25


@given(values=st.dictionaries(st.text("abc", min_size=1), st.floats() | st.integers() | st.booleans() | st.none(), max_size=4))
@settings(max_examples=50)
def test_numbers_come_back_as_they_were(tmp_path_factory, values):
    path = tmp_path_factory.getbasetemp() / "numbers.jsonl"
    path.unlink(missing_ok=True)
    lines = Lines(path)
    lines.append({"step": 3, **values, "d": Tensor()})
    lines.close()
    assert repr(read_history(path)) == repr([{"step": 3, **values, "d": 0.25}])


def test_lines_are_json_of_the_standard(tmp_path):
    start(tmp_path / "r").log(1, loss=math.nan, norm=math.inf, low=-math.inf, text="\ud800")
    raw = (tmp_path / "r" / "history.jsonl").read_bytes()

    def refuse(name):
        raise AssertionError(name)

    line = json.loads(raw.decode(), parse_constant=refuse)
    assert (line["loss"], line["norm"], line["low"], line["text"]) == ("nan", "inf", "-inf", "\ud800")
    with pytest.raises(TypeError, match="object"):
        start(tmp_path / "s").log(1, x=object())


def test_alive_moves_the_time_of_history(tmp_path):
    run = start(tmp_path / "r")
    os.utime(run.path / "history.jsonl", (1, 1))
    run.alive()
    assert abs((run.path / "history.jsonl").stat().st_mtime - time.time()) < 60


def test_alive_touches_the_file_at_most_once_a_second(tmp_path, monkeypatch):
    """On a disk in the network each touch is a request; a sampler shows life with every token."""
    now = [100.0]
    monkeypatch.setattr("align.tracking._run.time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    run, touched = start(tmp_path / "r"), []
    monkeypatch.setattr(Lines, "touch", lambda self: touched.append(now[0]))
    for _ in range(250):
        run.alive()
        now[0] += 0.01
    assert touched == pytest.approx([100.0, 101.0, 102.0])


def test_other_ranks_write_nothing(tmp_path):
    run = start(tmp_path / "r", write=False)
    run.log(1, loss=1.0)
    run.eval(1, x=1)
    run.sample(1, x=1)
    run.alive()
    run.finish("done")
    run.close()
    assert not (tmp_path / "r").exists() and run.checkpoints == tmp_path / "r" / "checkpoints"


# --- refusals


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/align-run")):
        with pytest.raises(RunDirError) as caught:
            start(path)
        message = str(caught.value)
        assert message.startswith(f"{path}: cannot be made: ") and message.endswith("; choose another run_dir") and "\n" not in message
        assert caught.value.exit_code == 2


def test_a_run_is_not_written_over(tmp_path):
    start(tmp_path / "r").log(1, loss=1.0)
    with pytest.raises(RunDirError) as caught:
        start(tmp_path / "r")
    assert str(caught.value) == (
        f"{tmp_path / 'r'}: holds a run already (history.jsonl); add --resume to go on with it, or choose another run_dir"
    )
    assert len(read_history(tmp_path / "r" / "history.jsonl")) == 1


def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_whole_lines(tmp_path, monkeypatch):
    run = start(tmp_path / "r")
    run.log(1, loss=1.0)
    real, calls = os.write, []

    def half(fd, data):
        calls.append(fd)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(RunDirError) as caught:
        run.log(2, loss=0.5)
    assert str(caught.value) == (
        f"{run.path / 'history.jsonl'}: cannot be written: No space left on device; free space on that disk or choose another run_dir"
    )
    monkeypatch.undo()
    run.log(3, loss=0.25)  # space again: nothing half-written is in the way
    assert [line["step"] for line in read_history(run.path / "history.jsonl")] == [1, 3]


def test_a_real_limit_on_the_files_size(tmp_path):
    done = child(
        """
import resource, sys
from align.tracking import RunDir
run = RunDir.create(sys.argv[1], config_toml="", env={})
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for step in range(1, 1000):
    run.log(step, loss=1.0)
""",
        str(tmp_path / "r"),
    )
    _, error = done.communicate(timeout=60)
    assert done.returncode == 1 and "history.jsonl: cannot be written: File too large" in error.splitlines()[-1]
    steps = [line["step"] for line in read_history(tmp_path / "r" / "history.jsonl")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 5
    assert (tmp_path / "r" / "history.jsonl").read_bytes().endswith(b"}\n")


def test_a_result_that_cannot_be_written_names_its_file(tmp_path, monkeypatch):
    run = start(tmp_path / "r")

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(RuntimeWarning, match=r"report\.html: not written"), pytest.raises(RunDirError) as caught:
        run.finish("done")
    assert str(caught.value).startswith(f"{run.path / 'stage_result.json'}: cannot be written: No space left")
    assert not list(run.path.glob(".*")) and not (run.path / "stage_result.json").exists()


def test_a_failing_report_does_not_cost_the_result(tmp_path):
    run = start(tmp_path / "r")
    (run.path / "report.html").mkdir()
    with pytest.warns(RuntimeWarning, match=r"report\.html: not written"):
        run.finish("done", steps=3)
    assert json.loads((run.path / "stage_result.json").read_text())["steps"] == 3


# --- kill and resume


def test_a_killed_run_leaves_files_that_parse(tmp_path):
    process = child(
        """
import sys
from align.tracking import RunDir
run = RunDir.create(sys.argv[1], config_toml="", env={})
for step in range(1, 10**9):
    run.log(step, loss=1.0 / step, text="x" * 500)
    if step == 50:
        print("go", flush=True)
""",
        str(tmp_path / "r"),
    )
    assert process.stdout.readline() == "go\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    steps = [line["step"] for line in read_history(tmp_path / "r" / "history.jsonl")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 50
    run = start(tmp_path / "r", resume_step=40)
    run.log(41, loss=0.0)
    assert [line["step"] for line in read_history(tmp_path / "r" / "history.jsonl")] == list(range(1, 42))


RUNS = """
import itertools, sys
from pathlib import Path
from align.tracking import RunDir
for number in itertools.count():
    run = RunDir.create(Path(sys.argv[1]) / str(number), config_toml="seed = 0\\n" * 200, env={"python": "3"})
    if number == 1:
        print("go", flush=True)
    for step in range(1, 60):
        run.log(step, loss=1.0 / step, text="x" * 300)
        run.alive()
        if step % 20 == 0:
            run.eval(step, accuracy=0.5, accuracy_low=0.4, accuracy_high=0.6)
            run.sample(step, prompt="p" * 3000, output="o")
    run.finish("done", stage="sft", steps=59)
"""


def test_a_kill_at_any_time_leaves_what_parses_and_a_report_can_be_made_of(tmp_path):
    """SIGKILL at twelve random moments of runs that are made, go on and end: in a line, between files, in the report."""
    draws, ended, cut = random.Random(0), 0, 0
    for kill in range(12):
        folder = tmp_path / str(kill)
        process = child(RUNS, str(folder))
        assert process.stdout.readline() == "go\n"
        time.sleep(draws.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        for run in sorted(folder.iterdir(), key=lambda path: int(path.name))[-2:]:
            whole = {name: (run / name).exists() for name in ("config.toml", "env.json", "history.jsonl", "stage_result.json")}
            assert not whole["config.toml"] or (run / "config.toml").read_text() == "seed = 0\n" * 200
            assert not whole["env.json"] or json.loads((run / "env.json").read_text()) == {"python": "3"}
            assert not whole["stage_result.json"] or json.loads((run / "stage_result.json").read_text())["steps"] == 59
            if not whole["history.jsonl"]:
                continue  # not begun: config.toml and env.json come first
            steps = [line["step"] for line in read_history(run / "history.jsonl")]
            assert steps == list(range(1, len(steps) + 1)) and (len(steps) == 59 or not whole["stage_result.json"])
            page = write_report(run).read_text()
            assert page.endswith("</html>\n") and ("running or killed" in page) == (not whole["stage_result.json"])
            ended, cut = ended + whole["stage_result.json"], cut + (not whole["stage_result.json"])
    assert ended and cut


def test_resume_drops_what_came_later_and_keeps_the_rest(tmp_path):
    path = tmp_path / "r"
    run = start(path)
    for step in range(1, 6):
        run.log(step, loss=float(step))
        run.eval(step, accuracy=0.1)
        run.sample(step, prompt="p")
    run.finish("stopped")
    with open(path / "history.jsonl", "ab") as file:
        file.write(b'{"step": 3, "lo')  # torn
    again = RunDir.create(path, config_toml="seed = 1\n", env={"python": "4"}, resume_step=3)
    assert not (path / "stage_result.json").exists()
    again.log(4, loss=40.0)
    assert [(line["step"], line["loss"]) for line in read_history(path / "history.jsonl")] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert [line["step"] for line in read_history(path / "eval.jsonl")] == [1, 2, 3]
    assert [line["step"] for line in read_history(path / "samples.jsonl")] == [1, 2, 3]
    assert (path / "config.toml").read_text() == "seed = 1\n" and (path / "config-1.toml").read_text() == "seed = 0\n"
    assert json.loads((path / "env.json").read_text()) == {"python": "3", "resumed": [{"after_step": 3, "python": "4"}]}
    RunDir.create(path, config_toml="seed = 1\n", env={"python": "5"}, resume_step=0)
    assert read_history(path / "history.jsonl") == [] and not (path / "config-2.toml").exists()
    assert [entry["after_step"] for entry in json.loads((path / "env.json").read_text())["resumed"]] == [3, 0]


def test_a_directory_has_one_writer_until_it_finishes_or_dies(tmp_path):
    path = tmp_path / "r"
    code = """
import sys, time
from align.tracking import RunDir
run = RunDir.create(sys.argv[1], config_toml="", env={}, resume_step=0)
run.log(1, loss=1.0)
print("go", flush=True)
sys.stdin.readline()
run.finish("stopped")
print("finished", flush=True)
time.sleep(60)
"""
    for end in ("finished", "killed"):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout.readline() == "go\n"
            before = {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}
            with pytest.raises(RunDirError) as caught:
                start(path, resume_step=0)
            assert str(caught.value) == f"{path}: another process writes its run there; wait until it ends, or choose another run_dir"
            assert before == {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}
            if end == "finished":
                process.stdin.write("\n")
                process.stdin.flush()
                assert process.stdout.readline() == "finished\n"
            else:
                process.kill()
                process.wait()
            run = start(path, resume_step=0)
            start(path, resume_step=0).close()  # the same process may take up its own run
            run.close()
        finally:
            process.kill()
            process.communicate()


def test_a_users_own_config_is_kept(tmp_path):
    (tmp_path / "config.toml").write_text("# mine\nseed = 0\n")
    start(tmp_path)
    assert (tmp_path / "config-1.toml").read_text() == "# mine\nseed = 0\n"
    assert (tmp_path / "config.toml").read_text() == "seed = 0\n"


def test_resume_where_nothing_is_starts(tmp_path):
    start(tmp_path / "r", resume_step=0).log(1, loss=1.0)
    assert len(read_history(tmp_path / "r" / "history.jsonl")) == 1


@given(cut=st.integers(0, 120), resume=st.integers(0, 6))
@settings(max_examples=60)
def test_a_history_cut_anywhere_reads_and_resumes(tmp_path_factory, cut, resume):
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    raw = b"".join(encode({"step": step, "loss": 0.5}) for step in range(1, 6))[:cut]
    path.write_bytes(raw)
    whole = [json.loads(line) for line in raw.split(b"\n") if line.endswith(b"}")]
    assert read_history(path) == whole
    cut_after(path, resume)
    lines = Lines(path)
    lines.append({"step": 9})
    lines.close()
    assert [line["step"] for line in read_history(path)] == [line["step"] for line in whole if line["step"] <= resume] + [9]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_bytes(b'{"step": 1}\n\x00\x00\n{"step": 2}\n')
    with pytest.raises(RunDirError) as caught:
        read_history(path)
    assert str(caught.value) == f"{path}:2: not a JSON object; remove the line"
    with pytest.raises(RunDirError, match="cannot be read: No such file"):
        read_history(tmp_path / "none")


# --- environment


def test_environment_tells_versions_and_git_and_no_names(tmp_path, monkeypatch):
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    before = set(sys.modules)
    found = environment({"threads": 1})
    assert found["threads"] == 1 and found["git"] is None and found["cores"] >= 1 and found["memory_gb"] > 0
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(found["packages"]) == {"torch", "triton", "numpy", "safetensors"}
    assert found["variables"]["CUDA_VISIBLE_DEVICES"] == "1" and "HOME" not in found["variables"]
    json.dumps(found)
    assert "torch" not in set(sys.modules) - before


def test_environment_names_the_commit(tmp_path, monkeypatch):
    calls = []

    def git(words, **_):
        calls.append(words)
        return subprocess.CompletedProcess(words, 0, "abc123\n" if "rev-parse" in words else " M file\n", "")

    monkeypatch.setattr(subprocess, "run", git)
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(tmp_path))
    assert environment()["git"] == {"commit": "abc123", "dirty": True}
    assert all(words[:3] == ["git", "-C", str(tmp_path)] for words in calls)


def test_the_readmes_example_runs():
    code = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    out, error = (done := child(code)).communicate(timeout=60)
    assert done.returncode == 0, error
    assert out.strip() == str(
        ["checkpoints", "config.toml", "env.json", "eval.jsonl", "history.jsonl", "report.html", "samples.jsonl", "stage_result.json"]
    )
    assert error.splitlines()[0].startswith("step 1/3  loss 1  67.0k tok/s")
