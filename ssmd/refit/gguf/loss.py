"""The error that an artifact's encoding adds to weights which came quantized in a GGUF file, measured on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ssmd.families.offsets import BLOCK, SUFFIX, divided
from ssmd.families.registry import family_of
from ssmd.families.weights import Array, Binding
from ssmd.refit.encodings import ENCODINGS, decoded
from ssmd.refit.gguf.source import GGUFSource
from ssmd.refit.graphfile import Header
from ssmd.refit.refit import bindings_of

Stored = Callable[[Array], Array]  # returns rows of a parameter as a runtime reads them
MOST = 64  # parameters that are measured, each on its first block of rows


def sentence(source: GGUFSource, header: Header | None, quantization: str) -> str:
    """Return a line for people: the file's types, and the error that is added to them.

    header: of the graph that the weights went into; None: they were packed in `quantization` without a graph.
    """
    begin = f"the weights are {source.kinds} in the file and {quantization} here"
    encodings = _of_graph(source, header) if header is not None else _of_packer(source, quantization)
    if not encodings:
        return begin
    error, count = relative_rms(source, encodings)
    return f"{begin}: this adds an error of {error:.2%} (RMS, relative to the weights), measured on {count:,} of them"


def relative_rms(source: GGUFSource, encodings: list[tuple[Binding, Stored]]) -> tuple[float, int]:
    """Return the RMS error of parameters in these encodings over the RMS of their values, and the number of values."""
    step = -(-len(encodings) // MOST)
    lost = whole = 0.0
    count = 0
    for binding, stored in encodings[::step]:
        rows = next(binding.blocks(source))
        lost += float(np.square(stored(rows) - rows, dtype=np.float64).sum())
        whole += float(np.square(rows, dtype=np.float64).sum())
        count += rows.size
    return (lost / whole) ** 0.5 if whole else 0.0, count


def _of_graph(source: GGUFSource, header: Header) -> list[tuple[Binding, Stored]]:
    """Return the parameters that a graph holds rounded. A weight that is divided counts whole, with its offsets."""
    whole = bindings_of(source.config, {k: v for k, v in header.recipe.items() if k != "offsets"}, header.tiers[-1])
    offsets = bindings_of(source.config, header.recipe, header.tiers[-1]).keys() - whole.keys()
    rounded = {
        hole.parameter: hole.encoding
        for part in header.files
        for hole in part.holes
        if ENCODINGS[hole.encoding].matrices and ENCODINGS[hole.encoding].part == 0
    }
    return [
        (
            whole[name],
            partial(_joined, encoding, rounded.get(name + SUFFIX, "f32"))
            if name + SUFFIX in offsets
            else partial(_rounded, encoding),
        )
        for name, encoding in sorted(rounded.items())
        if name not in offsets
    ]


def _rounded(encoding: str, rows: Array) -> Array:
    return decoded(rows, [encoding])


def _joined(encoding: str, of_offsets: str, rows: Array) -> Array:
    levels, offsets = divided(rows)
    return decoded(levels, [encoding]) + np.repeat(decoded(offsets, [of_offsets]), BLOCK, axis=-1)


def _of_packer(source: GGUFSource, quantization: str) -> list[tuple[Binding, Stored]]:
    """Return the matrices of a packed artifact; its int8 is that of LiteRT. Others are not measured."""
    if quantization != "int8":
        return []
    family = family_of(source.config)
    bound = family.bindings(family.parse(source.config))
    names = [
        n for n, b in bound.items() if all(len(shape) == 2 for shape in b.reads.values()) and n.endswith(_MATRICES)
    ]
    return [(bound[name], partial(_rounded, "litert-int8")) for name in names]


_MATRICES = ("embedding", "head", "_q", "_k", "_v", "_o", "_in", "_out", "_gate_up", "_up", "_down")
