"""Helpers for tests of runtimes over a flat graph: a talk bit by bit, altered artifacts, faulty libraries."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssmd.model.artifact import MANIFEST, Artifact, seal
from ssmd.runtime.hoststate.buffers import carve
from ssmd.runtime.hoststate.graph import Tensor
from ssmd.runtime.hoststate.program import FlatProgram


def conversation(program: FlatProgram) -> tuple[bytes, ...]:
    """Bits of logits and states of a few calls."""
    handle = program.new_state()
    out = [program.prefill(handle, list(range(50))), program.prefill(handle, [5] * 9)]
    out += [program.decode([handle], [i]) for i in (1, 2, 3)]
    state = program.save(handle)
    program.release(handle)
    return (*(a.tobytes() for a in out), *(state.tensors[t.name].tobytes() for t in program.spec.tensors))


def altered(artifact: Artifact, folder: Path, **changed: Any) -> Artifact:
    """A copy, unless `folder` has one whose files were altered, whose manifest says something else; sealed again."""
    if not folder.exists():
        shutil.copytree(artifact.path, folder)
    fields = json.loads((artifact.path / MANIFEST).read_text())
    (folder / MANIFEST).unlink()
    return seal(folder, {k: v for k, v in (fields | changed).items() if k not in ("format", "files", "build")})


def _apart(arrays: Mapping[str, Any]) -> dict[str, Any]:
    copies = {n: carve({n: Tensor(a.shape, a.dtype)})[1][n] for n, a in arrays.items()}
    for name, copy in copies.items():
        copy[...] = arrays[name]
    return copies


def stale(graph: Any) -> Any:
    """A class of graphs over a library that reads a copy of its inputs, made when they are bound."""

    class Stale(graph):  # type: ignore[misc] # whose base comes at run time
        def bind(self, signature: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Any:
            copies = _apart(inputs)
            self.kept = [*getattr(self, "kept", []), copies]
            return super().bind(signature, copies, outputs)

    return Stale


def silent(graph: Any) -> Any:
    """A class of graphs over a library that writes its outputs elsewhere."""

    class Silent(graph):  # type: ignore[misc] # whose base comes at run time
        def bind(self, signature: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Any:
            copies = _apart(outputs)
            self.kept = [*getattr(self, "kept", []), copies]
            return super().bind(signature, inputs, copies)

    return Silent


def mapped(file: Path) -> int:
    """Bytes of `file` that are resident in this process."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            inside = line.endswith(str(file.resolve()))
        elif inside and head == "Rss:":
            total += int(line.split()[1]) * 1024
    return total
