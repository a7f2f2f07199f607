"""Caches of any capacity: a .tflite in which the number of slots is open, though the converter knows fixed sizes only.

LiteRT computes all sizes anew when an input is given another one. What an attention does with S slots goes by the sizes
of its inputs, but for two slices of the softmax over S old scores and n new ones, whose sizes the converter writes
down. They become slices that count from the end. Whatever else would depend on S fails the build.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from ssmd.build.builder import BuildError
from ssmd_litert.weights_on_disk import OTHER

_ALIGNMENT = 64  # of constants in the file
_SMALL = 1024  # bytes of a constant that stays within the flatbuffer
_COPY_BYTES = 8 << 20
_Op = schema.BuiltinOperator
_FOLLOW = (_Op.ADD, _Op.CONCATENATION, _Op.SOFTMAX, _Op.TRANSPOSE)  # whose sizes go by those of the inputs


def open_capacity(file: Path, nominal: int) -> None:
    """Let the inputs' size `nominal` be another one in each call; no other size of the file is this one. Raises
    BuildError."""
    import flatbuffers

    with file.open("rb") as f:
        data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)  # closed with the last array over it
    model: Any = schema.ModelT.InitFromObj(schema.Model.GetRootAs(data, 0))
    opening = _Opening(model, nominal)
    for graph in model.subgraphs:
        opening.open(graph)

    def packed() -> bytearray:
        builder = flatbuffers.Builder(1 << 20)
        builder.Finish(model.Pack(builder), b"TFL3")
        made: bytearray = builder.Output()
        return made

    apart: list[tuple[Any, NDArray[np.uint8]]] = []
    for buffer in model.buffers:
        if buffer.size > 1:  # of large files they stand after the flatbuffer already
            apart.append((buffer, np.frombuffer(data, np.uint8, buffer.size, buffer.offset)))
        elif buffer.data is not None and len(buffer.data) >= _SMALL:
            apart.append((buffer, buffer.data))
    for buffer, array in apart:
        buffer.data, buffer.offset, buffer.size = None, 1, len(array)  # which takes as much room as the right offset
    place = len(packed())
    for buffer, array in apart:
        buffer.offset = place = -(-place // _ALIGNMENT) * _ALIGNMENT
        place += len(array)
    changed = file.with_suffix(".open")
    with changed.open("xb") as out:
        out.write(packed())
        for buffer, array in apart:
            out.write(b"\0" * (buffer.offset - out.tell()))
            for start in range(0, len(array), _COPY_BYTES):
                out.write(array[start : start + _COPY_BYTES].tobytes())
    changed.replace(file)


class _Opening:
    """A model in which slices are exchanged."""

    def __init__(self, model: Any, nominal: int) -> None:
        self._model, self._nominal = model, nominal
        self._codes = [max(c.builtinCode, c.deprecatedBuiltinCode) for c in model.operatorCodes]
        self._strided: int | None = None  # its place among the model's codes
        self._constants: dict[tuple[int, ...], int] = {}  # buffers of those made here

    def open(self, graph: Any) -> None:
        """Follow what has S in its size from the inputs on. Raises BuildError where that leads to another operator."""
        constants: dict[tuple[int, ...], int] = {}  # tensors of this graph
        sized = {int(i) for i in graph.inputs if self._nominal in graph.tensors[i].shape}
        for operator in graph.operators:
            if not sized.intersection(map(int, operator.inputs)):
                continue
            code, [made] = self._codes[operator.opcodeIndex], [int(i) for i in operator.outputs]
            if code == _Op.SLICE:
                goes_on = self._exchange(graph, operator, constants)
            elif code == _Op.BATCH_MATMUL:
                goes_on = self._nominal in graph.tensors[made].shape
            elif code in _FOLLOW:
                goes_on = True
            else:
                raise self._unknown(code)
            if goes_on:
                sized.add(made)

    def _exchange(self, graph: Any, operator: Any, constants: dict[tuple[int, ...], int]) -> bool:
        """Make a slice along the last axis one that counts from its end. Returns whether it takes the S that grow."""
        source, begin, size = (graph.tensors[i] for i in operator.inputs)
        first, count = (self._values(tensor) for tensor in (begin, size))
        rank, width = len(source.shape), int(source.shape[-1])
        others = (1 << (rank - 1)) - 1  # axes, as bits
        new = width - self._nominal
        old_ones = (first[-1], count[-1]) == (0, self._nominal)
        whole = all(b == 0 and c == int(n) for b, c, n in zip(first, count, source.shape[:-1], strict=False))
        if new < 1 or not whole or not (old_ones or (first[-1], count[-1]) == (self._nominal, new)):
            raise self._unknown(_Op.SLICE)
        at_end, anywhere = (*[0] * (rank - 1), -new), (0,) * rank
        options = schema.StridedSliceOptionsT()
        options.beginMask = others | (old_ones << (rank - 1))
        options.endMask = others | ((not old_ones) << (rank - 1))
        bounds = (anywhere, at_end) if old_ones else (at_end, anywhere)
        inputs = [int(operator.inputs[0]), *(self._constant(graph, v, constants) for v in (*bounds, (1,) * rank))]
        operator.inputs = np.array(inputs, np.int32)
        operator.opcodeIndex = self._strided_code()
        operator.builtinOptionsType, operator.builtinOptions = schema.BuiltinOptions.StridedSliceOptions, options
        return old_ones

    def _values(self, tensor: Any) -> tuple[int, ...]:
        data = self._model.buffers[tensor.buffer].data
        return () if data is None else tuple(np.asarray(data, np.uint8).view(np.int32).tolist())

    def _constant(self, graph: Any, values: tuple[int, ...], constants: dict[tuple[int, ...], int]) -> int:
        """The graph's int32 tensor of these values."""
        if values not in self._constants:
            buffer = schema.BufferT()
            buffer.data = np.array(values, np.int32).view(np.uint8)
            self._constants[values] = len(self._model.buffers)
            self._model.buffers.append(buffer)
        if values not in constants:
            tensor = schema.TensorT()
            tensor.shape, tensor.type = np.array([len(values)], np.int32), schema.TensorType.INT32
            tensor.buffer, tensor.name = self._constants[values], b"bounds"
            constants[values] = len(graph.tensors)
            graph.tensors.append(tensor)
        return constants[values]

    def _strided_code(self) -> int:
        if self._strided is None:
            code = schema.OperatorCodeT()
            code.builtinCode = code.deprecatedBuiltinCode = _Op.STRIDED_SLICE
            code.version = 1
            self._strided = len(self._codes)
            self._codes.append(_Op.STRIDED_SLICE)
            self._model.operatorCodes.append(code)
        return self._strided

    @staticmethod
    def _unknown(code: int) -> BuildError:
        name = next(name for name, value in vars(_Op).items() if value == code)
        return BuildError(f"{name} has the capacity of the caches in its sizes otherwise than is known; {OTHER}")
