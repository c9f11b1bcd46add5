"""What a decoding step's products are tuned on, and beside: what they replace."""

import functools
from collections.abc import Callable, Iterator

import torch
from workloads import DIM, MODELS, Functions, listed, rand

from align import kernels

EPS = 1e-5
ROWS = (1, 64)  # the table of 64 rows serves 2 to 64
Tuning = Iterator[tuple[str, str, list[dict[str, int]], Callable[[], Functions]]]
# n, k, stages; the splits of a product whose tiles are fewer than the cores are those that fill them once or twice
SPLIT = ((32, 128, 4), (64, 64, 6), (64, 128, 3), (64, 128, 4), (128, 64, 4), (128, 64, 6), (128, 128, 3), (128, 64, 3))
GATED = (
    (16, 128, 4, 6, 0), (32, 64, 4, 6, 0), (32, 128, 4, 4, 0), (32, 64, 4, 4, 0), (64, 64, 4, 3, 0), (64, 64, 4, 4, 0), (64, 64, 4, 5, 0),
    (64, 64, 4, 6, 0), (64, 128, 8, 4, 0), (128, 64, 8, 4, 0), (64, 64, 8, 6, 0), (32, 64, 4, 8, 0), (64, 64, 4, 6, 4),
)  # fmt: skip
VECTOR = (
    (1, 1024, 4, 1, 0), (1, 2048, 4, 1, 0), (1, 2048, 8, 1, 0), (2, 1024, 4, 1, 0), (2, 2048, 8, 1, 0), (4, 512, 4, 1, 0),
    (4, 512, 4, 4, 0),
    (8, 512, 4, 4, 0), (2, 512, 2, 1, 0), (1, 2048, 4, 1, 16), (2, 1024, 4, 1, 16), (1, 2048, 8, 1, 32), (4, 512, 4, 4, 8),
    (1, 4096, 8, 1, 0),
)  # fmt: skip
SHARED = 220 << 10  # bytes of shared memory that a tile may take
CORES = 132


def products() -> list[tuple[str, int, int]]:
    """(kind, outputs, inputs) of both models."""
    found = []
    for m in MODELS.values():
        found += [("split", (m.heads + 2 * m.kv_heads) * DIM, m.size), ("split", m.size, m.size), ("gated", m.inner, m.size)]
        found.append(("split", m.size, m.inner))
    return found


def case(kind: str, outputs: int, size: int, rows: int, replaced: bool = False) -> Functions:
    """Calls on weights that alternate, so that the cache is cold; `replaced`: what it stands for, without the norm or sum after it."""
    height = outputs * (2 if kind == "gated" else 1)
    sets = max(2, min(12, (200 << 20) // (height * size * 2) + 1))

    def one() -> Callable[[], object]:
        x, weight, h, norm = rand(rows, size), rand(height, size, scale=0.02), rand(rows, outputs), rand(outputs)
        if replaced:
            linear = kernels.gemv if rows == 1 else torch.nn.functional.linear
            if kind == "gated":
                return lambda: kernels.swiglu_packed(linear(x, weight))
            return lambda: kernels.add_rms_norm(linear(x, weight), h, norm, EPS)
        if rows == 1 and kind == "gated":
            return lambda: kernels.normed_vector(x, rand_norm, weight, EPS, gated=True)
        if rows == 1:
            return lambda: kernels.residual_vector(x, weight, h)
        if kind == "gated":
            return lambda: kernels.gated_linear(x, weight)
        return lambda: kernels.sum_rms_norm(kernels.split_linear(x, weight), h, norm, EPS, early=True)

    rand_norm = rand(size)
    return [one() for _ in range(sets)]


def tuning(rows: int, kind: str, outputs: int, size: int) -> Tuning:
    key = f"{outputs}x{size}"
    make = functools.partial(case, kind, outputs, size, rows)
    if rows == 1:
        yield f"step_vector{'_gated' if kind == 'gated' else ''}", key, listed("rows block warps stages lines", *VECTOR), make
    elif kind == "gated":
        configs = listed("n k warps stages lines", *GATED)
        yield "gated_linear", key, [c for c in configs if (rows + 2 * c["n"]) * c["k"] * 2 * c["stages"] <= SHARED], make
    else:
        configs = []
        for n, k, stages in SPLIT:
            tiles = outputs // n
            for splits in sorted({max(1, CORES // tiles), max(1, 2 * CORES // tiles), max(1, 4 * CORES // tiles)}):
                if (rows + n) * k * 2 * stages <= SHARED and splits <= 16 and size // splits >= 2 * k:
                    configs.append({"n": n, "k": k, "splits": splits, "warps": 4, "stages": stages, "lines": 0})
        yield "split_linear", key, configs, make


TUNING, REPLACED = {}, {}
for _rows in ROWS:
    for _kind, _outputs, _size in products():
        _group = f"step-{_rows}-{_kind}-{_outputs}x{_size}"
        TUNING[_group] = functools.partial(tuning, _rows, _kind, _outputs, _size)
        REPLACED[_group] = functools.partial(case, _kind, _outputs, _size, _rows, True)
