"""A program whose states live in MLState: a step computes with them where they are, a save reads them, a restore
writes them.

Core ML gives and takes whole states only, as float32, though it stores float16: a save of any rows reads all slots of
the caches, and a state that comes from elsewhere is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ssmd.model.state import Part, State
from ssmd.runtime.checked import CheckedHandle, CheckedProgram
from ssmd.runtime.hoststate.graph import Array, GraphError
from ssmd.runtime.hoststate.signatures import signature_name
from ssmd.runtime.protocol import Logits, StateLost
from ssmd_coreml.backend import Function, StateStore
from ssmd_coreml.graph import predicted
from ssmd_coreml.stacks import rounded, stacks

if TYPE_CHECKING:
    from ssmd.model.artifact import Manifest


@dataclass(eq=False, slots=True)
class _Handle(CheckedHandle):
    """A handle. `staged`: the stacks of a state that comes in parts, until it is whole."""

    state: StateStore | None = None
    staged: dict[str, NDArray[np.float32]] | None = None


class _Step:
    """A function and what it is given: memory that all handles share."""

    def __init__(self, length: int, function: Function) -> None:
        self.length, self.function = length, function
        self.tokens = np.zeros((1, length), np.int32)
        self.pos = np.zeros(1, np.int32)
        self.n_valid = np.zeros(1, np.int32)
        self._inputs: dict[str, Array] = {"tokens": self.tokens, "pos": self.pos, "n_valid": self.n_valid}

    def run(self, ids: NDArray[np.int32], position: int, state: StateStore, pad: int) -> Array:
        """Feed the ids; logits f32[V] in memory that nothing else uses. Raises GraphError."""
        self.tokens[0, : len(ids)] = ids
        self.tokens[0, len(ids) :] = pad
        self.pos[0], self.n_valid[0] = position, len(ids)
        logits: Array = predicted(self.function, self._inputs, state)["logits"][0]
        return logits


class StatefulProgram(CheckedProgram[_Handle]):
    """A package whose states live in MLState, as a Program. `pad_token` fills a bucket and never changes a result."""

    def __init__(self, functions: Mapping[str, Function], manifest: Manifest, producer: str, threads: int) -> None:
        super().__init__(manifest)
        self.producer = producer
        self.threads = threads
        self.pad_token = 0
        self.stacks = stacks(self.spec, manifest.context or 1)
        self._steps = [_Step(n, functions[signature_name(n, 0, 0)]) for n in sorted({1, *self.buckets})]

    def self_test(self) -> None:
        """Show that a state holds what is written to it, that a step changes it, and that it computes numbers.

        Raises GraphError if not.
        """
        noise = np.random.default_rng(0)
        state = self._steps[0].function.make_state()
        written = {s.name: rounded(noise.standard_normal(s.shape, np.float32)) for s in self.stacks}
        for name, array in written.items():
            _write(state, name, array)
            if not np.array_equal(_read(state, name), array):
                raise GraphError(f"{name} does not hold what was written to it")
        logits = self._steps[0].run(np.zeros(1, np.int32), 0, state, self.pad_token)
        if logits.shape != (self.vocabulary,) or not np.isfinite(logits).all():
            raise GraphError("its logits are no numbers: the weights are damaged")
        same = [name for name, array in written.items() if np.array_equal(_read(state, name), array)]
        if same:
            raise GraphError(f"a step left {', '.join(same)} as it was")

    def _new(self, tokens: int) -> _Handle:
        return _Handle(self, state=self._steps[0].function.make_state())

    def _prefill(self, handle: _Handle, ids: NDArray[np.int32]) -> Logits:
        step = next(s for s in self._steps if s.length >= len(ids))
        return self._fed(step, ids, handle, [handle])

    def _decode(self, handles: Sequence[_Handle], ids: NDArray[np.int32], logits: Logits) -> None:
        for i, handle in enumerate(handles):
            logits[i] = self._fed(self._steps[0], ids[i : i + 1], handle, handles)

    def _fed(self, step: _Step, ids: NDArray[np.int32], handle: _Handle, call: Sequence[_Handle]) -> Logits:
        """Feed the ids to `handle`. Raises StateLost.

        If Core ML fails, the states of all handles of the call are undefined, and so lost.
        """
        assert handle.state is not None  # until it is released
        try:
            logits = step.run(ids, handle.position, handle.state, self.pad_token)
        except GraphError as err:
            for one in call:
                one.lost = True
            raise StateLost(f"{err}; ask once more, it goes on from what is stored") from err
        handle.position += len(ids)
        return logits

    def _save(self, handle: _Handle, since: int) -> State:
        assert handle.state is not None
        tensors: dict[str, NDArray[Any]] = {}
        for stack in self.stacks:
            whole = _read(handle.state, stack.name)
            for i, t in enumerate(stack.layers):
                part = stack.canonical(whole, i, since, handle.position)
                tensors[t.name] = part if stack.recurrent else part.astype(t.numpy_dtype)
                tensors[t.name].flags.writeable = False
        return State(handle.position, since, tensors)

    def _fill(self, handle: _Handle, recurrent: Mapping[str, NDArray[Any]], rows: Part | None) -> None:
        assert handle.missing is not None
        assert handle.state is not None
        if handle.staged is None:
            handle.staged = {s.name: np.zeros(s.shape, np.float32) for s in self.stacks}
        for stack in self.stacks:
            for i, t in enumerate(stack.layers):
                if rows is not None and not stack.recurrent:
                    held = stack.canonical(handle.staged[stack.name], i, rows.first, rows.last)
                    held[...] = rounded(rows.tensors[t.name])
                elif t.name in recurrent:
                    stack.canonical(handle.staged[stack.name], i, 0, 0)[...] = rounded(recurrent[t.name])
        fed = handle.position if rows is None else rows.last
        if fed == handle.missing.position and handle.missing.recurrent == recurrent.keys():  # the last part
            for name, array in handle.staged.items():
                _write(handle.state, name, array)
            handle.staged = None

    def _clone(self, handle: _Handle) -> _Handle:
        twin = self._new(handle.position)
        assert handle.state is not None
        assert twin.state is not None
        for stack in self.stacks:
            _write(twin.state, stack.name, _read(handle.state, stack.name))
        return twin

    def _release(self, handle: _Handle) -> None:
        handle.state = handle.staged = None

    def _close(self) -> None:
        self._steps = []


def _read(state: StateStore, name: str) -> NDArray[np.float32]:
    """Read a state as float32. Raises GraphError."""
    try:
        return np.require(state.read_state(name), np.float32, ["W"])
    except Exception as err:  # coremltools raises RuntimeError and plain Exception
        raise GraphError(f"Core ML cannot read the state {name}: {err}") from err


def _write(state: StateStore, name: str, array: NDArray[np.float32]) -> None:
    """Write a state. Raises GraphError."""
    try:
        state.write_state(name, array)
    except Exception as err:
        raise GraphError(f"Core ML cannot write the state {name}: {err}") from err
