"""Weights that are out of memory while the converter writes its file.

Its writer puts the whole file together in a block of memory that it moves to a larger one as it grows: at the worst
twice the weights, beside the weights themselves, to which its graph only points. So before that the large ones go to a
file of their own and their memory back to the system, but for a mark at either end. Afterwards the place of each in the
converter's file is known by its marks, and is filled.
"""

from __future__ import annotations

import hashlib
import mmap
import sys
from pathlib import Path
from typing import Any

from ssmd.build.builder import BuildError
from ssmd.machine.installation import to_add
from ssmd_litert.constants import buffers

LARGE_BYTES = 1 << 20  # the converter copies smaller weights (its RESOURCE_CONSTANT_NUMEL_THRESHOLD, which is in bytes)
OTHER = f"install the version that ssmd was made for: {to_add('build')}"
_MARK_BYTES = 16
_COPY_BYTES = 8 << 20


class WeightsOnDisk:
    """The large parameters of a module. Linux only, where given back means zeros from then on; elsewhere they stay."""

    def __init__(self, module: Any) -> None:
        """Each of them gets memory of its own, which the module's parameter lies in from now on."""
        import torch

        self._held: dict[str, mmap.mmap] = {}  # by name
        if sys.platform != "linux":
            return
        for name, parameter in module.named_parameters():
            nbytes = parameter.numel() * parameter.element_size()
            if nbytes < LARGE_BYTES or bool((parameter == parameter.reshape(-1)[0]).all()):
                continue  # what is the same all over the converter stores as one value
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            moved = torch.frombuffer(memory, dtype=parameter.dtype).reshape(parameter.shape)
            moved.copy_(parameter)
            parameter.data = moved
            self._held[name] = memory

    def empty(self, file: Path) -> None:
        """Move the parameters to `file`. The module computes nothing after this."""
        with file.open("xb") as out:
            for name, memory in self._held.items():
                out.write(memory)
                memory.madvise(mmap.MADV_DONTNEED)
                begin, end = _marks(name)
                memory[:_MARK_BYTES], memory[-_MARK_BYTES:] = begin, end

    def fill(self, model: Path, file: Path) -> None:
        """Copy them from `file` into the .tflite `model`. Raises BuildError unless each is there once and whole."""
        places = {_marks(name)[0]: name for name in self._held}
        found: dict[str, int] = {}
        with model.open("r+b") as out, file.open("rb") as weights:
            for start, length in list(buffers(out.fileno())):
                out.seek(start)
                name = places.get(out.read(_MARK_BYTES))
                if name is None:
                    continue
                nbytes = len(self._held[name])
                out.seek(start + nbytes - _MARK_BYTES)
                if name in found or length != nbytes or out.read(_MARK_BYTES) != _marks(name)[1]:
                    raise BuildError(f"litert-torch has stored the weight {name} otherwise than it was given; {OTHER}")
                found[name] = start
            for name, memory in self._held.items():
                if name not in found:
                    raise BuildError(f"litert-torch has not stored the weight {name} where it can be found; {OTHER}")
                out.seek(found[name])
                for at in range(0, len(memory), _COPY_BYTES):
                    out.write(weights.read(min(_COPY_BYTES, len(memory) - at)))


def _marks(name: str) -> tuple[bytes, bytes]:
    digest = hashlib.sha256(name.encode()).digest()
    return digest[:_MARK_BYTES], digest[_MARK_BYTES : 2 * _MARK_BYTES]
