"""What calls for one stream and for several cost, and which of them a step of so many streams is cheapest in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

Calls = tuple[tuple[int, int], ...]  # lanes of each, and how many streams are in them


@dataclass(frozen=True)
class Cost:
    """What a call takes, with one stream in its lanes and with one in each: ms, or where a step alone is 1."""

    one: float
    full: float

    def of(self, streams: int, lanes: int) -> float:
        """Give that of a call with so many streams in so many lanes."""
        return self.one + (self.full - self.one) * (streams - 1) / max(1, lanes - 1)


@lru_cache(maxsize=64)
def cheapest(streams: int, costs: tuple[tuple[int, Cost], ...]) -> Calls:
    """The calls that have room for so many streams and cost least together, by (lanes, cost); those with most lanes
    first. Among equals the fewest are taken."""
    best: list[tuple[float, int, Calls]] = [(0.0, 0, ())]
    for n in range(1, streams + 1):
        options = []
        for lanes, cost in costs:
            for seated in range(1, min(n, lanes) + 1):
                total, count, calls = best[n - seated]
                options.append((cost.of(seated, lanes) + total, count + 1, (*calls, (lanes, seated))))
        best.append(min(options))
    return tuple(sorted(best[streams][2], reverse=True))
