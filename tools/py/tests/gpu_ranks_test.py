"""Ranks with a GPU each are left alone; ranks that share one differ in their host's name."""

from gpu_ranks import SHARED, described, environment, free_port


def test_a_gpu_each():
    two = [environment(rank, 2, 5, devices=2) for rank in range(2)]
    assert [(one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"], one["MASTER_PORT"]) for one in two] == [
        ("0", "0", "2", "5"),
        ("1", "1", "2", "5"),
    ]
    assert not any(name.startswith("NCCL") for one in two for name in one)
    assert described(2, 2) == "2 NCCL ranks, a GPU each"


def test_ranks_that_share():
    four = [environment(rank, 4, 5, devices=2) for rank in range(4)]
    assert [one["LOCAL_RANK"] for one in four] == ["0", "1", "0", "1"]
    assert len({one["NCCL_HOSTID"] for one in four}) == 4 and all(one.items() >= SHARED.items() for one in four)
    assert described(2, 1) == "rehearsal: 2 NCCL ranks share 1 GPU over sockets"


def test_ranks_on_the_cpu():
    assert [environment(rank, 2, free_port(), devices=0)["LOCAL_RANK"] for rank in range(2)] == ["0", "1"]
    assert "NCCL_HOSTID" not in environment(1, 2, 5, devices=0) and described(4, 0) == "4 gloo ranks on the CPU"
