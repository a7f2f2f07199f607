"""Rule 1: padding never leaks."""

from __future__ import annotations

import numpy as np
import pytest
from contract.driving import Loaded, decode, feed, same, started

MORE = [pytest.param(n, marks=pytest.mark.full) for n in (3, 5, 40)]  # between those that are tried always


@pytest.mark.parametrize("n", [1, 2, 15, 17, 63, *MORE])
def test_junk_pads_change_no_bit(loaded: Loaded, n: int) -> None:
    """From position 0 and from a state with a past, and in the steps that follow."""
    program, ids = loaded.program, loaded.ids(n)
    outcomes = []
    try:
        for pad in (0, 1, program.vocabulary - 1):
            program.pad_token = pad
            fresh, old = program.new_state(), started(program, loaded.ids(37, seed=1))
            logits = [program.prefill(fresh, ids), program.prefill(old, ids)]
            states = [program.save(fresh), program.save(old)]
            later = [decode(program, fresh, [3, 4]), program.prefill(old, ids)]
            outcomes.append((logits, states, later))
            program.release(fresh)
            program.release(old)
    finally:
        program.pad_token = 0
    first = outcomes[0]
    for other in outcomes[1:]:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(first[0] + first[2], other[0] + other[2], strict=True))
        assert all(same(a, b) for a, b in zip(first[1], other[1], strict=True))


@pytest.mark.parametrize("n", [2, 3, 15, 17, 63])
def test_padded_prefill_leaves_the_state_of_its_tokens(loaded: Loaded, n: int) -> None:
    """Against the same tokens one by one, which pads nothing."""
    program, ids = loaded.program, loaded.ids(n, seed=2)
    padded, single = started(program, ids), program.new_state()
    logits = decode(program, single, ids)[-1]
    assert program.position(padded) == program.position(single) == n
    states = program.save(padded), program.save(single)
    again = program.new_state()
    difference = np.abs(feed(program, again, ids, [n]) - logits).max() / logits.std()
    assert difference <= loaded.case.tolerance
    for handle in (padded, single, again):
        program.release(handle)
    loaded.case.check_states(*states)


def test_pads_beyond_the_context_are_harmless(loaded: Loaded) -> None:
    program = loaded.program
    if program.context is None:
        pytest.skip("this program has no context")
    ids = loaded.ids(program.context)
    cut = program.context - 3
    outcomes = []
    try:
        for pad in (0, program.vocabulary - 1):
            program.pad_token = pad
            handle = started(program, ids[:cut])
            outcomes.append((program.prefill(handle, ids[cut:]), program.save(handle)))
            program.release(handle)
    finally:
        program.pad_token = 0
    assert outcomes[0][0].tobytes() == outcomes[1][0].tobytes()
    assert same(outcomes[0][1], outcomes[1][1])
    assert np.isfinite(outcomes[0][0]).all()
