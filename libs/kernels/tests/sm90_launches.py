"""Compiles for sm_90, without a GPU, what the ops launch at the shapes of real models: the ops run on tensors without memory.

As a script it prints one JSON line a launch: [name, registers, bytes of stack, {memory and matrix instruction: count}].
"""

import collections
import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch

from align.kernels import (
    _decode_attention,
    _gemv,
    _invariant_attention,
    _invariant_linear,
    _linear_loss,
    _rms_norm,
    _rope,
    _rope_cache,
    _runtime,
    _sampling,
    _step_linear,
    _swiglu,
)

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8"}
MEMORY = ("LDG", "STG", "LDL", "STL", "HGMMA", "HMMA")
TOKENS = 16384


def compile_launch(kernel, arguments, named):
    """(registers, bytes of stack, counts) of one launch as its arguments specialise it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {key: named.pop(key) for key in ("num_warps", "num_stages") if key in named}
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | named
    signature, constants, attributes = {}, {}, {}
    for i, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        value = values[name]
        if parameter.is_constexpr:
            signature[name], constants[name] = "constexpr", value
            continue
        tensor = isinstance(value, torch.Tensor)
        signature[name] = TYPES[value.dtype] if tensor else "i32" if isinstance(value, int) else "fp32"
        if tensor or (isinstance(value, int) and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text, usage = (subprocess.run([tool, flag, file.name], capture_output=True, text=True).stdout for flag in ("-sass", "-res-usage"))
    opcodes = collections.Counter(re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+)", text))
    registers, stack = (int(re.findall(rf"{key}:(\d+)", usage)[-1]) for key in ("REG", "STACK"))
    return registers, stack, {o: n for o, n in opcodes.items() if o.startswith(MEMORY)}


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def floats(*shape):
    return empty(*shape, dtype=torch.float32)


def ints(*shape, dtype=torch.int64):
    return empty(*shape, dtype=dtype)


def training(size, heads, kv_heads, inner):
    x, weight = empty(TOKENS, size), empty(size)
    _rms_norm._launch_forward(x, None, weight, 1e-5)
    _rms_norm._launch_forward(x, x, weight, 1e-5)
    _rms_norm._launch_backward(x, x, x, weight, floats(TOKENS))
    tables = floats(4096, 64), floats(4096, 64), ints(4, 4096)
    _rope._rope_qkv(empty(4, 4096, (heads + 2 * kv_heads) * 128), *tables, heads, kv_heads)
    _swiglu._swiglu_packed(empty(TOKENS, 2 * inner))
    _swiglu._swiglu_packed_backward(empty(TOKENS, inner), empty(TOKENS, 2 * inner))
    _linear_loss._scale_(x, floats(1))


def vocabulary(size):
    logits, ids = empty(2816, size), ints(2816)
    _linear_loss._launch_rows(logits, ids, None, 0.0, 0.0, True)
    _linear_loss._launch_rows(logits, ids, None, 0.0, 0.0, False, floats(2816))
    _linear_loss._launch_slope(logits, ids, None, floats(2816), floats(2816))
    rows = 64
    options = floats(rows), ints(rows, dtype=torch.int32), floats(rows), floats(rows)
    for counters in (None, ints(rows, dtype=torch.int32)):
        _sampling._sample(empty(rows, size), ints(rows), ints(rows), *options, counters)


def decoding(rows, heads, kv_heads):
    lengths, q = ints(rows, dtype=torch.int32), empty(rows, heads, 128)
    counters, cache = ints(rows * kv_heads, dtype=torch.int32), empty(rows, 4096, kv_heads, 128)
    pages, table = {page: empty(1024, page, kv_heads, 128) for page in (16, 64)}, ints(rows, 64, dtype=torch.int32)
    _decode_attention._decode(q, cache, cache, lengths, None, 0.1, 0, None, False)
    for page in pages:
        _decode_attention._decode(q, pages[page], pages[page], lengths, table, 0.1, 4096, counters, page == 64)
    _invariant_attention._decode(q, cache, cache, lengths, None, 0.1, 0)
    _invariant_attention._decode(q, pages[64], pages[64], lengths, table, 0.1, 4096)


def step(rows, size, inner, heads, kv_heads):
    """A decoding step's products; the rotation from what the first one leaves."""
    x, pages = empty(rows, size), empty(1024, kv_heads, 128, 128).transpose(1, 2)
    qkv = empty(rows, (heads + 2 * kv_heads) * 128)
    if rows == 1:
        _step_linear._normed_vector(x, empty(size), empty(2 * inner, size), 1e-5, None, True)
        _step_linear._residual_vector(empty(1, inner), empty(size, inner), x, None)
    else:
        qkv = _step_linear._split(x, empty(qkv.shape[1], size))
        _step_linear._gated(x, empty(2 * inner, size))
        _step_linear._sum_rms_norm(_step_linear._split(empty(rows, inner), empty(size, inner)), x, empty(size), 1e-5, None, True)
    table = ints(rows, 16, dtype=torch.int32)
    tables, lengths = (floats(4096, 64), floats(4096, 64)), ints(rows, dtype=torch.int32)
    counters = ints(rows * kv_heads, dtype=torch.int32)
    _rope_cache._rope_to_cache(qkv, *tables, ints(rows), pages, pages, table, None, heads, None, True)
    _decode_attention._rope_decode(qkv, *tables, lengths, pages, pages, table, heads, None, 0.1, 0, counters, True)


def matrices(outputs, size):
    for batch in (1, 16):
        _gemv._gemv(empty(batch, size), empty(outputs, size), empty(batch, outputs))
    for rows in (1, 8192):
        _invariant_linear._linear(empty(rows, size), empty(outputs, size), None)


def report():
    from triton.runtime.jit import JITFunction

    seen = {}

    def launch(kernel, *arguments, grid, warmup, **named):
        key = f"{kernel.fn.__name__} {len(seen)}"
        seen[key] = compile_launch(kernel, arguments, named)
        print(json.dumps([key, *seen[key]]), flush=True)

    JITFunction.run = launch
    _runtime.use_kernel = lambda x: True
    training(4096, 32, 8, 14336)
    vocabulary(32768)
    decoding(1, 32, 8)
    matrices(4096, 14336)
    for rows in (1, 64):
        step(rows, 4096, 14336, 32, 8)
    heads, kv_heads = empty(8192, 32, 128), empty(8192, 8, 128)
    _invariant_attention._attention(heads, kv_heads, kv_heads, ints(5, dtype=torch.int32), 4096, 0.1, 0)


if __name__ == "__main__":
    report()
