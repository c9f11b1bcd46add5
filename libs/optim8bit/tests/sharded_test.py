"""Two ranks (gloo, or NCCL for the GPU test): DTensor shards step as the whole does; norm, skipping, state; FSDP2 against one rank.

Run as a script it is one rank. The ranks start once for all tests: every scenario runs on both and reports.
"""

import json
import os
import subprocess
import sys
import traceback

import pytest
import torch
import torch.distributed as dist

from align.optim8bit import AdamW8bit, OptimizerError, merge_state_dicts

SHAPES = {"even": (8, 128), "uneven": (5, 64), "one_row": (1, 4096), "odd": (7, 33), "bias": (9,), "short": (1,), "big": (66, 256)}
DEVICE = os.environ.get("OPTIM8BIT_TEST_DEVICE", "cpu")
OPTIONS = {"ieee": True, "lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.05, "min_8bit_elems": 256, "seed": 3}


def whole(name: str, seed: int, scale: float, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The same tensor on every rank."""
    generator = torch.Generator().manual_seed(1000 * seed + list(SHAPES).index(name))
    return (torch.randn(SHAPES[name], generator=generator) * scale).to(dtype).to(DEVICE)


def make(placements=None, mesh=None, dtype=torch.bfloat16, **options):
    """(parameters, optimizer), whole or as DTensors."""
    from torch.distributed.tensor import distribute_tensor

    params = {name: whole(name, 0, 0.1, dtype) for name in SHAPES}
    if placements:
        params = {name: distribute_tensor(p, mesh, placements) for name, p in params.items()}
    params = {name: torch.nn.Parameter(p) for name, p in params.items()}
    return params, AdamW8bit(params.items(), **{**OPTIONS, **options})


def train(params, optimizer, steps, scale=1e-2):
    """Steps with the same full gradients whatever the sharding; the norms."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    norms = []
    for step in steps:
        for name, p in params.items():
            g = whole(name, step + 1, scale, p.dtype)
            p.grad = distribute_tensor(g, p.device_mesh, p.placements) if isinstance(p, DTensor) else g
        norms.append(optimizer.step())
    return norms


def full(p: torch.Tensor) -> torch.Tensor:
    return p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach()


def on_cpu(state: dict) -> dict:
    entries = {name: {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in e.items()} for name, e in state["state"].items()}
    return {**state, "state": entries}


def gathered(optimizer) -> dict:
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, on_cpu(optimizer.state_dict()))
    return merge_state_dicts(states)


def assert_same_state(one: dict, two: dict) -> None:
    assert one["settings"] == two["settings"] and one["param_groups"] == two["param_groups"]
    for name, entry in one["state"].items():
        for key, value in entry.items():
            other = two["state"][name][key]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, (name, key)


def held_bytes(optimizer) -> int:
    entries = optimizer.state_dict()["state"].values()
    return sum(t.numel() * t.element_size() for entry in entries for t in entry.values() if isinstance(t, torch.Tensor))


def meshes():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    flat, hybrid = init_device_mesh(DEVICE, (2,)), init_device_mesh(DEVICE, (2, 1))
    return {"shard": (flat, [Shard(0)]), "replicate": (flat, [Replicate()]), "hsdp": (hybrid, [Replicate(), Shard(0)])}


def scenario_step_equals_the_unsharded_one():
    """Five steps with clipping and stochastic rounding: parameters and states bit for bit, norms to rounding."""
    reference, one = make()
    norms = train(reference, one, range(5))
    for mesh, placements in meshes().values():
        params, optimizer = make(placements, mesh)
        again = train(params, optimizer, range(5))
        assert again == pytest.approx(norms, rel=1e-12), placements
        for name, p in params.items():
            assert torch.equal(full(p), reference[name]), (name, placements)
        assert_same_state(gathered(optimizer), on_cpu(one.state_dict()))


def scenario_shards_hold_their_rows_only():
    """State bytes are the shard's: the 8-bit choice is the full parameter's, no rank holds another's rows."""
    mesh, placements = meshes()["shard"]
    _, optimizer = make(placements, mesh)
    state = optimizer.state_dict()["state"]
    rank = dist.get_rank()
    assert state["uneven"]["rows"] == [[0, 3], [3, 5]][rank] and state["uneven"]["block"] == 64  # 160 elements here, 320 in full
    assert state["one_row"]["rows"] == [[0, 1], [1, 1]][rank] and state["one_row"]["block"] == 2048
    assert state["short"]["rows"] == [[0, 1], [1, 1]][rank]
    assert state["big"]["m_codes"].shape == (33, 256) and state["big"]["m_absmax"].shape == (33, 1)
    total = torch.tensor([held_bytes(optimizer)], device=DEVICE)
    dist.all_reduce(total)
    assert total == held_bytes(make()[1])
    assert held_bytes(optimizer) <= optimizer.state_bytes()  # on a GPU each parameter's part is padded to whole programs


def scenario_save_on_two_load_on_one_and_back():
    """2 ranks -> 1 -> 2 at every step of four; the continuation is the uninterrupted one's, bit for bit."""
    mesh, placements = meshes()["shard"]
    reference, one = make()
    train(reference, one, range(4))
    for stop in range(4):
        params, optimizer = make(placements, mesh)
        train(params, optimizer, range(stop))
        saved, weights = gathered(optimizer), {name: full(p) for name, p in params.items()}

        alone, single = make(seed=0)
        for name, p in alone.items():
            p.data.copy_(weights[name])
        single.load_state_dict(saved)
        train(alone, single, range(stop, 4))
        assert all(torch.equal(alone[name], reference[name]) for name in SHAPES)

        before, halved = make()
        train(before, halved, range(stop))
        _, sharded = make(placements, mesh)
        sharded.load_state_dict(halved.state_dict())
        assert_same_state(gathered(sharded), saved)


def scenario_a_shard_alone_is_refused_by_name():
    mesh, placements = meshes()["shard"]
    _, optimizer = make(placements, mesh)
    _, single = make()
    with pytest.raises(OptimizerError, match=r"state of even holds rows \d:\d, rank needs 0:8; use merge_state_dicts"):
        single.load_state_dict(optimizer.state_dict())


def scenario_a_nan_on_one_rank_skips_on_both():
    mesh, placements = meshes()["shard"]
    params, optimizer = make(placements, mesh)
    train(params, optimizer, range(1))
    before = {name: full(p).clone() for name, p in params.items()}
    if dist.get_rank() == 1:
        params["big"].grad.to_local()[3, 3] = float("nan")
    norm = optimizer.step()
    assert norm != norm and optimizer.skipped == 1
    assert all(torch.equal(full(p), before[name]) for name, p in params.items())
    train(params, optimizer, range(1, 2))
    assert optimizer.skipped == 1 and optimizer.state_dict()["state"]["big"]["step"] == 2


def scenario_a_rank_without_gradients_takes_part_in_the_norm():
    mesh, placements = meshes()["shard"]
    params, optimizer = make(placements, mesh)
    for p in params.values():
        p.grad = None
    if dist.get_rank() == 0:
        from torch.distributed.tensor import distribute_tensor

        params["even"].grad = distribute_tensor(
            torch.full((8, 128), 2.0, dtype=torch.bfloat16, device=DEVICE), mesh, placements, src_data_rank=None
        )
    assert optimizer.step() == pytest.approx((4 * 128 * 4) ** 0.5)


def scenario_other_placements_are_refused_by_name():
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh, _ = meshes()["shard"]
    for placement in (Shard(1), _StridedShard(0, split_factor=1), Partial()):
        p = distribute_tensor(torch.zeros(4, 64, device=DEVICE), mesh, [Replicate()])
        local = torch.distributed.tensor.DTensor.from_local(p.to_local(), mesh, [placement], run_check=False)
        with pytest.raises(OptimizerError, match=r"parameter layers\.0\.w is placed .*only Shard\(0\)"):
            AdamW8bit([("layers.0.w", torch.nn.Parameter(local))])


def scenario_fsdp2_follows_one_rank():
    """50 steps of a small network under fully_shard, half of each batch a rank: every loss within 1e-3 of one rank's."""
    from torch.distributed.fsdp import fully_shard

    def network():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
        )

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(50, 16, 64, generator=generator)
    y = x[..., :1].sin() + x[..., 1:2]
    one, two, x, y = network().to(DEVICE), network().to(DEVICE), x.to(DEVICE), y.to(DEVICE)
    for layer in (two[0], two[2], two[4], two):
        fully_shard(layer, mesh=meshes()["shard"][0])
    options = {"lr": 3e-3, "weight_decay": 0.1, "max_grad_norm": 1.0}
    single, sharded = (AdamW8bit(m.named_parameters(), **options) for m in (one, two))
    rank = dist.get_rank()
    for step in range(50):
        losses = []
        for model, optimizer, part in ((one, single, slice(0, 16)), (two, sharded, slice(8 * rank, 8 * rank + 8))):
            loss = (model(x[step, part]) - y[step, part]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().clone())
        dist.all_reduce(losses[1])
        assert abs(losses[0] - losses[1] / 2) < 1e-3, step
    assert losses[0] < 1.0 and sharded.state_dict()["state"]["0.weight"]["block"] == 64


SCENARIOS = {name.removeprefix("scenario_"): f for name, f in dict(globals()).items() if name.startswith("scenario_")}


def rank_main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    backend = "gloo" if DEVICE == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    for name, scenario in SCENARIOS.items():
        try:
            scenario()
            result = ""
        except Exception:
            result = traceback.format_exc()
        print(json.dumps([name, result]), flush=True)
        if result:
            os._exit(1)  # the other rank can't go on without this one


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, __file__, "both", str(tmp_path_factory.mktemp("ranks") / "store")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    return dict(json.loads(line) for line in done.stdout.splitlines()) | {"error": done.stderr[-3000:]}


def both(store: str) -> None:
    """Start the two ranks and print [scenario, what both said] a line."""
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank), store], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    results: dict[str, str] = {}
    try:
        for rank in ranks:
            for line in rank.communicate()[0].splitlines():
                name, result = json.loads(line)
                results[name] = results.get(name, "") + result
    finally:
        for rank in ranks:
            rank.kill()
    for item in results.items():
        print(json.dumps(item))


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks(reports, name):
    assert reports.get(name, "not reached: " + reports["error"]) == ""


if __name__ == "__main__":
    if sys.argv[1] == "both":
        both(sys.argv[2])
    else:
        rank_main(int(sys.argv[1]), sys.argv[2])
