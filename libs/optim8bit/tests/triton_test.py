"""The Triton kernels under the interpreter against the torch backend, and their compilation to sm_90 without a GPU.

The interpreter is chosen when triton is imported, so both run in processes of their own: as a script this file is one of them.
"""

import copy
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest
import torch

from align.optim8bit import AdamW8bit, OptimizerError, quant

# Rows of whole chunks, of part of one, of several; blocks 2048, 64, 256, 2048, 512; fp32 state: odd, 1-D, 0-d, empty.
SHAPES = {"wide": (3, 2048), "narrow": (65, 64), "blocks": (20, 256), "long": (2, 6144), "cube": (3, 4, 512)}
SHAPES |= {"odd": (50, 90), "bias": (2049,), "scalar": (), "empty": (0, 64)}


def tensor(shape, seed, scale, dtype, spread=0.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * scale
    return (x * torch.exp(torch.randn(shape, generator=generator) * spread)).to(dtype)


def pair(dtype, shapes=None, **options):
    """The same parameters under both backends: [(parameters, optimizer), (parameters, optimizer)]."""
    made = []
    for backend in ("torch", "triton"):
        params = {name: torch.nn.Parameter(tensor(s, i, 0.05, dtype)) for i, (name, s) in enumerate((shapes or SHAPES).items())}
        made.append((params, AdamW8bit(params.items(), **{"lr": 1e-2, "weight_decay": 0.1, "backend": backend, "seed": 5, **options})))
    return made


def step(made, seed, spread=2.0, skip=()):
    norms = []
    for params, optimizer in made:
        for i, (name, p) in enumerate(params.items()):
            p.grad = None if name in skip else tensor(p.shape, 100 * seed + i, 1e-3, p.dtype, spread)
        norms.append(optimizer.step())
    return norms


def assert_same(made):
    (ours, one), (theirs, two) = made
    one, two = one.state_dict()["state"], two.state_dict()["state"]
    for name, p in ours.items():
        for key, value in one[name].items():
            same = torch.equal(value, two[name][key]) if isinstance(value, torch.Tensor) else value == two[name][key]
            assert same, (name, key)
        assert torch.equal(p, theirs[name]), name


def scenario_same_bits_bf16_stochastic():
    made = pair(torch.bfloat16)
    for seed in range(2):
        step(made, seed)
        assert_same(made)


def scenario_same_bits_bf16_to_nearest():
    made = pair(torch.bfloat16, {"wide": (2, 2048), "narrow": (65, 64), "bias": (77,)}, stochastic_rounding=False)
    step(made, 1)
    assert_same(made)


def scenario_same_bits_fp32():
    made = pair(torch.float32)
    for seed in range(2):
        step(made, seed)
        assert_same(made)


def scenario_same_bits_in_blocks_of_4096():
    made = pair(torch.bfloat16, {"long": (2, 8192), "wide": (1, 4096)}, block_size=4096)
    step(made, 0)
    step(made, 1)
    assert_same(made)


def scenario_same_bits_when_clipped():
    """Gradients of +-2**-6: their sum of squares is exact in any order, so both clip by the same factor."""
    made = pair(torch.bfloat16, {"wide": (4, 2048), "narrow": (64, 64), "bias": (4096,)}, max_grad_norm=0.25)
    for seed in range(2):
        for params, optimizer in made:
            for i, p in enumerate(params.values()):
                p.grad = (tensor(p.shape, 10 * seed + i, 1.0, torch.float32).sign() / 64).bfloat16()
            assert optimizer.step() == 2.0
        assert_same(made)


def scenario_norm_agrees_and_non_finite_is_skipped():
    made = pair(torch.bfloat16)
    one, two = step(made, 3)
    assert one == pytest.approx(two, rel=1e-6)
    before = [copy.deepcopy(optimizer.state_dict()) for _, optimizer in made]
    for params, _ in made:
        params["narrow"].grad[64, 63] = float("inf")
    assert all(not optimizer.step() < 1e18 and optimizer.skipped == 1 for _, optimizer in made)
    for name, entry in before[1]["state"].items():
        assert all(torch.equal(v, made[1][1].state_dict()["state"][name][k]) for k, v in entry.items() if isinstance(v, torch.Tensor))


def scenario_parameters_without_gradients():
    made = pair(torch.float32, {"a": (3, 2048), "b": (65, 64), "c": (64, 64), "d": (10,)})
    for seed, skip in enumerate(("b", "a", "", "d")):
        step(made, seed, skip=skip)
        assert_same(made)
    assert all(optimizer.step() > 0 for _, optimizer in made)  # the same gradients again


def scenario_unaligned_gradients_and_parameters():
    """Views that begin two bytes off."""
    made = pair(torch.bfloat16, {"wide": (2, 2048), "narrow": (65, 64)})
    for params, optimizer in made:
        for i, p in enumerate(params.values()):
            p.grad = torch.empty(p.numel() + 1, dtype=p.dtype)[1:].view(p.shape).copy_(tensor(p.shape, i, 1e-3, p.dtype))
            p.data = torch.empty(p.numel() + 1, dtype=p.dtype)[1:].view(p.shape).copy_(p.data)
        optimizer.step()
    assert_same(made)


def scenario_noise_counts_from_the_full_parameter():
    """Rows 3 to 7 as a shard get the noise of rows 3 to 7; odd beginnings too, with fp32 state."""
    for shape in ((7, 128), (7, 33), (7,)):
        (whole, one), (part, _) = pair(torch.bfloat16, {"w": shape}, min_8bit_elems=1)
        shard = torch.nn.Parameter(part["w"].detach()[3:].clone())
        sharded = AdamW8bit([("w", shard)], lr=1e-2, weight_decay=0.1, backend="triton", seed=5, min_8bit_elems=1)
        member = sharded._members["w"][1]
        member.start, member.stop = 3, 7
        whole["w"].grad = tensor(shape, 1, 1e-3, torch.bfloat16)
        shard.grad = whole["w"].grad[3:].clone()
        one.step()
        sharded.step()
        assert torch.equal(whole["w"][3:], shard), shape


def scenario_state_moves_between_backends():
    made = pair(torch.bfloat16, {"narrow": (65, 64), "odd": (50, 90), "scalar": ()})
    step(made, 0)
    (_, one), (_, two) = made
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    one.load_state_dict(copy.deepcopy(two.state_dict()))
    step(made, 1)
    assert_same(made)


def scenario_code_tables_are_the_codebook():
    """Every bound and its neighbours, every code's value, random and special patterns: the kernel's table gives quant's code."""
    from align.optim8bit import _triton_backend

    for signed in (True, False):
        book = quant.codebook(signed)
        table = _triton_backend.code_table(signed, torch.device("cpu"))
        x = torch.cat(
            [book.bounds, book.values.abs(), torch.tensor([0.0, 2.0**-149, 1e-30]), tensor((20000,), 1, 1e-3, torch.float32, 4.0).abs()]
        )
        bits = torch.cat([x.view(torch.int32) + d for d in (-1, 0, 1)]).clamp(0, 0x3F800001)
        x = bits.view(torch.float32)
        x = torch.cat([x, -x]) if signed else x
        bits = x.view(torch.int32)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF) if signed else bits
        whole = table.as_strided((1 << 16,), (1,), 0) if signed else table
        code = ((ordered + whole[((ordered >> 16) + (1 << 15 if signed else 0)).long()]) >> 16) & 255
        assert torch.equal(code.to(torch.uint8), quant.encode(x, book))


SCENARIOS = {name.removeprefix("scenario_"): f for name, f in dict(globals()).items() if name.startswith("scenario_")}


def interpret() -> None:
    torch.set_num_threads(1)
    for name, scenario in SCENARIOS.items():
        try:
            scenario()
            result = ""
        except Exception:
            result = traceback.format_exc()
        print(json.dumps([name, result]), flush=True)


def sass(kernel, pointers, constants, warps, unaligned=()):
    """(SASS opcodes, registers, bytes of stack) of a kernel compiled for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    integers = ("key0", "key1", "chunks")
    signature = {n: "constexpr" if n in constants else pointers.get(n) or ("i32" if n in integers else "fp32") for n in names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in pointers and n not in unaligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text, usage = (subprocess.run([tool, flag, file.name], capture_output=True, text=True).stdout for flag in ("-sass", "-res-usage"))
    opcodes = re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+)", text)
    return [o for o in opcodes if o not in ("NOP", "BRA", "EXIT")], *(
        int(re.findall(rf"{key}:(\d+)", usage)[-1]) for key in ("REG", "STACK")
    )


def compile_all() -> None:
    import triton.language as tl

    from align.optim8bit import _kernels, _triton_backend

    tables = {"chunk_member": "*i16", "records": "*i64"}
    eight = tables | dict.fromkeys(("m_codes", "v_codes"), "*u8") | dict.fromkeys(("m_absmax", "v_absmax", "maps"), "*fp32")
    eight |= {"m_table": "*i32", "v_table": "*i32"}
    tuning = _triton_backend.TUNING
    constants = {"CHUNK": tuning.chunk, "BLOCK": 2048, "PARAM": tl.bfloat16, "GRAD": tl.bfloat16}
    constants |= {"STOCHASTIC": True, "EVEN": True, "ALIGN": 16, "IEEE": False}
    report = {}
    opcodes, registers, stack = sass(_kernels.adam8, eight, constants, tuning.warps, ("m_codes", "v_codes"))
    memory = [o for o in opcodes if o.startswith(("LDG", "STG", "LDL", "STL"))]
    report["adam8"] = [len(opcodes) * tuning.warps * 32 / tuning.chunk, registers, stack, memory]
    norm = {"CHUNK": 2048, "UNROLL": 4, "GRAD": tl.bfloat16, "EVEN": True, "ALIGN": 16}
    report["square_sums"] = sass(_kernels.square_sums, tables | {"sums": "*fp64"}, norm, 4)[1:]
    print(json.dumps(report))


def run(mode: str, interpreted: str, cache: Path) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": interpreted, "TRITON_CACHE_DIR": str(cache), "HOME": str(cache)}
    done = subprocess.run([sys.executable, __file__, mode], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return dict(json.loads(line) for line in run("interpret", "1", tmp_path_factory.mktemp("cache")).splitlines())


@pytest.mark.parametrize("name", SCENARIOS)
def test_interpreter(reports, name):
    assert reports[name] == ""


def test_compiles_to_sm_90_within_the_instruction_budget(tmp_path):
    """At 10 bytes an element the H200 can issue 69 to 78 instructions an element in the time of the traffic; vectors are whole."""
    report = json.loads(run("compile", "0", tmp_path))
    per_element, registers, stack, memory = report["adam8"]
    assert per_element <= 53 and registers <= 128 and stack == 0
    assert memory.count("LDG.E.128") == 8 + 2 and memory.count("STG.E.128") == 4  # bf16: 32 values a thread in vectors of 8; the maps
    assert memory.count("STG.E.64") == 8 and not any("U16" in o and "STG" in o for o in memory)  # codes: vectors of 8
    assert report["square_sums"][1] == 0


def test_the_backend_needs_cuda_or_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(OptimizerError, match='backend "triton" needs CUDA parameters, not cpu'):
        AdamW8bit([torch.nn.Parameter(torch.zeros(3))], backend="triton")


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_all}[sys.argv[1]]()
