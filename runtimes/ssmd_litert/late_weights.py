"""Weights that a .tflite gets after its graphs are made, one at a time.

A converter's writer puts the whole file together in memory, and a quantizer holds it there again, so they would take
several times the weights. Here both see only the graphs. While the converter traces, a large parameter is memory that
takes no room (ssmd/families/weights.py). Before it writes its file, each such constant is emptied, and a matrix gets a
small shape: by their shapes the writer decides that a file is above 2 GiB, and then takes no empty constant. For the
quantizer a few rows of numbers stand for it: 16 levels, and for each matrix another step, so that in int4 each has
scales of its own. Then its own shape comes back, and the editor (modelfile.py) writes its values where they belong, by
blocks of rows, in the encoding that the quantizer chose.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from ssmd.build.builder import BuildError
from ssmd.families.offsets import BLOCK
from ssmd.families.weights import Parameters
from ssmd.machine.installation import to_add
from ssmd.refit.encodings import ENCODINGS
from ssmd_litert.modelfile import Edited, load, save

OTHER = f"install the version that ssmd was made for: {to_add('build')}"
_ADDRESS = re.compile(r"data_ptr=(\d+)")  # in the name of a constant of the converter
_ROWS, _COLUMNS = 2, 4096  # of numbers that stand for a matrix: enough that the quantizer takes it for one
_NOTHING = 3  # numbers in place of a constant's: too few for any, and one would stand for all
_LEVELS, _STEPS = 16, 128  # of these numbers; steps of one exponent that bfloat16 tells apart
_KINDS = {getattr(schema.TensorType, kind): kind for kind in ("FLOAT32", "INT8", "INT4")}
_FORMS = {"INT8": ENCODINGS["litert-int8"], "INT4": ENCODINGS["litert-int4"]}
Names = dict[tuple[int, bytes], str]  # a parameter by its tensor: the place of a graph, and a name there


class Values:
    """The values of a large parameter in a file, made when they are written. kind: the type of its tensors."""

    def __init__(self, parameters: Parameters, name: str, kind: str) -> None:
        rows, *others = parameters.late[name]
        self._blocks, self._form = (parameters, name), _FORMS.get(kind)
        bits = 32 if self._form is None else self._form.bits
        self.nbytes = rows * math.prod(others) * bits // 8
        # Of all tensors that are this parameter. They are known only when the values have been written.
        self.scales: NDArray[Any] | None = None
        if kind == "INT8":
            self.scales = np.zeros((rows, 1), np.float32)
        elif kind == "INT4":
            self.scales = np.zeros((rows, others[0] // BLOCK), np.float16)

    def parts(self) -> Iterator[bytes]:
        """Yield the bytes of the values in order, and fill in the scales. Raises SourceError."""
        parameters, name = self._blocks
        first = 0
        for rows in parameters.blocks(name):
            if self._form is None or self.scales is None:
                yield np.ascontiguousarray(rows, "<f4").tobytes()
                continue
            values, scales = self._form.form(rows)
            self.scales[first : first + len(rows)] = scales
            first += len(rows)
            yield values.tobytes()


class Scales:
    """The scales of blocks of such a parameter. They stand after its values in the file."""

    def __init__(self, of: NDArray[Any]) -> None:
        self.of, self.nbytes = of, of.nbytes

    def parts(self) -> Iterator[bytes]:
        yield self.of.tobytes()


def export(converted: Any, module: Any, file: Path) -> Names:
    """Write the file of a litert_torch model, in which a few numbers stand for each large parameter of `module`.

    Returns the parameters by their tensors. Raises BuildError if one of them is not found whole.
    """
    parameters: Parameters = module.late
    graphs = _emptied(converted._exporter.module, module)
    with _without_stderr():  # where the writer says of every emptied constant that it is empty
        converted.export(str(file))
    model = load(file)
    emptied = {place for place, buffer in enumerate(model.buffers) if _is_empty(buffer)}
    names: Names = {}
    order = {name: i for i, name in enumerate(parameters.late)}
    for place, (graph, expected) in enumerate(zip(model.subgraphs, graphs, strict=True)):
        tensors = [t for t in graph.tensors if t.buffer in emptied]
        shapes = [_emptied_shape(parameters, name) for name in expected]
        if [tuple(map(int, t.shape)) for t in tensors] != shapes:
            raise BuildError(f"litert-torch has not stored the large weights where they can be found; {OTHER}")
        for tensor, name in zip(tensors, expected, strict=True):
            names[place, tensor.name] = name
            values = _standing(tensor, parameters.late[name], order[name])
            model.buffers[tensor.buffer].data = np.frombuffer(values.tobytes(), np.uint8)
    if missing := [name for name in parameters.late if name not in names.values()]:
        raise BuildError(f"litert-torch has not stored the weight {missing[0]} where it can be found; {OTHER}")
    save(model, file)
    return names


def give_back(edited: Edited, parameters: Parameters, names: Names) -> None:
    """Have the editor write the large parameters' own values, in the encodings of the tensors that stand for them.

    Raises BuildError for another encoding.
    """
    made: dict[int, Values] = {}
    scales: dict[int, Scales] = {}
    places: dict[str, int] = {}
    for place, graph in enumerate(edited.model.subgraphs):
        for tensor in graph.tensors:
            name = names.get((place, tensor.name))
            if name is None:
                continue
            kind = _KINDS.get(tensor.type)
            if kind is None:
                raise BuildError(f"the quantizer has given {name} the type {tensor.type}; {OTHER}")
            if places.setdefault(name, tensor.buffer) != tensor.buffer:
                raise BuildError(f"the quantizer has stored {name} more than once; {OTHER}")
            if tensor.buffer not in made:
                made[tensor.buffer] = Values(parameters, name, kind)
            tensor.shape = np.array(parameters.late[name], np.int32)
            own = made[tensor.buffer].scales
            if own is None:
                continue
            if kind == "INT8":
                tensor.quantization.scale = own.reshape(-1)
                tensor.quantization.zeroPoint = np.zeros(len(own), np.int64)
            else:
                beside = graph.tensors[tensor.quantization.details.scales]
                beside.shape = np.array(own.shape, np.int32)
                if scales.setdefault(beside.buffer, Scales(own)).of is not own or beside.buffer < tensor.buffer:
                    raise BuildError(f"the quantizer has stored the scales of {name} with others; {OTHER}")
    if missing := [name for name in parameters.late if name not in places]:
        raise BuildError(f"the quantizer has lost the weight {missing[0]}; {OTHER}")
    edited.late = {**made, **scales}


@contextlib.contextmanager
def unwritten() -> Iterator[None]:
    """Keep the converter from writing to parameters: it replaces infinite values in place, also where there are none.

    The values of a source are finite (ssmd/model/source.py).
    """
    from litert_torch.backend import inline_consts

    module: Any = inline_consts
    before = getattr(module, "_clamp_inf_values", None)
    if before is None:
        yield  # another version: it takes more memory, and makes the same
        return
    module._clamp_inf_values = lambda tensor: tensor
    try:
        yield
    finally:
        module._clamp_inf_values = before


def _emptied(operation: Any, module: Any) -> list[list[str]]:
    """Replace the values of the converter's constants that are large parameters of `module` by nothing.

    Each gets its `_emptied_shape`. Returns the parameters of each graph in order.
    """
    from litert_converter.mlir import ir

    names = {getattr(module, name).data_ptr(): name for name in module.late.late}
    graphs: list[list[str]] = []
    empty: dict[str, Any] = {}
    with operation.context, operation.location:
        for graph in operation.regions[0].blocks[0].operations:
            if "sym_name" not in graph.attributes or not len(graph.regions):
                continue
            found: list[str] = []
            for op in _within(graph):
                value = op.attributes["value"] if "value" in op.attributes and len(op.results) == 1 else None
                if type(value) is not ir.Attribute:  # the class of values that lie outside of the converter's memory
                    continue
                address = _ADDRESS.search(str(value))
                name = names.get(int(address[1])) if address else None
                if name is None:
                    continue
                if name not in empty:
                    nothing = np.zeros(_NOTHING, np.float32).data
                    kind = ir.RankedTensorType.get(_emptied_shape(module.late, name), ir.F32Type.get())
                    empty[name] = ir.DenseResourceElementsAttr.get_from_buffer(nothing, f"late_{name}", kind)
                op.attributes["value"] = empty[name]
                op.results[0].set_type(empty[name].type)
                found.append(name)
            graphs.append(found)
    return graphs


def _emptied_shape(parameters: Parameters, name: str) -> tuple[int, ...]:
    """Return the shape of an emptied parameter: a matrix has rows and columns divided alike, as its products check."""
    shape = parameters.late[name]
    common = math.gcd(*shape)
    if len(shape) != 2 or common % 2:
        return shape
    return shape[0] // common * 2, shape[1] // common * 2


def _within(operation: Any) -> Iterator[Any]:
    """Yield the operations inside one, in order."""
    for region in operation.regions:
        for block in region.blocks:
            for op in block.operations:
                yield op.operation
                yield from _within(op.operation)


def _is_empty(buffer: Any) -> bool:
    return buffer.data is not None and not len(buffer.data) and buffer.size <= 1


def _standing(tensor: Any, shape: tuple[int, ...], place: int) -> NDArray[np.float32]:
    """Return numbers that stand for the parameter at this place among all, and give its tensor their shape."""
    exponent, fraction = divmod(place, _STEPS)
    step = np.float32(2.0**exponent * (1 + fraction / _STEPS))
    rows = (np.arange(_ROWS * _COLUMNS) % _LEVELS - _LEVELS // 2).astype(np.float32) * step
    if len(shape) == 2:
        tensor.shape = np.array((_ROWS, _COLUMNS), np.int32)
    return rows if len(shape) == 2 else rows[:1]


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Send what this process writes to its stderr nowhere meanwhile."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
