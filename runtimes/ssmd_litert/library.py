"""A model of LiteRT on the CPU, through the library's C interface: its tensors bound to numpy memory, and run.

The Python wrapper of ai-edge-litert copies every tensor in and out, loads GPU and NPU plugins, and logs twenty lines to
stderr. The C interface lets a graph read and write memory of ours, and ctypes releases the GIL during every call.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Callable, Mapping
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.machine.narrow import narrow
from ssmd.runtime.hoststate.graph import Array, Graph, GraphError, Signature, Tensor
from ssmd_litert.calls import LanesCall, LibraryCall, Sizes, sizes_of
from ssmd_litert.excerpt import Excerpt
from ssmd_litert.interface import (
    ALIGNMENT,
    ANY_INT,
    CPU,
    ELEMENTS,
    ERRORS_ONLY,
    HOST_MEMORY,
    LOCK_READ,
    LOCK_WRITE,
    TAG_ACCELERATORS,
    TAG_SEVERITY,
    Option,
    TensorType,
    keep,
    open_library,
    tensor_type,
)

METADATA = "ssmd.states"  # of a model whose signatures all write each state after its last reader,
IN_PLACE = b"written after they are read"  # which they say there
_MOST_SAID = 64  # bytes of it that are read


class LibraryGraph(Graph):
    """A model whose tensors lie in numpy memory. Not thread-safe: one call at a time, which the program sees to."""

    def __init__(
        self,
        path: Path,
        *,
        threads: int,
        weight_cache: Path | None,
        wanted: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """`wanted`: which signatures are read and compiled, by their names; `signatures` has those. Raises
        GraphError."""
        self.functions = open_library()
        self._model, self._options, self.compiled, self._environment = (c_void_p() for _ in range(4))
        self._file = Excerpt(path, wanted)
        self.names = self._file.names  # of all signatures in the file
        self.file_identity = self._file.identity
        # The last call of each signature, with its memory, whose pointers XNNPACK keeps. Were it free, the workspace of
        # all signatures could come to lie there when it grows, and an input where its copy is: XNNPACK then takes that
        # for copied, for ever.
        self.held: dict[int, tuple[LibraryCall, object]] = {}
        self._buffers: dict[int, c_void_p] = {}
        self._sizes: dict[int, Sizes] = {}  # of inputs, by signature, where a call asked for others than the file's
        options = (Option * 2)(Option(TAG_ACCELERATORS, ANY_INT, CPU), Option(TAG_SEVERITY, ANY_INT, ERRORS_ONLY))
        try:
            self._call("LiteRtCreateEnvironment", 2, options, byref(self._environment))
            self._call("LiteRtCreateModelFromBuffer", self._environment, *self._file.place, byref(self._model))
            self.in_place = self._metadata(METADATA) == IN_PLACE
            self.indices, known = self._read_signatures()
            self.signatures = {name: signature for name, signature in known.items() if wanted(name)}
            texts = self.options(threads, weight_cache)
            self._texts = {name: ctypes.create_string_buffer(text.encode()) for name, text in texts.items()}
            self._call("LiteRtCreateOptions", byref(self._options))
            self._call("LiteRtSetOptionsHardwareAccelerators", self._options, CPU)
            for name, memory in self._texts.items():
                more = c_void_p()
                address = ctypes.addressof(memory)
                self._call("LiteRtCreateOpaqueOptions", name.encode(), address, keep, byref(more))
                self._call("LiteRtAddOpaqueOptions", self._options, more)
            self._call("LiteRtCreateCompiledModel", self._environment, self._model, self._options, byref(self.compiled))
        except BaseException:
            self.close()
            raise

    def options(self, threads: int, weight_cache: Path | None) -> dict[str, str]:
        """Return LiteRT's options in TOML, by the name of the part that they are for."""
        text = f"num_threads = {threads}\n"
        if weight_cache is not None:  # LiteRT takes what stands between the quotes as it is: no escape in it is read
            with contextlib.suppress(OSError):
                text += f'weight_cache_file_path = "{narrow(weight_cache)}"\n'
        chosen = f"selected_signature_keys = {json.dumps(list(self.signatures))}\n"
        return {"xnnpack": text, "runtime_options_string": chosen}

    def bind(self, signature: str, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> LibraryCall:
        known = self.signatures[signature]
        known.check(signature, inputs, outputs)
        return LibraryCall(
            self,
            self.indices[signature],
            [self.buffer(inputs[name]) for name in known.inputs],
            [self.buffer(outputs[name]) for name in known.outputs],
            sizes_of(known, inputs),
            [*inputs.values(), *outputs.values()],
        )

    def bind_lanes(
        self, signature: str, inputs: Mapping[str, Array], outputs: Mapping[str, Array], lanes: int
    ) -> LanesCall:
        return LanesCall(self, signature, inputs, outputs, lanes)

    def size(self, index: int, sizes: Sizes) -> None:
        """Have a signature take inputs of these sizes from now on. Raises GraphError."""
        known = self._sizes.pop(index, {})
        for place, shape in sizes.items():
            if known.get(place) != shape:
                dims = (c_int * len(shape))(*shape)
                resize = "LiteRtCompiledModelResizeInputTensorNonStrict"
                self._call(resize, self.compiled, index, place, dims, len(shape))
        self._sizes[index] = {**known, **sizes}

    def sized(self, index: int) -> Sizes:
        """Return a signature's present sizes that differ from the file's."""
        return self._sizes.get(index, {})

    def forget(self, memory: NDArray[np.uint8]) -> None:
        start = memory.ctypes.data
        for address in [a for a in self._buffers if start <= a < start + memory.nbytes]:
            self.functions.LiteRtDestroyTensorBuffer(self._buffers.pop(address))

    def run_managed(self, signature: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        known = self.signatures[signature]
        results = {n: np.empty(t.shape, t.dtype) for n, t in known.outputs.items()}
        made: list[c_void_p] = []
        try:
            for array in [*(inputs[n] for n in known.inputs), *results.values()]:
                buffer = c_void_p()
                kind = tensor_type(array)
                size = max(ALIGNMENT, array.nbytes)
                self._call(
                    "LiteRtCreateManagedTensorBuffer",
                    self._environment,
                    HOST_MEMORY,
                    byref(kind),
                    size,
                    byref(buffer),
                )
                made.append(buffer)
            split = len(known.inputs)
            for name, buffer in zip(known.inputs, made[:split], strict=True):
                self._copy(buffer, inputs[name], LOCK_WRITE)
            sizes = sizes_of(known, inputs)
            LibraryCall(self, self.indices[signature], made[:split], made[split:], sizes).run()
            for array, buffer in zip(results.values(), made[split:], strict=True):
                self._copy(buffer, array, LOCK_READ)
        finally:
            for buffer in made:
                self.functions.LiteRtDestroyTensorBuffer(buffer)
        return results

    def drop_file(self) -> None:
        """Give the pages of the model's file back: packed weights are the library's own."""
        self._file.drop()

    def close(self) -> None:
        for buffer in self._buffers.values():
            self.functions.LiteRtDestroyTensorBuffer(buffer)
        self._buffers.clear()
        self.held.clear()
        for handle, destroy in (
            (self.compiled, "LiteRtDestroyCompiledModel"),
            (self._options, "LiteRtDestroyOptions"),
            (self._model, "LiteRtDestroyModel"),
            (self._environment, "LiteRtDestroyEnvironment"),
        ):
            if handle.value:
                getattr(self.functions, destroy)(handle)
                handle.value = None
        self._file.close()

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.functions, name)(*arguments)
        if status:
            raise GraphError(f"{name} failed with status {status}")

    def _copy(self, buffer: c_void_p, array: Array, mode: int) -> None:
        address = c_void_p()
        self._call("LiteRtLockTensorBuffer", buffer, byref(address), mode)
        try:
            ours = c_void_p(array.ctypes.data)
            target, source = (ours, address) if mode == LOCK_READ else (address, ours)
            ctypes.memmove(target, source, array.nbytes)
        finally:
            self._call("LiteRtUnlockTensorBuffer", buffer)

    def buffer(self, array: Array) -> c_void_p:
        """Return the tensor buffer over this array, made once. The array must not move until `forget`."""
        address = array.ctypes.data
        if address % ALIGNMENT or not array.flags.c_contiguous:
            raise GraphError(f"tensor memory at {address:#x} is not contiguous and aligned to {ALIGNMENT} bytes")
        if address not in self._buffers:
            buffer = c_void_p()
            kind = tensor_type(array)
            self._call(
                "LiteRtCreateTensorBufferFromHostMemory", byref(kind), address, array.nbytes, None, byref(buffer)
            )
            self._buffers[address] = buffer
        return self._buffers[address]

    def _metadata(self, name: str) -> bytes:
        """Return the model's metadata of this name; b"" if the model has no such metadata."""
        place, size = c_void_p(), c_size_t()
        if self.functions.LiteRtGetModelMetadata(self._model, name.encode(), byref(place), byref(size)):
            return b""
        return ctypes.string_at(place, min(size.value, _MOST_SAID)) if place.value else b""

    def _read_signatures(self) -> tuple[dict[str, int], dict[str, Signature]]:
        indices: dict[str, int] = {}
        signatures: dict[str, Signature] = {}
        count, handle, key = c_size_t(), c_void_p(), c_char_p()
        self._call("LiteRtGetNumModelSignatures", self._model, byref(count))
        for index in range(count.value):
            self._call("LiteRtGetModelSignature", self._model, index, byref(handle))
            self._call("LiteRtGetSignatureKey", handle, byref(key))
            name = _text(key)
            indices[name] = index
            signatures[name] = Signature(self._read_tensors(handle, "Input"), self._read_tensors(handle, "Output"))
        return indices, signatures

    def _read_tensors(self, signature: c_void_p, side: str) -> dict[str, Tensor]:
        """Read the tensors of one side, in the order in which a run takes its buffers."""
        tensors: dict[str, Tensor] = {}
        count, tensor, name, kind = c_size_t(), c_void_p(), c_char_p(), TensorType()
        self._call(f"LiteRtGetNumSignature{side}s", signature, byref(count))
        for index in range(count.value):
            self._call(f"LiteRtGetSignature{side}Name", signature, index, byref(name))
            self._call(f"LiteRtGetSignature{side}TensorByIndex", signature, index, byref(tensor))
            self._call("LiteRtGetRankedTensorType", tensor, byref(kind))
            text = _text(name)
            if kind.element not in ELEMENTS:
                raise GraphError(f"tensor {text!r} has element type {kind.element}, expected float32 or int32")
            tensors[text] = Tensor(tuple(kind.layout.dimensions[: kind.layout.rank]), ELEMENTS[kind.element])
        return tensors


def _text(name: c_char_p) -> str:
    """Return a name in a model. Raises GraphError if it is no text."""
    try:
        return (name.value or b"").decode()
    except UnicodeDecodeError as err:
        raise GraphError(f"the name {(name.value or b'')[:40]!r} of a signature or tensor is not UTF-8") from err
