"""The signatures of a graph: decode and each bucket, for each capacity of the caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ssmd.model.state import StateSpec
from ssmd.runtime.hoststate.graph import SLOTS, Signature, Tensor
from ssmd.runtime.hoststate.slot import graph_shape
from ssmd.runtime.protocol import ProgramError

if TYPE_CHECKING:
    from ssmd.model.artifact import Manifest

LANES = (4, 8)  # numbers of streams that builds make signatures of decode steps for
_INT32 = np.dtype(np.int32)
_FLOAT32 = np.dtype(np.float32)


def signature_name(length: int, capacity: int, smallest: int) -> str:
    """Return the name of a bucket's signature; the smallest tier has no suffix. length: the bucket, 1 for decode."""
    name = "decode" if length == 1 else f"prefill_{length}"
    return name if capacity == smallest else f"{name}_{capacity}"


def lanes_name(lanes: int) -> str:
    """Return the name of the signature of a decode step with `lanes` lanes."""
    return f"decode_b{lanes}"


def is_open(signatures: Mapping[str, Signature]) -> bool:
    """Return True if one signature of each length serves every capacity of the caches."""
    return any(signature.nominal is not None for signature in signatures.values())


def check_signatures(
    signatures: Mapping[str, Signature], manifest: Manifest, spec: StateSpec, tiers: Sequence[int]
) -> None:
    """Check that the graph has every bucket in every tier, or once for all of them, with the tensors of its state.

    Raises ProgramError.
    """
    lengths = (1, *manifest.buckets)
    if is_open(signatures):
        for length in lengths:
            _check_signature(signatures, signature_name(length, 0, 0), length, None, manifest, spec)
        return
    for capacity in tiers:
        for length in lengths:
            _check_signature(signatures, signature_name(length, capacity, tiers[0]), length, capacity, manifest, spec)


def _check_signature(
    signatures: Mapping[str, Signature],
    name: str,
    length: int,
    capacity: int | None,
    manifest: Manifest,
    spec: StateSpec,
) -> None:
    """Check one signature. capacity: None if it is open. Raises ProgramError."""
    signature = signatures.get(name)
    if signature is None:
        raise ProgramError(f"the model has no signature {name!r}, it has {sorted(signatures)}; build it again")
    slots = capacity or signature.nominal or 0
    inputs = {t.name: Tensor(graph_shape(t, slots), _FLOAT32) for t in spec.tensors}
    if capacity is None:
        inputs[SLOTS] = Tensor((1, 1, slots), _FLOAT32)
    inputs |= {"tokens": Tensor((1, length), _INT32), "pos": Tensor((1,), _INT32), "n_valid": Tensor((1,), _INT32)}
    outputs = {t.name: Tensor(graph_shape(t, length), _FLOAT32) for t in spec.tensors}
    outputs |= {"logits": Tensor((1, manifest.vocabulary), _FLOAT32)}
    for side, found, wanted in (("input", signature.inputs, inputs), ("output", signature.outputs, outputs)):
        for key in sorted(found.keys() | wanted.keys()):
            if found.get(key) != wanted.get(key):
                raise ProgramError(
                    f"signature {name!r}: {side} {key!r} is {found.get(key)}, the manifest says {wanted.get(key)}; "
                    "build the artifact again"
                )
