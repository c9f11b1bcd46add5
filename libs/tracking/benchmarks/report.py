"""CPU time, memory and size of a report over many steps: python libs/tracking/benchmarks/report.py 100000"""

import resource
import sys
import tempfile
import time
from pathlib import Path

from align.tracking import RunDir, write_report


def main() -> None:
    steps = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir.create(Path(folder) / "run", config_toml="", env={})
        started = time.process_time()
        for step in range(1, 1001):
            run.log(step, loss=1 / step, lr=1e-3, grad_norm=1.0, tokens_per_s=6e4)
        print(f"log: {time.process_time() - started:.3f} ms a line")
        with open(run.path / "history.jsonl", "w", encoding="utf-8") as file:
            for step in range(1, steps + 1):
                loss = step**-0.5 + step * 7919 % 100 / 1000
                file.write(
                    f'{{"step": {step}, "time": {1.7e9 + step:.3f}, "loss": {loss:.6f}, "lr": {1 / step:.4g}, '
                    f'"grad_norm": {1 + step % 17 / 9:.4f}, "tokens_per_s": {60000 + step % 991}}}\n'
                )
        started = time.process_time()
        size = write_report(run.path).stat().st_size
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"report of {steps} steps: {time.process_time() - started:.2f} s, {size / 1e6:.2f} MB, {peak:.0f} MiB")


if __name__ == "__main__":
    main()
