"""Rule 3: save, a new process, restore, the same calls: bit for bit equal logits and states."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from contract import continuation
from contract.driving import Loaded, decode, frozen, same, started

from ssmd.model.state import State, StateError


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_new_process_continues_bit_for_bit(loaded: Loaded, tmp_path: Path, threads: int) -> None:
    program, ids = loaded.load(threads=threads), loaded.ids(95, seed=3)
    handle = started(program, loaded.ids(83))
    decode(program, handle, [1, 2, 3])
    state = program.save(handle)
    np.savez(tmp_path / "state.npz", allow_pickle=False, position=state.position, ids=ids, **state.tensors)
    expected = continuation.continue_from(program, handle, ids)
    program.close()
    artifact, files = loaded.artifact, (tmp_path / "state.npz", tmp_path / "logits.npz")
    arguments = [artifact.manifest.runtime, loaded.case.device, artifact.path, threads, *files]
    done = subprocess.run(
        [sys.executable, continuation.__file__, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "logits.npz") as actual:
        assert set(actual.files) == set(expected)
        for name in expected:
            assert actual[name].tobytes() == expected[name].tobytes(), name


def test_save_and_restore_return_the_same_state(loaded: Loaded) -> None:
    program = loaded.program
    for n in (0, 1, 90):
        handle = started(program, loaded.ids(n))
        state = program.save(handle)
        assert (state.position, state.since) == (n, 0)
        state.check(program.spec)
        again = program.restore(state)
        assert program.position(again) == n
        assert same(program.save(again), state)
        assert decode(program, again, [7, 8]).tobytes() == decode(program, handle, [7, 8]).tobytes()
        program.release(handle)
        program.release(again)


def test_save_is_not_disturbed_and_does_not_disturb(loaded: Loaded) -> None:
    program, ids = loaded.program, loaded.ids(70)
    quiet, saved = started(program, ids), started(program, ids)
    copies = []
    for step in (5, 6, 7):
        state = program.save(saved)
        copies.append((state, frozen(state)))
        a, b = (decode(program, h, [step, step + 1]) for h in (quiet, saved))
        assert a.tobytes() == b.tobytes()
    program.prefill(saved, ids[:40])
    program.release(saved)
    reused = [started(program, loaded.ids(90, seed=seed)) for seed in (5, 6)]  # in memory that was `saved`'s
    more = [program.save(h) for h in reused]
    for state, copy in copies:
        assert same(state, copy)
    assert not any(a.flags.writeable for state, _ in copies for a in state.tensors.values())
    for handle in (quiet, *reused):
        program.release(handle)
    assert all(s.position == 90 for s in more)


def test_rows_in_parts_are_the_whole(loaded: Loaded) -> None:
    """save(since=k) carries the rows from k on and whole recurrent tensors."""
    program = loaded.program
    handle = program.new_state()
    parts = [program.save(handle)]
    for n in (64, 3, 1, 30):
        program.prefill(handle, loaded.ids(n, seed=n))
        parts.append(program.save(handle, since=parts[-1].position))
        assert parts[-1].since == parts[-2].position
    whole = program.save(handle)
    assert program.save(handle, since=whole.position).since == whole.position
    for t in program.spec.rows:
        rows = np.concatenate([p.tensors[t.name] for p in parts], axis=1)
        assert rows.tobytes() == whole.tensors[t.name].tobytes()
    for t in program.spec.recurrent:
        assert parts[-1].tensors[t.name].tobytes() == whole.tensors[t.name].tobytes()
    glued = {t.name: whole.tensors[t.name] for t in program.spec.recurrent}
    glued |= {t.name: np.concatenate([p.tensors[t.name] for p in parts], axis=1) for t in program.spec.rows}
    again = program.restore(State(whole.position, 0, glued))
    assert decode(program, again, [9]).tobytes() == decode(program, handle, [9]).tobytes()
    program.release(again)
    program.release(handle)


def test_a_part_cannot_be_restored(loaded: Loaded) -> None:
    program = loaded.program
    handle = started(program, loaded.ids(20))
    with pytest.raises(StateError, match="since"):
        program.restore(program.save(handle, since=5))
    program.release(handle)
