"""align.guard: the seed's table, how each figure moves, what was measured, and every refusal with its way out."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.guard import GuardError, Refused, RunShape, preflight, project, read_host

GIB = 2**30
N = 7_248_023_552  # Mistral-7B-v0.3
SEED = RunShape(parameters=N, ranks=4, host_base_gb_per_rank=5.5)  # the base of its table, of another stack than ours
MISTRAL = RunShape(
    parameters=N,
    layers=32,
    hidden=4096,
    intermediate=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=32768,
    length=4096,
    largest=32768 * 4096,
)
MEASURED = json.loads((Path(__file__).parent / "data" / "measured.json").read_text(encoding="utf-8"))


# --- the seed's table, 7.25B on 4 ranks


def test_the_seeds_table_with_adamw8bit():
    gather, files = project(replace(SEED, per_rank_optimizer_state=False)), project(SEED)
    assert round(files.device_optimizer_state_gb_per_rank, 2) == 3.38
    assert files.host_optimizer_gb == 0
    assert round(gather.checkpoint_save_transient_gb, 1) == 40.6 and round(files.checkpoint_save_transient_gb, 1) == 13.5
    assert files.total_gb == gather.total_gb == 22.0
    assert round(gather.peak_gb, 1) == 62.6 and round(files.peak_gb, 1) == 35.5


def test_the_seeds_table_with_offload_adamw():
    # 12 N and the base of 22.0 make 103.0; the seed's total has 1.7 more, taken as four ranks' pinned staging.
    offload = project(replace(SEED, optimizer="offload_adamw", pinned_staging_gb=0.425))
    assert round(offload.host_optimizer_gb, 1) == 81.0 and offload.device_optimizer_state_gb_per_rank == 0
    assert round(offload.total_gb, 1) == round(offload.peak_gb, 1) == 104.7


def test_the_seeds_refusal_names_the_files_per_rank_and_they_pass():
    with pytest.raises(Refused) as caught:
        preflight(project(replace(SEED, per_rank_optimizer_state=False)), available_host_gb=85, mem_floor_gb=45)
    assert str(caught.value) == (
        "host memory: the run peaks at 62.6 GiB (interpreter and libraries 22.0 + saving 40.6) and 45.0 must stay free, 107.6 together; "
        "85.0 are available; with train.per_rank_optimizer_state=true (per-rank files) it needs 80.5, which fits"
    )
    assert caught.value.exit_code == 3 and caught.value.check == "host_memory"
    gather = project(replace(SEED, per_rank_optimizer_state=False))
    with pytest.raises(Refused, match="no one or two of the settings"):  # a setting that the caller has not is not proposed
        preflight(gather, available_host_gb=85, mem_floor_gb=45, settings={"optimizer.name"})
    assert preflight(project(SEED), available_host_gb=85, mem_floor_gb=45) == []


@settings(max_examples=40)
@given(n=st.integers(10**6, 10**11), ranks=st.sampled_from([1, 2, 4, 8]), block=st.sampled_from([64, 256, 2048]))
def test_doubling_moves_each_figure_as_the_formula_says(n, ranks, block):
    shape = RunShape(parameters=n, ranks=ranks, block=block, host_base_gb_per_rank=2.0)
    one, two = project(shape), project(replace(shape, parameters=2 * n))
    state = (2 + 8 / block) * n / GIB
    assert one.device_optimizer_state_gb_per_rank == pytest.approx(state / ranks, rel=1e-12)
    for name in ("weights_gb", "grads_gb", "device_optimizer_state_gb_per_rank", "checkpoint_save_transient_gb", "checkpoint_gb"):
        assert getattr(two, name) == pytest.approx(2 * getattr(one, name), rel=1e-12)
    assert two.total_gb == one.total_gb == 2.0 * ranks
    more = project(replace(shape, ranks=2 * ranks))
    assert more.device_optimizer_state_gb_per_rank == pytest.approx(one.device_optimizer_state_gb_per_rank / 2, rel=1e-12)
    assert more.weights_gb == pytest.approx(one.weights_gb / 2, rel=1e-12) and more.total_gb == 2 * one.total_gb
    assert more.checkpoint_save_transient_gb == pytest.approx(state, rel=1e-12)
    gather = project(replace(shape, ranks=2 * ranks, per_rank_optimizer_state=False))
    assert gather.checkpoint_save_transient_gb == pytest.approx(3 * state, rel=1e-12)
    wider = project(replace(shape, block=2 * block))
    assert wider.device_optimizer_state_gb_per_rank == pytest.approx((2 + 4 / block) * n / ranks / GIB, rel=1e-12)


def test_states_are_counted_over_the_shapes():
    # 4096 and 14336 give blocks of 2048, 11008 of 256; 1-D, small and odd rows keep fp32.
    shape = RunShape.of([(4096, 4096), (4096, 14336), (128, 11008), (4096,), (4, 512), (4096, 33)])
    blocks = 4096 * 4096 // 2048 + 4096 * 14336 // 2048 + 128 * 11008 // 256
    fp32 = 4096 + 4 * 512 + 4096 * 33
    assert (shape.scales, shape.fp32_state, shape.largest) == (blocks, fp32, 4096 * 14336)
    got = project(shape).device_optimizer_state_gb_per_rank * GIB
    assert got == pytest.approx(2 * (shape.parameters - fp32) + 8 * blocks + 8 * fp32, rel=1e-12)
    assert project(replace(shape, optimizer="adamw")).device_optimizer_state_gb_per_rank * GIB == pytest.approx(12 * shape.parameters)
    assert project(replace(shape, optimizer="adamw", weight_bytes=4)).device_optimizer_state_gb_per_rank * GIB == pytest.approx(
        8 * shape.parameters
    )


# --- what was measured


def on_the_cpu(row, **more):
    return RunShape.of(row["parameter_shapes"], device="cpu", save_mode="stream", **row["shape"], **more)


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: "-".join(str(value) for value in row["shape"].values()))
def test_the_projection_is_what_torch_allocated_on_the_cpu(row):
    """Exact where it is arithmetic; a step's peak within 1 %, with accumulation never under by more (the promise is 20 %)."""
    projection = project(on_the_cpu(row))

    def measured(gib):
        return pytest.approx(gib * GIB, rel=1e-9)

    assert row["weights"] == measured(projection.weights_gb) and row["state"] == measured(projection.device_optimizer_state_gb_per_rank)
    assert row["grads"] == pytest.approx(projection.grads_gb * GIB, abs=64)  # the loss is alive, too
    assert row["saved"] == measured(projection.activations_gb)
    standing = (projection.weights_gb + projection.device_optimizer_state_gb_per_rank) * GIB
    phases = {name: value * GIB - standing for name, value in projection.phases.items()}
    assert phases["loss"] == pytest.approx(row["loss"], rel=0.04)
    assert max(value for name, value in phases.items() if name != "optimizer step") == pytest.approx(row["step"], rel=0.01)
    assert phases["optimizer step"] - row["weights"] == pytest.approx(row["optimizer_step"], rel=0.01)
    many = project(on_the_cpu(row, accumulation=2))
    accumulating = max(value for name, value in many.phases.items() if name != "optimizer step") * GIB - standing - row["weights"]
    assert 0.99 * row["accumulating_step"] <= accumulating <= 1.05 * row["accumulating_step"]
    # What a save adds is 2 kB of JSON; what it writes is weights and state, and a kilobyte of headers a tensor.
    assert projection.checkpoint_save_transient_gb == 0 and row["saving"] == 2048
    assert 0 <= row["files"] - projection.checkpoint_gb * GIB <= 1300 * len(row["parameter_shapes"])


@pytest.mark.parametrize("documents, longest, peak", [(54, 66, 28_258_704), (49, 69, 27_971_760), (56, 69, 28_729_104)])
def test_the_default_sft_run(documents, longest, peak):
    """100,352 parameters, fp32, CPU: steps of //stages:sft's own loader, 2048 packed tokens each, measured as in PROVENANCE.md."""
    blocks = [(64,), (64,), (64, 64), (32, 64), (32, 64), (64, 64), (176, 64), (176, 64), (64, 176)] * 2
    shape = RunShape.of(
        [(123, 64), *blocks, (64,)],
        layers=2,
        hidden=64,
        intermediate=176,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocabulary=123,
        tied=True,
        device="cpu",
        weight_bytes=4,
        length=2048,
        forward_impl="cpu_per_document",
        save_mode="stream",
        trained_share=0.37,
        padding=documents * longest / 2048,
    )
    projection = project(shape)
    assert shape.parameters == 100_352 and projection.weights_gb * GIB == 4 * 100_352
    standing = projection.weights_gb + projection.device_optimizer_state_gb_per_rank
    step = max(value for name, value in projection.phases.items() if name != "optimizer step") - standing
    assert step * GIB == pytest.approx(peak, rel=0.001)
    unknown = project(replace(shape, padding=1.0, trained_share=1.0)).device_peak_gb - standing  # from the configuration alone
    assert unknown * GIB == pytest.approx(peak, rel=0.2)
    assert projection.total_gb == projection.peak_gb == pytest.approx(0.25 + standing + 1.5 * (projection.device_peak_gb - standing))


@pytest.mark.parametrize("length, resident_mib", [(128, 259.8), (2048, 296.5), (8192, 423.0)])
def test_what_the_system_sees_of_the_sft_run_on_the_cpu(length, resident_mib):
    """Largest resident size of //stages:sft, 40 steps over 3,000 rows of its own data (data.max_length), as measured."""
    blocks = [(64,), (64,), (64, 64), (32, 64), (32, 64), (64, 64), (176, 64), (176, 64), (64, 176)] * 2
    shape = RunShape.of(
        [(115, 64), *blocks, (64,)],
        layers=2,
        hidden=64,
        intermediate=176,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocabulary=115,
        tied=True,
        device="cpu",
        weight_bytes=4,
        length=length,
        forward_impl="cpu_per_document",
        save_mode="stream",
        trained_share=0.39,
        padding=1.74,
    )
    projection = project(shape)
    assert projection.total_gb * 1024 == pytest.approx(resident_mib, rel=0.03)
    increment = resident_mib - projection.host_base_gb * 1024
    if length > 128:
        assert projection.host_run_gb * 1024 == pytest.approx(increment, rel=0.1)


@pytest.mark.parametrize(
    "micro_batch, checkpointing, peak",
    [
        (2, "none", 65.1),
        (4, "none", 101.8),
        (1, "full", 40.9),
        (2, "full", 41.7),
        (4, "full", 43.3),
    ],
)
def test_the_projection_is_what_was_measured_on_an_h200(micro_batch, checkpointing, peak):
    """7.25B, bf16, blocks compiled, 8-bit states, no accumulation, 4096 tokens a row; one block measured at 147 KiB a token."""
    shape = replace(MISTRAL, micro_batch=micro_batch, checkpointing=checkpointing, layer_bytes_per_token=147 * 1024)
    assert project(shape).device_peak_gb == pytest.approx(peak, rel=0.01)
    # By formula alone, without compilation: what is not fused away is over, not under.
    assert 0.99 * peak <= project(replace(shape, layer_bytes_per_token=None)).device_peak_gb <= 1.1 * peak


@pytest.mark.parametrize("micro_batch, peak", [(1, 29.2), (2, 30.8), (4, 34.4)])
def test_a_step_in_the_backward_is_what_was_measured_on_an_h200(micro_batch, peak):
    shape = replace(MISTRAL, micro_batch=micro_batch, checkpointing="full", in_backward=True, layer_bytes_per_token=147 * 1024)
    assert project(shape).device_peak_gb == pytest.approx(peak, rel=0.03)


SMALL = RunShape(
    parameters=1_442_940_928,
    layers=24,
    hidden=2048,
    intermediate=7168,
    heads=16,
    kv_heads=4,
    head_dim=128,
    vocabulary=32768,
    length=4096,
    largest=32768 * 2048,
    compiled=True,
)


@pytest.mark.parametrize(
    "shape, peak",
    [
        (replace(MISTRAL, micro_batch=4, compiled=True), 96.1),
        (replace(SMALL, micro_batch=8), 57.2),
        (replace(SMALL, micro_batch=4), 31.5),
        (replace(MISTRAL, micro_batch=4, compiled=True, checkpointing="full", in_backward=True), 33.77),
    ],
)
def test_compiled_steps_of_align_train_are_what_was_measured_on_an_h200(shape, peak):
    """By formula alone, nothing measured on a block (benchmarks/2026-11-30-trainer-h200.md)."""
    assert project(shape).device_peak_gb == pytest.approx(peak, rel=0.03)


def test_an_adapter_needs_states_and_gradients_of_its_own_alone():
    adapter = 32 * 16 * (4 * 4096 + 2 * 1024 + 4096 + 3 * 14336 + 3 * 4096)  # rank 16 on all seven layers: (in + out) × rank each
    full, lora = project(replace(MISTRAL, checkpointing="full")), project(replace(MISTRAL, checkpointing="full", adapter=adapter))
    assert lora.weights_gb * GIB == pytest.approx(2 * N + 4 * adapter) and lora.grads_gb * GIB == pytest.approx(4 * adapter)
    assert lora.device_optimizer_state_gb_per_rank * GIB == pytest.approx((2 + 8 / 2048) * adapter)
    assert lora.activations_gb == full.activations_gb and lora.device_peak_gb < full.device_peak_gb - 25
    four = project(replace(MISTRAL, checkpointing="full", adapter=adapter, ranks=4))
    assert four.grads_gb == lora.grads_gb and four.weights_gb * GIB == pytest.approx(2 * N / 4 + 4 * adapter)


def test_a_sampler_s_cache_is_kept_beside_the_training_or_goes_with_its_copy():
    """131,072 bytes a position at 7.25B: 256 samples of 1,024 are 32 GiB."""
    plain, shape = project(MISTRAL), replace(MISTRAL, sampler_rows=256, sampler_length=1000)
    assert project(shape).sampler_cache_gb == 32.0 and project(shape).sampler_copy_gb == 0
    assert project(shape).device_peak_gb == pytest.approx(plain.device_peak_gb + 32)
    assert project(replace(shape, sampler_budget_gb=10.0)).device_peak_gb == pytest.approx(plain.device_peak_gb + 10)
    copied = project(replace(shape, sampler_copy=True))
    assert copied.sampler_copy_gb * GIB == pytest.approx(2 * N)
    assert copied.phases["sampling"] == pytest.approx(plain.weights_gb * 2 + plain.device_optimizer_state_gb_per_rank + 32)
    assert copied.device_peak_gb == pytest.approx(max(plain.device_peak_gb, copied.phases["sampling"]))
    assert "sampler's cache, 256 rows" in copied.table() and "sampler" not in plain.table()
    assert project(replace(shape, device="cpu")).sampler_cache_gb == 0
    with pytest.raises(GuardError, match="sampler_budget_gb is 0"):
        replace(shape, sampler_budget_gb=0)


def test_selective_lies_between_and_what_is_copied_is_counted():
    shape = replace(MISTRAL, micro_batch=2)
    none, selective, full = (project(replace(shape, checkpointing=mode)).activations_gb for mode in ("none", "selective", "full"))
    assert selective == pytest.approx((none + full) / 2, rel=1e-3)
    state, weights = project(shape).device_optimizer_state_gb_per_rank, project(shape).weights_gb
    copied = replace(shape, snapshot_weights=True)
    assert project(copied).checkpoint_save_transient_gb == pytest.approx(state + weights)
    gathered = replace(copied, ranks=4, per_rank_optimizer_state=False, gather_copies=1, save_mode="stream")
    assert project(gathered).checkpoint_save_transient_gb == pytest.approx(state)
    with pytest.raises(GuardError, match="accumulation is 2"):
        replace(shape, in_backward=True, accumulation=2)


@settings(max_examples=40)
@given(
    shape=st.builds(
        RunShape,
        parameters=st.integers(10**5, 10**10),
        layers=st.integers(1, 40),
        hidden=st.sampled_from([64, 512, 4096]),
        intermediate=st.sampled_from([128, 2048, 14336]),
        heads=st.just(8),
        kv_heads=st.sampled_from([1, 8]),
        head_dim=st.just(64),
        vocabulary=st.sampled_from([112, 32768]),
        length=st.integers(1, 8192),
        micro_batch=st.integers(1, 16),
        accumulation=st.integers(1, 3),
        ranks=st.sampled_from([1, 4]),
        device=st.sampled_from(["cpu", "cuda"]),
        optimizer=st.sampled_from(["adamw8bit", "adamw", "offload_adamw"]),
    )
)
def test_what_saves_memory_does(shape):
    before = project(shape)
    assert before.device_peak_gb == max(before.phases.values()) and before.peak_gb >= before.total_gb
    assert project(replace(shape, checkpointing="full")).activations_gb <= before.activations_gb
    assert project(replace(shape, micro_batch=shape.micro_batch + 1)).device_peak_gb >= before.device_peak_gb
    assert project(replace(shape, accumulation=shape.accumulation + 1)).device_peak_gb >= before.device_peak_gb
    assert project(replace(shape, lean_workers=8)).total_gb == pytest.approx(before.total_gb + 8 * 0.25 + 3.4)


# --- preflight


def refused(shape, **have):
    with pytest.raises(Refused) as caught:
        preflight(project(shape), **{"available_host_gb": 1000, "mem_floor_gb": 45} | have)
    assert "\n" not in str(caught.value)
    return caught.value.check, str(caught.value)


def test_device_memory_names_the_smallest_change():
    check, message = refused(replace(MISTRAL, micro_batch=4), available_device_gb=80)
    assert check == "device_memory"
    assert message.startswith("device memory: each rank peaks at 110.7 GiB in the loss (weights 13.5, gradients 13.5, ")
    assert message.endswith("80.0 are available; with train.checkpointing=selective it peaks at 71.7, which fits")
    _, message = refused(replace(MISTRAL, micro_batch=4), available_device_gb=60)
    assert message.endswith("60.0 are available; with train.checkpointing=full it peaks at 43.7, which fits")
    _, message = refused(replace(MISTRAL, checkpointing="full"), available_device_gb=24)
    assert message.endswith("24.0 are available; with launch.nproc=2 it peaks at 21.8, which fits")
    _, message = refused(replace(MISTRAL, parameters=40 * N), available_device_gb=24)
    assert message.endswith("take a smaller model or a larger machine")
    assert preflight(project(MISTRAL), available_host_gb=1000, available_device_gb=139) == []


def test_two_changes_where_one_is_not_enough():
    shape = replace(MISTRAL, micro_batch=16, optimizer="adamw")
    check, message = refused(shape, available_device_gb=70)
    assert check == "device_memory" and " and " in message.rpartition(";")[2] and message.endswith("which fits")


def test_the_floor_is_the_smaller_of_45_and_a_fifth():
    shape = RunShape(parameters=10**6, host_base_gb_per_rank=10.0)
    assert preflight(project(shape), available_host_gb=13, total_host_gb=14) == []  # 10 + 2.8
    with pytest.raises(Refused, match=r"and 3\.2 must stay free, 13\.2 together; 13\.0 are available"):
        preflight(project(shape), available_host_gb=13, total_host_gb=16)
    with pytest.raises(Refused, match=r"45\.0 must stay free"):
        preflight(project(shape), available_host_gb=50, total_host_gb=1000)
    assert preflight(project(shape), available_host_gb=10.5, mem_floor_gb=0.0) == []


def test_disk_load_and_queue():
    shape = RunShape(parameters=GIB, checkpoints_kept=3)  # 4.004 GiB each
    check, message = refused(shape, free_disk_gb=15)
    assert (check, message) == (
        "disk",
        "disk: 3 checkpoints kept and one being written, 4.00 GiB each, need 16.02 GiB; 15.00 GiB are free; checkpoint.keep=2 fits",
    )
    assert refused(shape, free_disk_gb=5)[1].endswith("5.00 GiB are free; choose a run_dir on another disk")
    assert refused(shape, load=8.0, cores=4) == (
        "load",
        "load: 8.0 on 4 cores, the limit is 8; wait for the other jobs, or ignore the check load",
    )
    assert refused(shape, disk_queue=64)[0] == "disk_queue"
    assert preflight(project(shape), available_host_gb=100, free_disk_gb=17, load=7.9, cores=4, disk_queue=63) == []


def test_what_is_ignored_is_told():
    shape = RunShape(parameters=GIB)
    busy = {"available_host_gb": 1, "mem_floor_gb": 45, "load": 99.0, "cores": 2, "disk_queue": 900}
    with pytest.raises(Refused, match=r"^host memory"):
        preflight(project(shape), ignore=["load", "disk_queue"], **busy)
    assert preflight(project(shape), ignore=["load", "disk_queue", "host_memory"], **busy) == ["host_memory", "load", "disk_queue"]
    assert preflight(project(shape), available_host_gb=100, ignore=["load"]) == []
    with pytest.raises(GuardError, match="no check is named 'lode'; known: host_memory"):
        preflight(project(shape), available_host_gb=100, ignore=["lode"])


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("parameters", 0, "parameters is 0; it must be at least 1"),
        ("ranks", -1, "ranks is -1; it must be at least 1"),
        ("hidden", -4, "hidden is -4; it must not be negative"),
        ("trained_share", 1.5, "trained_share is 1.5; it is a share, 0 to 1"),
        ("optimizer", "sgd", "optimizer is 'sgd'; known: adamw8bit, adamw, offload_adamw"),
        ("weight_bytes", 1, "weight_bytes is 1; known: 2, 4"),
        ("padding", 0.5, "padding is 0.5; it is padded positions for each token, at least 1"),
        ("fp32_state", 11, "fp32_state 11 is more than parameters 10"),
        ("forward_impl", "flash9", "forward_impl is 'flash9'; known: sdpa_causal, cpu_per_document, varlen, invariant"),
    ],
)
def test_numbers_that_describe_no_run(field, value, message):
    with pytest.raises(GuardError) as caught:
        RunShape(**{"parameters": 10} | {field: value})
    assert str(caught.value) == message and caught.value.exit_code == 2


def test_the_table_shows_what_there_is():
    text = project(replace(MISTRAL, ranks=4, checkpointing="full")).table()
    for line in ("optimizer state (adamw8bit)", "activations (checkpointing full, sdpa_causal)", "device peak, each of 4", "host: peak"):
        assert line in text
    assert "pinned" not in text and "MiB" in project(on_the_cpu(MEASURED[0])).table()


# --- the machine


def test_this_machine(tmp_path):
    host = read_host(tmp_path / "not" / "there")
    assert 0 < host.available_host_gb <= host.total_host_gb and host.free_disk_gb > 0 and host.cores >= 1


def test_a_machine_by_its_files(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:       33554432 kB\nMemFree: 1 kB\nMemAvailable:   16777216 kB\n")
    (tmp_path / "loadavg").write_text("3.25 1.0 1.0 1/100 42\n")
    device = os.stat(tmp_path).st_dev
    queue = tmp_path / f"{os.major(device)}:{os.minor(device)}"
    queue.mkdir()
    (queue / "inflight").write_text("       3        4\n")
    none = tmp_path / "none"
    host = read_host(tmp_path, proc=tmp_path, cgroup=none, sys_block=tmp_path)
    assert (host.total_host_gb, host.available_host_gb, host.load, host.disk_queue) == (32.0, 16.0, 3.25, 7)
    assert read_host(tmp_path, proc=tmp_path, cgroup=none, sys_block=none).disk_queue is None
    # A container of 8 GiB that uses 3, 1 of them page cache.
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {GIB}\n")
    host = read_host(tmp_path, proc=tmp_path, cgroup=tmp_path, sys_block=none)
    assert (host.total_host_gb, host.available_host_gb) == (8.0, 6.0)
    (tmp_path / "memory.max").write_text("max\n")
    assert read_host(tmp_path, proc=tmp_path, cgroup=tmp_path, sys_block=none).total_host_gb == 32.0
    assert read_host(tmp_path, proc=none, cgroup=none, sys_block=none).load is None


def test_the_readmes_example_runs():
    code = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "host: peak" in done.stdout
