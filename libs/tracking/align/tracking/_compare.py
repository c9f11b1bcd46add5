"""Several runs on one page: the same curves over each other, results side by side, and where the configurations differ."""

import tomllib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from align.tracking._jsonl import RunDirError, write_whole
from align.tracking._progress import show_duration
from align.tracking._report import (
    _HEAD,
    _cell,
    _collect,
    _finite,
    _metrics,
    _read_json,
    _real,
    _Run,
    _status,
    _words,
    heading,
)
from align.tracking._series import Series
from align.tracking._svg import Curve, chart, number

_MOST = 12
_FIRST = ("loss", "reward", "lr", "grad_norm", "tokens_per_s")  # in front; whatever else there is follows
_SKIP = ("_low", "_high", "_total")


def write_comparison(paths: Sequence[str | Path], target: str | Path) -> Path:
    """Writes one page about 2 to 12 run directories, finished or not; returns `target`.

    A chart for each number that two or more runs hold (of history.jsonl, then of eval.jsonl), a table of results before and after, and the
    configuration fields in which the runs differ. Raises RunDirError: no run in a directory, a directory named twice, too few or too many,
    or a target that cannot be written.
    """
    folders = [Path(path) for path in paths]
    if not 2 <= len(folders) <= _MOST:
        raise RunDirError(f"{len(folders)} runs to compare; name 2 to {_MOST} run directories")
    if len({folder.absolute() for folder in folders}) < len(folders):
        raise RunDirError(f"a run directory is named twice: {', '.join(map(str, paths))}")
    for folder in folders:
        if not (folder / "history.jsonl").is_file():
            raise RunDirError(f"{folder}: no history.jsonl, so no run; name a run directory")
    names = _names(folders)
    runs = [_collect(folder) for folder in folders]
    results = [_read_json(folder / "stage_result.json") for folder in folders]
    title = "Comparison of " + ", ".join(names)
    body = [
        f"<header><h1>{escape(title)}</h1></header>",
        _results(names, runs, results),
        _curves("Curves", names, [run.history for run in runs], dots=False),
        _curves("Evaluations", names, [run.evals for run in runs], dots=True),
        _differences(names, folders),
    ]
    css = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    page = f"{_HEAD}<title>{escape(title)}</title><style>\n{css}</style></head>\n<body><main>{''.join(body)}</main></body></html>\n"
    target = Path(target)
    write_whole(target, page.encode("utf-8", "replace"))
    return target


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, with as many parents as it takes to tell them apart."""
    parts = [folder.absolute().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def _results(names: Sequence[str], runs: Sequence[_Run], results: Sequence[dict[str, Any]]) -> str:
    rows: list[tuple[str, list[str]]] = [("status", []), ("steps", []), ("time", [])]
    for run, result in zip(runs, results, strict=True):
        text, style = _status(result)
        rows[0][1].append(f'<span class="badge {style}">{escape(text)}</span>')
        rows[1][1].append(number(_real(result.get("steps", run.last_step)) or 0.0))
        wall = _finite(result.get("wall_s", run.seconds))
        rows[2][1].append(show_duration(wall) if wall is not None and wall > 0 else "–")
    keys = dict.fromkeys((when, key) for result in results for when in ("before", "after") for key in _metrics(result, when))
    for when, key in sorted(keys, key=lambda item: item[1]):
        rows.append((f"{_words(key)}, {when}", [_cell(_metrics(result, when).get(key)) for result in results]))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = "".join(f"<tr><td>{escape(name)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for name, cells in rows)
    return f'<h2>Results</h2><div class="table"><table><tr><th></th>{head}</tr>{lines}</table></div>'


def _curves(title: str, names: Sequence[str], series: Sequence[dict[str, Series]], *, dots: bool) -> str:
    shared = [key for key in dict.fromkeys(k for one in series for k in one) if sum(key in one for one in series) > 1]
    shared = [key for key in shared if not key.endswith(_SKIP) and not key.startswith("total_")]
    shared.sort(key=lambda key: _FIRST.index(key) if key in _FIRST else len(_FIRST))
    figures = []
    for key in shared:
        holders = [(name, one) for name, one in zip(names, series, strict=True) if key in one and one[key].count]
        curves = [Curve(name, one[key], dots, one.get(f"{key}_low"), one.get(f"{key}_high")) for name, one in holders]
        if len({curve.series.final for curve in curves}) > 1 or any(curve.series.low < curve.series.high for curve in curves):
            figures.append(chart(heading(key), curves, fixed=(0.0, 1.0) if "accuracy" in key else None, exact=key == "lr"))
    return f'<h2>{title}</h2><div class="charts">{"".join(figures)}</div>' if any(figures) else ""


def _differences(names: Sequence[str], folders: Sequence[Path]) -> str:
    fields = []
    for folder in folders:
        try:
            fields.append(dict(_flat(tomllib.loads((folder / "config.toml").read_text(encoding="utf-8")))))
        except (OSError, ValueError):
            fields.append({})
    rows = ""
    for key in dict.fromkeys(key for one in fields for key in one):
        values = [one.get(key, "–") for one in fields]
        if key != "run_dir" and len(set(values)) > 1:
            rows += f"<tr><td><code>{escape(key)}</code></td>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
    if not rows:
        return "<h2>Configuration</h2><p>The configurations are the same.</p>"
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    return f'<h2>Configuration: what differs</h2><div class="table"><table><tr><th>field</th>{head}</tr>{rows}</table></div>'


def _flat(table: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    made: list[tuple[str, str]] = []
    for key, value in table.items():
        made += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, str(value))]
    return made
