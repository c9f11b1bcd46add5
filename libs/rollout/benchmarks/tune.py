"""Tunes the kernels of a decoding step in whole steps, on one GPU, and writes the answers into the table of `align.kernels`.

    PYTHONPATH=libs/rollout:libs/model:libs/kernels:libs/kernels/benchmarks:libs/tokenizer:libs/config \\
        python3 libs/rollout/benchmarks/tune.py --out DIR [--write]

Alone, a kernel that takes all of a core's shared memory may be the quickest; in a step it keeps the next one from starting early. So each
configuration is tried in captured steps of `NativeSampler` around position 512: one field changed at a time, for attention (keys, stages,
warps) at once. What was quicker is measured again in turn with what stood before, and kept if it wins that too: the GPU warms up meanwhile.
About two to four seconds a configuration. DIR/tune.json has what was kept, and all that was measured.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import gpu
import torch

from align.kernels import _runtime
from align.model import Decoder
from align.rollout import NativeSampler
from align.rollout._advance import LIMIT, NEXT, POSITION, STEP
from align.rollout._paged_run import STEPS

CORES, SHARED = 132, 227 << 10  # of an H100 or H200; bytes of shared memory a core has
GAIN = 0.998  # of the time before: less is noise
# Keys of a tile, stages, warps, from many small programs on a core to few large ones.
ATTENTION = (
    (16, 2, 1), (16, 3, 1), (16, 4, 1), (16, 5, 1), (16, 6, 1), (16, 8, 1), (32, 2, 1), (32, 3, 1), (32, 4, 1), (64, 2, 1),
    (32, 2, 2), (32, 3, 2), (32, 4, 2), (32, 5, 2), (32, 6, 2), (32, 8, 2), (32, 10, 2), (32, 4, 4), (64, 2, 2), (64, 3, 2),
    (64, 4, 2), (64, 3, 4), (64, 5, 4), (128, 2, 4), (128, 3, 4),
)  # fmt: skip
FIELDS = {
    "split_linear": {"splits": (1, 2, 3, 4, 6, 8), "n": (32, 64, 128), "k": (64, 128), "stages": (3, 4, 5, 6, 8), "lines": (0, 2, 4, 8)},
    "gated_linear": {"n": (32, 64, 128), "k": (64, 128), "stages": (3, 4, 5, 6), "warps": (4, 8), "lines": (0, 2, 4, 8)},
    "sum_rms_norm": {"warps": (2, 4, 8, 16)},
    "sample": {"share": (4096, 8192, 16384, 32768), "block": (1024, 2048, 4096, 8192), "warps": (4, 8, 16, 32)},
    "step_vector": {"rows": (1, 2, 4, 8), "block": (512, 1024, 2048), "warps": (2, 4, 8), "stages": (1, 3, 4), "lines": (0, 8, 16)},
    "step_vector_gated": {"rows": (1, 2, 4), "block": (512, 1024, 2048), "warps": (2, 4, 8), "stages": (1, 3, 4), "lines": (0, 8, 16)},
}
ATTENTIONS = ("decode_attention", "rope_decode_attention")  # of one row, and of more
PROGRAMS = (1, 264, 528, 1056)
Config = dict[str, int]


def classes(model: Decoder, rows: int) -> list[tuple[str, str]]:
    """(op, shape class) of all that a step of so many rows tunes."""
    c = model.config
    dim, heads, kv_heads, size, inner = c.head_dim, c.num_attention_heads, c.num_key_value_heads, c.hidden_size, c.intermediate_size
    joint, out, gated, down = f"{(heads + 2 * kv_heads) * dim}x{size}", f"{size}x{heads * dim}", f"{inner}x{size}", f"{size}x{inner}"
    attention = "decode_attention" if rows == 1 else "rope_decode_attention"
    found = [(attention, f"{dim}/{heads // kv_heads}/{min(2048, _runtime.power_of_two(rows * kv_heads))}")]
    if rows == 1:
        found += [("step_vector", key) for key in (joint, out, down, f"{c.vocab_size}x{size}")] + [("step_vector_gated", gated)]
    elif rows <= 64:
        found += [("split_linear", key) for key in (joint, out, down)] + [("gated_linear", gated), ("sum_rms_norm", str(size))]
    return [*found, ("sample", str(_runtime.power_of_two(c.vocab_size)))]


def candidates(op: str, now: Config, programs: int) -> Iterator[Config]:
    """What is tried in place of `now`. programs: of attention, before its keys are cut."""
    if op not in ATTENTIONS:
        for field, values in FIELDS[op].items():
            yield from (now | {field: value} for value in values if value != now.get(field))
        return
    for keys, stages, warps in ATTENTION:
        if keys * stages * 512 <= SHARED:  # K and V, 128 wide, half precision
            yield now | {"keys": keys, "stages": stages, "warps": warps, "chunk": 0}
    if programs < 8 * CORES:
        yield from (now | {"programs": value, "chunk": 0} for value in PROGRAMS if value != now.get("programs"))


class Steps:
    """Captured steps of `rows` rows around position 512."""

    def __init__(self, model: Decoder, rows: int, steps: int) -> None:
        self._rows, self._steps = rows, max(1, steps // STEPS) * STEPS
        sampler = NativeSampler(model, eos_ids=[], max_batch=rows, paged=True)
        sampler.generate(gpu.prompts_of(rows, [256]), max_new_tokens=330, seeds=list(range(rows)))
        assert sampler._engine is not None
        self._engine = sampler._engine
        room = torch.arange(rows * self._engine.width).view(rows, -1)
        self._table = (1 + room % (self._engine.page_count - 1)).int()

    def ms(self) -> float:
        """Of one step, the better of two rounds; infinite where the configuration does not run."""
        engine = self._engine
        _runtime._tuned.cache_clear()
        engine._graphs.clear()
        if engine._pool is not None:
            engine._pool = torch.cuda.graph_pool_handle()  # of the graphs before: gone with the last of them
        best = float("inf")
        try:
            with torch.inference_mode():
                engine.table.copy_(self._table)
                engine.state.zero_()
                engine.state[LIMIT] = 10**6
                for turn in range(3):
                    engine.state[POSITION], engine.state[NEXT] = 512 - self._steps // 2, 513 - self._steps // 2
                    engine.state[STEP] = 0
                    gpu.wait(engine.device.type)
                    start = time.perf_counter()
                    for _ in range(self._steps // STEPS):
                        engine.step(self._rows, STEPS)
                    gpu.wait(engine.device.type)
                    if turn:  # the first captures
                        best = min(best, (time.perf_counter() - start) / self._steps * 1e3)
        except Exception as e:  # more shared memory than there is, for one
            if "CUDA error" in str(e):
                raise
            return float("inf")
        return best


def tune(model: Decoder, rows: int, ops: list[str], steps: int, end: float) -> Iterator[list[object]]:
    """Rows [op, class, configuration, ms, ms of what it replaces, kept or not]; the table of `_runtime` holds what was kept."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    table = _runtime.tuning_table().setdefault(device, {})
    whole = Steps(model, rows, steps)
    for op, key in classes(model, rows):
        if op not in ops:
            continue
        entries = table.setdefault(op, {})
        measured: list[tuple[float, Config]] = []
        best, now = whole.ms(), entries.get(key, {})
        for config in candidates(op, now, rows * model.config.num_key_value_heads):
            if time.time() > end:
                break
            entries[key] = config
            measured.append((whole.ms(), config))
            yield [op, key, config, measured[-1][0], best, False]
        for ms, config in sorted(measured, key=lambda pair: pair[0])[:2]:
            if ms >= best * GAIN:
                break
            entries[key] = now
            stood = whole.ms()
            entries[key] = config
            again = whole.ms()
            if again < stood * GAIN:
                now = config
                yield [op, key, config, again, stood, True]
                break
        entries[key] = now
        if not now:
            del entries[key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for tune.json")
    parser.add_argument("--cases", default="7.25B:64,7.25B:256,1.44B:256,1.44B:64", help="size:rows, …")
    parser.add_argument("--ops", default=",".join((*ATTENTIONS, *FIELDS)), help="what is tuned, of these")
    parser.add_argument("--steps", type=int, default=100, help="steps of a measurement, in graphs of several")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each case, at most")
    parser.add_argument("--write", action="store_true", help="write what was kept into the library's table")
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    rows: list[list[object]] = []
    models: dict[str, Decoder] = {}
    for case in arguments.cases.split(","):
        size, count = case.split(":")
        if size not in models:
            models.clear()
            torch.cuda.empty_cache()
            models[size] = gpu.build(size, "cuda" if torch.cuda.is_available() else "cpu")
        end = time.time() + arguments.seconds
        for row in tune(models[size], int(count), arguments.ops.split(","), arguments.steps, end):
            rows.append([case, *row])
            print(json.dumps(rows[-1]), flush=True)
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / "tune.json").write_text(json.dumps({"gpu": name, "rows": rows}, indent=0) + "\n")
    if arguments.write:
        import tuning_file  # of libs/kernels/benchmarks, which only this needs on the path

        tuning_file.write(_runtime.tuning_table())


if __name__ == "__main__":
    main()
