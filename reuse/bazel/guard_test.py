"""A run that cannot fit is refused with the figures."""

from align.guard import Refused, RunShape, preflight, project

shape = RunShape(
    parameters=7_248_023_552, layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocabulary=32768,
    micro_batch=4, length=4096, checkpointing="full", ranks=1,
)  # fmt: skip
projection = project(shape)
assert abs(projection.weights_gb - 7_248_023_552 * 2 / 2**30) < 0.01  # bf16, in GiB
try:
    preflight(projection, available_host_gb=64, total_host_gb=64, available_device_gb=24)
except Refused as refusal:
    assert "24" in str(refusal)
else:
    raise AssertionError("a 7B run on 24 GiB was let through")
