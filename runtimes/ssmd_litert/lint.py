"""The rule for a fast .tflite: XNNPACK computes everything from its first operator on.

LiteRT itself computes the operators before: look-ups of tokens and positions, and masks. A later operator of LiteRT's
splits the graph: tensors go out of XNNPACK and in again, and LiteRT's kernels use one thread and no packed weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ssmd.machine.room import check_room
from ssmd.runtime.hoststate.buffers import carve
from ssmd_litert.profiler import Node, ProfiledGraph

_SPARE_BYTES = 32 << 20  # room on the disk beside the packed weights


def lint(file: Path) -> list[str]:
    """Return a sentence for each signature that breaks the rule; empty if none does. Raises GraphError.

    Each signature is run once. All of them read one copy of the packed weights, in a file beside this one that goes
    again: else XNNPACK packs them for each.
    """
    with packed(file) as cache:
        return _lint(file, cache)


@contextmanager
def packed(file: Path) -> Iterator[Path | None]:
    """Yield the path of a file for packed weights, which is removed afterwards; None if the disk has no room for it."""
    cache = file.with_suffix(".packed")
    nbytes = file.stat().st_size
    try:
        check_room(file.parent, nbytes + nbytes // 4 + _SPARE_BYTES)  # XNNPACK ends the process where there is none
    except OSError:
        yield None
        return
    try:
        yield cache
    finally:
        cache.unlink(missing_ok=True)


def _lint(file: Path, cache: Path | None) -> list[str]:
    found = []
    graph = ProfiledGraph(file, threads=1, weight_cache=cache)
    try:
        graph.drop_file()
        for name, signature in graph.signatures.items():
            blocks, sides = zip(*(carve(tensors) for tensors in (signature.inputs, signature.outputs)), strict=True)
            inputs, outputs = sides
            if "n_valid" in inputs:
                inputs["n_valid"][...] = 1
            if beyond := left_out(graph.nodes(graph.bind(name, inputs, outputs).run)):
                counts = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(beyond).items()))
                found.append(f"{name}: XNNPACK leaves {counts} to LiteRT, in the middle of the graph")
            for block in blocks:
                graph.forget(block)
    finally:
        graph.close()
    return found


def left_out(nodes: Sequence[Node]) -> list[str]:
    """Return the operators that LiteRT computes itself after XNNPACK has begun."""
    names = [name for name, _ in nodes]
    begun = next((i for i, name in enumerate(names) if not _is_own(name)), len(names))
    return [name for name in names[begun:] if _is_own(name)]


def _is_own(name: str) -> bool:
    """Return True if a node is one of LiteRT's own, named in capitals, such as FULLY_CONNECTED."""
    return name == name.upper()
