"""report.html: one self-contained file, inline SVG and CSS, no script, nothing from the network."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from align.tracking._jsonl import RunDirError, read_batches, read_lines, restore, write_whole
from align.tracking._progress import show_duration
from align.tracking._series import Series
from align.tracking._svg import Curve, chart, number

_MAX_EVENTS = 200
_MAX_SAMPLES = 8
_NO_CURVE = {"step", "time", "epoch"}
_NOT_TOLD = {"step", "prompt", "output", "completion", "correct", "problem", "sample"}
# The policy lets no request leave the page, whatever a sample's text may try.
_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">"""
_STATUS = {
    "done": ("done", "good"),
    "stopped": ("stopped, can be resumed", "wait"),
    "tripwire": ("stopped by a tripwire", "bad-badge"),
    "failed": ("failed", "bad-badge"),
    None: ("no result: running or killed", "wait"),
}


class _Run(NamedTuple):
    """What the files of a run hold, in bounded memory."""

    history: dict[str, Series]
    evals: dict[str, Series]
    events: list[tuple[float, str]]
    first_samples: list[dict[str, Any]]
    last_samples: list[dict[str, Any]]
    last_step: float
    seconds: float  # between the first and the last line
    problems: list[str]


def write_report(path: str | Path, *, result: Mapping[str, Any] | None = None) -> Path:
    """Writes `report.html` into a run directory, of a finished run or one that is still going or was killed.

    Charts of every number in history.jsonl and eval.jsonl, the table of metrics before and after, samples with verdicts, events,
    configuration and environment. Neither memory nor the file grows with the length of the run. `result` is the content of
    stage_result.json when that is not written yet. Returns the file. Raises RunDirError when there is no run or the file cannot be
    written.
    """
    path = Path(path)
    if not (path / "history.jsonl").is_file():
        raise RunDirError(f"{path}: no history.jsonl, so no run; name a run directory")
    run = _collect(path)
    if result is None:
        result = _read_json(path / "stage_result.json")
    stage = str(result.get("stage") or path.absolute().name)
    body = [
        _header(path, stage, run, result),
        _tiles(run, result),
        _before_after(run, result),
        _charts(run),
        _events(run),
        _samples(run),
        _files(path, result),
    ]
    css = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    title = escape(f"{stage}: {path.absolute().name}")
    page = f"{_HEAD}<title>{title}</title><style>\n{css}</style></head>\n<body><main>{''.join(body)}</main></body></html>\n"
    target = path / "report.html"
    write_whole(target, page.encode("utf-8", "replace"))
    return target


def _collect(path: Path) -> _Run:
    history: dict[str, Series] = {}
    evals: dict[str, Series] = {}
    events: list[tuple[float, str]] = []
    problems: list[str] = []
    times: list[float] = []
    last_step = 0.0
    for batch in _batches(path / "history.jsonl", problems):
        if not _add_alike(history, batch):
            for record in map(restore, batch):
                if isinstance(record.get("event"), str) and len(events) < _MAX_EVENTS:
                    events.append((_step(record), record["event"]))
                _add(history, _step(record), record)
        last_step = max(last_step, max(map(_step, batch)))
        if isinstance(batch[0].get("time"), float) and not times:
            times.append(batch[0]["time"])
        if isinstance(batch[-1].get("time"), float):
            times[1:] = [batch[-1]["time"]]
    for record in _records(path / "eval.jsonl", problems):
        last_step = max(last_step, _step(record))
        _add(evals, _step(record), record)
    first: list[dict[str, Any]] = []
    last: list[dict[str, Any]] = []
    for record in _records(path / "samples.jsonl", problems):
        if not first or first[0].get("step") == record.get("step"):
            first.append(record)
            del first[64:]
        if last and last[0].get("step") != record.get("step"):
            last = []
        if len(last) < 64:
            last.append(record)
    return _Run(history, evals, events, first, last, last_step, times[-1] - times[0] if times else 0.0, problems)


def _batches(path: Path, problems: list[str]) -> Iterable[list[dict[str, Any]]]:
    try:
        yield from read_batches(path)
    except RunDirError as error:
        problems.append(str(error))


def _add_alike(series: dict[str, Series], batch: list[dict[str, Any]]) -> bool:
    """Adds the numbers of lines that all have the same fields, a column at a time; False, and nothing added, where they differ."""
    first = batch[0]
    if len(batch) < 64 or set(map(len, batch)) != {len(first)}:
        return False
    try:
        columns = {key: [record[key] for record in batch] for key in first}
    except KeyError:
        return False
    types = {key: set(map(type, column)) for key, column in columns.items()}
    if any(str in kinds for kinds in types.values()) or not types.get("step", {str}) <= {int}:
        return False
    for key, column in columns.items():
        if key not in _NO_CURVE and types[key] <= {int, float}:
            curve = series.get(key)
            if curve is None:
                curve = series[key] = Series()
            curve.extend(columns["step"], column)
    return True


def _records(path: Path, problems: list[str]) -> Iterable[dict[str, Any]]:
    """The file's objects; a broken line ends it and is told in the report."""
    if not path.exists():
        return
    try:
        for _, _, record in read_lines(path):
            yield restore(record)
    except RunDirError as error:
        problems.append(str(error))


def _real(value: Any) -> float | None:
    """A number as a file gives it, infinite where no float holds it; None where it is another thing."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _finite(value: Any) -> float | None:
    real = _real(value)
    return real if real is not None and math.isfinite(real) else None


def _step(record: dict[str, Any]) -> float:
    return _finite(record.get("step")) or 0.0


def _add(series: dict[str, Series], step: float, record: dict[str, Any]) -> None:
    for key, value in record.items():
        if (type(value) is float or type(value) is int) and key not in _NO_CURVE:
            curve = series.get(key)
            if curve is None:
                curve = series[key] = Series()
            curve.add(step, value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _status(result: Mapping[str, Any]) -> tuple[str, str]:
    """In words, and the class of its badge."""
    status = result.get("status")
    return _STATUS.get(None if status is None else str(status), (str(status), "wait"))


def _header(path: Path, stage: str, run: _Run, result: Mapping[str, Any]) -> str:
    text, style = _status(result)
    reason = f'<p class="soft">{escape(str(result["reason"]))}</p>' if result.get("reason") else ""
    problems = "".join(f'<p class="badge bad-badge">{escape(problem)}</p>' for problem in run.problems)
    return (
        f'<header><h1>{escape(stage)}</h1><span class="badge {style}">{escape(text)}</span>'
        f'<span class="soft">{escape(path.absolute().name)}</span></header>{reason}{problems}'
    )


def _tiles(run: _Run, result: Mapping[str, Any]) -> str:
    steps = _real(result.get("steps", run.last_step)) or 0.0
    tiles = [("steps", number(steps))] if steps or not result else []  # an evaluation has none
    wall = _finite(result.get("wall_s", run.seconds))
    if wall is not None and wall > 0:
        tiles.append(("time", show_duration(wall)))
    loss = run.history.get("loss")
    if loss and loss.count:
        tiles.append(("last loss, averaged", number(loss.smooth()[-1][1])))
    rate = run.history.get("tokens_per_s")
    if rate and rate.count:
        tiles.append(("tokens/s, mean", number(sum(b.total for b in rate.buckets) / rate.count)))
    skip = {"status", "stage", "steps", "wall_s", "reason", "checkpoint", "next", "last_loss"}
    for key, value in result.items():
        if key not in skip and (real := _real(value)) is not None:
            tiles.append((_words(key), number(real)))
    inner = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in tiles)
    return f'<dl class="tiles">{inner}</dl>'


def _before_after(run: _Run, result: Mapping[str, Any]) -> str:
    """The table of metrics; without any from before, a table of results. Intervals are those of the last evaluation."""
    before, after = _metrics(result, "before"), _metrics(result, "after")
    columns = ["metric", "before", "after", "change"] if before else ["metric", "value"]
    ends = {f"{name}_{end}" for name in [*before, *after] for end in ("low", "high")}  # of an interval: shown beside its own number
    intervals = {name: _interval(run, name) if name in after else "" for name in [*before, *after] if name not in ends}
    if any(intervals.values()):
        columns.append("interval")
    rows = []
    for name in intervals:
        old, new = _finite(before.get(name)), _finite(after.get(name))
        change = f"{new - old:+.3g}" if old is not None and new is not None else ""
        texts = {
            "metric": escape(_words(name)),
            "before": _cell(before.get(name)),
            "after": _cell(after.get(name)),
            "value": _cell(after.get(name)),
            "change": change,
            "interval": intervals[name],
        }
        bar = ""
        if new is not None and 0 <= new <= 1 and 0 <= (old or 0) <= 1:
            bar = f'<i style="width:{100 * new:.1f}%"></i><i class="before" style="width:{100 * (old or 0):.1f}%"></i>'
            bar = f'<div class="track">{bar}</div>'
        cells = "".join(f"<td{_class(column, columns)}>{texts[column]}</td>" for column in columns)
        rows.append(f'<tr>{cells}<td class="bar">{bar}</td></tr>')
    if not rows:
        return ""
    head = "".join(f"<th{_class(text, columns)}>{text}</th>" for text in [*columns, ""])
    title = "Before and after" if before else "Results"
    return f'<h2>{title}</h2><div class="table"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _class(column: str, columns: Sequence[str]) -> str:
    """A phone has no room for the change beside an interval."""
    return ' class="change"' if column == "change" and "interval" in columns else ""


def _interval(run: _Run, name: str) -> str:
    low, high = run.evals.get(f"{name}_low"), run.evals.get(f"{name}_high")
    return f"{number(low.final)} – {number(high.final)}" if low and high else ""


def _metrics(result: Mapping[str, Any], when: str) -> Mapping[str, Any]:
    metrics = result.get("metrics")
    values = metrics.get(when) if isinstance(metrics, Mapping) else None
    return values if isinstance(values, Mapping) else {}


def _cell(value: Any) -> str:
    real = _real(value)
    return "–" if value is None else escape(str(value)) if real is None else number(real)


def _words(name: str) -> str:
    return name.replace("_", " ").replace("/", " ")


def heading(name: str) -> str:
    """A chart's heading: abbreviations as they are written, the unit of "step_s" in full."""
    words = [{"kl": "KL", "mfu": "MFU", "lr": "learning rate"}.get(word, word) for word in _words(name).split()]
    if len(words) > 1 and words[-1] == "s":
        words[-2:] = [f"{words[-2]},", "seconds"]
    said = " ".join(words)
    return said[:1].upper() + said[1:]


def _charts(run: _Run) -> str:
    """The charts a reader looks for first, then one for every other number that varies; none where there is but one step."""
    history = {name: series for name, series in run.history.items() if not name.startswith("total_")}
    evals = dict(run.evals)
    if len({bucket.first for series in [*history.values(), *evals.values()] for bucket in series.buckets}) < 2:
        return ""
    figures = []
    steps = (min([s.buckets[0].first for s in [*history.values(), *evals.values()] if s.count], default=0.0), run.last_step)

    def draw(title: str, wanted: Any, fixed: tuple[float, float] | None = None, *, exact: bool = False) -> None:
        curves = [Curve(_words(name), history.pop(name)) for name in list(history) if wanted(name)]
        for name in sorted(name for name in evals if wanted(name) and not name.endswith(("_low", "_high"))):
            low, high = evals.pop(f"{name}_low", None), evals.pop(f"{name}_high", None)
            curves.append(Curve(_words(name) + (" (held out)" if name in run.history else ""), evals.pop(name), True, low, high))
        figures.append(chart(title, curves, events=run.events, fixed=fixed, steps=steps, exact=exact))

    draw("Loss", lambda name: name.endswith("loss"))
    draw("Accuracy", lambda name: "accuracy" in name and not name.endswith(("_low", "_high")), (0.0, 1.0))
    draw("Reward", lambda name: "reward" in name)
    draw("Learning rate", lambda name: name == "lr" or name.startswith("lr_"), exact=True)
    draw("Gradient norm", lambda name: name == "grad_norm")
    draw("Tokens per second", lambda name: name == "tokens_per_s")
    draw("Tokens a step", lambda name: name in ("tokens", "trained_tokens"))
    draw("Memory, GiB", lambda name: name.endswith("_gb"))
    for name in dict.fromkeys([*history, *evals]):
        if name.endswith(("_low", "_high")) and name.rpartition("_")[0] in evals:
            continue  # the band of its own curve
        curves = [Curve(_words(name), history[name])] if name in history else []
        if name in evals:
            told = _words(name) + (" (evaluations)" if curves else "")
            curves.append(Curve(told, evals[name], True, evals.get(f"{name}_low"), evals.get(f"{name}_high")))
        if any(curve.series.low < curve.series.high for curve in curves):  # a constant needs no picture
            figures.append(chart(heading(name), curves, events=run.events, steps=steps))
    return f'<h2>Curves</h2><div class="charts">{"".join(figures)}</div>' if any(figures) else ""


def _events(run: _Run) -> str:
    if not run.events:
        return ""
    rows = "".join(f'<tr><td>{number(step)}</td><td class="text">{escape(text)}</td></tr>' for step, text in run.events)
    return f'<h2>Events</h2><div class="table"><table><tr><th>step</th><th class="text">event</th></tr>{rows}</table></div>'


def _samples(run: _Run) -> str:
    """Each prompt of the last evaluation with its outputs, and with its output at the first."""
    earlier = {str(record.get("prompt")): record for record in reversed(run.first_samples)}
    prompts: dict[str, list[dict[str, Any]]] = {}
    for record in run.last_samples:
        prompts.setdefault(str(record.get("prompt", "")), []).append(record)
    cards = []
    for prompt, records in list(prompts.items())[:_MAX_SAMPLES]:
        first = earlier.get(prompt)
        shown = records[:3] if first is None or first.get("step") == records[0].get("step") else [first, *records[:2]]
        outputs = "".join(_output(record, stepped=run.last_step > 0) for record in shown)
        cards.append(f'<article class="card"><p class="prompt">{escape(prompt)}</p><div class="pair">{outputs}</div></article>')
    return f'<h2>Samples</h2><div class="samples">{"".join(cards)}</div>' if cards else ""


def _output(record: dict[str, Any], *, stepped: bool) -> str:
    text = str(record.get("output", record.get("completion", "")))
    marks = [f"step {number(_step(record))}"] if stepped else []
    if "correct" in record:
        name, style = {"True": ("right", "good"), "False": ("wrong", "bad-badge")}.get(str(record["correct"]), ("undecided", "wait"))
        marks.append(f'<span class="badge {style}">{name}</span>')
    for key, value in record.items():
        if key not in _NOT_TOLD and value is not None and (key, value) != ("finish_reason", "stop"):
            real = _real(value)
            label = str(value) if real is None else number(real)
            marks.append(f"<span>{escape(_words(key))}: {escape(label)}</span>")
    shown = text if len(text) <= 4000 else text[:4000] + " …"
    inner = escape(shown) or '<span class="soft">(empty)</span>'
    return f"<section><h4>{' '.join(marks)}</h4><pre>{inner}</pre></section>"


def _files(path: Path, result: Mapping[str, Any]) -> str:
    parts = ["<h2>Details</h2>"]
    if result.get("next"):
        parts.append(f"<p>Next: <code>{escape(str(result['next']))}</code></p>")
    for title, name in (("Result", "stage_result.json"), ("Configuration", "config.toml"), ("Environment", "env.json")):
        if name == "stage_result.json":
            text = json.dumps(result, indent=2, ensure_ascii=False, default=str) if result else ""
        else:
            try:
                text = (path / name).read_text(encoding="utf-8", errors="replace")
            except OSError:
                text = ""
        if text:
            parts.append(f"<details><summary>{title}</summary><pre>{escape(text.strip())}</pre></details>")
    return "".join(parts)
