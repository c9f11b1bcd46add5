"""Rows from files, the hub, text and parquet to token shards: checked, without copies, without the tests' questions.

Without arguments: GSM8K's training problems, without those that touch GSM8K's test set or MATH-500.
"""

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, NoReturn

from _entry import Life, find, run_stage, say
from _fields import PROCESSES, check_most, of_field
from _kept import Kept, open_folder, rows_path, write_tests
from _sources import File, Published, Reading, files_on_disk, list_files, living, read_file

from align.config import ConfigError, Invocation, caller_path, dumps, workspace_root
from align.data import (
    Contamination,
    DataError,
    Hub,
    Row,
    RowSet,
    SeenRows,
    Shards,
    build_shards,
    bundled_rows,
    chat_rows,
    check_encoding,
    encode_rows,
    is_held_out,
    read_rows,
    stream_rows,
)
from align.tokenizer import Tokenizer, resolve_tokenizer
from align.tracking import Progress, RunDir, environment

TRAINABLE = ("messages", "completion", "text")
TOLD_EVERY_S = 5
LOOKED_AT = 1000  # rows of a dry run


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """What is read, and what is kept of it."""

    sources: Annotated[
        list[str], "bundled sets (gsm8k_train, gsm8k_test, gsm8k_solutions, math500), files (wildcards too), hub:owner/name[@revision]/path"
    ] = field(default_factory=lambda: ["gsm8k_train"])
    format: Annotated[Published, "of JSON Lines and parquet: rows (libs/data/README.md), or a published data set's own form"] = "rows"
    kind: Annotated[
        Literal["auto", "messages", "completion", "text", "preference", "answer", "steps"], "of the rows; auto: the first row's"
    ] = "auto"
    rename: Annotated[list[str], 'fields, as in ["instruction=prompt", "output=completion"]'] = field(default_factory=list)
    columns: Annotated[list[str] | None, "of parquet files; none: all"] = None
    text: Annotated[Literal["file", "line", "paragraph"], "what is one document of a text file"] = "file"
    rows: Annotated[int | None, "the first so many of each file; none: all"] = None
    chat: Annotated[bool, "make conversations of prompt and completion"] = False
    system: Annotated[str | None, "system message for conversations that have none"] = None
    template: Annotated[str | None, "chat template (Jinja text) in place of the tokenizer's own"] = None
    dedupe: Annotated[Literal["normalised", "exact", "none"], "which rows are copies: alike but for case, width and spaces, or equal"] = (
        "normalised"
    )
    held_out: Annotated[float, "share of the questions that goes into shards of its own"] = 0.0
    stream: Annotated[bool, "read a hub's files while they arrive, parquet by range, and keep no copy"] = False


@dataclass(frozen=True, kw_only=True)
class TestsSection:
    """What the model will be judged on."""

    sets: Annotated[list[str], "bundled sets, or JSONL files of {prompt, answer}; each is written as tests/<name>.jsonl"] = field(
        default_factory=lambda: ["gsm8k_test", "math500"]
    )
    words: Annotated[int, "a row with so many words in a row of a test's question is removed; 0: none is"] = 13


@dataclass(frozen=True, kw_only=True)
class ShardsSection:
    """How rows become tokens."""

    tokenizer: Annotated[str, "a vendored name, or a directory with a tokenizer's files"] = "mistral-7b-v0.3"
    max_length: Annotated[int, "tokens of a document"] = 2048
    overlong: Annotated[Literal["truncate", "drop", "error", "split"], "what becomes of a longer one; split is for text"] = "truncate"
    rows_per_shard: Annotated[int, "rows of a shard"] = 8192
    processes: Annotated[int, "that encode at once; the shards are the same for any number"] = 1


@dataclass(frozen=True, kw_only=True)
class BuildDataConfig:
    """All of the stage's configuration; the defaults build GSM8K."""

    run_dir: Annotated[
        Path | None, "where everything is written, relative to where you are; none: runs/build_data-<time> in the workspace"
    ] = None
    data: DataSection = field(default_factory=DataSection)
    tests: TestsSection = field(default_factory=TestsSection)
    shards: ShardsSection = field(default_factory=ShardsSection)


class Stopped(Exception):
    """A signal came. What is whole stays, and the same command goes on with it."""

    exit_code = 5


def build_data(call: Invocation[BuildDataConfig]) -> int:
    started, config = time.perf_counter(), call.config
    if call.allow_change:
        raise ConfigError("build_data changes nothing that is there; give another run_dir")
    check(config)

    # Load: tokenizer, tests, the list of files.
    with of_field("shards.tokenizer"):
        own = find(config.shards.tokenizer)
        tokenizer = resolve_tokenizer(own if own.exists() else config.shards.tokenizer)
    with of_field("tests.sets"):
        tests = dict(map(questions_of, config.tests.sets))
    if len(tests) < len(config.tests.sets):
        raise ConfigError(f"tests.sets names a set twice: {', '.join(config.tests.sets)}")
    reading = reading_of(config.data)
    with of_field("run_dir"):
        run_dir = caller_path(config.run_dir) if config.run_dir else workspace_root() / "runs" / time.strftime("build_data-%Y%m%d-%H%M%S")
    alive = Life()
    hub = cache(lambda: Hub(progress=hub_progress(alive)))
    if call.dry_run:
        return plan(config, listed(config, hub), reading, tests, tokenizer, hub)
    settings = {**asdict(config), "fingerprint": tokenizer.fingerprint}
    with open_folder(run_dir, settings, lambda: listed(config, hub)) as folder:
        run = RunDir.create(
            run_dir, config_toml=dumps(config), env=environment({"stage": "build_data"}), resume_step=0 if folder.again else None
        )
        alive.run = run
        say(f"files    {len(folder.files)}, {sum(file.size for file in folder.files):,} bytes" + (", going on" if folder.again else ""))
        fields: dict[str, Any] = {"stage": "build_data", "steps": 0, "checkpoint": None}
        try:
            with stopped_by_signals():
                # Rows: read, checked, without copies and contamination, split.
                fits = partial(check_kind, config, tokenizer)
                kept = folder.kept(files_on_disk(config.data.sources), run.alive) or folder.keep(
                    sift(config, folder.files, reading, tests, hub, fits=fits, alive=run.alive), run.alive
                )
                say(f"rows     {kept.summary()}")
                write_tests(run_dir / "tests", tests)
                # Tokens.
                made = {side: encode(run_dir, side, kept, tokenizer, config, run) for side in kept.sides if kept.kind in TRAINABLE}
        except Exception as error:
            status: Literal["stopped", "failed"] = "stopped" if isinstance(error, Stopped) else "failed"
            run.finish(status, **fields, reason=f"{type(error).__name__}: {error}", wall_s=time.perf_counter() - started)
            raise

        # Report.
        show_documents(run, made, tokenizer)
        metrics = {"after": numbers_of(kept, made)}
        fields |= {"steps": sum(len(shards.manifest["shards"]) for shards in made.values()), "metrics": metrics}
        fields["shards"] = {side: {"digest": shards.digest, **shards.manifest["counts"]} for side, shards in made.items()}
        fields["rows"] = kept.plain()
        run.finish("done", **fields, wall_s=time.perf_counter() - started, next=following(run_dir, kept))
    report(run_dir, kept, made)
    return 0


def check(config: BuildDataConfig) -> None:
    """Raises ConfigError for values that fit no build; what depends on the rows is checked with them."""
    if config.data.rows is not None and config.data.rows < 1:
        raise ConfigError(f"data.rows is {config.data.rows}; it must be at least 1, or none for all")
    if config.tests.words and not config.tests.sets:
        raise ConfigError(f"tests.words is {config.tests.words}, but tests.sets is empty; name the sets, or set tests.words=0")
    if min(config.shards.rows_per_shard, config.shards.processes) < 1:
        raise ConfigError(
            f"shards.rows_per_shard {config.shards.rows_per_shard} and processes {config.shards.processes} must be at least 1"
        )
    check_most("shards.processes", config.shards.processes, PROCESSES)
    for word in config.data.rename:
        if not all(word.partition("=")):
            raise ConfigError(f"data.rename {word!r} is not of the form theirs=ours")
    is_held_out({"text": "x"}, config.data.held_out)
    if config.tests.words:
        Contamination({}, n=config.tests.words)


def check_kind(config: BuildDataConfig, tokenizer: Tokenizer, kind: str) -> None:
    """Raises ConfigError or DataError when rows of this kind cannot be encoded as configured: before they are gathered, not after."""
    if kind == "messages" and config.data.template is None and tokenizer.chat_template is None:
        raise ConfigError(f"data.template: {config.shards.tokenizer} has no chat template, and conversations need one; set it")
    if kind in TRAINABLE:
        check_encoding(tokenizer, kind=kind, **encoding_of(config))


def encoding_of(config: BuildDataConfig) -> dict[str, Any]:
    section = config.shards
    return {
        "max_length": section.max_length,
        "overlong": section.overlong,
        "template": config.data.template,
        "system": config.data.system,
    }


def reading_of(section: DataSection) -> Reading:
    names = {theirs: ours for theirs, _, ours in (word.partition("=") for word in section.rename)}
    return Reading(section.format, section.kind, names, section.columns, section.text, section.stream)


def questions_of(name: str) -> tuple[str, RowSet]:
    """A bundled set's name, or a file's without its endings, and its rows."""
    if name in ("gsm8k_test", "math500", "gsm8k_train"):
        return name, bundled_rows(name)
    path = caller_path(name)
    return path.name.partition(".")[0], read_rows(path, kind="answer")


def sift(
    config: BuildDataConfig,
    files: list[File],
    reading: Reading,
    tests: dict[str, RowSet],
    hub: Callable[[], Hub],
    *,
    fits: Callable[[str], object],
    limit: int | None = None,
    alive: Callable[[], object] = lambda: None,
) -> Iterator[tuple[str, Row, dict[str, Any]]]:
    """(side, row, note) of every row: side "train" or "held_out", or "removed" with a note that says why.

    After each file comes ("end", ...) with what was read of it, and at last one with the questions that were too short to look for. `fits`
    is called with the kind of the first row, and raises where that cannot be used.
    """
    section = config.data
    seen = SeenRows(by=section.dedupe) if section.dedupe != "none" else None
    search = Contamination({name: rows.rows for name, rows in tests.items()}, n=config.tests.words) if config.tests.words else None
    limits = [given for given in (section.rows, limit) if given is not None]
    kind: str = section.kind
    count, told = 0, time.monotonic()
    for file in files:
        with of_field("data.sources"):
            rows, dropped = read_file(file, reading, hub, limit=min(limits, default=None), alive=alive)
        before = count
        for row, found in named(living(rows, alive)):
            count += 1
            if kind not in ("auto", found):
                raise DataError(f"{row.place}: is of kind {found}, the rows before it of kind {kind}; build them apart, or set data.kind")
            if section.chat and found != "completion":
                raise ConfigError(f"data.chat is for rows of prompt and completion, {file.name} has rows of kind {found}; set it to false")
            if count == 1:
                fits("messages" if section.chat else found)
            kind, place = found, row.place
            if time.monotonic() - told > TOLD_EVERY_S:
                told = time.monotonic()
                print(f"         {count:,} rows read, now {place}", file=sys.stderr, flush=True)
            first = seen.first(row) if seen is not None else None
            hit = search.find(row, place=place) if search is not None and first is None else None
            if first is not None:
                yield "removed", row, {"row": place, "why": "copy", "of_row_read": first}
            elif hit is not None:
                yield "removed", row, {"row": place, "why": "contaminated", "test": hit.test, "item": hit.item, "words": hit.words}
            else:
                made = chat_rows([row])[0] if section.chat else row
                side = "held_out" if is_held_out(row, section.held_out) else "train"
                yield side, Row(made), {"kind": "messages" if section.chat else found}
        yield "end", Row(), {"file": file, "rows": count - before, "dropped": dict(dropped)}
    yield "end", Row(), {"unchecked": dict(search.unchecked) if search is not None else {}}


def named(rows: Iterator[tuple[Row, str]]) -> Iterator[tuple[Row, str]]:
    """The same; what goes wrong in the reading, and not with who reads it, is told with the field's name."""
    with of_field("data.sources"):
        yield from rows


def listed(config: BuildDataConfig, hub: Callable[[], Hub]) -> list[File]:
    with of_field("data.sources"):
        return list_files(config.data.sources, hub)


def encode(path: Path, side: str, kept: Kept, tokenizer: Tokenizer, config: BuildDataConfig, run: RunDir) -> Shards:
    """shards/<side>; what is whole there is taken over."""
    section, shards = config.shards, -(-kept.sides[side]["rows"] // config.shards.rows_per_shard)
    progress, began, count = Progress(shards, every=max(1, shards // 20), stream=sys.stderr), time.perf_counter(), 0

    def told(rows: int, tokens: int) -> None:
        nonlocal count
        count += 1
        rate = tokens / (time.perf_counter() - began)
        progress.update(count, rows=rows, tokens=tokens, tokens_per_s=rate)
        run.log(count, **{f"{side}_rows": rows, f"{side}_tokens": tokens, "tokens_per_s": rate})

    made = build_shards(
        (row for row, _ in living(stream_rows(rows_path(path, side), kind=kept.kind), run.alive)),
        tokenizer,
        path / "shards" / side,
        kind=kept.kind,
        **encoding_of(config),
        rows_per_shard=section.rows_per_shard,
        processes=section.processes,
        progress=told,
        alive=run.alive,
    )
    counts = made.manifest["counts"]
    dropped = ", ".join(f"{why} {number:,}" for why, number in counts["dropped"].items()) or "none"
    told_counts = f"{counts['tokens']:,} tokens, {counts['trained_tokens']:,} trained; {counts['truncated']:,} rows truncated"
    say(f"{side:<9}{counts['documents']:,} documents, {told_counts}, dropped {dropped}")
    return made


def plan(
    config: BuildDataConfig, files: list[File], reading: Reading, tests: dict[str, RowSet], tokenizer: Tokenizer, hub: Callable[[], Hub]
) -> int:
    """What a dry run says: the files, and what becomes of their first rows."""
    for file in files[:20]:
        say(f"file     {file.name}   {file.form}, {file.size:,} bytes")
    if len(files) > 20:
        say(f"         and {len(files) - 20} more; {sum(file.size for file in files):,} bytes in all")
    say(f"tests    {', '.join(f'{name} ({len(rows)} questions)' for name, rows in tests.items()) or 'none'}")
    streamed, fits = replace(reading, stream=True), partial(check_kind, config, tokenizer)
    looked = list(sift(config, files[:20], streamed, tests, hub, fits=fits, limit=LOOKED_AT))
    removed = Counter(note["why"] for side, _, note in looked if side == "removed")
    rows = [(side, row, note["kind"]) for side, row, note in looked if side in ("train", "held_out")]
    ends = [note for side, _, note in looked if side == "end" and "file" in note]
    whole = all(note["rows"] < LOOKED_AT for note in ends) and len(files) <= 20
    what = "all rows" if whole else f"the first {LOOKED_AT:,} rows of {'each file' if len(files) <= 20 else 'the first 20 files'}"
    sides = Counter(side for side, _, _ in rows)
    say(f"rows     of {what}: {sides['train']:,} train, {sides['held_out']:,} held out, removed {dict(removed) or 'none'}")
    if rows and rows[0][2] in TRAINABLE:
        encoded = encode_rows([row for _, row, _ in rows], tokenizer, kind=rows[0][2], **encoding_of(config))
        say(f"tokens   of these: {encoded.summary()}; longest {encoded.lengths.max()}, mean {encoded.lengths.mean():.0f}")
    elif rows:
        say(f"tokens   none: rows of kind {rows[0][2]} are kept as JSON Lines, the stage that uses them encodes them")
    say("dry run: nothing was written")
    return 0


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """SIGTERM and Ctrl-C end the stage with exit code 5; what is whole stays."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Stopped(f"stopped by {signal.Signals(number).name}; the same command goes on with what is whole")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def hub_progress(alive: Callable[[], None]) -> Callable[[str, int, int | None], None]:
    """Tells now and then how much of a file has arrived; each chunk is a sign of life."""
    told = time.monotonic()

    def tell(path: str, done: int, size: int | None) -> None:
        nonlocal told
        alive()
        if time.monotonic() - told > TOLD_EVERY_S:
            told = time.monotonic()
            print(f"         {path}: {done:,} of {size or 0:,} bytes", file=sys.stderr, flush=True)

    return tell


def numbers_of(kept: Kept, made: dict[str, Shards]) -> dict[str, float]:
    """The figures of the summary page."""
    numbers: dict[str, float] = {"rows_read": kept.read, "rows_kept": kept.rows}
    numbers |= {f"rows_removed_{why}": count for why, count in sorted((kept.removed + kept.unread).items())}
    for test, found in kept.touched.items():
        numbers |= {f"{test}_{name}": count for name, count in found.items()}
    for side, shards in made.items():
        counts = shards.manifest["counts"]
        numbers |= {f"{side}_{name}": counts[name] for name in ("documents", "tokens", "trained_tokens", "truncated")}
        numbers |= {f"{side}_dropped_{why}": count for why, count in counts["dropped"].items()}
        numbers[f"{side}_longest"] = int(shards.lengths.max())
    return numbers


def show_documents(run: RunDir, made: dict[str, Shards], tokenizer: Tokenizer) -> None:
    """The first documents, as the model will see them: what is read, and what is trained."""
    for shards in list(made.values())[:1]:
        for example in islice(shards.examples, 3):
            first = int(example.mask.argmax()) if not example.mask[0] else 0
            read, trained = (tokenizer.decode(part.tolist()) for part in (example.ids[:first], example.ids[first:]))
            run.sample(0, prompt=read, output=trained, tokens=len(example.ids), trained_tokens=int(example.mask[1:].sum()))


def following(path: Path, kept: Kept) -> str:
    """The command that uses what was made."""
    rows = rows_path(path, "train")
    if kept.kind == "text":
        held = f" data.held_out_source={path / 'shards' / 'held_out'}" if "held_out" in kept.sides else ""
        return f"./bazelw run //stages:pretrain -- data.source={path / 'shards' / 'train'}{held}"
    stage = {"preference": "dpo", "steps": "prm", "answer": "grpo"}.get(kept.kind, "sft")
    return f"./bazelw run //stages:{stage} -- data.source={rows} model.path=<checkpoint>"


def report(path: Path, kept: Kept, made: dict[str, Shards]) -> None:
    for test, found in kept.touched.items():
        say(f"  {test:<16} {found['rows_removed']:,} rows removed, {found['questions_found']:,} of its questions found")
    say(f"\nrows     {path / 'rows'}")
    for side in made:
        say(f"shards   {path / 'shards' / side}")
    say(f"tests    {path / 'tests'}\nreport   {path / 'report.html'}\nnext     {following(path, kept)}")


if __name__ == "__main__":
    sys.exit(run_stage("build_data", BuildDataConfig, build_data, __doc__ or "", sys.argv[1:]))
