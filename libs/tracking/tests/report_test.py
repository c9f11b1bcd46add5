"""report.html: self-contained and well-formed, ticks by value, no spike lost, bounded in size; read from broken runs too."""

import json
import math
import re
import time
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from align.tracking import RunDir, RunDirError, write_comparison, write_report
from align.tracking._report import heading
from align.tracking._series import Series
from align.tracking._svg import Curve, chart, linear_axis, log_axis, nice_ticks, number, value_axis

NASTY = '</script><img src=x onerror="alert(1)">&'


def a_run(path, steps=300):
    run = RunDir.create(path, config_toml=f'name = "{NASTY}"\n', env={"cpu": NASTY})
    for step in range(1, steps + 1):
        event = {"event": f"spike {NASTY}"} if step == 77 else {}
        run.log(
            step,
            loss=math.nan if step == 5 else 4.0 * 0.97**step + 0.001 * (step % 7),
            lr=1e-3,
            grad_norm=1.0 + step % 5,
            tokens_per_s=6e4,
            reward=step / steps,
            **event,
        )
    for step in (0, steps):
        run.eval(step, accuracy_1=step / steps, accuracy_1_low=0.0, accuracy_1_high=1.0)
        run.sample(step, prompt=f"2+2? {NASTY}", output="5" if step == 0 else "4", correct=step > 0, reason="equal", answer="4")
    run.finish(
        "done",
        stage="sft",
        steps=steps,
        metrics={"before": {"accuracy_1": 0.0}, "after": {"accuracy_1": 1.0, "new": None}},
        next=f"go {NASTY}",
    )
    return (path / "report.html").read_text(encoding="utf-8")


class Tags(HTMLParser):
    """Every element, and whether they close in order."""

    def __init__(self, text):
        super().__init__()
        self.found, self.open = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def svgs(page):
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_the_report_is_self_contained_and_well_formed(tmp_path):
    page = a_run(tmp_path / "r")
    tags = Tags(page).found
    names = {tag for tag, _ in tags}
    assert not names & {"script", "img", "iframe", "object", "embed"}
    assert [attrs["href"] for tag, attrs in tags if "href" in attrs] == ["data:,"]
    assert not any("src" in attrs or ("style" in attrs and "url" in attrs["style"]) for _, attrs in tags)
    assert "http:" not in page and "https:" not in page and "@import" not in page and "url(" not in page
    policies = [attrs["content"] for tag, attrs in tags if attrs.get("http-equiv")]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    pictures = svgs(page)
    assert len(pictures) == 6  # loss, accuracy, reward, lr, grad norm, tokens/s
    assert all(picture.get("role") == "img" and picture.get("aria-label") for picture in pictures)
    assert "<img" not in page.replace("&lt;img", "") and page.count("&lt;img src=x") >= 6


def test_what_the_report_says(tmp_path):
    page = a_run(tmp_path / "r")
    for text in (
        "<title>sft: r</title>",
        ">done</span>",
        '<td>accuracy 1</td><td>0</td><td>1</td><td class="change">+1</td><td>0 – 1</td>',
        "step 5: loss is not finite",
        "step 77: spike",
        '<span class="badge bad-badge">wrong</span>',
        '<span class="badge good">right</span>',
        "reason: equal",
        "<h3>Loss <small>log scale</small></h3>",
        "<h3>Accuracy</h3>",
        "<summary>Configuration</summary>",
    ):
        assert text in page, text
    assert page.index("Before and after") < page.index("Curves") < page.index("Samples") < page.index("Details")


def test_a_number_of_steps_and_evaluations_is_one_chart_and_an_evaluation_has_no_steps(tmp_path):
    run = RunDir.create(tmp_path / "r", config_toml="", env={})
    for step in range(1, 4):
        run.log(step, answer_tokens=10.0 + step)
    for step in (0, 3):
        run.eval(step, answer_tokens=11.0 + step, pass_at_2=0.1 * step, pass_at_2_low=0.05 * step, pass_at_2_high=0.2 * step)
    labels = [svg.get("aria-label") for svg in svgs(write_report(run.path).read_text())]
    assert [label.partition(" over")[0] for label in labels] == ["Answer tokens", "Pass at 2"]
    assert "answer tokens from 11 to 13" in labels[0] and "answer tokens (evaluations) from 11 to 14" in labels[0]
    run.finish("tripwire", metrics={"before": {"pass_at_2": 0.0}, "after": {"answer_tokens": 14.0}})
    page = (run.path / "report.html").read_text()
    assert "<td>pass at 2</td><td>0</td><td>–</td><td></td>" in page and "0.15 – 0.6" not in page  # the interval is of another evaluation
    judged = RunDir.create(tmp_path / "e", config_toml="", env={})
    judged.log(0, accuracy=0.5)
    judged.sample(0, prompt="p", output="o", correct=True)
    judged.finish("done", stage="evaluate", steps=0)
    page = (tmp_path / "e/report.html").read_text()
    assert "<dt>steps</dt>" not in page and "step 0" not in page and '<span class="badge good">right</span>' in page


def test_a_report_of_a_run_that_goes_on_was_killed_or_is_broken(tmp_path):
    run = RunDir.create(tmp_path / "r", config_toml="", env={})
    assert "no result: running or killed" in write_report(run.path).read_text()
    run.log(1, loss=1.0)
    run.log(2, loss=0.5)
    with open(run.path / "history.jsonl", "ab") as file:
        file.write(b'{"st')
    assert "<h3>Loss</h3>" in write_report(run.path).read_text()
    with open(run.path / "history.jsonl", "ab") as file:
        file.write(b'\n[]\n{"step": "x", "loss": 3, "deep": {"a": 1}}\n')
    for torn in ("{", "[" * 100_000):
        (run.path / "stage_result.json").write_text(torn)
        page = write_report(run.path).read_text()
        assert "history.jsonl:3: not a JSON object" in page and "<h3>Loss</h3>" in page
    with pytest.raises(RunDirError, match=r"no history\.jsonl"):
        write_report(tmp_path)


def test_a_hundred_thousand_steps_stay_small_and_keep_their_spike(tmp_path):
    series = Series()
    for step in range(100_000):
        series.add(step, 500.0 if step == 77_777 else math.sin(step / 1000) + (step * 7919 % 100) / 100)
    assert len(series.buckets) <= 1000 and series.count == 100_000
    assert (77_777, 500.0) in series.outline()
    assert len(chart("Loss", [Curve("loss", series)])) < 60_000
    page = a_run(tmp_path / "r", steps=3000)
    assert len(page) < 250_000


def test_the_report_of_a_hundred_thousand_steps_is_small_quick_and_shows_every_spike(tmp_path):
    """At most 1 MB and 2 s (of CPU time: .6 on an idle machine); the single steps that stick out are points of the picture."""
    run = RunDir.create(tmp_path / "r", config_toml="", env={})
    spikes = {17: 31.0, 40_001: 57.0, 99_998: 43.0}
    with open(run.path / "history.jsonl", "w") as file:
        for step in range(1, 100_001):
            loss = spikes.get(step, 3.0 + step * 7919 % 100 / 1000)
            file.write(
                f'{{"step": {step}, "time": {1.7e9 + step:.3f}, "loss": {loss:.3f}, "lr": {1 / step:.4g}, "grad_norm": 1.5, '
                f'"tokens_per_s": {60000 + step % 991}}}\n'
            )
    seconds = []
    for _ in range(2):
        started = time.process_time()
        page = write_report(run.path)
        seconds.append(time.process_time() - started)
    assert page.stat().st_size <= 1_000_000 and min(seconds) <= 2
    figure = next(svg for svg in svgs(page.read_text()) if svg.get("aria-label").startswith("Loss"))
    lines = [path.get("d") for path in figure.iter("path") if path.get("class") in ("raw c1", "line c1")]
    heights = [float(y) for line in lines for y in re.findall(r"[\d.]+ ([\d.]+)", line)]
    low, high = 244.0, 12.0  # of the plot: 0 and the axis's end, 60
    for spike in spikes.values():
        assert any(abs(y - (low - spike / 60 * (low - high))) < 0.1 for y in heights), spike


@given(
    values=st.lists(st.integers(-(10**9), 10**9).map(lambda value: value / 1000), min_size=1, max_size=300),
    limit=st.sampled_from([2, 8, 64]),
)
@settings(max_examples=60)
def test_a_series_keeps_extremes_mean_order_and_end(values, limit):
    series = Series(limit)
    for x, y in enumerate(values):
        series.add(x, y)
    assert len(series.buckets) <= limit and sum(bucket.points for bucket in series.buckets) == len(values)
    outline = series.outline()
    assert max(outline, key=lambda p: p[1])[1] == max(values) == series.high and min(outline, key=lambda p: p[1])[1] == min(values)
    assert [x for x, _ in outline] == sorted(x for x, _ in outline) and all(values[int(x)] == y for x, y in outline)
    assert math.isclose(sum(bucket.total for bucket in series.buckets), sum(values), rel_tol=1e-9, abs_tol=1e-6)
    assert series.final == values[-1]
    low, high = min(values), max(values)
    assert all(low - 1e-6 <= y <= high + 1e-6 for _, y in series.smooth())


def test_smoothing_a_constant_gives_the_constant():
    series = Series()
    for step in range(500):
        series.add(step, 3.0)
    assert all(math.isclose(y, 3.0) for _, y in series.smooth())


@pytest.mark.parametrize(
    "low, high, labels",
    [
        (0, 1, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0.1, 4.2, ["0", "1", "2", "3", "4", "5"]),
        (-3, 7, ["-4", "-2", "0", "2", "4", "6", "8"]),
        (0, 3e-4, ["0", "1e-4", "2e-4", "3e-4"]),
        (61_000, 71_000, ["60k", "62k", "64k", "66k", "68k", "70k", "72k"]),
        (5, 5, ["0", "2", "4", "6", "8"]),
        (0.9995, 1.0011, ["0.9995", "1.0000", "1.0005", "1.0010", "1.0015"]),
        (100_001, 100_019, ["100k", "100.005k", "100.01k", "100.015k", "100.02k"]),
        (0, 0, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ],
)
def test_linear_ticks(low, high, labels):
    assert [label for _, label in linear_axis(low, high).ticks] == labels


@pytest.mark.parametrize(
    "low, high, labels",
    [
        (6e-4, 12, ["1e-4", "0.001", "0.01", "0.1", "1", "10", "100"]),
        (0.3, 20, ["0.2", "0.5", "1", "2", "5", "10", "20"]),
        (0.05, 20, ["0.03", "0.1", "0.3", "1", "3", "10", "30"]),
    ],
)
def test_log_ticks(low, high, labels):
    assert [label for _, label in log_axis(low, high).ticks] == labels


def test_shares_far_below_the_end_of_their_range_are_not_flattened():
    """Accuracies of .03 to .07 on an axis to 1 are a line on the floor; those above .3 keep the axis that every run has."""
    for values, end in (((0.035, 0.069), 0.08), ((0.0, 0.29), 0.3), ((0.02, 0.31), 1.0), ((0.0, 0.0), 1.0), ((0.97, 0.99), 1.0)):
        series = Series()
        for step, value in enumerate(values):
            series.add(step, value)
        axis = value_axis([Curve("accuracy", series)], fixed=(0.0, 1.0), linear=False)
        assert (axis.low, axis.high, axis.log) == (0.0, pytest.approx(end), False)


@given(low=st.floats(-1e9, 1e9), span=st.floats(1e-6, 1e9))
@settings(max_examples=100)
def test_ticks_cover_the_data_evenly(low, span):
    high = low + span
    assume(high - low > 1e-9 * abs(low))
    ticks = nice_ticks(low, high)
    step = ticks[1] - ticks[0]
    slack = 1e-6 * step + 1e-9 * abs(low)
    assert ticks[0] <= low + slack and ticks[-1] >= high - slack and 2 <= len(ticks) <= 8
    axis = linear_axis(low, high)
    assert axis.at(low) >= -1e-6
    labels = [label for _, label in axis.ticks]
    assert len(set(labels)) == len(labels)
    power = {"k": 1e3, "M": 1e6, "G": 1e9}
    for tick, label in axis.ticks:  # what it says is where it stands
        value = float(label[:-1]) * power[label[-1]] if label[-1] in power else float(label)
        assert abs(value - tick) <= 0.06 * (axis.ticks[1][0] - axis.ticks[0][0])


@given(values=st.lists(st.floats() | st.floats(1e-9, 1e3), min_size=1, max_size=80))
@settings(max_examples=60)
def test_any_numbers_make_a_picture_within_its_frame(values):
    series = Series()
    for step, value in enumerate(values):
        series.add(step, value)
    drawn = chart("x", [Curve("x", series)])
    if drawn == "":
        assert not any(abs(value) <= 1e100 for value in values)
        return
    assert "nan" not in drawn and "inf" not in drawn.replace("not finite", "")
    for path in ElementTree.fromstring(re.search(r"<svg.*</svg>", drawn, re.DOTALL)[0]).iter("path"):
        if path.get("class").startswith(("line", "raw")):
            points = [tuple(map(float, pair.split())) for pair in path.get("d")[1:].split("L")]
            assert all(55 <= x <= 549 and 11 <= y <= 245 for x, y in points)


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (0.203, "0.203"),
        (3e-4, "3e-4"),
        (1.25e-7, "1.25e-7"),
        (67_200, "67.2k"),
        (7.248e9, "7.248G"),
        (2600, "2600"),
        (-0.5, "-0.5"),
        (math.nan, "nan"),
    ],
)
def test_numbers_for_people(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    "name, words",
    [
        ("mfu", "MFU"),
        ("step_s", "Step, seconds"),
        ("reference/kl", "Reference KL"),
        ("dead_groups", "Dead groups"),
        ("s", "S"),
        ("lr", "Learning rate"),
    ],
)
def test_headings_for_people(name, words):
    assert heading(name) == words


def test_a_run_of_one_evaluation_has_a_table_and_no_curves(tmp_path):
    run = RunDir.create(tmp_path / "r", config_toml="", env={})
    run.log(0, accuracy=0.25)
    run.eval(0, accuracy=0.25, accuracy_low=0.2, accuracy_high=0.31)
    for output in ("4", "5", "6", "7"):
        run.sample(0, prompt="2+2?", output=output, problem=7, finish_reason="stop")
    run.finish("done", stage="evaluate", steps=0, metrics={"after": {"accuracy": 0.25, "mean_tokens": 12.5}})
    page = (run.path / "report.html").read_text()
    assert "<h2>Results</h2>" in page and "Before" not in page and "<h2>Curves</h2>" not in page
    assert "<td>accuracy</td><td>0.25</td><td>0.2 – 0.31</td>" in page and "<td>mean tokens</td><td>12.5</td><td></td>" in page
    assert page.count('<p class="prompt">') == 1 and page.count("<pre>") == 3 + 2 and "problem" not in page and "finish" not in page


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers()
    | st.integers(-5, 5).map(lambda n: n * 10**400)
    | st.sampled_from(["7", "<b>&\"'"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["accuracy", "a<b>", "a<b>_low"]), inner, max_size=2),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    a_run(root / "other")
    (root / "run").mkdir()
    return root / "run"


RESULTS = ["status", "stage", "steps", "wall_s", "reason", "next", "metrics", "last_loss", "<i>"]
RECORDS = ["step", "time", "loss", "accuracy", "accuracy_low", "event", "prompt", "output", "correct", "finish_reason", "<i>"]


@given(
    st.dictionaries(st.sampled_from(RESULTS), JSON, max_size=6),
    st.lists(st.dictionaries(st.sampled_from(RECORDS), JSON, max_size=5), max_size=4),
)
@settings(max_examples=150)
def test_any_values_in_a_run_s_files_make_a_well_formed_report(scratch, result, records):
    """The files are on a disk: of another release, edited, of somebody else's program."""
    for name in ("history.jsonl", "eval.jsonl", "samples.jsonl"):
        (scratch / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    result["metrics"] = {"before": result.get("metrics"), "after": {"a<b>": result.get("<i>")}}
    (scratch / "stage_result.json").write_text(json.dumps(result))
    for path in (write_report(scratch), write_comparison([scratch, scratch.parent / "other"], scratch / "both.html")):
        page = path.read_text()
        tags = Tags(page)
        assert not tags.open and len(svgs(page)) == sum(tag == "svg" for tag, _ in tags.found)
        assert "<b>&" not in page and "<i>" not in page  # of the values and names


def test_a_comparison_lays_the_runs_over_each_other(tmp_path):
    for name, rate in (("a", 0.9), ("b", 0.5)):
        config = f"lr = {rate}\nsame = 1\n[model]\npath = '{NASTY}{name}'\n"
        run = RunDir.create(tmp_path / name, config_toml=config, env={})
        for step in range(1, 60):
            run.log(step, loss=4.0 * rate**step, lr=1e-3, **({"only_a": step * 1.0} if name == "a" else {}))
        run.eval(59, accuracy=rate, accuracy_low=rate - 0.1, accuracy_high=min(1.0, rate + 0.1))
        if name == "a":
            run.finish("done", stage="sft", steps=59, metrics={"before": {"accuracy": 0.0}, "after": {"accuracy": rate}})
    page = write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "both.html").read_text(encoding="utf-8")
    found = Tags(page).found
    assert not any(tag in ("script", "iframe", "img") for tag, _ in found)
    labels = [svg.get("aria-label") for svg in svgs(page)]
    assert [label.split(" over steps")[0] for label in labels] == ["Loss", "Accuracy"]  # lr is the same in both, only_a in one
    assert "a from 3.6" in labels[0] and "b from 2" in labels[0]
    text = re.sub(r"<[^>]+>", "|", page.split("<main>")[1])
    assert "running or killed" in text and "accuracy, after||0.9||–" in text
    differs = text.split("Configuration: what differs")[1]
    assert "lr|||0.9||0.5" in differs and "model.path" in differs and "same" not in differs


@pytest.mark.parametrize("wrong", [["a"], ["a", "a"], ["a", "nothing"]])
def test_a_comparison_names_what_is_wrong(tmp_path, wrong):
    a_run(tmp_path / "a", steps=3)
    with pytest.raises(RunDirError, match=r"name 2 to 12|named twice|nothing: no history\.jsonl"):
        write_comparison([tmp_path / name for name in wrong], tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


VALUES = st.one_of(
    st.floats(), st.floats(-1e3, 1e3), st.integers(-5, 5).map(float), st.just(math.nan), st.sampled_from([1e-120, -1e-300, 1e101])
)


@given(st.lists(VALUES, max_size=300), st.integers(4, 40), st.integers(1, 90))
def test_many_points_at_once_are_the_points_one_by_one(values, limit, chunk):
    one, many = Series(limit), Series(limit)
    for x, y in enumerate(values):
        one.add(x, y)
    for start in range(0, len(values), chunk):
        many.extend(range(start, min(start + chunk, len(values))), values[start : start + chunk])
    assert (one.count, one.not_finite) == (many.count, many.not_finite)
    assert one.final == many.final or math.isnan(one.final)
    for a, b in zip(one.buckets, many.buckets, strict=True):
        assert a._replace(total=0) == b._replace(total=0)
        assert a.total == pytest.approx(b.total, rel=1e-9, abs=1e-9 * max(abs(a.low), abs(a.high)) * a.points)


def test_a_long_history_is_read_in_batches_and_says_what_single_lines_say(tmp_path):
    """Batches of like lines, lines with an event, with NaN, with another field, and a torn end."""
    run = RunDir.create(tmp_path / "r", config_toml="", env={})
    lines = [f'{{"step": {step}, "time": {step}.5, "loss": {1 / step}, "lr": 0.001}}' for step in range(1, 40_001)]
    lines[20_000] = '{"step": 20001, "time": 20001.5, "loss": "nan", "lr": 0.001, "event": "spike"}'
    lines[30_000] = '{"step": 30001, "time": 30001.5, "loss": 9.75, "lr": 0.001, "reward": 1}'
    run.close()
    (tmp_path / "r/history.jsonl").write_text("\n".join(lines) + '\n{"step": 40001, "lo')
    page = write_report(tmp_path / "r").read_text(encoding="utf-8")
    labels = [svg.get("aria-label") for svg in svgs(page)]
    assert any("largest 9.75" in label and "to 2.5e-5" in label for label in labels)
    assert "spike" in page and "is not finite" in page
    (tmp_path / "r/history.jsonl").write_text("\n".join([*lines[:9000], '{"step": 1}, {"step": 2}', *lines[9000:]]) + "\n")
    assert "history.jsonl:9001: not a JSON object" in write_report(tmp_path / "r").read_text(encoding="utf-8")
