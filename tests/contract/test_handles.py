"""Handles are independent of one another, whatever memory they share or inherit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from contract.driving import Loaded, decode, frozen, ready, same, started

from ssmd.runtime.protocol import Program, ProgramError


def test_a_handle_does_not_depend_on_the_others_of_its_call(loaded: Loaded) -> None:
    program = loaded.program
    ready(program)
    prompts = [loaded.ids(n, seed=n) for n in (3, 40, 77)]
    steps = np.array([loaded.ids(12, seed=50 + i) for i in range(3)])
    alone = []
    for prompt, own in zip(prompts, steps, strict=True):
        handle = started(program, prompt)
        alone.append((decode(program, handle, own.tolist()), program.save(handle)))
        program.release(handle)
    handles = [started(program, prompt) for prompt in prompts]
    together = []
    for step in steps.T:
        order = [2, 0, 1]
        logits = program.decode([handles[i] for i in order], step[order].tolist())
        assert logits.shape == (3, program.vocabulary)
        together.append([logits[order.index(i)] for i in range(3)])
    for i, handle in enumerate(handles):
        assert np.stack([row[i] for row in together]).tobytes() == alone[i][0].tobytes()
        assert same(program.save(handle), alone[i][1])
        program.release(handle)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_streams_that_join_and_leave_change_nothing(loaded: Loaded, seed: int) -> None:
    """Up to nine at a time, of any length, each for some steps: the bits of each are those that it has alone."""
    program, chance = loaded.program, np.random.default_rng(seed)
    ready(program)
    prompts = [loaded.ids(n, seed=n) for n in (1, 2, 16, 40, 58, 63, 64, 77, 115, 120, 127, 130)]
    steps = [loaded.ids(int(chance.integers(3, 25)), seed=70 + i) for i in range(len(prompts))]
    alone = []
    for prompt, own in zip(prompts, steps, strict=True):
        handle = started(program, prompt)
        alone.append((decode(program, handle, own).tobytes(), frozen(program.save(handle))))
        program.release(handle)
    waiting: list[int] = chance.permutation(len(prompts)).tolist()
    running: dict[int, Any] = {}
    rows: dict[int, list[bytes]] = {i: [] for i in range(len(prompts))}
    while waiting or running:
        while waiting and len(running) < 9 and chance.random() < 0.5:
            begun = waiting.pop()
            running[begun] = started(program, prompts[begun])
        if not running:
            continue
        taking = [i for i in chance.permutation(list(running)).tolist() if chance.random() < 0.9] or list(running)
        logits = program.decode([running[i] for i in taking], [steps[i][len(rows[i])] for i in taking])
        for i, row in zip(taking, logits, strict=True):
            rows[i].append(row.tobytes())
            if len(rows[i]) == len(steps[i]):
                assert same(program.save(running[i]), alone[i][1])
                program.release(running.pop(i))
    assert [b"".join(rows[i]) for i in range(len(prompts))] == [logits for logits, _ in alone]


def test_prefills_of_others_in_between_change_nothing(loaded: Loaded) -> None:
    program, ids = loaded.program, loaded.ids(20, seed=9)
    quiet = started(program, loaded.ids(30))
    expected = decode(program, quiet, ids)
    one, two = started(program, loaded.ids(30)), program.new_state()
    rows = []
    for i in ids:
        program.prefill(two, loaded.ids(1 + i % 20, seed=i))
        rows.append(program.decode([one], [i])[0])
    assert np.stack(rows).tobytes() == expected.tobytes()
    for handle in (quiet, one, two):
        program.release(handle)


def test_a_clone_goes_its_own_way(loaded: Loaded) -> None:
    program = loaded.program
    for n in (0, 45, 46):  # both sides of a pair of buffers
        handle = started(program, loaded.ids(n))
        before = frozen(program.save(handle))
        twin = program.clone(handle)
        assert program.position(twin) == n
        assert same(program.save(twin), before)
        a = decode(program, handle, [1, 2, 3])
        assert same(program.save(twin), before)
        program.release(handle)
        assert decode(program, twin, [1, 2, 3]).tobytes() == a.tobytes()
        program.release(twin)


def test_logits_are_fresh_arrays(loaded: Loaded) -> None:
    program = loaded.program
    handle = program.new_state()
    first = program.prefill(handle, loaded.ids(20))
    second = program.decode([handle], [1])
    kept = first.copy(), second.copy()
    assert first.dtype == second.dtype == np.float32
    assert first.shape == (program.vocabulary,)
    program.decode([handle], [2])
    program.prefill(handle, [3] * 20)
    assert (first.tobytes(), second.tobytes()) == (kept[0].tobytes(), kept[1].tobytes())
    program.release(handle)


def test_memory_of_a_released_handle_brings_nothing_with_it(loaded: Loaded) -> None:
    """A new handle computes the same as in a program that never computed anything else."""
    other = loaded.load()
    ids = loaded.ids(50, seed=7)

    def conversation(owner: Program) -> tuple[bytes, ...]:
        handle = owner.new_state()
        empty = owner.save(handle)
        assert all(not a.any() for a in empty.tensors.values())
        out = (owner.prefill(handle, ids).tobytes(), decode(owner, handle, ids[:9]).tobytes())
        state = owner.save(handle)
        owner.release(handle)
        return (*out, *(a.tobytes() for a in state.tensors.values()))

    expected = conversation(other)
    other.close()
    for seed in range(2):
        handles = [started(loaded.program, loaded.ids(200, seed=20 + seed + i)) for i in range(3)]
        for handle in handles:
            loaded.program.release(handle)
        assert conversation(loaded.program) == expected


def test_release_ends_a_handle_and_may_be_repeated(loaded: Loaded) -> None:
    program = loaded.program
    handle, other = started(program, loaded.ids(9)), started(program, loaded.ids(9))
    program.release(handle)
    program.release(handle)
    calls: list[Callable[[], object]] = [
        lambda: program.prefill(handle, [1]),
        lambda: program.decode([handle], [1]),
        lambda: program.decode([other, handle], [1, 1]),
        lambda: program.position(handle),
        lambda: program.save(handle),
        lambda: program.clone(handle),
    ]
    for call in calls:
        with pytest.raises(ProgramError, match="released"):
            call()
    assert program.position(other) == 9
    program.release(other)


def test_a_closed_program_says_so(loaded: Loaded) -> None:
    program = loaded.load()
    handle = program.new_state()
    program.close()
    program.close()
    calls: list[Callable[[], object]] = [
        program.new_state,
        lambda: program.decode([handle], [1]),
        lambda: program.position(handle),
    ]
    for call in calls:
        with pytest.raises(ProgramError, match="closed"):
            call()
    program.release(handle)
