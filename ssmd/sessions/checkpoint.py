"""Checkpoints: a state to be kept, what names one that is kept, and for whom it counts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ssmd.model.state import State, StateSpec
from ssmd.sessions.line import Line

CheckpointKind = Literal["system", "user", "turn"]
_THREADS = re.compile(r"; \d+ threads")
KINDS: tuple[CheckpointKind, ...] = ("system", "user", "turn")


@dataclass(frozen=True)
class Scope:
    """What states share that serve one another: `layout` is StateSpec.digest(), `lineage`, `build` the artifact's."""

    layout: str
    lineage: str
    build: str


@dataclass(frozen=True)
class Maker:
    """The program that makes states: they are `spec`'s, and kept under its artifact's scope."""

    scope: Scope
    producer: str
    spec: StateSpec


@dataclass(frozen=True)
class Found:
    """A stored checkpoint."""

    id: int
    position: int
    build: str
    producer: str
    origin: str | None

    def is_exact(self, build: str, producer: str) -> bool:
        """Whether a program of that build and producer computes the very bits of this state.

        However many threads it has: where a producer names them, they change no bit (tests/engine/test_company.py).
        """
        return self.build == build and _THREADS.sub("", self.producer) == _THREADS.sub("", producer)


@dataclass(frozen=True, eq=False)
class NewCheckpoint:
    """A state that is to be stored.

    ids: those that were fed, as many as `state.position`. state: with the KV rows since the parent's position, or
    whole if there is no parent. parent: the stored checkpoint it grew from, or one that is still on its way to the
    store. origin: the imported session it grew from, if any; it is the parent's. turn: the turn it belongs to; None
    for all turns of the commit. owner: whose it is, as the session that it is made for.
    """

    kind: CheckpointKind
    ids: Line
    state: State
    parent: int | NewCheckpoint | None = None
    origin: str | None = None
    turn: str | None = None
    owner: str = ""


def prefix_keys(layout: str, lineage: str, line: Line, positions: Sequence[int]) -> list[bytes]:
    """H(layout, lineage, first p ids) for each p of the ascending `positions`, as far as Line.hashes has them."""
    scope = json.dumps([layout, lineage]).encode()
    return [
        hashlib.blake2b(scope + hashed, digest_size=32, person=b"ssmd.prefix.2").digest()
        for hashed in line.hashes(positions)
    ]


Digested = tuple[int, int, bytes]  # of a blob: first, last, checksum


Name = tuple[bytes, str, str]  # of a checkpoint: key, build, origin


def digest(name: Name, position: int, segments: Sequence[Digested], pieces: Sequence[Digested]) -> bytes:
    """What a checkpoint is made of, and whose: sha256 over its name, its position and (first, last, checksum) of all
    segments and pieces.
    """
    running = hashlib.sha256(f"ssmd checkpoint 1 {position}\n".encode())
    for kind, parts in (("rows", segments), ("recurrent", pieces)):
        for first, last, checksum in parts:
            running.update(f"{kind} {first} {last} {checksum.hex()}\n".encode())
    return bound(running.digest(), name)


def bound(parts: bytes, name: Name) -> bytes:
    """Tie parts to the name that they are found by: under another one they are the state of other ids."""
    return hashlib.sha256(b"ssmd checkpoint 2 %b %b" % (parts, repr(tuple(name)).encode())).digest()
