"""Calibration of a new int4 artifact: its matrices are rounded anew for the inputs that a text gives them.

The artifact's own runtime computes these inputs, with the weights as a refit rounds them. compensated.py rounds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, BinaryIO

import numpy as np

from ssmd.families.offsets import SUFFIX
from ssmd.families.weights import Array
from ssmd.machine.progress import tell
from ssmd.model.artifact import Artifact
from ssmd.model.source import Tensors
from ssmd.refit.compensated import Factor, better
from ssmd.refit.encodings import ENCODINGS, nibbles
from ssmd.refit.graphfile import Header, Hole
from ssmd.refit.refit import RefitError, bindings_of, write_blocks
from ssmd.runtime.activations import Activations, Place
from ssmd.runtime.hoststate.graph import GraphError
from ssmd.runtime.info import info_of, infos, target_of
from ssmd.text.tokenizer import Tokenizer

LEAST_TOKENS, MOST_TOKENS = 1024, 8192  # of a text; the rest of a longer one is not read
PIECE = 512  # tokens that are fed from a fresh state
_PRODUCTS = 1 << 30  # bytes of the inputs' products that are summed in one pass over the text
_FORMS = 8  # of a matrix in float32 while it is rounded: weights, targets, errors, levels of both ways, …
_BRIEF = "litert-"  # begins the encodings whose steps are rounded to bfloat16


def why_not(wanted: str) -> str:
    """Return why artifacts for a value of `--runtime` cannot be calibrated, or ""."""
    info, target = target_of(wanted)
    if wanted == "auto" or (info.activations is not None and target.device_class == "cpu"):
        return ""
    able = [info.name for info in infos() if info.activations is not None]
    return f"--calibrate: runtime {wanted} does not read what its matrices multiply; take {' or '.join(able)}"


def check_calibrates(header: Header) -> None:
    """Raise RefitError if no artifact of this graph can be calibrated."""
    if "offsets" not in header.recipe or info_of(header.runtime).activations is None:
        raise RefitError(
            f"{header.name}'s graph for {header.runtime} in {header.quantization} cannot be calibrated: it has no "
            "blocks with offsets"
        )


def memory_of(header: Header) -> int:
    """Return the bytes of memory that `calibrate` takes beside the loaded artifact.

    They hold the inputs' products, a factor and its copy, and the largest matrix in several forms.
    """
    holes = [hole for file in header.files for hole in file.holes if _has_blocks(hole)]
    columns = max((2 * hole.length // hole.rows for hole in holes), default=0)
    largest = max((2 * hole.length for hole in holes), default=0)
    return _PRODUCTS + 4 * (3 * columns * columns + _FORMS * largest)


def tokens_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a text that are fed. Raises RefitError if it is too short."""
    tokens = tokenizer.encode(text)[:MOST_TOKENS]
    if len(tokens) < LEAST_TOKENS:
        raise RefitError(
            f"the text to calibrate with has {len(tokens)} tokens, expected {LEAST_TOKENS} or more; the first "
            f"{MOST_TOKENS} are read: take texts of the kind that the model is for"
        )
    return tokens


def recipe_of(text: str, tokens: Sequence[int]) -> dict[str, Any]:
    """Return what a manifest says of a calibration."""
    return {"tokens": len(tokens), "sha256": hash_of(text)}


def hash_of(text: str) -> str:
    """Return the sha256 of a text, by which a manifest names it."""
    return hashlib.sha256(text.encode()).hexdigest()


def calibrate(artifact: Artifact, header: Header, source: Tensors, tokens: Sequence[int]) -> str:
    """Round the matrices of an artifact of this graph for these tokens, in its files. Returns a sentence about it.

    The artifact's manifest does not fit its files afterwards. Raises RefitError.
    """
    matrices = _Matrices(header, source)
    observe = info_of(header.runtime).activations
    assert observe is not None
    try:
        activations: Activations = observe(artifact, matrices.places)
    except GraphError as err:
        raise RefitError(f"{header.name}'s graph for {header.runtime} cannot be calibrated: {err}") from err
    readers: dict[str, list[str]] = {}  # of a tensor
    for name, tensor in activations.sources.items():
        readers.setdefault(tensor, []).append(name)
    shares: list[float] = []
    with closing(activations), ExitStack() as stack:
        files = {f.name: stack.enter_context((artifact.path / f.name).open("r+b")) for f in header.files}
        for group in _groups({tensor: matrices.columns[mine[0]] for tensor, mine in readers.items()}):
            grams = _grams(activations, tokens, group)
            for tensor in group:
                factor = _factor(grams.pop(tensor), readers[tensor][0])
                for name in readers[tensor]:
                    shares.append(matrices.rounded(name, factor, files))
                    tell(len(shares), len(matrices.places))
    less = 1 - float(np.sqrt(np.mean(shares)))
    return f"{len(shares)} matrices were rounded for {len(tokens)} tokens: what they give is off by {less:.0%} less"


class _Matrices:
    """The matrices of 4 bits of a graph. places: where their values stand; columns: of a row."""

    def __init__(self, header: Header, source: Tensors) -> None:
        divided = bindings_of(source.config, header.recipe, header.tiers[-1])
        recipe = {key: value for key, value in header.recipe.items() if key != "offsets"}
        self._bindings, self._source = bindings_of(source.config, recipe, header.tiers[-1]), source
        self._holes: dict[str, list[tuple[str, Hole]]] = {}
        for file in header.files:
            for hole in file.holes:
                self._holes.setdefault(hole.parameter, []).append((file.name, hole))
        self.places: dict[str, Place] = {}
        self.columns: dict[str, int] = {}
        self._encodings: dict[str, str] = {}
        for name in (name for name in divided if name + SUFFIX in divided):
            place, hole = next((f, h) for f, h in self._holes[name] if _is_of_levels(h))
            self.places[name] = Place(place, hole.offset)
            self.columns[name] = 2 * hole.length // hole.rows
            self._encodings[name] = hole.encoding

    def rounded(self, name: str, factor: Factor, files: Mapping[str, BinaryIO]) -> float:
        """Round a matrix, and write it. Returns its products' squared error in place of 1."""
        rows = np.concatenate(list(self._bindings[name].blocks(self._source)))
        made, before = better(rows, factor, brief=self._encodings[name].startswith(_BRIEF))
        packed, steps = nibbles(made.levels.reshape(*made.steps.shape, -1)), made.steps.astype("<f2")
        for file, hole in self._holes[name]:
            part = packed if _is_of_levels(hole) else steps
            files[file].seek(hole.offset)
            files[file].write(np.ascontiguousarray(part[hole.first : hole.first + hole.rows]).data)
        write_blocks(iter([made.offsets]), [(files[file], hole) for file, hole in self._holes[name + SUFFIX]])
        whole = float(before.sum())
        return float(made.costs.sum()) / whole if whole else 1.0


def _is_of_levels(hole: Hole) -> bool:
    return ENCODINGS[hole.encoding].part == 0


def _has_blocks(hole: Hole) -> bool:
    encoding = ENCODINGS.get(hole.encoding)
    return encoding is not None and encoding.bits == 4 and encoding.part == 0


def _factor(gram: Array, matrix: str) -> Factor:
    """Factor the inputs' products of a matrix. Raises RefitError if they are not finite."""
    if np.isfinite(gram).all():
        try:
            return Factor.of(gram)
        except np.linalg.LinAlgError:
            pass
    raise RefitError(f"the inputs of {matrix} are not finite, or too large, with this text: the weights are damaged")


def _groups(columns: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield tensors in order, as many at a time as _PRODUCTS has room for."""
    group, size = list[str](), 0
    for tensor, count in columns.items():
        nbytes = 4 * count * count
        if group and size + nbytes > _PRODUCTS:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += nbytes
    yield group


def _grams(activations: Activations, tokens: Sequence[int], names: Sequence[str]) -> dict[str, Array]:
    """Return the products (K, K) of each tensor's rows with one another, summed over the tokens."""
    grams: dict[str, Array] = {}
    piece = min(PIECE, activations.program.context or PIECE)
    for first in range(0, len(tokens), piece):
        calls = list(activations.fed(tokens[first : first + piece], names))
        for name in names if calls else ():
            rows = np.concatenate([call[name] for call in calls])
            grams[name] = rows.T @ rows if name not in grams else np.add(grams[name], rows.T @ rows, out=grams[name])
    return grams
