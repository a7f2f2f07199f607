"""Checkpoints: a state to be kept, what names one that is kept, and for whom it counts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ssmd.model.state import State

CheckpointKind = Literal["system", "user", "turn"]
KINDS: tuple[CheckpointKind, ...] = ("system", "user", "turn")
_ANCHOR_BITS = 4

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Scope:
    """What states share that serve one another: `layout` is StateSpec.digest(), `lineage`, `build` the artifact's."""

    layout: str
    lineage: str
    build: str


@dataclass(frozen=True)
class Found:
    """A stored checkpoint. Resuming from it is exact when build and producer are the program's own."""

    id: int
    position: int
    build: str
    producer: str
    origin: str | None


@dataclass(frozen=True, eq=False)
class NewCheckpoint:
    """A state that is to be stored.

    ids: all ids fed, int32, as many as `state.position`. state: with the KV rows since the parent's position, or
    whole if there is no parent. parent: the stored checkpoint it grew from, or one that is still on its way to the
    store. origin: the imported session it grew from, if any; it is the parent's. turn: the turn it belongs to; None
    for all turns of the commit.
    """

    kind: CheckpointKind
    ids: Ids
    state: State
    parent: int | NewCheckpoint | None = None
    origin: str | None = None
    turn: str | None = None


def as_ids(ids: Sequence[int] | NDArray[Any]) -> Ids:
    """Token ids as little-endian int32. Raises ValueError on one that no vocabulary can hold."""
    wide = np.asarray(ids, dtype=np.int64)
    if wide.ndim != 1 or (wide.size and (wide.min() < 0 or wide.max() > 0x7FFFFFFF)):
        raise ValueError("token ids must be a flat list of numbers from 0 to 2147483647")
    return np.ascontiguousarray(wide.astype("<i4"))


def prefix_keys(layout: str, lineage: str, ids: Ids, positions: Sequence[int]) -> list[bytes]:
    """H(layout, lineage, ids[:p]) for each p of the ascending `positions`, in one pass over the ids."""
    running = hashlib.blake2b(digest_size=32, person=b"ssmd.prefix.1")
    running.update(json.dumps([layout, lineage]).encode())
    data = memoryview(ids.tobytes())
    keys, at = [], 0
    for p in positions:
        running.update(data[4 * at : 4 * p])
        at = p
        keys.append(running.copy().digest())
    return keys


def anchor(position: int) -> int:
    """Round a position down to its four leading bits.

    Stored beside each checkpoint is the key of its ids up to here. Some 8 anchors for every doubling of the length
    are enough to ask the database for the checkpoints that share nearly all of their ids with a prompt, however many
    others there are.
    """
    shift = max(0, position.bit_length() - _ANCHOR_BITS)
    return position >> shift << shift


def anchors(last: int) -> list[int]:
    """List all anchors of the positions 1..last, ascending."""
    found: list[int] = []
    at = 1
    while at <= last:
        found.append(at)
        at += 1 << max(0, at.bit_length() - _ANCHOR_BITS)
    return found


Digested = tuple[int, int, bytes]  # of a blob: first, last, checksum


def digest(position: int, segments: Sequence[Digested], pieces: Sequence[Digested]) -> bytes:
    """What a checkpoint is made of: sha256 over its position and (first, last, checksum) of all segments and pieces."""
    running = hashlib.sha256(f"ssmd checkpoint 1 {position}\n".encode())
    for name, parts in (("rows", segments), ("recurrent", pieces)):
        for first, last, checksum in parts:
            running.update(f"{name} {first} {last} {checksum.hex()}\n".encode())
    return running.digest()
