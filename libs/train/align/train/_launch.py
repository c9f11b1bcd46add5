"""One process a GPU, through torch's elastic launcher. The program starts itself again, once for each rank."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from align.train._config import LaunchConfig
from align.train._errors import TrainError

FOLDER = "ALIGN_LAUNCH_FOLDER"  # where the ranks of this machine leave their process id and their exit code
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def launched() -> bool:
    """Whether this process is a rank that a launcher started."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "RANK" in os.environ


def launch(config: LaunchConfig, program: str | Path, argv: Sequence[str]) -> int | None:
    """Runs `program argv` as launch.nproc processes on each of launch.nnodes machines, and waits for them.

    Signals that end a run in order (SIGTERM, SIGINT, SIGUSR1) are handed on to the ranks, which stop after their step with a checkpoint;
    to one that has not called `started` yet when it does.

    Args:
        program: the Python file; it calls `launch` again, in each rank, and goes on there.

    Returns:
        None in a rank, or where one process was asked for: go on. Else the exit code of the run: the one that all ranks returned through
        `finished`, or that of the first that failed.

    Raises:
        TrainError: values that no run can have.
    """
    if launched() or config.nproc * config.nnodes == 1:
        return None
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig as Elastic
    from torch.distributed.launcher.api import elastic_launch

    if config.nnodes > 1 and config.rdzv is None:
        raise TrainError(f"launch.nnodes is {config.nnodes}: launch.rdzv must name the first machine, as host:port")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its report of a failed rank is a screen long
    os.environ.setdefault("OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) // config.nproc, 1)))
    elastic = Elastic(
        min_nodes=config.nnodes, max_nodes=config.nnodes, nproc_per_node=config.nproc, run_id="align", max_restarts=0,
        rdzv_backend="c10d", rdzv_endpoint=config.rdzv or "localhost:0", local_addr=None if config.rdzv else "localhost",
        signals_to_handle="SIGHUP,SIGQUIT",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="align-launch-") as folder, _forwarding(Path(folder)):
        os.environ[FOLDER] = folder
        try:
            elastic_launch(elastic, sys.executable)("-u", str(program), *argv)
        except ChildFailedError as error:
            # The first to fail is the cause; a rank that a signal ended has a negative code.
            first = min(error.failures.values(), key=lambda failure: failure.timestamp)
            return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
        finally:
            del os.environ[FOLDER]
        return max((int(path.read_text()) for path in Path(folder).glob("code-*")), default=0)


def started() -> None:
    """Tells the launcher which process to hand signals to, and takes those that came before; without a launcher of ours nothing happens."""
    if _leave("pid", os.getpid()):
        for path in sorted(Path(os.environ[FOLDER]).glob("signal-*")):
            os.kill(os.getpid(), int(path.name.rpartition("-")[2]))


def finished(code: int) -> int:
    """What a rank exits with when the run came to its end in order with `code`: 0, and the launcher passes `code` on.

    torch's launcher takes every other code for a failure and ends the ranks that are still writing.
    """
    return 0 if _leave("code", code) else code


def _leave(kind: str, number: int) -> bool:
    folder = os.environ.get(FOLDER)
    if folder is None or "LOCAL_RANK" not in os.environ:
        return False
    Path(folder, f"{kind}-{os.environ['LOCAL_RANK']}").write_text(str(number))
    return True


@contextlib.contextmanager
def _forwarding(folder: Path) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        (folder / f"signal-{number}").touch()  # for a rank that has not started yet; first, so that each sees the one or the other
        for path in folder.glob("pid-*"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(path.read_text()), number)

    before: dict[signal.Signals, Any] = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
