"""Curves of any length in bounded memory: buckets that keep their extremes, so that no spike is lost."""

import math
from collections.abc import Sequence
from typing import NamedTuple

_LARGEST = 1e100  # beyond it a value counts as not finite and below its inverse as 0: sums and logarithms stay in range


class Bucket(NamedTuple):
    """Neighbouring points of a curve."""

    first: float  # x of the first and of the last point
    last: float
    low_x: float  # where the smallest value is
    low: float
    high_x: float
    high: float
    total: float
    points: int

    @property
    def mean(self) -> float:
        return self.total / self.points


class Series:
    """A curve (x ascending), halved in resolution whenever it has filled its buckets: 10 million points take the room of 1,000."""

    def __init__(self, limit: int = 1000):
        self._limit = limit
        self._width = 1  # points a bucket
        self._closed: list[Bucket] = []
        self._open = 0  # points of the bucket that is being filled; its parts are below, loose for speed
        self._first = self._last = self._low_x = self._low = self._high_x = self._high = self._total = 0.0
        self.final = math.nan
        self.not_finite: list[float] = []  # x of the first hundred points that are NaN, infinite or beyond 1e100

    def add(self, x: float, y: float) -> None:
        """One more point."""
        if not -_LARGEST <= y <= _LARGEST:
            if len(self.not_finite) < 100:
                self.not_finite.append(x)
            return
        if -1 / _LARGEST < y < 1 / _LARGEST:
            y = 0.0
        if self._open == self._width:
            self._close()
        if not self._open:
            self._first = self._low_x = self._high_x = x
            self._low = self._high = self._total = y
        else:
            if y < self._low:
                self._low, self._low_x = y, x
            elif y > self._high:
                self._high, self._high_x = y, x
            self._total += y
        self._last, self.final = x, y
        self._open += 1

    def extend(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        """Many more points, at the speed of the built-in functions where buckets are wide."""
        place, count = 0, len(ys)
        while place < count:
            if self._open == self._width:
                self._close()
            end = min(count, place + self._width - self._open)
            part = ys[place:end]
            low, high, total = min(part), max(part), sum(part)
            plain = low >= -_LARGEST and high <= _LARGEST and total - total == 0  # no NaN among them, whose comparisons are all false
            if end - place < 8 or not plain or 0 < abs(low) < 1 / _LARGEST or 0 < abs(high) < 1 / _LARGEST:
                for x, y in zip(xs[place:end], part, strict=True):
                    self.add(x, y)
                place = end
                continue
            if not self._open:
                self._first, self._total, self._low, self._high = xs[place], 0.0, math.inf, -math.inf
            if low < self._low:
                self._low, self._low_x = low, xs[place + part.index(low)]
            if high > self._high:
                self._high, self._high_x = high, xs[place + part.index(high)]
            self._total += total
            self._last, self.final = xs[end - 1], part[-1]
            self._open += end - place
            place = end

    def _bucket(self) -> Bucket:
        return Bucket(self._first, self._last, self._low_x, self._low, self._high_x, self._high, self._total, self._open)

    def _close(self) -> None:
        """Puts the full bucket with the others; when there are too many, two make one and the next takes twice the points."""
        self._closed.append(self._bucket())
        self._open = 0
        if len(self._closed) >= self._limit - 1:
            odd = self._closed.pop() if len(self._closed) % 2 else None
            self._closed = [_join(left, right) for left, right in zip(self._closed[::2], self._closed[1::2], strict=True)]
            self._width *= 2
            if odd:
                self._first, self._last, self._low_x, self._low, self._high_x, self._high, self._total, self._open = odd

    @property
    def buckets(self) -> list[Bucket]:
        """The curve so far."""
        return [*self._closed, self._bucket()] if self._open else self._closed

    @property
    def count(self) -> int:
        """Points that are finite."""
        return len(self._closed) * self._width + self._open

    @property
    def low(self) -> float:
        """The smallest value; infinity without points."""
        return min((bucket.low for bucket in self.buckets), default=math.inf)

    @property
    def high(self) -> float:
        """The largest value; minus infinity without points."""
        return max((bucket.high for bucket in self.buckets), default=-math.inf)

    def outline(self) -> list[tuple[float, float]]:
        """The points to draw: every bucket's extremes in their order."""
        points: list[tuple[float, float]] = []
        for bucket in self.buckets:
            ends = sorted({(bucket.low_x, bucket.low), (bucket.high_x, bucket.high)})
            points += ends
        return points

    def smooth(self, share: float = 0.02) -> list[tuple[float, float]]:
        """Exponential average over about `share` of the curve, corrected for its start; one point a bucket."""
        decay = 1 - 1 / max(share * len(self.buckets), 1)
        points, average, weight = [], 0.0, 0.0
        for bucket in self.buckets:
            average = decay * average + (1 - decay) * bucket.mean
            weight = decay * weight + (1 - decay)
            points.append(((bucket.first + bucket.last) / 2, average / weight))
        return points


def _join(left: Bucket, right: Bucket) -> Bucket:
    low = left if left.low <= right.low else right
    high = left if left.high >= right.high else right
    return Bucket(left.first, right.last, low.low_x, low.low, high.high_x, high.high, left.total + right.total, left.points + right.points)
