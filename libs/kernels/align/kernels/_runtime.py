"""What every op shares: where it runs, its errors, and how its kernels are launched.

An op runs its Triton kernel on CUDA tensors of fp32, fp16 or bf16, and its torch reference on anything else. With TRITON_INTERPRET=1 the
kernels run on CPU tensors, for tests. Triton is imported by the first call that needs a kernel, never before.
"""

import contextlib
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

FAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Config = dict[str, int]
Function = TypeVar("Function", bound=Callable[..., Any])

# benchmarks/gpu.py tries configurations by setting them here: {op: configuration}. Nothing else writes to it.
trial: dict[str, Config] = {}


_LIBRARY = torch.library.Library("align", "FRAGMENT")  # type: ignore[no-untyped-call]


def op(name: str, mutates: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Registers a function as torch.ops.align.<name>, one node of a compiled graph; its annotations are the schema.

    What torch.library.custom_op does, without its import of torch._dynamo (1.5 s) at the first call.
    """

    def register(function: Function) -> Function:
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=mutates))  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        return function

    return register


def fake(name: str) -> Callable[[Function], Function]:
    """Registers what an op returns as tensors without data, for torch.compile."""
    return torch.library.register_fake(f"align::{name}", lib=_LIBRARY)  # type: ignore[no-any-return]


def differentiable(name: str, backward: Callable[..., Any], save: Callable[..., None]) -> None:
    torch.library.register_autograd(f"align::{name}", backward, setup_context=save, lib=_LIBRARY)


class KernelError(ValueError):
    """Arguments that an op can't take: the message names the value and what would fit."""

    exit_code = 2


@functools.cache
def interpreted() -> bool:
    """Whether Triton's interpreter was asked for; read once, as Triton does."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def use_kernel(x: Tensor) -> bool:
    return x.dtype in FAST_DTYPES and (x.is_cuda or interpreted())


def early() -> dict[str, bool]:
    """Options of a kernel that begins while the one before it still runs and waits for its end itself; not in the interpreter."""
    return {"PDL": False} if interpreted() else {"PDL": True, "launch_pdl": True}


def on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def wide(x: Tensor) -> Tensor:
    """In the dtype that references compute in: fp32, or fp64 for fp64."""
    return x if x.dtype == torch.float64 else x.float()


def rows_of(x: Tensor) -> Tensor:
    """(..., D) as contiguous (N, D)."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def power_of_two(n: int) -> int:
    """The smallest one that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@functools.cache
def tuning_table() -> dict[str, dict[str, dict[str, Config]]]:
    """{GPU name: {op: {shape class: configuration}}}, as benchmarks/gpu.py --tune made it; see README, Tuning."""
    table: dict[str, dict[str, dict[str, Config]]] = json.loads((Path(__file__).parent / "tuning.json").read_text(encoding="utf-8"))
    return table


@functools.cache
def _tuned(device: int, op: str, shape_class: str) -> Config:
    return tuning_table().get(torch.cuda.get_device_name(device), {}).get(op, {}).get(shape_class, {})


def config(x: Tensor, op: str, shape_class: str | int, default: Config) -> Config:
    """The launch configuration of an op: the table's for this GPU and shape class, else `default`. Never measured while running."""
    if op in trial:
        return default | trial[op]
    if not x.is_cuda:
        return default
    return default | _tuned(x.device.index, op, str(shape_class))
