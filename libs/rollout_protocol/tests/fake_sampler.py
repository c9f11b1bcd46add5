"""A sampler as a program: FakeEngine behind a server, on an address or on standard streams, with a fault on demand.

fake_sampler.py DIRECTORY [--listen ADDRESS] [--die-after N FILE | --hang-after N FILE]: it kills itself, or hangs,
after N answers, once (FILE remembers).
"""

import argparse
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from rollout_protocol_cases import FakeEngine

from align.rollout_protocol import Drawn, Server, listen, standard_streams, stop_with_parent, weights_sha256


class Mortal(FakeEngine):
    def __init__(self, weights: str, left: int, memory: Path, end: Callable[[], None]) -> None:
        super().__init__(weights)
        self._left, self._memory, self._end = left, memory, end

    def step(self) -> list[tuple[str, list[Drawn]]]:
        if self._left == 0 and not self._memory.exists():
            self._memory.touch()
            self._end()
        self._left -= 1
        return super().step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--listen")
    parser.add_argument("--die-after", nargs=2)
    parser.add_argument("--hang-after", nargs=2)
    parser.add_argument("--lifeline", action="store_true")
    arguments = parser.parse_args()
    weights = weights_sha256(arguments.directory)
    engine = FakeEngine(weights)
    ends = {"die": lambda: os.kill(os.getpid(), signal.SIGKILL), "hang": lambda: time.sleep(60)}
    for name, found in (("die", arguments.die_after), ("hang", arguments.hang_after)):
        if found:
            engine = Mortal(weights, int(found[0]), Path(found[1]), ends[name])
    server = Server(engine)
    if arguments.lifeline:
        stop_with_parent(server)
    if arguments.listen:
        server.accept(listen(arguments.listen))
        server.run()
    else:
        server.attach(standard_streams())
        print("this does not disturb the protocol", flush=True)
        server.run(until_gone=True)


if __name__ == "__main__":
    main()
