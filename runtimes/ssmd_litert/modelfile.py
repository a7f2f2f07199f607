"""A .tflite that was converted, changed after that: its flatbuffer as objects, its constants left where they are."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

OPERATORS = {value: name for name, value in vars(schema.BuiltinOperator).items() if isinstance(value, int)}
_RESHAPE = schema.BuiltinOptions.ReshapeOptions
_ALIGNMENT = 64  # of constants in the file
_SMALL = 1024  # bytes of a constant that stays within the flatbuffer
_COPY_BYTES = 8 << 20
Known = dict[tuple[str, tuple[int, ...], bytes], int]  # places of constants, by what they are


class Content(Protocol):
    """The bytes of a constant, which are made when they are written."""

    @property
    def nbytes(self) -> int: ...

    def parts(self) -> Iterator[bytes]:
        """Yield the bytes in order."""


class Edited:
    """A model whose graphs are changed. model: schema.ModelT; its large constants stay in `data`, the file."""

    def __init__(self, file: Path) -> None:
        with file.open("rb") as f:
            self.data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)  # closed with the last array over it
        self.model: Any = schema.ModelT.InitFromObj(schema.Model.GetRootAs(self.data, 0))
        model = self.model
        self._codes: list[int] = [max(c.builtinCode, c.deprecatedBuiltinCode) for c in model.operatorCodes]
        self._buffers: Known = {}  # of the constants that were added
        self.late: Mapping[int, Content] = {}  # what is written only at last, by the place of its buffer

    def code(self, operator: Any) -> int:
        """Return an operator's code in schema.BuiltinOperator."""
        return self._codes[int(operator.opcodeIndex)]

    def place_of(self, code: int) -> int:
        """Return the place of an operator in the model's list of operators. A missing one is added."""
        if code not in self._codes:
            made = schema.OperatorCodeT()
            made.builtinCode, made.deprecatedBuiltinCode, made.version = code, min(code, 127), 1
            self._codes.append(code)
            self.model.operatorCodes.append(made)
        return self._codes.index(code)

    def is_constant(self, tensor: Any) -> bool:
        buffer = self.model.buffers[tensor.buffer]
        return tensor.buffer in self.late or buffer.size > 1 or buffer.data is not None

    def numbers(self, tensor: Any) -> tuple[int, ...]:
        """Return the values of a small int32 constant."""
        data = self.model.buffers[tensor.buffer].data
        return () if data is None else tuple(np.asarray(data, np.uint8).view(np.int32).tolist())

    def add_numbers(self, graph: Any, values: tuple[int, ...], known: Known) -> int:
        """Return the place of a graph's int32 vector constant. A missing one is added. known: the constants so far."""
        return self.add_constant(graph, np.array(values, np.int32), known)

    def add_constant(self, graph: Any, array: NDArray[Any], known: Known) -> int:
        """Return the place of a graph's int32 or float32 constant. A missing one is added."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._buffers:
            buffer = schema.BufferT()
            buffer.data = np.frombuffer(array.tobytes(), np.uint8)
            self._buffers[key] = len(self.model.buffers)
            self.model.buffers.append(buffer)
        if key not in known:
            kind = schema.TensorType.INT32 if array.dtype == np.int32 else schema.TensorType.FLOAT32
            known[key] = add_tensor(graph, array.shape, kind, b"constant", self._buffers[key])
        return known[key]

    def operator(self, code: int, inputs: Sequence[int], output: int, options: Any, kind: int) -> Any:
        """Return an operator for a graph's list. options: a schema object. kind: its kind of schema.BuiltinOptions."""
        made = schema.OperatorT()
        made.opcodeIndex = self.place_of(code)
        made.inputs, made.outputs = np.array(inputs, np.int32), np.array([output], np.int32)
        made.builtinOptions, made.builtinOptionsType = options, kind
        return made

    def reshape(self, graph: Any, tensor: int, target: int, known: Known) -> Any:
        """Return the operator that reshapes a tensor to `target`."""
        options = schema.ReshapeOptionsT()
        options.newShape = np.array(graph.tensors[target].shape, np.int32)
        inputs = [tensor, self.add_numbers(graph, tuple(map(int, options.newShape)), known)]
        return self.operator(schema.BuiltinOperator.RESHAPE, inputs, target, options, _RESHAPE)


def add_tensor(graph: Any, shape: tuple[int, ...], kind: int, name: bytes, buffer: int = 0) -> int:
    """Add a tensor to a graph. Returns its place."""
    tensor = schema.TensorT()
    tensor.shape, tensor.type, tensor.name, tensor.buffer = np.array(shape, np.int32), kind, name, buffer
    graph.tensors.append(tensor)
    return len(graph.tensors) - 1


def _ordered(edited: Edited, graph: Any, signatures: list[Any]) -> None:
    """Put a graph's constants first, the most used ones before others.

    LiteRT finds a tensor by counting from the first one, each time that an operator names it.
    """
    uses = np.zeros(len(graph.tensors), np.int64)
    for operator in graph.operators:
        np.add.at(uses, operator.inputs[operator.inputs >= 0], 1)
    constant = np.array([edited.is_constant(tensor) for tensor in graph.tensors])
    order = np.lexsort((np.arange(len(uses)), np.where(constant, -uses, 1)))
    places = np.empty_like(order)
    places[order] = np.arange(len(order))

    def moved(indices: Any) -> Any:
        found = np.asarray(indices, np.int32)
        return np.where(found >= 0, places[found], found).astype(np.int32)

    graph.tensors = [graph.tensors[i] for i in order]
    for tensor in graph.tensors:  # of int4: what a block's values are multiplied by is a tensor, too
        details = None if tensor.quantization is None else tensor.quantization.details
        if isinstance(details, schema.BlockwiseQuantizationT):
            details.scales, details.zeroPoints = (int(i) for i in moved([details.scales, details.zeroPoints]))
    graph.inputs, graph.outputs = moved(graph.inputs), moved(graph.outputs)
    for operator in graph.operators:
        operator.inputs, operator.outputs = moved(operator.inputs), moved(operator.outputs)
    for signature in signatures:
        for named in (*signature.inputs, *signature.outputs):
            named.tensorIndex = int(places[named.tensorIndex])


def edit(file: Path, *changes: Callable[[Edited], None], target: Path | None = None) -> None:
    """Change a file, or write the changed one as `target`. If a change raises, the file stays unchanged."""
    edited = Edited(file)
    model, data = edited.model, edited.data
    for change in changes:
        change(edited)
    for place, graph in enumerate(model.subgraphs):
        _ordered(edited, graph, [s for s in model.signatureDefs if s.subgraphIndex == place])

    apart: list[tuple[Any, NDArray[np.uint8] | Content]] = []
    for place, buffer in enumerate(model.buffers):
        if place in edited.late:
            apart.append((buffer, edited.late[place]))
        elif buffer.size > 1:  # of large files they stand after the flatbuffer already
            apart.append((buffer, np.frombuffer(data, np.uint8, buffer.size, buffer.offset)))
        elif buffer.data is not None and len(buffer.data) >= _SMALL:
            apart.append((buffer, buffer.data))
    for buffer, content in apart:
        buffer.data, buffer.size = None, content.nbytes
        buffer.offset = 1  # which takes as much room as the right one
    at = len(_packed(model))
    for buffer, content in apart:
        buffer.offset = at = -(-at // _ALIGNMENT) * _ALIGNMENT
        at += content.nbytes
    changed = (target or file).with_suffix(".open")
    with changed.open("xb") as out:
        out.write(_packed(model))
        for buffer, content in apart:
            out.write(b"\0" * (buffer.offset - out.tell()))
            for part in _parts(content):
                out.write(part)
            if out.tell() != buffer.offset + content.nbytes:
                raise ValueError(f"a constant of {content.nbytes} bytes was given {out.tell() - buffer.offset}")
        if edited.late:  # some of what stands before them is known only now: scales
            out.seek(0)
            out.write(_packed(model))
    changed.replace(target or file)


def load(file: Path) -> Any:
    """Read a small file whole, as objects: a schema.ModelT."""
    return schema.ModelT.InitFromObj(schema.Model.GetRootAs(file.read_bytes(), 0))


def save(model: Any, file: Path) -> None:
    """Write objects as a file, with all constants within the flatbuffer."""
    file.write_bytes(_packed(model))


def _packed(model: Any) -> bytearray:
    import flatbuffers

    builder = flatbuffers.Builder(1 << 20)
    builder.Finish(model.Pack(builder), b"TFL3")
    made: bytearray = builder.Output()
    return made


def _parts(content: NDArray[np.uint8] | Content) -> Iterator[bytes]:
    if not isinstance(content, np.ndarray):
        yield from content.parts()
        return
    for start in range(0, len(content), _COPY_BYTES):
        yield content[start : start + _COPY_BYTES].tobytes()
