"""The costs of calls for one stream and for several, and the cheapest calls for a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

Calls = tuple[tuple[int, int], ...]  # (lanes, streams in them) of each call


@dataclass(frozen=True)
class Cost:
    """The cost of a call with one stream in its lanes (`one`) and with a stream in each (`full`).

    It is in ms, or relative to a single step.
    """

    one: float
    full: float

    def of(self, streams: int, lanes: int) -> float:
        """Return the cost of a call with `streams` streams in `lanes` lanes."""
        return self.one + (self.full - self.one) * (streams - 1) / max(1, lanes - 1)


@lru_cache(maxsize=64)
def cheapest(streams: int, costs: tuple[tuple[int, Cost], ...]) -> Calls:
    """Return the cheapest calls that have room for all streams, those with most lanes first.

    costs: (lanes, cost) of each kind of call. Of equal costs the fewest calls are taken.
    """
    best: list[tuple[float, int, Calls]] = [(0.0, 0, ())]
    for n in range(1, streams + 1):
        options = []
        for lanes, cost in costs:
            for seated in range(1, min(n, lanes) + 1):
                total, count, calls = best[n - seated]
                options.append((cost.of(seated, lanes) + total, count + 1, (*calls, (lanes, seated))))
        best.append(min(options))
    return tuple(sorted(best[streams][2], reverse=True))
