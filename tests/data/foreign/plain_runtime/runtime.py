"""The runtime's one class, which the entry point names, and its program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from plain_runtime.model import Array, Model
from ssmd.model.plan import Plan
from ssmd.runtime import (
    Artifact,
    CheckedHandle,
    CheckedProgram,
    Device,
    Logits,
    Part,
    ProgramError,
    RuntimeUnavailable,
    State,
    check_threads,
)

PLAN, WEIGHTS = "plan.json", "weights.safetensors"


class PlainRuntime:
    name = "plain"

    def devices(self) -> list[Device]:
        return [Device("cpu", "numpy")]

    def load(self, artifact: Artifact, *, device: str | None = None, threads: int | None = None) -> PlainProgram:
        """Load an artifact; numpy's BLAS chooses its threads itself. Raises ProgramError or RuntimeUnavailable."""
        if artifact.manifest.runtime != self.name:
            raise ProgramError(f"artifact {artifact.path} is for the runtime {artifact.manifest.runtime!r}")
        if device not in (None, "cpu"):
            raise RuntimeUnavailable(f"runtime plain has no device {device!r}; it has: cpu")
        check_threads(threads)
        return PlainProgram(artifact, threads or 1)


@dataclass(eq=False, slots=True)
class _Handle(CheckedHandle):
    tensors: dict[str, Array] = field(default_factory=dict)  # canonical; replaced by a step, never changed


class PlainProgram(CheckedProgram[_Handle]):
    """A model in numpy. A prefill computes the tokens there are, so nothing is ever padded."""

    def __init__(self, artifact: Artifact, threads: int) -> None:
        super().__init__(artifact.manifest)
        self.threads = threads
        self.producer = f"plain 1.0; numpy {np.__version__}; {threads} threads"
        plan = Plan.open(artifact.file(PLAN))
        if plan.spec("float32").digest() != self.spec.digest():
            raise ProgramError(f"artifact {artifact.path}: its plan has another state than its manifest")
        self._model = Model(plan, load_file(artifact.file(WEIGHTS)), self.context or 0)

    def _new(self, tokens: int) -> _Handle:
        tensors = {t.name: np.zeros(t.shape, np.float32) for t in self.spec.recurrent}
        for t in self.spec.rows:
            heads, size = t.shape
            tensors[t.name] = np.zeros((heads, 0, size), np.float32)
        return _Handle(self, tensors=tensors)

    def _prefill(self, handle: _Handle, ids: NDArray[np.int32]) -> Logits:
        logits: Logits
        logits, handle.tensors = self._model.forward(ids, handle.position, handle.tensors)
        handle.position += len(ids)
        return logits

    def _decode(self, handles: Sequence[_Handle], ids: NDArray[np.int32], logits: Logits) -> None:
        for i, handle in enumerate(handles):
            logits[i] = self._prefill(handle, ids[i : i + 1])

    def _save(self, handle: _Handle, since: int) -> State:
        rows = {t.name for t in self.spec.rows}
        tensors = {n: a[:, since:].copy() if n in rows else a.copy() for n, a in handle.tensors.items()}
        for array in tensors.values():
            array.flags.writeable = False
        return State(handle.position, since, tensors)

    def _fill(self, handle: _Handle, recurrent: Mapping[str, Array], rows: Part | None) -> None:
        handle.tensors |= {name: np.array(array, np.float32) for name, array in recurrent.items()}
        for t in self.spec.rows if rows is not None else ():
            assert rows is not None
            handle.tensors[t.name] = np.concatenate([handle.tensors[t.name], rows.tensors[t.name]], 1)

    def _clone(self, handle: _Handle) -> _Handle:
        return _Handle(self, tensors=dict(handle.tensors))

    def _release(self, handle: _Handle) -> None:
        handle.tensors = {}

    def _close(self) -> None:
        del self._model
