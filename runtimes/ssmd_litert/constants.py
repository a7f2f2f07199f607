"""Where the constants of a .tflite stand, and the scales of quantized ones: offset and length of each, in bytes."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

from ai_edge_litert import schema_py_generated as schema

_DATA, _SCALE = 4, 8  # of a Buffer and of QuantizationParameters: which entry of the table
_FLOAT_BYTES = 4


def buffers(fd: int) -> Iterator[tuple[int, int]]:
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as data:
        model: Any = schema.Model.GetRootAs(data, 0)
        for i in range(model.BuffersLength()):
            buffer = model.Buffers(i)
            if buffer.Size() > 1:  # of a file beyond 2 GiB it stands after the flatbuffer
                yield buffer.Offset(), buffer.Size()
            elif buffer.DataLength():
                yield _vector(buffer, _DATA), buffer.DataLength()


def scales(fd: int) -> Iterator[tuple[int, int]]:
    """Yield the places (offset, bytes) of the scales of every tensor in every signature. Tensors may share scales."""
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as data:
        model: Any = schema.Model.GetRootAs(data, 0)
        for i in range(model.SubgraphsLength()):
            graph = model.Subgraphs(i)
            for j in range(graph.TensorsLength()):
                quantization = graph.Tensors(j).Quantization()
                if quantization is not None and quantization.ScaleLength():
                    yield _vector(quantization, _SCALE), quantization.ScaleLength() * _FLOAT_BYTES


def _vector(table: Any, entry: int) -> int:
    first: int = table._tab.Vector(table._tab.Offset(entry))
    return first
