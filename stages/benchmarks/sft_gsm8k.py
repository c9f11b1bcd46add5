"""SFT of a small instruct model on GSM8K on a GPU: held-out loss and accuracy before, on the way and after, as a table.

Run: python3 stages/benchmarks/sft_gsm8k.py --model models/smollm2-135m-instruct [--steps 400] [--problems 500] [--out FILE.md]
[key=value …] (libs/* on PYTHONPATH). It is //stages:sft with these settings: its rows are the bundled GSM8K train split, and align.verify
judges answers to the test split.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

STAGE = Path(__file__).absolute().parents[1] / "sft.py"


def settings(model: str, steps: int, problems: int) -> list[str]:
    return [
        f"model.path={model}", "model.device=cuda", "model.dtype=bfloat16",
        "data.source=gsm8k_train", "data.chat=true", "data.held_out=0.02", "data.max_length=512", "data.packing=true",
        f"train.max_steps={steps}", "train.global_batch=16", "train.micro_batch=16", "train.log_every=50", "train.threads=0",
        "optimizer.lr=1e-4", "optimizer.weight_decay=0.0", f"schedule.warmup_steps={max(steps // 20, 1)}",
        "checkpoint.every=0", "checkpoint.keep=1",
        f"eval.every={max(steps // 4, 1)}", "eval.source=gsm8k_test", f"eval.problems={problems}", "eval.max_new_tokens=256",
        "eval.batch=256",
    ]  # fmt: skip


def table(run: Path, command: str) -> str:
    """The curve of eval.jsonl, and what stage_result.json says."""
    result = json.loads((run / "stage_result.json").read_text(encoding="utf-8"))
    history = [json.loads(line) for line in (run / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    environment = json.loads((run / "env.json").read_text(encoding="utf-8"))
    evaluations = [json.loads(line) for line in (run / "eval.jsonl").read_text(encoding="utf-8").splitlines()]
    names = [name for name in evaluations[-1] if isinstance(evaluations[-1][name], float) and name != "time"]
    losses = {line["step"]: line["loss"] for line in history}
    where = ", ".join(f"{name} {environment[name]}" for name in ("torch", "device", "gpu") if name in environment)
    lines = [f"    {command}", "", f"{where}; {result['wall_s']:.0f} s in all.", ""]
    lines += [f"| step | training loss | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for line in evaluations:
        seen = [losses[step] for step in range(line["step"] - 9, line["step"] + 1) if losses.get(step) is not None]
        mean = f"{sum(seen) / len(seen):.4f}" if seen else "–"
        numbers = " | ".join(f"{line[name]:.4f}" if name in line else "–" for name in names)
        lines.append(f"| {line['step']} | {mean} | {numbers} |")
    return "\n".join([*lines, ""])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--out", type=Path)
    asked, more = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, str(STAGE), f"run_dir={run}", *settings(asked.model, asked.steps, asked.problems), *more]
        code = subprocess.run(command, check=False).returncode
        if code:
            return code
        told = table(run, f"python3 stages/benchmarks/sft_gsm8k.py {' '.join(argv)}")
    print(told)
    if asked.out:
        asked.out.write_text(f"# SFT on GSM8K\n\n{told}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
