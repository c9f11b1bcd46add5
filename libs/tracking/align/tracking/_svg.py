"""Line charts as inline SVG: ticks a person would choose, a log axis where decades are spanned, values on hover without a script."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from align.tracking._series import Series

_WIDTH, _HEIGHT = 560, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 36
_COLORS = 6  # classes c1 to c6 of report.css
_COLUMNS = 60  # places that answer to the mouse

Point = tuple[float, float]


class Curve(NamedTuple):
    """One line of a chart; `low` and `high` bound its confidence band."""

    name: str
    series: Series
    dots: bool = False  # measured at few steps: a mark at each
    low: Series | None = None
    high: Series | None = None


class Axis(NamedTuple):
    """A scale: data to 0…1, with its ticks and their labels."""

    low: float
    high: float
    log: bool
    ticks: list[tuple[float, str]]

    def at(self, value: float) -> float:
        if self.log:
            value = max(value, self.low)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def number(value: float, digits: int = 4) -> str:
    """A number for people, to so many digits (3 in powers of ten and above 1e12): 0.203, 67.2k, 3e-4."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e12:
        return f"{value:.{digits - 1}g}".replace("e+", "e")
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit * (1 - 5e-5):  # what would be rounded up to it
            return f"{value / (1e3 if suffix == 'k' else limit):.{digits}g}{suffix}"
    if size >= 1e-3:
        return f"{value:.{digits}g}"
    mantissa, exponent = f"{value:.{digits - 2}e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten that cover low…high in about `count` steps; the ends lie outside or on them."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, last + 1)]


def linear_axis(low: float, high: float, count: int = 5) -> Axis:
    """An axis from a tick at or below `low` to one at or above `high`; it begins at 0 when the data comes near."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = min(low, 0.0), max(1.25 * high, 0.0) if high else 1.0
    elif 0 <= low < 0.4 * high:
        low = 0.0
    ticks = nice_ticks(low, high, count)
    step = ticks[1] - ticks[0]
    return Axis(ticks[0], ticks[-1], False, list(zip(ticks, _labels([0.0 if abs(t) < step / 2 else t for t in ticks], step), strict=True)))


def _labels(ticks: list[float], step: float) -> list[str]:
    """One a tick, no two alike: decimals as the step has them, or as many digits as it takes to show it."""
    if not ticks:
        return []
    top = max(abs(ticks[0]), abs(ticks[-1]))
    places = next((places for places in range(7) if abs(round(step, places) - step) < 1e-6 * step), None)
    if places is not None and 1e-3 <= top < 1e4 and (step >= 1e-3 or top >= 0.1):
        return [f"{tick:.{places}f}" if tick else "0" for tick in ticks]
    digits = math.floor(math.log10(top or 1.0)) - math.floor(math.log10(step)) + 3  # to the second digit of the step, 2.5 for one
    return [number(tick, min(max(digits, 4), 15)) for tick in ticks]


def log_axis(low: float, high: float) -> Axis:
    """An axis of powers of ten; of 1, 2 and 5 times them when fewer than three are spanned."""
    decades = math.log10(high / low)
    factors = (1,) if decades > 3 else (1, 3) if decades > 2 else (1, 2, 5)
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
    marks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    below = max(mark for mark in marks if mark <= low * (1 + 1e-9))
    above = min(mark for mark in marks if mark >= high * (1 - 1e-9))
    inside = [mark for mark in marks if below <= mark <= above]
    keep = max(1, math.ceil(len(inside) / 8))
    return Axis(below, above, True, [(mark, number(mark)) for mark in inside[::keep]])


def value_axis(curves: Sequence[Curve], *, fixed: tuple[float, float] | None, linear: bool) -> Axis:
    """Logarithmic, unless `linear`, when every value is positive and the largest is more than 20 times the smallest."""
    series = [one for curve in curves for one in (curve.series, curve.low, curve.high) if one is not None and one.count]
    low, high = min(one.low for one in series), max(one.high for one in series)
    if fixed and fixed[0] <= low and high <= fixed[1]:
        return linear_axis(fixed[0], fixed[1] if high > 0.3 * fixed[1] else high)
    return log_axis(low, high) if low > 0 and high > 20 * low and not linear else linear_axis(low, high)


def chart(
    title: str,
    curves: Sequence[Curve],
    *,
    events: Sequence[tuple[float, str]] = (),
    fixed: tuple[float, float] | None = None,
    steps: tuple[float, float] | None = None,
    exact: bool = False,
) -> str:
    """One figure: heading with the last value, legend when there are several curves, plot, and a description for who cannot see it.

    `events` are (step, text) marked by vertical lines, `fixed` the value range when the data keeps within it (from its
    lower end to the data's where that is far below its upper one), `steps` the range of
    the x axis; `exact` is for what is set and not measured, as a learning rate: linear, and never averaged.
    """
    curves = [curve for curve in curves if curve.series.count]
    if not curves:
        return ""
    low, high = steps or (min(c.series.buckets[0].first for c in curves), max(c.series.buckets[-1].last for c in curves))
    x, y = _step_axis(low, high), value_axis(curves, fixed=fixed, linear=exact)
    parts = [_grid(x, y)]
    parts += [_event(x, at, text) for at, text in events if x.low <= at <= x.high]
    for i, curve in enumerate(curves):
        parts.append(_curve(curve, x, y, i % _COLORS + 1, exact))
    parts.append(_hover(curves, x))
    summary = "; ".join(
        f"{c.name} from {number(c.series.buckets[0].mean)} to {number(c.series.final)}, "
        f"smallest {number(c.series.low)}, largest {number(c.series.high)}"
        for c in curves
    )
    scale = " <small>log scale</small>" if y.log else ""
    single = f'<span class="last">{number(curves[0].series.final)}</span>' if len(curves) == 1 else ""
    return (
        f'<figure class="chart"><figcaption><h3>{escape(title)}{scale}</h3>{single}{_legend(curves)}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(f"{title} over steps: {summary}")}">'
        f"{''.join(parts)}</svg></figure>"
    )


def _step_axis(low: float, high: float) -> Axis:
    """From the first to the last step exactly, ticks where they are round."""
    if high <= low:
        low, high = low - 1, high + 1
    ticks = [tick for tick in nice_ticks(low, high, 6) if low <= tick <= high and tick == int(tick)]
    return Axis(low, high, False, list(zip(ticks, _labels(ticks, ticks[1] - ticks[0] if len(ticks) > 1 else 1.0), strict=True)))


def _x(x: Axis, value: float) -> float:
    return round(_LEFT + x.at(value) * (_WIDTH - _LEFT - _RIGHT), 1)


def _y(y: Axis, value: float) -> float:
    return round(_HEIGHT - _BOTTOM - y.at(value) * (_HEIGHT - _TOP - _BOTTOM), 1)


def _grid(x: Axis, y: Axis) -> str:
    parts = []
    bottom = _HEIGHT - _BOTTOM
    for value, label in y.ticks:
        at = _y(y, value)
        parts.append(
            f'<path class="grid" d="M{_LEFT} {at}H{_WIDTH - _RIGHT}"/><text class="tick" x="{_LEFT - 8}" y="{at + 4:g}" '
            f'text-anchor="end">{label}</text>'
        )
    for value, label in x.ticks:
        at = _x(x, value)
        # The outermost labels stay inside the picture.
        parts.append(
            f'<path class="axis" d="M{at} {bottom}v5"/><text class="tick" x="{min(max(at, 12), _WIDTH - 14):g}" y="{bottom + 18}" '
            f'text-anchor="middle">{label}</text>'
        )
    parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{_WIDTH - _RIGHT}"/>')
    parts.append(f'<text class="tick name" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 3}" text-anchor="end">step</text>')
    return "".join(parts)


def _path(points: Sequence[Point], x: Axis, y: Axis) -> str:
    return "M" + "L".join(f"{_x(x, at):g} {_y(y, value):g}" for at, value in points)


def _curve(curve: Curve, x: Axis, y: Axis, color: int, exact: bool) -> str:
    """A mark a point when they are few; else the outline with its extremes, pale, and the average over it."""
    series = curve.series
    parts = []
    if curve.low and curve.high and curve.low.count and curve.high.count:
        band = curve.low.outline() + curve.high.outline()[::-1]
        parts.append(f'<path class="band c{color}" d="{_path(band, x, y)}Z"/>')
    outline = series.outline()
    few = curve.dots or series.count <= 40
    if few:
        parts.append(f'<path class="line c{color}" d="{_path(outline, x, y)}"/>')
        parts += [f'<circle class="dot c{color}" cx="{_x(x, at):g}" cy="{_y(y, value):g}" r="3"/>' for at, value in outline[:200]]
    else:
        smooth = series.smooth()
        noisy = not exact and _roughness(outline) > 0.01 * (series.high - series.low)
        if noisy:
            parts.append(f'<path class="raw c{color}" d="{_path(outline, x, y)}"/>')
        parts.append(f'<path class="line c{color}" d="{_path(smooth if noisy else outline, x, y)}"/>')
    for at in series.not_finite:
        parts.append(
            f'<path class="bad" d="M{_x(x, at) - 4:g} {_TOP}l8 8m0 -8l-8 8"><title>step {number(at)}: {escape(curve.name)} '
            "is not finite</title></path>"
        )
    return "".join(parts)


def _roughness(points: Sequence[Point]) -> float:
    """Mean second difference: next to nothing for a schedule, large for a noisy loss."""
    if len(points) < 3:
        return 0.0
    values = [value for _, value in points]
    return sum(abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)) / (len(values) - 2)


def _event(x: Axis, at: float, text: str) -> str:
    place = _x(x, at)
    return f'<path class="event" d="M{place} {_TOP}V{_HEIGHT - _BOTTOM}"><title>step {number(at)}: {escape(text)}</title></path>'


def _hover(curves: Sequence[Curve], x: Axis) -> str:
    """Invisible columns whose titles tell the values: what a mouse rests on, the browser shows."""
    texts: dict[int, list[str]] = {}
    for curve in curves:
        column = -1
        for bucket in curve.series.buckets:
            middle = (bucket.first + bucket.last) / 2
            now = min(int(x.at(middle) * _COLUMNS), _COLUMNS - 1)
            if now != column:
                texts.setdefault(now, [f"step {number(middle)}"]).append(f"{curve.name} {number(bucket.mean)}")
                column = now
    width = (_WIDTH - _LEFT - _RIGHT) / _COLUMNS
    return "".join(
        f'<rect class="hover" x="{_LEFT + column * width:.1f}" y="{_TOP}" width="{width:.1f}" height="{_HEIGHT - _TOP - _BOTTOM}">'
        f"<title>{escape(chr(10).join(lines))}</title></rect>"
        for column, lines in sorted(texts.items())
    )


def _legend(curves: Sequence[Curve]) -> str:
    if len(curves) == 1:
        return ""
    keys = "".join(
        f'<li><span class="key c{i % _COLORS + 1}"></span>{escape(curve.name)} <b>{number(curve.series.final)}</b></li>'
        for i, curve in enumerate(curves)
    )
    return f'<ul class="legend">{keys}</ul>'
