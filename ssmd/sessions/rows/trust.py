"""The machines that a user trusts: their states serve here as this one's own, and go when the trust ends."""

from __future__ import annotations

import base64
import re
import time
from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, insert, select, update

from ssmd.sessions.checkpoint import of_machine
from ssmd.sessions.rows.checkpoints import sweep
from ssmd.sessions.rows.holding import batches, count_again
from ssmd.sessions.rows.schema import checkpoint, trusted_machine, turn, turn_checkpoint
from ssmd.sessions.turn import StoreError

MAX_NAME = 64  # characters of the name that a user gives a machine
_KEY = re.compile(r"[0-9a-f]{64}")
_m, _c, _l = trusted_machine.c, checkpoint.c, turn_checkpoint.c


@dataclass(frozen=True)
class TrustedMachine:
    """A trusted machine. key: in hex. trusted_at: in us since 1970. states: that are stored here because of it."""

    key: str
    name: str
    trusted_at: int
    states: int


def origin_of(key: str) -> str:
    """Return the origin that a trusted machine's states have here. key: in hex, 64 digits."""
    return "@" + base64.urlsafe_b64encode(bytes.fromhex(key)).decode().rstrip("=")


def check_key(key: str) -> str:
    """Return a public key in the form in which it is kept. Raises StoreError if it is not one."""
    found = key.strip().lower()
    if not _KEY.fullmatch(found):
        raise StoreError(f"{key[:80]!r} is not a machine's key: `ssmd store key` on that machine shows it, 64 digits")
    return found


def trusted(connection: Connection) -> list[TrustedMachine]:
    """List the trusted machines, the one trusted first at the beginning."""
    states = select(func.count()).where(_c.origin == _m.origin).scalar_subquery()
    rows = connection.execute(select(_m.origin, _m.name, _m.trusted_at, states.label("n")).order_by(_m.trusted_at))
    return [TrustedMachine(_key_of(row.origin), row.name, row.trusted_at, row.n) for row in rows]


def _key_of(origin: str) -> str:
    return base64.urlsafe_b64decode(f"{origin[1:]}=").hex()


def trust(connection: Connection, key: str, name: str = "") -> None:
    """Trust a machine from now on, or give a trusted one another name. Raises StoreError."""
    if len(name) > MAX_NAME or not name.isprintable():
        raise StoreError(f"a machine's name has at most {MAX_NAME} printable characters")
    origin = origin_of(check_key(key))
    if connection.execute(update(trusted_machine).where(_m.origin == origin).values(name=name)).rowcount == 0:
        values = {"origin": origin, "name": name, "trusted_at": time.time_ns() // 1000}
        connection.execute(insert(trusted_machine).values(values))


def distrust(connection: Connection, key: str) -> int:
    """End the trust in a machine, and remove its states and all that grew from them. Returns how many.

    Text stays, and is read again. Raises StoreError if the machine is not trusted.
    """
    origin = origin_of(check_key(key))
    assert of_machine(origin)
    if connection.execute(delete(trusted_machine).where(_m.origin == origin)).rowcount == 0:
        raise StoreError(f"machine {key[:80]} is not trusted here; `ssmd store machines` lists those that are")
    doomed = list(connection.scalars(select(_c.id).where(_c.origin == origin)))
    sessions = set[str]()
    for some in batches(doomed):
        linked = select(turn.c.session).join(turn_checkpoint, _l.turn == turn.c.id).where(_l.checkpoint.in_(some))
        sessions.update(connection.scalars(linked.distinct()))
        connection.execute(delete(turn_checkpoint).where(_l.checkpoint.in_(some)))
    sweep(connection, doomed)
    count_again(connection, sessions)
    return len(doomed)
