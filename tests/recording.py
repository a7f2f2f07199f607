"""A program that writes down what is fed to it, so that every state it gives can be computed again from nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from contract.driving import error, started

from ssmd.model.state import State
from ssmd.runtime.protocol import Handle, Logits, Program

Call = tuple[str, tuple[int, ...]]
"""("prefill" or "decode", the tokens of one handle)."""


def fingerprint(state: State) -> bytes:
    """Of all bits of a whole state."""
    assert state.since == 0
    digest = hashlib.sha256(str(state.position).encode())
    for name in sorted(state.tensors):
        array = np.ascontiguousarray(state.tensors[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.digest()


class Recorder:
    """Passes everything on to the real program. A handle that came from a store is known again by its state's bits."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._calls: dict[int, tuple[Handle, list[Call]]] = {}  # the handle too, so that its id is not another's
        self.made: dict[bytes, tuple[Call, ...]] = {}  # fingerprint of a state that was saved -> all its calls
        self.begun: list[int] = []  # positions of handles at their first call
        self.fed: list[tuple[int, ...]] = []  # what was prefilled
        self.tell: Callable[[tuple[bytes, tuple[Call, ...]]], object] | None = None  # of each that is added to `made`

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def prefill(self, handle: Handle, tokens: Sequence[int]) -> Logits:
        self._note(handle, "prefill", tokens)
        return self._program.prefill(handle, tokens)

    def decode(self, handles: Sequence[Handle], tokens: Sequence[int]) -> Logits:
        for handle, token in zip(handles, tokens, strict=True):
            self._note(handle, "decode", [token])
        return self._program.decode(handles, tokens)

    def save(self, handle: Handle, since: int = 0) -> State:
        key, calls = fingerprint(self._program.save(handle)), tuple(self._of(handle))
        self.made[key] = calls
        if self.tell is not None:
            self.tell((key, calls))
        return self._program.save(handle, since)

    def clone(self, handle: Handle) -> Handle:
        made = self._program.clone(handle)
        self._calls[id(made)] = (made, list(self._of(handle)))
        return made

    def release(self, handle: Handle) -> None:
        self._calls.pop(id(handle), None)
        self._program.release(handle)

    def _note(self, handle: Handle, kind: str, tokens: Sequence[int]) -> None:
        self._of(handle).append((kind, tuple(tokens)))
        if kind == "prefill":
            self.fed.append(tuple(tokens))

    def _of(self, handle: Handle) -> list[Call]:
        if id(handle) not in self._calls:
            position, calls = self._program.position(handle), list[Call]()
            self.begun.append(position)
            if position:
                key = fingerprint(self._program.save(handle))
                assert key in self.made, f"restored a state at {position} that no calls made"
                calls = list(self.made[key])
            self._calls[id(handle)] = (handle, calls)
        return self._calls[id(handle)][1]

    def fed_to(self, state: State) -> list[int]:
        """The tokens that were fed to a state, by the calls that made it."""
        calls = self.made.get(fingerprint(state))
        assert calls is not None, f"a stored state at {state.position} that no calls made"
        return [t for _, tokens in calls for t in tokens]

    def check(self, state: State, tolerance: float) -> None:
        """The state's recorded calls, repeated from nothing, give its bits and those of the next logits.

        One-shot feeding of all ids gives the next logits within `tolerance` standard deviations (seen to for a quarter
        of the states, as it takes the most time).
        """
        key = fingerprint(state)
        ids, program, calls = self.fed_to(state), self._program, self.made[key]
        again = program.new_state()
        for kind, tokens in calls:
            if kind == "prefill":
                program.prefill(again, tokens)
            else:
                program.decode([again], tokens)
        assert fingerprint(program.save(again)) == key
        if program.context is None or len(ids) < program.context:
            restored = program.restore(state)
            logits = [program.decode([handle], [ids[0]]) for handle in (restored, again)]
            assert logits[0].tobytes() == logits[1].tobytes()
            program.release(restored)
            if key[0] < 64:
                oneshot = started(program, ids)
                assert error(logits[0], program.decode([oneshot], [ids[0]])) <= tolerance
                program.release(oneshot)
        program.release(again)
