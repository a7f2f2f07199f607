"""Checkpoints: a state to be stored, its name, the programs that can use it, and the seal of states without a text.

A sealed state opens only for a request that brings the text it was computed from. A state tells its text, as the keys
of a first layer follow from token and position. The state of a request with "store": false must not. So its name in
the store and the key of its bytes are both derived from the running hash of its ids, each by a function of its own.
Neither the ids nor their hash nor the key are stored. Without the ids nothing opens. With other ids nothing is found,
or the authentication tag fails and the prompt is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ssmd.model.state import State, StateSpec
from ssmd.sessions.line import Line

SealKind = Literal["sealed", "memory"]
_NONCE_BYTES = 12
FIRST_NAME = b"\xff" * 8  # names begin with it, which keys of other states do not: so an index finds them together
Part = tuple[str, int, int]  # of a state: "rows" or "recurrent", first and last as a Blob has them


@dataclass(frozen=True)
class Seal:
    """A way to derive names and keys.

    kind: of the checkpoints that it seals. secret: mixed into all that is derived, up to 64 bytes.
    """

    kind: SealKind
    secret: bytes

    def names(self, layout: str, lineage: str, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the name, 32 bytes, of the state of the ids with each of these hashes (Line.hashes)."""
        derived = self._derived(b"ssmd.sealed.name", layout, lineage, hashes)
        return [FIRST_NAME + one[: -len(FIRST_NAME)] for one in derived]

    def key(self, layout: str, lineage: str, hashed: bytes) -> bytes:
        """Return the key, 32 bytes, of what was computed from the ids with this hash."""
        return self._derived(b"ssmd.sealed.key", layout, lineage, [hashed])[0]

    def _derived(self, person: bytes, layout: str, lineage: str, hashes: Sequence[bytes]) -> list[bytes]:
        scope = json.dumps([layout, lineage]).encode()
        return [
            hashlib.blake2b(scope + hashed, digest_size=32, key=self.secret, person=person).digest()
            for hashed in hashes
        ]


ON_DISK = Seal("sealed", b"")  # the text alone opens it
IN_MEMORY = Seal("memory", os.urandom(32))  # it opens in this process only: what is on disk is lost with it
SEALS = (ON_DISK, IN_MEMORY)


class SealedLine:
    """The ids of a prompt, and the keys that they give. For one thread at a time."""

    def __init__(self, seal: Seal, layout: str, lineage: str, line: Line) -> None:
        """line: with all ids at hand from the first one on."""
        self._seal = seal
        self._scope = layout, lineage
        self._line = line
        self._boxes: dict[int, AESGCM] = {}

    def close(self, data: bytes | memoryview, part: Part, position: int) -> bytes:
        """Encrypt a part of the state at a position. Returns nonce, ciphertext and tag."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._box(position).encrypt(nonce, data, _bound(part))

    def open(self, data: bytes, part: Part, position: int) -> bytes:
        """Decrypt a part of the state at a position. Raises ValueError if it is of other ids, or was altered."""
        try:
            return self._box(position).decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], _bound(part))
        except (InvalidTag, ValueError) as err:
            raise ValueError("it does not open with these tokens") from err

    def _box(self, position: int) -> AESGCM:
        if position not in self._boxes:
            hashed = self._line.hash(position)
            self._boxes[position] = AESGCM(self._seal.key(*self._scope, hashed))
        return self._boxes[position]


def _bound(part: Part) -> bytes:
    """Return the bytes that tie a part to its place in the state."""
    return b"%b %d %d" % (part[0].encode(), part[1], part[2])


CheckpointKind = Literal["system", "prefix", "user", "turn"]
_THREADS = re.compile(r"; \d+ threads")
KINDS: tuple[CheckpointKind, ...] = ("system", "prefix", "user", "turn")
STORED_KINDS: tuple[str, ...] = (*KINDS, *(seal.kind for seal in SEALS))


@dataclass(frozen=True)
class Scope:
    """The facts that states must share to replace one another."""

    layout: str  # StateSpec.digest()
    lineage: str
    build: str  # of the artifact


@dataclass(frozen=True)
class Maker:
    """The program that computes states. They have the layout `spec` and are stored under its artifact's scope."""

    scope: Scope
    producer: str
    spec: StateSpec


def of_machine(origin: str) -> bool:
    """Return True for the origin of a trusted machine's states, which begins as no session's id does."""
    return origin.startswith("@")


@dataclass(frozen=True)
class StoredCheckpoint:
    """A stored checkpoint."""

    id: int
    position: int
    build: str
    producer: str
    origin: str | None  # None: computed here
    seal: Seal | None = None  # with which it was sealed
    # A checkpoint that grew from this one with other ids at its end, and how many of its rows serve: more than
    # `position`. Only for states that are rows alone.
    longer: tuple[int, int] | None = None

    @property
    def start(self) -> int:
        """Return the position from which a prompt is fed."""
        return self.position if self.longer is None else self.longer[1]

    def is_exact(self, build: str, producer: str) -> bool:
        """Return True if a program of this build and producer computes the very bits of this state.

        The number of threads is ignored. If a producer names it, it changes no bit (tests/engine/test_company.py).
        """
        return self.build == build and _THREADS.sub("", self.producer) == _THREADS.sub("", producer)


@dataclass(frozen=True, eq=False)
class NewCheckpoint:
    """A state that is to be stored."""

    kind: CheckpointKind
    ids: Line  # that were fed, `state.position` of them
    state: State  # with the KV rows since the parent's position, or whole if there is no parent
    parent: int | NewCheckpoint | None = None  # the checkpoint it grew from; it may still be on its way to the store
    origin: str | None = None  # of the state that the parent grew from, if it was not computed here
    turn: str | None = None  # the turn it belongs to; None: all turns of the commit
    owner: str = ""  # of the session that it is made for
    seal: Seal | None = None  # to seal it with; then it belongs to no turn, and its parent has the same seal


def prefix_keys(layout: str, lineage: str, line: Line, positions: Sequence[int]) -> list[bytes]:
    """Hash (layout, lineage, first p ids) for each p of the ascending `positions`, as far as Line.hashes has them."""
    return keys_of(layout, lineage, line.hashes(positions))


def keys_of(layout: str, lineage: str, hashes: Sequence[bytes]) -> list[bytes]:
    """Hash (layout, lineage, ids) for the ids with each of these hashes."""
    scope = json.dumps([layout, lineage]).encode()
    return [hashlib.blake2b(scope + hashed, digest_size=32, person=b"ssmd.prefix.2").digest() for hashed in hashes]


Digested = tuple[int, int, bytes]  # of a blob: first, last, checksum
Name = tuple[bytes, str, str]  # of a checkpoint: key, build, origin


def digest(name: Name, position: int, segments: Sequence[Digested], pieces: Sequence[Digested]) -> bytes:
    """Hash a checkpoint: sha256 over its name, position, and (first, last, checksum) of its segments and pieces."""
    running = hashlib.sha256(f"ssmd checkpoint 1 {position}\n".encode())
    for kind, parts in (("rows", segments), ("recurrent", pieces)):
        for first, last, checksum in parts:
            running.update(f"{kind} {first} {last} {checksum.hex()}\n".encode())
    return bound(running.digest(), name)


def bound(parts: bytes, name: Name) -> bytes:
    """Tie parts to the name under which they are stored: under another name they would be the state of other ids."""
    return hashlib.sha256(b"ssmd checkpoint 2 %b %b" % (parts, repr(tuple(name)).encode())).digest()
