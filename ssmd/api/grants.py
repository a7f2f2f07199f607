"""Tickets and the keys that they give: so many of each for each key, in memory alone, held by nothing but hashes."""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

TICKET_S, KEY_S = 60.0, 43_200.0
MOST_TICKETS, MOST_KEYS = 64, 256  # of one key: of more the oldest goes


@dataclass(frozen=True)
class Grant:
    """What a ticket or a key of this digest stands for. by: the digest of the key that it was made with, and whose
    rights it has. until: by the clock. least: a key that it gives, or is, ends then at the latest.
    """

    digest: bytes
    by: bytes
    until: float
    least: float = math.inf


class Grants:
    """All tickets and the keys made of them. From any thread. clock: seconds, never going back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._tickets: list[Grant] = []
        self._keys: list[Grant] = []

    def ticket(self, by: bytes, until: float = math.inf) -> str:
        """Make a ticket. until: when the key ends that it is made with."""
        ticket = secrets.token_urlsafe(32)
        with self._lock:
            self._add(self._tickets, Grant(digest_of(ticket), by, self._clock() + TICKET_S, until), MOST_TICKETS)
        return ticket

    def redeem(self, ticket: str, is_good: Callable[[Grant], bool]) -> tuple[str, float] | None:
        """(key, seconds for which it is good) for a ticket, which is good for this once; None for any other.

        is_good: whether the key is in force that it was made with.
        """
        with self._lock:
            found = _find(self._tickets, digest_of(ticket))
            if found is None:
                return None
            self._tickets.remove(found)
            now = self._clock()
            if now >= found.until or now >= found.least or not is_good(found):
                return None
            key = secrets.token_urlsafe(32)
            until = min(now + KEY_S, found.least)
            self._add(self._keys, Grant(digest_of(key), found.by, until), MOST_KEYS)
            return key, until - now

    def _add(self, among: list[Grant], grant: Grant, most: int) -> None:
        """Keep one more; what is over goes, and the oldest of more than `most` of the same key."""
        now = self._clock()
        among[:] = [one for one in among if one.until > now]
        mine = [one for one in among if one.by == grant.by]
        if len(mine) >= most:
            among.remove(mine[0])
        among.append(grant)

    def find(self, digest: bytes) -> Grant | None:
        """What a key of this digest stands for, if it is one of these and good still."""
        with self._lock:
            found = _find(self._keys, digest)
            return None if found is None or self._clock() >= found.until else found


def digest_of(secret: str) -> bytes:
    """The hash that is held of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def _find(among: list[Grant], digest: bytes) -> Grant | None:
    """The one of this digest. All are compared, each in constant time."""
    found = None
    for grant in among:
        found = grant if hmac.compare_digest(digest, grant.digest) else found
    return found
