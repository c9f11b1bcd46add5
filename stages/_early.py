"""What comes before a stage's libraries, which take seconds: closed streams, and a signal, which ends it with one line. Import it first."""

import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

CODES = {signal.SIGINT: 130, signal.SIGTERM: 5, signal.SIGUSR1: 5}  # 130 is what a shell gives for Ctrl-C; the last is a scheduler's
_before: dict[signal.Signals, Any] = {}


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """No exception: it would be raised, and told of with a traceback, in the middle of another library's import."""
    if os.environ.get("RANK", "0") == "0":
        by = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        name = os.path.basename(sys.argv[0]).removesuffix(".py")
        os.write(2, f"{name}: stopped by {by}; nothing was begun\n".encode())
    os._exit(CODES[signal.Signals(number)])


def begun() -> None:
    """From now on signals are the stage's own business."""
    while _before:
        number, handler = _before.popitem()
        if signal.getsignal(number) is _end:
            signal.signal(number, handler)


def _is_a_stage() -> bool:
    """Whether the program is a file beside this one, and not a test, a benchmark or another process's worker that imports it."""
    program = getattr(sys.modules["__main__"], "__file__", None)
    return program is not None and os.path.dirname(os.path.abspath(program)) == os.path.dirname(os.path.abspath(__file__))


def _open_closed_streams() -> None:
    """A stream that the caller closed (`>&-`) is the null device: Python has none for it, and the next file that is opened would take its
    number and get what libraries print."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free number: the stream's own
            os.set_inheritable(descriptor, descriptor <= 2)
            setattr(sys, name, os.fdopen(descriptor, mode))


if _is_a_stage():
    _open_closed_streams()
    for _number in CODES:
        if signal.getsignal(_number) in (signal.SIG_DFL, signal.default_int_handler):  # else somebody, such as nohup, wants it otherwise
            _before[_number] = signal.signal(_number, _end)
