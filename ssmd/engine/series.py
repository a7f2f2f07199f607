"""A measured quantity over time: its last values, percentiles of the last minutes and since the start, and counts.

Percentiles are of a sketch with buckets 1.9 % wide (DDSketch, Masson et al. 2019): at most 1 % off, and as large
after a year as after a minute.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.core import HistogramMetricFamily

RECENT_S = 300  # that percentiles are of
_SLOT_S = 10  # values go out of them in portions of so many seconds
RECENT_VALUES = 120
_GROWTH = math.log(1.019)
_NOTHING = -2000  # the bucket of 0, below all others


class Series:
    """One quantity of which many values come. Its owner locks.

    clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recent: deque[float] = deque(maxlen=RECENT_VALUES)
        self._ever: Counter[int] = Counter()
        self._slots: deque[tuple[int, Counter[int]]] = deque()  # by time; the youngest stands last

    def add(self, values: Iterable[float]) -> None:
        """Take in values, 0 or more each."""
        slot = int(self._clock() // _SLOT_S)
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, Counter()))
            self._forget(slot)
        young, ever = self._slots[-1][1], self._ever
        for value in values:
            place = _place(value)
            young[place] += 1
            ever[place] += 1
            self._recent.append(value)

    def summary(self, *, recent: bool = True) -> dict[str, Any]:
        """{last, p50, p95, n, since_start: {p50, p95, n}, recent}: of the last five minutes but for what says it is
        of all; None where nothing came."""
        self._forget(int(self._clock() // _SLOT_S))
        lately: Counter[int] = Counter()
        for _, counts in self._slots:
            lately.update(counts)
        last = round(self._recent[-1], 3) if self._recent else None
        found = {"last": last, **_percentiles(lately), "since_start": _percentiles(self._ever)}
        return found | {"recent": [round(value, 3) for value in self._recent]} if recent else found

    def _forget(self, slot: int) -> None:
        while self._slots and self._slots[0][0] <= slot - RECENT_S // _SLOT_S:
            self._slots.popleft()


class Histogram:
    """Counts per bucket and the sum, as Prometheus has them; in ms until it is shown in seconds. Its owner locks."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._edges_ms = [bound * 1e3 for bound in bounds_s]
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_ms = 0.0

    def add(self, values_ms: Iterable[float]) -> None:
        """Count values; a bucket holds those up to its bound, with it."""
        for value in values_ms:
            self._counts[bisect_left(self._edges_ms, value)] += 1
            self._sum_ms += value

    def add_to(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        """Show it as one of a family."""
        names, total, buckets = [*map(str, self._bounds_s), "+Inf"], 0, []
        for name, n in zip(names, self._counts, strict=True):
            total += n
            buckets.append((name, float(total)))
        family.add_metric(labels, buckets, self._sum_ms / 1e3)


def _place(value: float) -> int:
    """The bucket of a value: its logarithm's, and one below all for what has none."""
    return math.ceil(math.log(value) / _GROWTH) if value > 1e-9 else _NOTHING


def _value(place: int) -> float:
    """What stands for the values of a bucket: its middle."""
    return 0.0 if place == _NOTHING else math.exp((place - 0.5) * _GROWTH)


def _percentiles(counts: Counter[int]) -> dict[str, Any]:
    n = counts.total()
    return {"p50": _percentile(counts, n, 0.50), "p95": _percentile(counts, n, 0.95), "n": n}


def _percentile(counts: Counter[int], n: int, part: float) -> float | None:
    """The smallest value that at least so large a part of all does not exceed."""
    rank = max(1, math.ceil(part * n))
    for place in sorted(counts):
        rank -= counts[place]
        if rank <= 0:
            return round(_value(place), 3)
    return None
