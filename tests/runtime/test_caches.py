"""The memory of keys and values: what it holds is the same wherever it lies."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from ssmd.model.state import Kind, StateSpec, TensorSpec
from ssmd.runtime.hoststate.graph import SLOTS
from ssmd.runtime.hoststate.slot import Caches, RowGroup, Slot, row_groups

F16 = np.dtype(np.float16)
GROUPS = (
    RowGroup("key", 3, 5, F16, ("key_0", "key_1", "key_4")),
    RowGroup("value", 3, 5, F16, ("value_0", "value_1", "value_4")),
    RowGroup("key", 2, 16, F16, ("key_7",)),
)


def filled(caches: Caches, rows: int) -> list[NDArray[np.float32]]:
    """Rows of other numbers each, as they are told apart by `rows_of`."""
    noise = np.random.default_rng(0)
    for group, stack in zip(GROUPS, caches.stacks, strict=True):
        part = group.tokens(stack, 0, rows)
        part[...] = noise.standard_normal(part.shape, np.float32)
    return rows_of(caches, rows)


def rows_of(caches: Caches, rows: int) -> list[NDArray[np.float32]]:
    return [g.tokens(s, 0, rows).copy() for g, s in zip(GROUPS, caches.stacks, strict=True)]


@pytest.mark.parametrize("capacities", [(8, 12, 16, 17), (3, 4, 100, 160), (7, 14)])
@pytest.mark.parametrize("full", [True, False])
def test_rows_are_the_same_after_any_growth(capacities: tuple[int, ...], full: bool) -> None:
    caches = Caches(GROUPS, capacities[0], context=160, masked=True)
    rows = capacities[0] - (not full)
    expected, moved = filled(caches, rows), 0
    for capacity in capacities[1:]:
        stays = caches.has_room(capacity)
        before = caches.blocks
        caches.grow(capacity, rows)
        moved += caches.blocks is not before
        assert (caches.blocks is before) == stays
        for was, now in zip(expected, rows_of(caches, rows), strict=True):
            np.testing.assert_array_equal(was, now)
        for group, stack in zip(GROUPS, caches.stacks, strict=True):
            assert not group.tokens(stack, rows, capacity).any()  # nothing of what lay there before
            assert stack[0].shape == group.shape(capacity)
        assert caches.arrays[SLOTS].shape == (1, 1, capacity)
        assert (caches.arrays[SLOTS] < -1e4).all()
    assert moved < len(capacities) - 1 or capacities[1] > 2 * capacities[0]


@pytest.mark.parametrize("has_room", [True, False])
def test_memory_that_is_not_there_is_not_taken(has_room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small growth is not asked for: the system knows pages, not arrays."""
    rows = 1 << 18
    caches = Caches(GROUPS, rows, context=1 << 21, masked=True)
    expected, blocks = filled(caches, 100), caches.blocks
    more = caches.nbytes if has_room else 4 * caches.nbytes
    monkeypatch.setattr("ssmd.runtime.hoststate.slot.available", lambda: more - 4096)
    with pytest.raises(MemoryError, match=r"^a conversation of \d+ tokens takes .* more memory, and .* are free$"):
        caches.grow((2 if has_room else 4) * rows, 100)
    assert (caches.capacity, caches.blocks) == (rows, blocks)
    for was, now in zip(expected, rows_of(caches, 100), strict=True):
        np.testing.assert_array_equal(was, now)
    monkeypatch.setattr("ssmd.runtime.hoststate.slot.available", lambda: 0)
    caches.grow(rows + 128, 100)


def test_a_capacity_beyond_the_context_allocates_its_own_size() -> None:
    caches = Caches(GROUPS, 8, context=10, masked=False)
    assert caches.has_room(10)
    assert not caches.has_room(11)
    caches.grow(12, 0)
    assert caches.capacity == 12


def test_slots_that_are_shown_count_and_no_others() -> None:
    caches = Caches(GROUPS, 8, context=16, masked=True)
    for rows in (3, 7, 2, 2):
        caches.show(rows)
        assert (caches.arrays[SLOTS][0, 0] == 0).tolist() == [i < rows for i in range(8)]
    caches.grow(16, 2)
    caches.show(1)
    assert (caches.arrays[SLOTS][0, 0] == 0).sum() == 1


def test_what_was_never_written_is_not_counted() -> None:
    caches = Caches(GROUPS, 4, context=1 << 16, masked=False)
    small = caches.nbytes
    caches.fit(8)
    assert caches.nbytes > small
    caches.fit(4)
    assert caches.nbytes > small  # its pages are there
    assert sum(b.nbytes for b in caches.blocks) < 3 * caches.nbytes


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_come_back_from_any_parts_they_came_in(dtype: str) -> None:
    """Parts end within the blocks that are transposed at a time and at their ends; two layers, and wide heads."""
    kinds: list[tuple[int, Kind]] = [(0, "key"), (0, "value"), (3, "key"), (3, "value")]
    spec = StateSpec(tuple(TensorSpec(f"{kind}_{i}", kind, i, (8, 128), dtype) for i, kind in kinds))
    groups = row_groups(spec)
    step = next(stop - start for start, stop in groups[0].blocks(0, 1000))
    total, noise = 5 * step + 3, np.random.default_rng(0)
    store = noise.standard_normal((total, spec.row_values)).astype(dtype)
    rows = {t.name: store[:, spec.row_columns[t.name]].reshape(total, *t.shape).transpose(1, 0, 2) for t in spec.rows}
    slot = Slot(spec, groups, 1000, 512)
    slot.begin()
    for first, last in itertools.pairwise([0, 1, step, 2 * step + 5, total]):
        slot.load_rows({n: r[:, first:last] for n, r in rows.items()}, first, last)
    for t in spec.rows:
        held = slot.caches.arrays[t.name]
        held = held if t.kind == "key" else held.transpose(0, 2, 1)
        np.testing.assert_array_equal(held[:, :total], rows[t.name].astype(np.float32))
        assert not held[:, total:].any()
    for since in (total - 1, step + 2, 0):
        for name, part in slot.canonical_rows(since, total).items():
            assert part.dtype == dtype
            np.testing.assert_array_equal(part, rows[name][:, since:])
