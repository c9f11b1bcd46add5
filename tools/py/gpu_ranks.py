"""The environment of each rank of a test or a benchmark over NCCL, also where there are fewer GPUs than ranks.

NCCL refuses two ranks on one GPU because it finds the same host and the same bus twice. A host name of its own for each rank makes it take
them for ranks of different machines, which talk over sockets: the same collectives in the same order, slow. A rehearsal on one GPU, never
a way to train; so it lives here, and only what is testonly can depend on it.
"""

import socket

SHARED = {
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none",
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_MNNVL_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "NCCL_RAS_ENABLE": "0",
}  # fmt: skip


def environment(rank: int, world: int, port: int, devices: int) -> dict[str, str]:
    """What `rank` of `world` on this machine needs beside os.environ.

    Args:
        port: free on this machine (`free_port`).
        devices: GPUs here. Fewer than `world` are shared, rank r getting number r % devices; 0: no GPU is meant, the ranks are gloo's.
    """
    own = {
        "WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank % devices if devices else rank),
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    return own if not devices or devices >= world else {**own, **SHARED, "NCCL_HOSTID": f"align-rank-{rank}"}


def described(world: int, devices: int) -> str:
    """How the ranks of `environment` are placed, for a title."""
    if not devices:
        return f"{world} gloo ranks on the CPU"
    if devices >= world:
        return f"{world} NCCL ranks, a GPU each"
    return f"rehearsal: {world} NCCL ranks share {devices} GPU{'s' * (devices > 1)} over sockets"


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])
