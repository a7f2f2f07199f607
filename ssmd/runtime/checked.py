"""The checks and the lock of every program's calls: the part of the contract that does not depend on the runtime.

A program derives from `CheckedProgram`, its handles from `CheckedHandle`. It implements the methods that start with an
underscore. Each of them is called with the lock held and with checked arguments.
"""

from __future__ import annotations

import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ssmd.model.state import Part, State, StateError
from ssmd.runtime.protocol import Handle, Logits, ProgramError, StateLost

if TYPE_CHECKING:
    from ssmd.model.artifact import Manifest


@dataclass(slots=True)
class MissingState:
    """The missing parts of a reserved handle: KV rows up to `position`, and these recurrent tensors."""

    position: int
    recurrent: set[str]


@dataclass(eq=False, slots=True)
class CheckedHandle:
    """A handle's common fields. A program's own handles add their memory."""

    program: object  # the program that made it
    _: KW_ONLY
    position: int = 0  # tokens fed; while rows are missing, rows taken in
    missing: MissingState | None = None  # None: the handle is whole
    released: bool = False
    lost: bool = False  # the state was lost, with its device or in a step that failed


H = TypeVar("H", bound=CheckedHandle)


def token_ids(tokens: Sequence[int], vocabulary: int) -> NDArray[np.int32]:
    """Check token ids and return them as int32 [n]. Raises ProgramError, which names the first invalid one."""
    for token in tokens:
        try:
            known = 0 <= operator.index(token) < vocabulary
        except TypeError:
            known = False
        if not known:
            raise ProgramError(f"{token!r} is not a token id: ids are 0 to {vocabulary - 1}")
    return np.asarray(tokens, np.int32).reshape(len(tokens))


class CheckedProgram(ABC, Generic[H]):
    """The calls of ssmd.runtime.Program. They may come from any thread and wait for one another."""

    producer: str
    threads: int
    wide = False  # True if one call of several grid cells (ssmd/runtime/buckets.py) gives the bits of a call for each

    def __init__(self, manifest: Manifest) -> None:
        self.spec = manifest.spec
        self.buckets = manifest.buckets
        self.context = manifest.context
        self.vocabulary = manifest.vocabulary
        self._lock = threading.Lock()
        self._closed = False

    # calls of the contract

    def new_state(self) -> Handle:
        with self._lock:
            self._check_open()
            return self._new(0)

    def prefill(self, handle: Handle, tokens: Sequence[int]) -> Logits:
        ids = token_ids(tokens, self.vocabulary)
        if not 1 <= len(ids) <= self.buckets[-1]:
            raise ProgramError(f"a prefill takes 1 to {self.buckets[-1]} tokens, not {len(ids)}")
        with self._lock:
            return self._prefill(self._held(handle, len(ids)), ids)

    def decode(self, handles: Sequence[Handle], tokens: Sequence[int]) -> Logits:
        ids = token_ids(tokens, self.vocabulary)
        if not len(handles) == len(ids) >= 1:
            raise ProgramError(f"decode takes one token for each handle, not {len(ids)} for {len(handles)}")
        if len({id(h) for h in handles}) != len(handles):
            raise ProgramError("decode was given the same handle twice")
        with self._lock:
            for handle in handles:
                self._held(handle, 1)
            logits = np.empty((len(handles), self.vocabulary), np.float32)
            self._decode(handles, ids, logits)
            return logits

    def prepare(self) -> None:
        """Do work now that is otherwise done on first need, such as opening graphs. For idle times and for trials."""

    def step_cost(self, streams: int) -> float:
        """Return the cost of a decode step of `streams` handles; a step of one costs 1. Here they run in turn."""
        return float(streams)

    def position(self, handle: Handle) -> int:
        with self._lock:
            return self._held(handle, 0).position

    def save(self, handle: Handle, since: int = 0) -> State:
        with self._lock:
            held = self._held(handle, 0)
            if not 0 <= since <= held.position:
                raise ProgramError(f"cannot save rows since {since} of a state at position {held.position}")
            return self._save(held, since)

    def restore(self, state: State) -> Handle:
        if state.since:
            raise StateError(f"a state that holds rows since {state.since} only cannot be restored: all are needed")
        state.check(self.spec)
        handle = self.reserve(state.position)
        self.fill(handle, Part(0, state.position, state.tensors))
        return handle

    def reserve(self, position: int) -> Handle:
        if position < 0 or (self.context is not None and position > self.context):
            raise StateError(f"the state has {position} tokens, the context is {self.context}")
        with self._lock:
            self._check_open()
            held = self._new(position)
            held.position = position if not self.spec.rows else 0
            held.missing = MissingState(position, {t.name for t in self.spec.recurrent})
            return held

    def fill(self, handle: Handle, part: Part) -> None:
        part.check(self.spec)
        with self._lock:
            held = self._held(handle, 0, whole=False)
            missing = held.missing
            if missing is None:
                raise StateError("the handle is whole already")
            recurrent = part.tensors.keys() - self.spec.row_columns.keys()
            if strangers := recurrent - missing.recurrent:
                raise StateError(f"state tensors {sorted(strangers)} were given already")
            has_rows = part.last > part.first and bool(self.spec.rows)
            if has_rows and not (part.first == held.position and part.last <= missing.position):
                raise StateError(
                    f"rows [{part.first}, {part.last}) do not fit: those from {held.position} to {missing.position} "
                    "are missing"
                )
            self._fill(held, {name: part.tensors[name] for name in recurrent}, part if has_rows else None)
            if has_rows:
                held.position = part.last
            missing.recurrent -= recurrent
            if held.position == missing.position and not missing.recurrent:
                held.missing = None

    def clone(self, handle: Handle) -> Handle:
        with self._lock:
            held = self._held(handle, 0)
            twin = self._clone(held)
            twin.position = held.position
            return twin

    def release(self, handle: Handle) -> None:
        with self._lock:
            held = self._own(handle)
            if not held.released:
                held.released = True
                self._release(held)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._close()

    # methods that a program implements; no closed program, released handle or too long input gets here

    @abstractmethod
    def _new(self, tokens: int) -> H:
        """Return a handle at position 0, with room for this many tokens."""

    @abstractmethod
    def _prefill(self, handle: H, ids: NDArray[np.int32]) -> Logits:
        """Feed the ids and move the handle's position on. Returns logits in a fresh array."""

    @abstractmethod
    def _decode(self, handles: Sequence[H], ids: NDArray[np.int32], logits: Logits) -> None:
        """Feed one id to each handle, fill `logits` [n, vocab] and move the positions on."""

    @abstractmethod
    def _save(self, handle: H, since: int) -> State: ...

    @abstractmethod
    def _fill(self, handle: H, recurrent: Mapping[str, NDArray[Any]], rows: Part | None) -> None:
        """Take in whole recurrent tensors, and a part's rows if it has some."""

    @abstractmethod
    def _clone(self, handle: H) -> H:
        """Return a handle with a copy of the state. The caller sets its position."""

    @abstractmethod
    def _release(self, handle: H) -> None:
        """Free a handle's memory. Called once for a handle, also after `_close`."""

    @abstractmethod
    def _close(self) -> None:
        """Free the program's memory. Called once."""

    # the checks

    def _check_open(self) -> None:
        if self._closed:
            raise ProgramError("the program is closed")

    def _own(self, handle: Handle) -> H:
        if not isinstance(handle, CheckedHandle) or handle.program is not self:
            raise ProgramError("the handle belongs to another program")
        return cast(H, handle)

    def _held(self, handle: Handle, more: int, *, whole: bool = True) -> H:
        """Return the handle, if it can take `more` tokens. Raises ProgramError or StateLost."""
        self._check_open()
        held = self._own(handle)
        if held.lost:
            raise StateLost("this state was lost, with its device or in a step that failed")
        if held.released:
            raise ProgramError("the handle was released")
        if whole and held.missing is not None:
            raise ProgramError("the handle is not whole: parts of its state are still missing")
        if self.context is not None and held.position + more > self.context:
            raise ProgramError(f"{held.position} + {more} tokens do not fit into a context of {self.context}")
        return held
