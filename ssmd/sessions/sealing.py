"""Sealed states: a stored state that opens only for a request that brings the text it was computed from.

A state tells its text, as the keys of a first layer follow from token and position. The state of a request with
"store": false must not. So its name in the store and the key of its bytes are both derived from the running hash of
its ids, each by a function of its own. Neither the ids nor their hash nor the key are stored. Without the ids nothing
opens; with other ids nothing is found, or the authentication tag fails and the prompt is read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

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
