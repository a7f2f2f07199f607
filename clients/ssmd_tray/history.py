"""The values of a quantity in the last minutes, one for each second with values, for drawing a line."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ssmd.daemon import said

SPAN_S = 300  # as the percentiles of the metrics


@dataclass(frozen=True)
class Point:
    """The mean of the values of a second. age_s: the second's age."""

    age_s: float
    ms: float


class History:
    """The values of one of the metrics' series since the tray watches it: a point a second, for five minutes."""

    def __init__(self) -> None:
        self._points: deque[tuple[int, float, int]] = deque(maxlen=SPAN_S)  # second, sum and count
        self._seen: float | None = None  # how many values there were since the daemon's start

    def add(self, series: Mapping[str, Any], at: float) -> None:
        """Take in the new values of a series. at: seconds of the monotonic clock."""
        count = said.number(said.of(series, "since_start").get("n"))
        before, self._seen = self._seen, count
        if count is None or before is None or count <= before:
            return
        recent = series.get("recent")
        came = recent[-int(min(count - before, len(recent))) :] if isinstance(recent, list) and recent else []
        values = [value for value in map(said.number, came) if value is not None and value >= 0]
        if not values:
            return
        second, total, n = int(at), sum(values), len(values)
        if self._points and self._points[-1][0] >= second:
            second, total, n = self._points[-1][0], total + self._points[-1][1], n + self._points[-1][2]
            self._points.pop()
        self._points.append((second, total, n))

    def restart(self) -> None:
        """Note that another daemon counts from 0 again. The line continues."""
        self._seen = 0.0

    def points(self, now: float) -> tuple[Point, ...]:
        """Return the points, the oldest first."""
        found = (Point(max(0.0, now - second), total / n) for second, total, n in self._points)
        return tuple(point for point in found if point.age_s <= SPAN_S)
