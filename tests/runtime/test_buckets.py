"""Plans of prefill calls: cheapest by the stated cost, whole, within the limit, the same every time."""

from __future__ import annotations

from functools import cache
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssmd.runtime.buckets import CALL, GRID, grid, piece, pieces, plan

BUCKETS = (16, 64, 256)


def cost(lengths: list[int], buckets: tuple[int, ...]) -> float:
    return sum(min(b for b in (1, *buckets) if b >= length) + CALL for length in lengths)


@cache
def cheapest(n: int, buckets: tuple[int, ...]) -> float:
    """By another way: all numbers of whole calls of each bucket, largest first, the rest in one padded call."""
    if n <= 0:
        return 0.0
    if not buckets:
        return n * (1 + CALL)
    *smaller, largest = buckets
    options = [largest + CALL + cheapest(n - largest, buckets)]
    return min([*options, cheapest(n, tuple(smaller))])


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, []),
        (1, [1]),
        (2, [1, 1]),
        (3, [1, 1, 1]),
        (4, [4]),
        (16, [16]),
        (17, [16, 1]),
        (64, [64]),
        (200, [64, 64, 64, 8]),
        (245, [245]),
        (256, [256]),
        (300, [256, 16, 16, 12]),
    ],
)
def test_known_plans(n: int, expected: list[int]) -> None:
    assert plan(n, BUCKETS) == expected


@given(st.integers(0, 150), st.sets(st.integers(1, 70), min_size=1, max_size=4))
def test_plans_are_whole_and_cheapest(n: int, some: set[int]) -> None:
    buckets = tuple(sorted(some))
    lengths = plan(n, buckets)
    assert sum(lengths) == n
    assert all(1 <= length <= buckets[-1] for length in lengths)
    assert cost(lengths, buckets) == cheapest(n, tuple(sorted({1, *buckets})))
    assert lengths == plan(n, list(buckets))


def test_only_the_last_call_is_padded() -> None:
    for n in range(1, 1000):
        assert all(length in (1, *BUCKETS) for length in plan(n, BUCKETS)[:-1])


def test_limit_keeps_calls_short() -> None:
    assert plan(1500, BUCKETS, limit=64) == [64] * 23 + [16, 12]
    assert max(plan(1500, BUCKETS, limit=16)) == 16
    assert plan(3, BUCKETS, limit=1) == [1, 1, 1]


def test_long_prompts_use_the_bucket_cheapest_a_token() -> None:
    lengths = plan(100_000, BUCKETS)
    assert sum(lengths) == 100_000
    assert lengths[:390] == [256] * 390


def test_measured_costs_decide() -> None:
    slow_decode = {1: 50.0, 16: 60.0, 64: 150.0, 256: 700.0}
    assert plan(17, BUCKETS, costs=slow_decode) == [16, 1]
    assert plan(200, BUCKETS, costs=slow_decode) == [64, 64, 64, 8]
    assert plan(200, BUCKETS, costs={**slow_decode, 256: 300.0}) == [200]


@pytest.mark.parametrize(
    ("n", "buckets", "limit"), [(-1, BUCKETS, None), (5, (), None), (5, BUCKETS, 0), (5, (0,), None)]
)
def test_nonsense_is_refused(n: int, buckets: tuple[int, ...], limit: int | None) -> None:
    with pytest.raises(ValueError, match=r"plan|no bucket"):
        plan(n, buckets, limit)


@given(st.integers(0, 700), st.integers(0, 700), st.sets(st.integers(1, 130), min_size=1, max_size=3))
def test_pieces_end_on_the_grid_wherever_they_begin(one: int, other: int, some: set[int]) -> None:
    """So all that is read after a multiple of the grid is read by the same calls, wherever reading began."""
    start, end, sizes = min(one, other), max(one, other), sorted(some)
    cell, at, ends = grid(sizes), start, [start]
    for n in pieces(start, end, sizes):
        assert 1 <= n <= max(sizes)
        at += n
        ends.append(at)
    assert at == end
    assert {p for p in range(start, end) if p % cell == 0} <= {*ends}
    whole = list(accumulate(pieces(0, end, sizes), initial=0))
    first = next((p for p in ends if p % cell == 0), end)
    assert [p for p in ends if p >= first] == [p for p in whole if p >= first]


def test_the_grid_is_of_64_tokens_or_of_the_smallest_bucket() -> None:
    assert [grid(sizes) for sizes in (BUCKETS, (16,), (64,), (128, 256))] == [GRID, GRID, GRID, 128]
    assert list(pieces(0, 200, BUCKETS)) == [64, 64, 64, 8]
    assert list(pieces(100, 200, BUCKETS)) == [16, 12, 64, 8]
    assert list(pieces(0, 200, (128, 256))) == [128, 72]


def test_whole_cells_of_the_grid_go_at_once_where_that_is_asked() -> None:
    sizes, at, found = BUCKETS, 10, list[int]()
    while at < 700:
        found.append(piece(at, 700, sizes, wide=True))
        at += found[-1]
    assert found == [54, 256, 256, 64, 60]


def test_nothing_is_no_piece() -> None:
    with pytest.raises(ValueError, match="nothing to feed"):
        piece(7, 7, BUCKETS)
    assert list(pieces(7, 7, BUCKETS)) == []
