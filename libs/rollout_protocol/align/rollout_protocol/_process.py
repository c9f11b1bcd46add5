"""A sampler that the trainer starts itself."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from align.rollout_protocol._channel import Channel, dial
from align.rollout_protocol._errors import ChannelClosed, RolloutProtocolError

_STEP_S = 0.05


class Launched:
    """Starts a sampler and connects to it, again and again if it must: calling this ends the process before, if it still runs.

    With an address the process listens there; without, it speaks over its standard input and output. Its standard error is the caller's,
    and its standard input ends when the caller does, so that it can end too (`stop_with_parent`).
    """

    def __init__(
        self, command: Sequence[str] | Callable[[], Sequence[str]], *, address: str | None = None, start_s: float = 600.0,
        env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """command: the program and its arguments, or what gives them at each start, as where the weights lie by then. start_s: seconds
        within which it must listen. env: of the process; None: this one's.
        """
        self._command, self._address, self._start_s, self._env = command, address, start_s, env
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> Channel:
        """Raises RolloutProtocolError: there is no such program; ChannelClosed: it ended, or listens nowhere in time."""
        if self._address is not None and self._process is not None and self._process.poll() is None:
            try:
                return dial(self._address)  # it lives; the connection alone was lost
            except ChannelClosed:
                pass
        self.end()
        command = list(self._command() if callable(self._command) else self._command)
        own = subprocess.PIPE if self._address is None else None
        try:
            self._process = process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=own, env=self._env)
        except OSError as error:
            raise RolloutProtocolError(f"the sampler {command[0]} does not start: {error.strerror}") from None
        if self._address is None:
            assert process.stdin is not None and process.stdout is not None
            return Channel(process.stdout.fileno(), process.stdin.fileno(), release=self.end)
        patience = time.monotonic() + self._start_s
        while True:
            try:
                return dial(self._address)
            except ChannelClosed:
                code = process.poll()
                if code is not None:
                    raise ChannelClosed(f"the sampler ended with exit code {code} before it listened; its own words are above") from None
                if time.monotonic() > patience:
                    self.end()
                    raise ChannelClosed(f"the sampler did not listen at {self._address} within {self._start_s:g} s") from None
                time.sleep(_STEP_S)

    @property
    def pid(self) -> int | None:
        """Of the process, while one runs."""
        return self._process.pid if self._process is not None else None

    def end(self) -> None:
        """Ends the process; it has no state that is worth saving."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
