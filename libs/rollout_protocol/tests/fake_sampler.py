"""A sampler as a program: FakeEngine behind a server, on an address or on standard streams, with a fault on demand.

fake_sampler.py DIRECTORY [--listen ADDRESS] [--die-after N FILE]: with the last it kills itself after N answers, once (FILE remembers).
"""

import argparse
import os
import signal
from pathlib import Path

from rollout_protocol_cases import FakeEngine

from align.rollout_protocol import Drawn, Server, listen, standard_streams, stop_with_parent, weights_sha256


class Mortal(FakeEngine):
    def __init__(self, weights: str, left: int, memory: Path) -> None:
        super().__init__(weights)
        self._left, self._memory = left, memory

    def step(self) -> list[tuple[str, list[Drawn]]]:
        if self._left == 0 and not self._memory.exists():
            self._memory.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        return super().step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--listen")
    parser.add_argument("--die-after", nargs=2)
    parser.add_argument("--lifeline", action="store_true")
    arguments = parser.parse_args()
    weights = weights_sha256(arguments.directory)
    engine = FakeEngine(weights)
    if arguments.die_after:
        engine = Mortal(weights, int(arguments.die_after[0]), Path(arguments.die_after[1]))
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
