"""Token ids and rendered text of a conversation, of which only the end may be at hand. A hash stands for the rest.

A conversation only grows at its end. Of the part before, a request needs only the length and the hash. Hashes are
chained over blocks of a fixed size, so that hashing can go on from any position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
EMPTY = bytes(32)  # the hash of nothing
_IDS_BLOCK = 128  # bytes
_TEXT_BLOCK = 512
_ANCHOR_BITS = 4


def as_ids(ids: Sequence[int] | NDArray[Any]) -> Ids:
    """Convert token ids to little-endian int32. Raises ValueError on an id that no vocabulary can have."""
    wide = np.asarray(ids, dtype=np.int64)
    if wide.ndim != 1 or (wide.size and (wide.min() < 0 or wide.max() > 0x7FFFFFFF)):
        raise ValueError("token ids must be a flat list of numbers from 0 to 2147483647")
    return np.ascontiguousarray(wide.astype("<i4"))


def anchor(position: int) -> int:
    """Round a position down to its four leading bits.

    Each checkpoint is stored with the key of its ids up to this position. There are some 8 anchors for every doubling
    of the length. They are enough to find the checkpoints that share nearly all of their ids with a prompt, however
    many others there are.
    """
    shift = max(0, position.bit_length() - _ANCHOR_BITS)
    return position >> shift << shift


def anchors(first: int, last: int) -> list[int]:
    """List the anchors of the positions first..last, ascending. The first anchor may be less than `first`."""
    found: list[int] = []
    at = anchor(max(1, first))
    while at <= last:
        found.append(at)
        at += 1 << max(0, at.bit_length() - _ANCHOR_BITS)
    return found


def advance(hashed: bytes, data: bytes, block: int) -> bytes:
    """Carry a hash on over more bytes: 32 bytes that stand for whole blocks, then those of the block not yet full."""
    chain, rest = hashed[:32], hashed[32:] + data
    full = len(rest) - len(rest) % block
    for at in range(0, full, block):
        chain = _block(chain, rest[at : at + block])
    return chain + rest[full:]


def _block(chain: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(chain + data, digest_size=32, person=b"ssmd.line.1").digest()


@dataclass(frozen=True, eq=False)
class Line:
    """The token ids of a conversation, of which `own` are at hand. Its length counts all ids."""

    own: Ids
    start: int = 0  # how many ids come before `own`
    before: bytes = EMPTY  # hash of the first `start` ids
    anchored: bytes = EMPTY  # hash of the first anchor(start) ids

    @staticmethod
    def of(ids: Sequence[int] | NDArray[Any]) -> Line:
        """Make a line with all its ids at hand. Raises ValueError on an id that no vocabulary can have."""
        return Line(as_ids(ids))

    def __len__(self) -> int:
        return self.start + len(self.own)

    def since(self, position: int) -> Ids:
        """Return the ids from a position on. Raises ValueError if they are not at hand."""
        if position < self.start:
            raise ValueError(f"ids from {position} on are not at hand, those from {self.start} on are")
        return self.own[position - self.start :]

    def up_to(self, position: int) -> Line:
        """Return the line of the first `position` ids. Raises ValueError if these end before `start`."""
        if position < self.start:
            raise ValueError(f"a line from {self.start} on cannot end at {position}")
        found = Line(self.own[: position - self.start], self.start, self.before, self.anchored)
        if "_chain" in self.__dict__:  # its first hashes are the same
            found.__dict__["_chain"] = self._chain
        return found

    def then(self, ids: Sequence[int] | NDArray[Any]) -> Line:
        """Return the line with more ids at its end."""
        return Line(np.concatenate([self.own, as_ids(ids)]), self.start, self.before, self.anchored)

    def hashes(self, positions: Sequence[int]) -> list[bytes]:
        """Hash the first p ids, for each p of the ascending `positions`: anchor(start), or from `start` on."""
        rest, found = self.before[len(EMPTY) :], []
        data = rest + self.own.tobytes()
        for p in positions:
            if p < self.start:
                if p != anchor(self.start):
                    raise ValueError(f"ids before {self.start} are not at hand")
                found.append(self.anchored)
                continue
            end = min(len(rest) + 4 * (p - self.start), len(data))
            full = end // _IDS_BLOCK
            found.append(self._chain[full] + data[full * _IDS_BLOCK : end])
        return found

    @cached_property
    def _chain(self) -> list[bytes]:
        """Hash all full blocks: item n stands for the first n of them. Cached: a request hashes its ids many times."""
        chain, data = self.before[: len(EMPTY)], self.before[len(EMPTY) :] + self.own.tobytes()
        found = [chain]
        for at in range(0, len(data) - len(data) % _IDS_BLOCK, _IDS_BLOCK):
            chain = _block(chain, data[at : at + _IDS_BLOCK])
            found.append(chain)
        return found

    def hash(self, position: int) -> bytes:
        """Hash the first `position` ids."""
        return self._end[1] if position == len(self) else self.hashes([position])[0]

    @cached_property
    def _end(self) -> tuple[bytes, bytes]:
        """Hash the first anchor(len) ids, and all ids. Cached: any number of lines may go on from here."""
        anchored, before = self.hashes([anchor(len(self)), len(self)])
        return anchored, before

    def cut(self, position: int) -> Line:
        """Return the same line, with only the ids from `position` on at hand."""
        anchored, before = self._end if position == len(self) else self.hashes([anchor(position), position])
        return Line(self.since(position), position, before, anchored)

    def after(self, earlier: Sequence[Line]) -> Line:
        """Return the same line, with the ids of earlier parts at hand too.

        Each part ends where the next one's own ids begin. Raises ValueError if one does not.
        """
        if not earlier:
            return self
        for part, then in pairwise([*earlier, self]):
            if len(part) != then.start:
                raise ValueError(f"a line up to {len(part)} is not the part before {then.start}")
        first = earlier[0]
        own = np.concatenate([*(part.own for part in earlier), self.own])
        return Line(own, first.start, first.before, first.anchored)


@dataclass(frozen=True, eq=False)
class Passage:
    """The rendered text of a conversation, of which `own` is at hand. Its length counts all characters."""

    own: str
    start: int = 0  # how many characters come before `own`
    before: bytes = EMPTY  # hash of those

    def __len__(self) -> int:
        return self.start + len(self.own)

    def then(self, text: str) -> Passage:
        """Return the passage with more text at its end."""
        return Passage(self.own + text, self.start, self.before)

    def hash(self, position: int) -> bytes:
        """Hash the first `position` characters. Raises ValueError if they are not at hand."""
        if position < self.start:
            raise ValueError(f"text before {self.start} is not at hand")
        return self._end if position >= len(self) else self._hashed(position)

    @cached_property
    def _end(self) -> bytes:
        """Hash all of it. Cached: any number of passages may go on from here."""
        return self._hashed(len(self))

    def _hashed(self, position: int) -> bytes:
        return advance(self.before, self.own[: position - self.start].encode(), _TEXT_BLOCK)

    def cut(self, position: int) -> Passage:
        """Return the same passage, with only the text from `position` on at hand."""
        return Passage(self.own[position - self.start :], position, self.hash(position))


NOTHING = Line(np.empty(0, np.int32))
SILENCE = Passage("")
