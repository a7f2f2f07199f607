"""Rule 5: what cannot be done is refused before anything runs, and the handle is unharmed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from contract.driving import Loaded, decode, same, started

from ssmd.model.state import State, StateError
from ssmd.runtime.protocol import ProgramError


@pytest.fixture
def unharmed(loaded: Loaded) -> Iterator[Any]:
    """A handle whose state and next logits must be what they would have been."""
    program = loaded.program
    handle, twin = (started(program, loaded.ids(33)) for _ in range(2))
    before = program.save(handle)
    yield handle
    assert same(program.save(handle), before)
    assert decode(program, handle, [4, 5]).tobytes() == decode(program, twin, [4, 5]).tobytes()
    program.release(handle)
    program.release(twin)


@pytest.mark.parametrize("bad", [-1, "vocabulary", 2**31, 2**70, 1.5, "x", None, float("nan")])
def test_ids_outside_the_vocabulary(loaded: Loaded, unharmed: Any, bad: Any) -> None:
    program = loaded.program
    bad = program.vocabulary if bad == "vocabulary" else bad
    with pytest.raises(ProgramError, match="token id"):
        program.prefill(unharmed, [1, 2, bad])
    with pytest.raises(ProgramError, match="token id"):
        program.decode([unharmed], [bad])


def test_too_few_and_too_many_tokens(loaded: Loaded, unharmed: Any) -> None:
    program = loaded.program
    for ids in ([], [1] * (max(program.buckets) + 1)):
        with pytest.raises(ProgramError, match="prefill takes"):
            program.prefill(unharmed, ids)
    for handles, ids in (([], []), ([unharmed], [1, 2]), ([unharmed], []), ([unharmed, unharmed], [1, 2])):
        with pytest.raises(ProgramError, match="decode"):
            program.decode(handles, ids)


def test_more_than_the_context(loaded: Loaded, unharmed: Any) -> None:
    program = loaded.program
    if program.context is None:
        pytest.skip("this program has no context")
    full = started(program, loaded.ids(program.context - 1))
    with pytest.raises(ProgramError, match="context"):
        program.prefill(full, [1, 2])
    program.decode([full], [1])
    before = program.save(full)
    calls: list[Callable[[], object]] = [
        lambda: program.decode([full], [1]),
        lambda: program.prefill(full, [1]),
        lambda: program.decode([unharmed, full], [1, 1]),
    ]
    for call in calls:
        with pytest.raises(ProgramError, match="context"):
            call()
    assert same(program.save(full), before)
    program.release(full)


def test_handles_of_others(loaded: Loaded, unharmed: Any) -> None:
    program, other = loaded.program, loaded.load()
    stranger = other.new_state()
    for handle in (stranger, None, 7, object()):
        calls: list[Callable[[Any], object]] = [
            lambda h: program.prefill(h, [1]),
            lambda h: program.decode([unharmed, h], [1, 1]),
            program.position,
            program.save,
            program.clone,
            program.release,
        ]
        for call in calls:
            with pytest.raises(ProgramError, match="another program"):
                call(handle)
    other.close()


@pytest.mark.parametrize("since", [-1, 34])
def test_rows_that_are_not_there(loaded: Loaded, unharmed: Any, since: int) -> None:
    with pytest.raises(ProgramError, match="since"):
        loaded.program.save(unharmed, since=since)


def spoilt(change: Callable[[dict[str, Any]], None]) -> Callable[[State], State]:
    def spoil(state: State) -> State:
        tensors: dict[str, Any] = {n: a.copy() for n, a in state.tensors.items()}
        change(tensors)
        return State(state.position, 0, tensors)

    return spoil


def _not_finite(tensors: dict[str, Any]) -> None:
    next(iter(tensors.values())).reshape(-1)[3] = np.inf


LIES: dict[str, Callable[[State], State]] = {
    "a tensor less": spoilt(lambda t: t.pop(next(iter(t)))),
    "a tensor more": spoilt(lambda t: t.update(extra=np.zeros(3, np.float32))),
    "another shape": spoilt(lambda t: t.update({n: a[:-1] for n, a in t.items()})),
    "another dtype": spoilt(lambda t: t.update({n: a.astype(np.float64) for n, a in t.items()})),
    "not finite": spoilt(_not_finite),
    "another position": lambda s: State(s.position + 1, 0, s.tensors),
    "a negative position": lambda s: State(-1, 0, s.tensors),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_states_that_do_not_fit(loaded: Loaded, unharmed: Any, lie: Callable[[State], State]) -> None:
    program = loaded.program
    state = program.save(unharmed)
    if not program.spec.rows and "position" in "".join(k for k, v in LIES.items() if v is lie):
        pytest.skip("recurrent tensors do not show a position")
    with pytest.raises(StateError):
        program.restore(lie(state))


def test_a_state_longer_than_the_context(loaded: Loaded, unharmed: Any) -> None:
    program = loaded.program
    if program.context is None:
        pytest.skip("this program has no context")
    n = program.context + 1
    tensors = {t.name: np.zeros(t.shape_at(n), t.numpy_dtype) for t in program.spec.tensors}
    with pytest.raises(StateError, match="context"):
        program.restore(State(n, 0, tensors))


def test_loading_something_else(loaded: Loaded) -> None:
    with pytest.raises((ProgramError, RuntimeError), match="device"):
        loaded.load(device="no such device")
    for threads in (0, -1, 10**6):
        with pytest.raises(ProgramError, match="threads"):
            loaded.load(threads=threads)
