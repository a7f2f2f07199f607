"""Leases in a remote: a row a role and name, the database's clock, and a fence that every guarded write compares.

A machine that slept, or was cut off, may believe in a lease that another one has by now: its writes find a newer
fence, and do nothing. The row is locked by each of them to its end, so that no other machine takes it meanwhile.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

from sqlalchemy import Connection, text

from ssmd.sessions.remote.postgres.server import Server

_ACQUIRE = text("""
    INSERT INTO ssmd.lease AS held (name, holder, fence, until)
    VALUES (:name, :holder, 1, clock_timestamp() + make_interval(secs => :seconds))
    ON CONFLICT (role, name) DO UPDATE
    SET holder = :holder, fence = held.fence + 1, until = clock_timestamp() + make_interval(secs => :seconds)
    WHERE held.until < clock_timestamp()
    RETURNING fence""")
_HOLDS = text("SELECT true FROM ssmd.lease WHERE role = CURRENT_USER AND name = :name AND fence = :fence FOR SHARE")
_RELEASE = text("""
    UPDATE ssmd.lease SET until = '-infinity' WHERE role = CURRENT_USER AND name = :name AND fence = :fence""")


@dataclass(frozen=True)
class Lease:
    """A lease that this machine was given. fence: higher than that of every earlier one of this name."""

    name: str
    fence: int


def acquire(server: Server, name: str, seconds: float) -> Lease | None:
    """Take a lease, also if this machine has it; None while it is given. Raises RemoteError."""
    values = {"name": name, "holder": platform.node()[:64], "seconds": seconds}
    fence = server.write(lambda connection: connection.scalar(_ACQUIRE, values))
    return None if fence is None else Lease(name, int(fence))


def holds(connection: Connection, lease: Lease) -> bool:
    """Return True if no other machine was given the lease. None is until the transaction ends."""
    return connection.scalar(_HOLDS, {"name": lease.name, "fence": lease.fence}) is True


def release(server: Server, lease: Lease) -> None:
    """Give a lease back, if it is still this machine's. Raises RemoteError."""
    server.write(lambda connection: connection.execute(_RELEASE, {"name": lease.name, "fence": lease.fence}))
