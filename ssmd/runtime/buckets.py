"""The choice of prefill buckets for n tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

# A call of a bucket of T tokens takes about T + CALL units, a unit being the time that one more token adds. CALL stands
# for reading all weights once: SmolLM2-135M int8 (LiteRT, 2 threads of a Xeon) takes 12 ms for one token and 135 ms
# for 64, so a unit is 2 ms and CALL 5 units.
CALL = 5.0
GRID = 64  # tokens between the positions at which pieces of a prompt end
_EXACT = 8  # largest buckets that are planned exactly; longer prompts begin with the bucket that is cheapest per token


def plan(
    n: int, buckets: Sequence[int], limit: int | None = None, costs: Mapping[int, float] | None = None
) -> list[int]:
    """Return the cheapest cut of n tokens into prefill calls: lengths that add up to n, each at most one bucket.

    A length l runs in the smallest bucket T >= l and costs as much as T tokens: T + CALL units, as padding is not free.
    costs: measured costs instead, in any unit, for every bucket and for 1, the decode step. Of equal cuts the one with
    the fewest calls is taken, then the one with the largest first. Only the last call is padded. The same arguments
    always give the same cut: an exact resume needs the same calls.

    limit: the largest bucket to use. Raises ValueError if n < 0 or no bucket is within the limit.
    """
    if n < 0:
        raise ValueError(f"cannot plan {n} tokens")
    usable = sorted(
        {b for b in buckets if limit is None or b <= limit} | ({1} if limit is None or limit >= 1 else set())
    )
    if not buckets or min(buckets) < 1 or not usable:
        raise ValueError(f"no bucket of {tuple(buckets)} is within the limit of {limit}")
    price = {b: float(costs[b]) if costs is not None else b + CALL for b in usable}
    best = min(usable, key=lambda b: (price[b] / b, -b))
    whole = max(0, (n - _EXACT * usable[-1]) // best)
    return [best] * whole + list(_cheapest(n - whole * best, tuple(sorted(price.items(), reverse=True))))


def grid(buckets: Sequence[int]) -> int:
    """Return the multiple of positions at which pieces of a prompt end: GRID, or a larger smallest bucket."""
    return max(GRID, min(buckets))


def piece(position: int, end: int, buckets: Sequence[int], *, wide: bool = False) -> int:
    """Return how many of the tokens [position, end) to feed in the next prefill call: at least one.

    A call ends at the next multiple of the grid at the latest. So the cuts of a prompt depend only on `position` and
    `end`. wide: one call may take several whole cells of the grid, as many as a bucket holds.
    """
    if not position < end:
        raise ValueError(f"there is nothing to feed in [{position}, {end})")
    cell = grid(buckets)
    if wide and position % cell == 0 and end - position >= 2 * cell:
        return max(cell, min(end - position, max(buckets)) // cell * cell)
    return plan(min(end, position - position % cell + cell) - position, buckets)[0]


def pieces(position: int, end: int, buckets: Sequence[int]) -> Iterator[int]:
    """Yield the lengths of all calls that feed the tokens [position, end), as `piece` cuts them."""
    while position < end:
        n = piece(position, end, buckets)
        yield n
        position += n


def bucket_of(n: int, buckets: Sequence[int]) -> int:
    """Return the length of the signature for n tokens: 1, or the smallest bucket that has room for them."""
    return 1 if n == 1 else min(b for b in buckets if b >= n)


@lru_cache(maxsize=64)
def _tables(price: tuple[tuple[int, float], ...], n: int) -> tuple[list[float], list[int], list[int]]:
    """Tables over every length up to n: its cost, its number of calls, and the bucket of its first call."""
    cost, calls, first = [0.0], [0], [0]
    for length in range(1, n + 1):
        options = []
        for bucket, own in price:
            rest = max(0, length - bucket)
            options.append((own + cost[rest], 1 + calls[rest], -bucket))
        chosen = min(options)
        cost.append(chosen[0])
        calls.append(chosen[1])
        first.append(-chosen[2])
    return cost, calls, first


def _cheapest(n: int, price: tuple[tuple[int, float], ...]) -> list[int]:
    largest = price[0][0]
    first = _tables(price, (_EXACT + 1) * largest)[2]
    lengths = []
    while n > 0:
        lengths.append(min(first[n], n))
        n -= lengths[-1]
    return lengths
