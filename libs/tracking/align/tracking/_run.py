"""RunDir: the directory of one run."""

import json
import time
import warnings
from pathlib import Path
from typing import Any, Literal

from align.tracking._jsonl import Lines, RunDirError, cut_after, encode, failed, write_whole
from align.tracking._lock import hold, release
from align.tracking._report import write_report

Status = Literal["done", "stopped", "tripwire", "failed"]
_TOUCH_EVERY_S = 1.0
_LOGS = ("history.jsonl", "eval.jsonl", "samples.jsonl")


class RunDir:
    """config.toml, env.json, history.jsonl, eval.jsonl, samples.jsonl, checkpoints/, report.html, and stage_result.json last.

    Every line is on its way to the disk when the call returns: a killed run leaves files that parse.
    """

    path: Path
    checkpoints: Path

    def __init__(self, path: Path, *, write: bool = True):
        """An existing run directory; use `create`. With write=False (ranks other than 0) every method does nothing.

        Raises RunDirError where a log there cannot be opened.
        """
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.writes = write
        self._touched = -_TOUCH_EVERY_S
        self._history, self._eval, self._samples = (Lines(path / name) if write else None for name in _LOGS)

    @classmethod
    def create(
        cls, path: str | Path, *, config_toml: str, env: dict[str, Any], resume_step: int | None = None, write: bool = True
    ) -> "RunDir":
        """Makes the directory, or takes up the one of a run that goes on after `resume_step`.

        On resume every log line of a later step is dropped, an earlier stage_result.json too, and env.json gets the new environment under
        "resumed". A config.toml that differs, a run's or anything else's, is kept as config-1.toml (-2, …). Until `finish`, `close` or its
        end this process is the directory's one writer. Raises RunDirError when the directory cannot be written, another process writes
        there, or it holds a run and `resume_step` is None.
        """
        path = Path(path)
        if not write:
            return cls(path, write=False)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise failed(path, error, "cannot be made") from None
        hold(path)
        if resume_step is None:
            present = [name for name in ("history.jsonl", "stage_result.json") if (path / name).exists()]
            if present:
                raise RunDirError(f"{path}: holds a run already ({present[0]}); add --resume to go on with it, or choose another run_dir")
        else:
            try:
                (path / "stage_result.json").unlink(missing_ok=True)
            except OSError as error:
                raise failed(path / "stage_result.json", error, "cannot be removed") from None
            for name in _LOGS:
                cut_after(path / name, resume_step)
            env = _join_environments(path, env, resume_step)
        _keep_old_config(path, config_toml)
        write_whole(path / "config.toml", config_toml.encode())
        write_whole(path / "env.json", _pretty(env))
        try:
            (path / "checkpoints").mkdir(exist_ok=True)
        except OSError as error:
            raise failed(path / "checkpoints", error, "cannot be made") from None
        return cls(path)

    def log(self, step: int, **numbers: Any) -> None:
        """One line of history.jsonl: step, time (Unix, s) and the numbers; a one-element tensor is its number. Raises RunDirError."""
        if self._history:
            self._history.append({"step": step, "time": round(time.time(), 3), **numbers})

    def eval(self, step: int, **numbers: Any) -> None:
        """One line of eval.jsonl. `x_low` and `x_high` beside `x` are its confidence interval. Raises RunDirError."""
        if self._eval:
            self._eval.append({"step": step, "time": round(time.time(), 3), **numbers}, sync=True)

    def sample(self, step: int, **fields: Any) -> None:
        """One line of samples.jsonl; the report knows prompt, output, answer, correct and reason, and shows the rest as it is."""
        if self._samples:
            self._samples.append({"step": step, **fields})

    def alive(self) -> None:
        """Sets the time of history.jsonl to now, as a sign of life in a long phase without steps. Call it freely: once a second it does."""
        if self._history and (now := time.monotonic()) - self._touched >= _TOUCH_EVERY_S:
            self._touched = now
            self._history.touch()

    def finish(self, status: Status, **fields: Any) -> None:
        """Writes report.html and then, whole and last, stage_result.json; the directory may then have another writer.

        Raises RunDirError when stage_result.json cannot be written."""
        if not self.writes:
            return
        result = {"status": status, **fields}
        try:
            write_report(self.path, result=result)
        except Exception as error:  # the result of hours must not be lost to a picture of it
            warnings.warn(f"{self.path / 'report.html'}: not written: {error!r}", RuntimeWarning, stacklevel=2)
        write_whole(self.path / "stage_result.json", _pretty(result))
        release(self.path)

    def close(self) -> None:
        """Closes the files; the directory may then have another writer."""
        for lines in (self._history, self._eval, self._samples):
            if lines:
                lines.close()
        if self.writes:
            release(self.path)


def _pretty(record: dict[str, Any]) -> bytes:
    return (json.dumps(json.loads(encode(record)), indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _keep_old_config(path: Path, config_toml: str) -> None:
    config = path / "config.toml"
    try:
        if not config.exists() or config.read_bytes() == config_toml.encode():
            return
        number = next(n for n in range(1, 1_000_000) if not (path / f"config-{n}.toml").exists())
        config.rename(path / f"config-{number}.toml")
    except OSError as error:
        raise failed(config, error) from None


def _join_environments(path: Path, env: dict[str, Any], step: int) -> dict[str, Any]:
    """The first environment with the later ones listed under "resumed"."""
    try:
        first = json.loads((path / "env.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return env
    if not isinstance(first, dict):
        return env
    first.setdefault("resumed", []).append({"after_step": step, **env})
    return first
