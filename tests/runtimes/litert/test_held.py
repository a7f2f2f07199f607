"""Memory that a graph computed with last has no other user, for XNNPACK goes on from its pointers."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from ssmd.model.artifact import Artifact
from ssmd.runtime.hoststate.batches import Batch
from ssmd.runtime.hoststate.graph import GraphError
from ssmd.runtime.hoststate.program import FlatProgram
from ssmd_litert.calls import LibraryCall
from ssmd_litert.library import LibraryGraph
from ssmd_litert.runtime import LiteRTRuntime


def used(program: FlatProgram) -> weakref.ref[Any]:
    """Memory that a decode step computed with, and its slot had."""
    with program._scratch() as slot:
        program._alone((slot, 0, 0, 1))
        return weakref.ref(slot.arenas[0].base)


def there(memory: weakref.ref[Any]) -> bool:
    gc.collect()
    return memory() is not None


def test_memory_stays_until_its_signature_computes_with_other(
    granite: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = LiteRTRuntime().load(granite)
    memory, handle = used(program), program.new_state()
    assert there(memory)
    program.prefill(handle, [1, 2, 3])
    assert there(memory)

    def failing(call: LibraryCall) -> None:
        raise GraphError("it breaks")

    with monkeypatch.context() as patch:
        patch.setattr(LibraryCall, "_compute", failing)
        with pytest.raises(GraphError, match="breaks"):
            program._alone((handle.slot, 0, 0, 1))
    assert there(memory)
    program.decode([handle], [4])
    assert not there(memory)


def test_after_the_test_of_a_load_it_is_the_programs_own(granite: Artifact) -> None:
    program = LiteRTRuntime().load(granite)
    assert isinstance(program.graph, LibraryGraph)
    [(call, before)] = program.graph.held.values()
    assert before is None
    for array in program._spare[0].recurrent[0].values():
        assert any(np.shares_memory(array, known) for known in call._memory)


def test_a_workspace_may_lie_where_a_trial_had_its_memory(granite: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of such loads every third answered otherwise from then on: XNNPACK took an input for its own copy."""
    compute, chance, others = Batch.compute, random.Random(0), list[bytearray]()

    def otherwise(batch: Batch, seated: Mapping[int, Any]) -> None:
        compute(batch, seated)
        batch.logits[0] += 1

    expected = answers(LiteRTRuntime().load(granite))
    for _ in range(24):
        others += [bytearray(chance.choice((64, 300, 1500, 9000, 40_000))) for _ in range(chance.randrange(60))]
        chance.shuffle(others)
        del others[: len(others) // 2]
        program = LiteRTRuntime().load(granite)
        with monkeypatch.context() as patch:
            patch.setattr(Batch, "compute", otherwise)
            program.batches.open(4)  # a graph is tried, and closed
        assert list(program.batches.costs) == [1]
        assert answers(program) == expected


def answers(program: FlatProgram) -> list[list[bytes]]:
    handles = [program.new_state() for _ in range(4)]
    for i, handle in enumerate(handles):
        program.prefill(handle, list(range(i, i + 5)))
    return [[program.decode([handle], [i + 7])[0].tobytes() for handle in handles] for i in range(3)]
