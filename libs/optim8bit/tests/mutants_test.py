"""Hand-planted faults in the quantiser, map, moments, decay, rounding, clipping, layout and state: the other tests must see each.

As a script this file is the harness: it loads torch and pytest once, and forks for every mutant a child that imports the mutated
copy of the library afresh and runs quant_test.py and adamw_test.py until the first failure.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# (file, what stands there, what a mutant has)
MUTANTS = [
    ("_maps.py", "3f7e3333 3f800000", "3f7e3334 3f800000"),
    ("_maps.py", "34ae7baa 35500998", "34ae7bab 35500998"),
    ("_maps.py", "3513a3b7", "3513a3b8"),
    ("quant.py", "-magnitudes[1:128].flip(0), magnitudes", "-magnitudes[:127].flip(0), magnitudes"),
    ("quant.py", "magnitudes[1:].double()) / 2", "magnitudes[1:].double()) / 2.0001"),
    ("quant.py", "torch.where(rounded.double() > exact, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)", "rounded"),
    ("quant.py", "(bits & 0x7FFFFFFF) if book.signed else bits", "bits"),
    ("quant.py", ".clamp_(0, book.table", ".clamp_(1, book.table"),
    ("quant.py", "code = found.bitwise_and_(255).sub_(above)", "code = found.bitwise_and_(255)"),
    ("quant.py", "code = found.bitwise_and_(255).sub_(above)", "code = found.bitwise_and_(255).add_(above)"),
    ("quant.py", ".add_(127).clamp_min_(0)", ".add_(127)"),
    ("quant.py", ".add_(127).clamp_min_(0)", ".add_(128).clamp_min_(0)"),
    ("quant.py", "inside[(bits >> shift) - base] = bits & last", "inside[(bits >> shift) - base] = (bits & last) >> 8 << 8"),
    ("quant.py", "17 if signed else 16", "18 if signed else 16"),
    ("quant.py", "torch.where(absmax < TINY, 0.0, absmax)", "absmax"),
    ("quant.py", "torch.where(usable | (absmax == 0), absmax, float(\"nan\"))", "absmax.nan_to_num()"),
    ("quant.py", "1.0 / absmax", "0.9999 / absmax"),
    ("quant.py", "blocks.abs().amax(1)", "blocks.amax(1)"),
    ("quant.py", "blocks = torch.where(blocks < 0, 0.0, blocks)", "pass"),
    ("quant.py", "{True: 127, False: 0}", "{True: 128, False: 0}"),
    ("quant.py", "block_size & (block_size - 1) == 0", "block_size % 2 == 0"),
    ("_noise.py", "(1 << (32 - by)) - 1", "-1"),
    ("_noise.py", "MIX1, MIX2 = 0x9E3779B1, 0x7FEB352D, 0x846CA68B", "MIX1, MIX2 = 0x9E3779B1, 1, 1"),
    ("_noise.py", "+ key1", "+ key0"),
    ("_noise.py", "[words & 0xFFFF, _shift(words, 16)]", "[words & 0xFFFF, words & 0xFFFF]"),
    ("_noise.py", 'f"{seed}:{step}"', 'f"{seed}"'),
    ("_noise.py", "+ bits) & -65536", "+ bits // 2) & -65536"),
    ("_noise.py", "+ bits) & -65536", "+ 32768) & -65536"),
    ("_noise.py", "+ bits) & -65536", "+ bits + 1) & -65536"),
    ("_torch_backend.py", "1.0 - self.beta1", "1.0"),
    ("_torch_backend.py", "1.0 - self.beta2", "self.beta2"),
    ("_torch_backend.py", "(g * hyper.one_minus_beta2).mul_(g)", "(g * hyper.one_minus_beta2).abs_()"),
    ("_torch_backend.py", ".mul_(hyper.root_bias2).add_(hyper.eps)", ".add_(hyper.eps).mul_(hyper.root_bias2)"),
    ("_torch_backend.py", ".add_(hyper.eps)", ""),
    ("_torch_backend.py", "p.mul_(hyper.decay).sub_(", "p.sub_("),
    (
        "_torch_backend.py",
        "p.mul_(hyper.decay).sub_((m / denominator).mul_(hyper.step_size))",
        "p.sub_((m / denominator).mul_(hyper.step_size)).mul_(hyper.decay)",
    ),
    ("_torch_backend.py", "values.view(-1, block).mul_(absmax[:, None])", "pass"),
    ("_torch_backend.py", "(blocks.abs() if signed else blocks).amax(1)", "blocks.amax(1)"),
    ("_torch_backend.py", "_noise.as_int32(a ^ b) for a, b in", "_noise.as_int32(b) for a, b in"),
    ("_torch_backend.py", "first = (member.first + piece.begin) // 2", "first = member.first // 2"),
    ("_torch_backend.py", "end = max(begin + block, end - (end - begin) % block)", "pass"),
    ("_torch_backend.py", "if hyper.stochastic else p.bfloat16()", "if True else p.bfloat16()"),
    ("_adamw.py", "1.0 - beta1**t", "1.0 - beta1**(t + 1)"),
    ("_adamw.py", "(1.0 - beta2**t) ** -0.5", "1.0"),
    ("_adamw.py", "1.0 - lr * group[\"weight_decay\"]", "1.0 - group[\"weight_decay\"]"),
    ("_adamw.py", "self.max_grad_norm / (norm + 1e-6)", "self.max_grad_norm / (norm + 1.0)"),
    ("_adamw.py", "min(1.0, self.max_grad_norm", "max(1.0, self.max_grad_norm"),
    ("_adamw.py", "if not norm <= MAX_NORM", "if norm > MAX_NORM"),
    ("_adamw.py", "member.step = count", "member.step = max(m.step for m in part.bucket.members) + 1"),
    ("_adamw.py", "self._hyper(self.param_groups[part.bucket.group],", "self._hyper(self.param_groups[0],"),
    ("_adamw.py", "math.sqrt(sum(", "(sum("),
    ("_adamw.py", "settings[\"seed\"], settings", "self.seed, settings"),
    ("_layout.py", "row & -row", "numel & -numel"),
    ("_layout.py", "numel < min_8bit_elems", "row < min_8bit_elems"),
    ("_state.py", "member.step = int(saved[\"step\"])", "pass"),
    ("_state.py", "if saved[\"dtype\"] != dtype:", "if False:"),
    ("_state.py", "if stop > end:", "if True:"),
]  # fmt: skip


def harness(work: Path) -> None:
    """Print [index, exit code of pytest] for every mutant; index -1 is the library as it is, which must pass."""
    import hypothesis
    import torch

    torch.set_num_threads(1)
    assert hypothesis and "align.optim8bit" not in sys.modules
    sources = {p.name: p.read_text() for p in (work / "original").glob("*.py")}
    target = work / "align/optim8bit"
    for index in range(-1, len(MUTANTS)):
        changed = dict(sources)
        if index >= 0:
            name, old, new = MUTANTS[index]
            assert old in sources[name], f"mutant {index}: {name} has no {old!r}"
            changed[name] = sources[name].replace(old, new, 1)
        for name, text in changed.items():
            (target / name).write_text(text)
        child = os.fork()
        if child == 0:
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), 1)
                arguments = ["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={work}", "-c", str(work / "pytest.ini")]
                os._exit(
                    int(
                        pytest.main(
                            [
                                *arguments,
                                "--deselect=adamw_test.py::test_the_readmes_example_runs",
                                str(work / "adamw_test.py"),
                                str(work / "quant_test.py"),
                            ]
                        )
                    )
                )
        print(json.dumps([index, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]), flush=True)


def test_every_mutant_is_killed(tmp_path):
    import align.optim8bit  # here, not above: as a script this process must not have the library before it forks

    library, tests = Path(align.optim8bit.__file__).parent, Path(__file__).parent
    (tmp_path / "align/optim8bit").mkdir(parents=True)
    shutil.copytree(library, tmp_path / "original", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("quant_test.py", "adamw_test.py", "mutants_test.py"):
        shutil.copy(tests / name, tmp_path / name)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib --hypothesis-profile=ci\n")
    others = [p for p in os.environ["PYTHONPATH"].split(os.pathsep) if p and not (Path(p) / "align/optim8bit").exists()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *others]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "mutants_test.py"), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=3000
    )
    codes = dict(json.loads(line) for line in done.stdout.splitlines())
    assert len(codes) == len(MUTANTS) + 1, done.stderr[-3000:]
    assert codes[-1] == 0, "the tests fail without a mutant"
    survivors = [MUTANTS[i] for i, code in codes.items() if i >= 0 and code != 1]
    assert not survivors


if __name__ == "__main__":
    harness(Path(sys.argv[1]))
