"""A state that comes in parts: the handle is as one that was restored at once, and of no use before it is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from contract.driving import Loaded, decode, frozen, same, started

from ssmd.model.state import Part, State, StateError, StateSpec
from ssmd.runtime.protocol import ProgramError

CUTS = (0, 1, 30, 90)


def parts_of(state: State, spec: StateSpec) -> Iterator[Part]:
    """Rows in uneven parts, then each recurrent tensor alone."""
    for first, last in pairwise(CUTS):
        if spec.rows:
            yield Part(first, last, {t.name: state.tensors[t.name][:, first:last] for t in spec.rows})
    for t in spec.recurrent:
        yield Part(state.position, state.position, {t.name: state.tensors[t.name]})


def test_it_is_the_same_as_restored(loaded: Loaded) -> None:
    program = loaded.program
    handle = started(program, loaded.ids(CUTS[-1]))
    state = frozen(program.save(handle))
    other, filled = program.new_state(), program.reserve(state.position)
    for part in parts_of(state, program.spec):
        program.fill(filled, part)
        program.decode([other], [3])  # others go on meanwhile
    assert program.position(filled) == state.position
    expected = decode(program, handle, [7, 8, 9])
    assert decode(program, filled, [7, 8, 9]).tobytes() == expected.tobytes()
    assert same(program.save(filled), program.save(handle))
    tail = program.save(filled, since=40)  # rows that were restored, and rows that were not
    assert all(
        tail.tensors[t.name].tobytes() == program.save(handle, since=40).tensors[t.name].tobytes()
        for t in program.spec.tensors
    )
    twin = program.clone(filled)
    assert same(program.save(twin), program.save(handle))
    for h in (handle, other, filled, twin):
        program.release(h)


def test_it_takes_nothing_before_it_is_whole(loaded: Loaded) -> None:
    program = loaded.program
    handle = started(program, loaded.ids(CUTS[-1]))
    state = program.save(handle)
    *most, last = parts_of(state, program.spec)
    filled = program.reserve(state.position)
    for part in [None, *most]:
        if part is not None:
            program.fill(filled, part)
        uses: list[Callable[[], object]] = [
            partial(program.prefill, filled, [1]),
            partial(program.decode, [filled], [1]),
            partial(program.save, filled),
            partial(program.clone, filled),
            partial(program.position, filled),
        ]
        for use in uses:
            with pytest.raises(ProgramError, match="not whole"):
                use()
    program.fill(filled, last)
    assert decode(program, filled, [5]).tobytes() == decode(program, handle, [5]).tobytes()
    with pytest.raises(StateError, match="whole already"):
        program.fill(filled, last)
    unfinished = program.reserve(state.position)
    program.fill(unfinished, most[0])
    for h in (handle, filled, unfinished):
        program.release(h)
    with pytest.raises(ProgramError, match="released"):
        program.fill(unfinished, last)
    again = program.new_state()  # in memory that was half filled
    assert all(not a.any() for a in program.save(again).tensors.values())
    program.release(again)


def test_parts_that_do_not_fit(loaded: Loaded) -> None:
    program, spec = loaded.program, loaded.program.spec
    handle = started(program, loaded.ids(CUTS[-1]))
    state = program.save(handle)

    def rows(first: int, last: int) -> dict[str, Any]:
        return {t.name: state.tensors[t.name][:, first:last] for t in spec.rows}

    lies: list[Callable[[], Part]] = [lambda: Part(0, 1, {"unheard_of": np.zeros(1, np.float32)})]
    if spec.rows:
        name = spec.rows[0].name
        lies += [
            lambda: Part(5, 9, rows(5, 9)),  # those before are missing
            lambda: Part(0, 9, rows(0, 8)),
            lambda: Part(0, 9, {n: a for n, a in rows(0, 9).items() if n != name}),
            lambda: Part(0, 9, rows(0, 9) | {name: rows(0, 9)[name].astype(np.float64)}),
            lambda: Part(0, 91, {n: np.concatenate([a, a[:, :1]], axis=1) for n, a in rows(0, 90).items()}),
        ]
    if spec.recurrent:
        one = spec.recurrent[0].name
        lies.append(lambda: Part(90, 90, {one: state.tensors[one][..., :1]}))
    for lie in lies:
        filled = program.reserve(state.position)
        with pytest.raises(StateError):
            program.fill(filled, lie())
        program.release(filled)
    if spec.recurrent:
        filled = program.reserve(state.position)
        program.fill(filled, Part(90, 90, {one: state.tensors[one]}))
        with pytest.raises(StateError, match="already"):
            program.fill(filled, Part(90, 90, {one: state.tensors[one]}))
        program.release(filled)
    program.release(handle)
    with pytest.raises(StateError, match="context"):
        program.reserve((program.context or 0) + 1) if program.context else program.reserve(-1)
