"""Rule 2: any split of a prompt over buckets, then decode, gives the one-shot logits and state."""

from __future__ import annotations

import pytest
from contract.driving import Loaded, decode, error, feed

SPLITS = {
    "whole buckets": [64, 64, 16, 6],
    "small buckets": [16] * 9 + [6],
    "uneven": [50, 1, 13, 64, 16, 6],
    "padded in the middle": [17, 3, 33, 60, 37],
    "one by one": [1] * 150,
}


@pytest.mark.parametrize("lengths", SPLITS.values(), ids=SPLITS.keys())
def test_splits_agree(loaded: Loaded, lengths: list[int]) -> None:
    program, ids, later = loaded.program, loaded.ids(150), loaded.ids(8, seed=1)
    one, other = program.new_state(), program.new_state()
    expected = feed(program, one, ids, [64, 64, 22])
    actual = feed(program, other, ids, lengths)
    assert error(actual, expected) <= loaded.case.tolerance
    states = program.save(other), program.save(one)
    assert error(decode(program, other, later), decode(program, one, later)) <= loaded.case.tolerance
    program.release(one)
    program.release(other)
    loaded.case.check_states(*states)


def test_the_same_calls_give_the_same_bits(loaded: Loaded) -> None:
    program, ids = loaded.program, loaded.ids(100)
    results = []
    for _ in range(2):
        handle = program.new_state()
        results.append((feed(program, handle, ids, [64, 20, 16]), decode(program, handle, ids[:5])))
        program.release(handle)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*results, strict=True))
