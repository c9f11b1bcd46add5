"""Downloads a model (or a dataset) from a Hugging Face-style hub: ./bazelw run //stages:download -- org/name

Every file is checked against the hub's digest and kept in the cache by commit; a download that was cut off goes on where it was. The files
are then put into models/<name> of the workspace, whole or not at all. HF_ENDPOINT names another hub, HF_TOKEN a token, ALIGN_CACHE the
cache.
"""

import fnmatch
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from _entry import run_stage, say
from _fields import of_field

from align.config import ConfigError, Invocation, caller_path, workspace_root
from align.data import Hub, HubFile
from align.tracking import Progress

# What a model is loaded from; where there are safetensors the other formats of the same weights are left.
OTHER_WEIGHTS = (
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.h5",
    "*.msgpack",
    "*.gguf",
    "*.onnx",
    "*.ot",
    "onnx/*",
    "original/*",
    "consolidated*",
)


@dataclass(frozen=True, kw_only=True)
class DownloadConfig:
    """All of the stage's configuration; the first word may be the repository."""

    repo: Annotated[str, "owner/name"]
    revision: Annotated[str, "branch, tag or commit"] = "main"
    kind: Annotated[Literal["model", "dataset"], "of the repository"] = "model"
    include: Annotated[list[str], "only files that match one of these (* and ?); none given: all"] = field(default_factory=list)
    exclude: Annotated[list[str] | None, "not files that match one of these; none: weights in other formats than safetensors"] = None
    to: Annotated[Path | None, "directory that is made; none: models/<name> (data/<name> for a dataset) in the workspace"] = None


def download(call: Invocation[DownloadConfig]) -> int:
    config = call.config
    if call.resume or call.allow_change:
        raise ConfigError("download goes on by itself where it was cut off; leave the option out")
    name = config.repo.rpartition("/")[2]
    folder = "models" if config.kind == "model" else "data"
    with of_field("to"):
        target = caller_path(config.to) if config.to else workspace_root() / folder / name
        if target.exists():
            raise ConfigError(f"{target} is there already; remove it, or name another to=")
    told = Told()
    hub = Hub(progress=told)
    commit = hub.commit(config.repo, config.revision, kind=config.kind)
    files = wanted(hub.files(config.repo, commit, kind=config.kind), config)
    size = sum(file.size for file in files)
    say(f"repository {config.repo} at {commit}\nfiles      {len(files)}, {size / 1e9:.2f} GB")
    for file in files if call.dry_run else ():
        say(f"  {file.size:>14,}  {file.path}")
    free = shutil.disk_usage(existing(hub.cache)).free
    if size > free:
        raise ConfigError(
            f"{size / 1e9:.2f} GB are wanted and {free / 1e9:.2f} GB are free under {hub.cache}; set ALIGN_CACHE to a larger disk"
        )
    if call.dry_run:
        say(f"dry run: nothing was downloaded to {target}")
        return 0
    told.progress, started = Progress(max(1, size >> 20), every=256, stream=sys.stderr), time.perf_counter()
    with of_field("to"):
        target.parent.mkdir(parents=True, exist_ok=True)
        scratches = tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-")
    with scratches as scratch:
        made = Path(scratch, "made")
        for file in files:
            put(hub.download(config.repo, file.path, commit, kind=config.kind), made / file.path)
            told.before += file.size
        made.mkdir(exist_ok=True)
        made.rename(target)
    say(f"{target}   {size / 1e6:.1f} MB in {time.perf_counter() - started:.1f} s")
    if config.kind == "model":
        say(f"next     ./bazelw run //stages:chat -- model.path={target}")
    return 0


class Told:
    """Shows MiB; what the hub's client calls for each chunk of a file."""

    def __init__(self) -> None:
        self.progress: Progress | None = None
        self.before, self.shown = 0, 0  # bytes of the files before this one; MiB told last

    def __call__(self, path: str, done: int, size: int | None) -> None:
        step = (self.before + done) >> 20
        if self.progress is not None and step > self.shown:
            self.shown = step
            self.progress.update(step)


def wanted(files: list[HubFile], config: DownloadConfig) -> list[HubFile]:
    exclude = config.exclude
    if exclude is None:
        exclude = list(OTHER_WEIGHTS) if any(file.path.endswith(".safetensors") for file in files) and config.kind == "model" else []
    kept = [file for file in files if not any(fnmatch.fnmatch(file.path, pattern) for pattern in exclude)]
    if config.include:
        kept = [file for file in kept if any(fnmatch.fnmatch(file.path, pattern) for pattern in config.include)]
    if not kept:
        raise ConfigError(f"{config.repo}: none of {len(files)} files is wanted; look at include= and exclude=")
    return kept


def put(source: Path, target: Path) -> None:
    """A hard link, so that the cache's copy and this one take the room once; a copy on another disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def main(argv: list[str]) -> int:
    words = [f"repo={word}" if "=" not in word and not word.startswith("-") and "/" in word else word for word in argv[:1]]
    return run_stage("download", DownloadConfig, download, __doc__ or "", [*words, *argv[1:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
