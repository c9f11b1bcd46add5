"""What gpu_check finds, counts and writes; the GPU itself is for the machine that has one."""

import re
import sys
from types import SimpleNamespace

import gpu_check

KNOWN = {"torch": "2.11.0", "cuda": "13.0", "python": "3.12.3", "gpus": ["NVIDIA H200"]}


def test_a_run_is_counted_and_its_end_told(tmp_path):
    (tmp_path / "a_test.py").write_text("import pytest\n\n\ndef test_a():\n    pass\n\n\ndef test_b():\n    pytest.skip('x')\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\npython_files = *_test.py\n")
    row = gpu_check.tests("gpu tests", ["--rootdir", str(tmp_path), "-c", str(tmp_path / "pytest.ini"), str(tmp_path)], 60)
    assert (row["exit"], row["passed"], row["skipped"]) == (0, 1, 1)
    failing = gpu_check.process("x.py", [sys.executable, "-c", "print(1); raise SystemExit(3)"], 60)
    assert (failing["exit"], failing["said"]) == (3, "1\n")
    late = gpu_check.process("y.py", [sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
    assert late["exit"] == 124
    assert gpu_check.table([row, failing, late]).splitlines()[2:] == [
        f"| gpu tests | ok (1 passed, 1 skipped) | {row['wall_s']} s | `python3 {row['command']}` |",
        f"| x.py | exit 3 | {failing['wall_s']} s | `python3 {failing['command']}` |",
        f"| y.py | time limit | {late['wall_s']} s | `python3 {late['command']}` |",
    ]


def test_the_document_tells_hardware_command_and_words():
    row = {"run": "libs/a/benchmarks/b.py", "command": "libs/a/benchmarks/b.py", "exit": 0, "wall_s": 1.0, "said": "fast ```\n"}
    text = gpu_check.document(KNOWN, [row], ["c.py"], "2026-11-30")
    assert text.startswith(
        "# GPU check, 2026-11-30\n\n1 × NVIDIA H200, torch 2.11.0, CUDA 13.0, Python 3.12.3. All by `python3 tools/gpu_check.py`."
    )
    assert "\n## libs/a/benchmarks/b.py\n\n```\nfast '''\n```\n" in text
    assert "`c.py`" in text


def test_one_command_prints_one_table_and_writes_the_document(tmp_path, monkeypatch, capsys):
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, get_device_name=lambda i: "NVIDIA H200")
    torch = SimpleNamespace(cuda=cuda, __version__="2.11.0", version=SimpleNamespace(cuda="13.0"))
    monkeypatch.setitem(sys.modules, "torch", torch)
    (tmp_path / "fast.py").write_text("print('4 TB/s')\n")
    (tmp_path / "a_test.py").write_text("def test_a():\n    pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\npython_files = *_test.py\nmarkers = gpu\n")
    scripts = [(str(tmp_path / "fast.py"), []), ("needs_weights.py", None)]
    monkeypatch.setattr(gpu_check, "benchmarks", lambda: scripts)
    words = ["--rootdir", str(tmp_path), "-c", str(tmp_path / "pytest.ini"), str(tmp_path)]
    assert gpu_check.main(["--out", str(tmp_path / "out"), *words]) == 0
    (document,) = (tmp_path / "out").glob("*-gpu-check-h200.md")
    text = document.read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| (gpu tests|default tests|\S+fast.py) \| ok", line)]
    assert len(rows) == 3 and set(rows) <= set(capsys.readouterr().out.splitlines())
    assert "4 TB/s" in text and "Not run here, for want of what they need: `needs_weights.py`." in text
    cuda.is_available = lambda: False
    assert gpu_check.main([]) == 2


def test_a_benchmark_that_wants_arguments_has_them_or_is_left_out():
    """Under Bazel the benchmarks are not here; then there is nothing to compare."""
    found = dict(gpu_check.benchmarks())
    assert not found or set(gpu_check.ARGUMENTS) <= set(found)
    wanting = {script for script in found if re.search(r"required=True|if len\(sys\.argv\) < \d", (gpu_check.ROOT / script).read_text())}
    assert wanting <= set(gpu_check.ARGUMENTS)
