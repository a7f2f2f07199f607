"""Recovery of a remote that was put back from an older backup: machines send again what it had confirmed and lost.

A machine counts what it publishes, in the remote together with the turns, and then in its own store. So the remote's
count is behind only if the remote is older than it was.
"""

from __future__ import annotations

import logging

from sqlalchemy import select

from ssmd.sessions.remote.remote import Remote
from ssmd.sessions.rows import outbox, tree
from ssmd.sessions.rows.schema import turn
from ssmd.sessions.rows.warm import WARM
from ssmd.sessions.store import Store

log = logging.getLogger(__name__)


def mark_of(store: Store, remote: Remote) -> outbox.Mark:
    """Return what a remote has confirmed to this machine. The machine gets a name there the first time."""
    with store.reading() as connection:
        found = outbox.read_mark(connection, remote.identity)
    if found is None:
        with store.writing() as connection:
            found = outbox.new_mark(connection, remote.identity)
    return found


def recover(store: Store, remote: Remote) -> list[str]:
    """Find out if a remote has lost what it had confirmed, and then put that into the outbox again.

    All tombstones of this machine are sent before. Returns the sessions that the remote had not whole. A kill at any
    moment leaves it to the next call. Raises RemoteError, StoreError.
    """
    mark = mark_of(store, remote)
    if not mark.confirmed or remote.mark_of(mark.machine) >= mark.confirmed:
        return []
    log.warning("the remote %s is older than it was, as from a backup: what it lost is sent again", remote.name)
    with store.reading() as connection:
        sessions, turns = outbox.names_of(connection, "buried"), outbox.buried_turns(connection)
        shared = sorted(outbox.names_of(connection, "shared"))
    there = set(remote.buried())
    for session in sorted(sessions - there):
        remote.bury(session, None)
    for name, session in sorted(turns.items()):
        if name not in there and session not in sessions:
            remote.bury(session, name)
    found = []
    for session in shared:
        if session in there:  # another machine removed it: it is removed here next
            continue
        names = set(remote.turns(session))
        with store.writing() as connection:
            own = select(turn.c.id).where(tree.belongs(session), turn.c.finish != WARM).order_by(turn.c.seq)
            lost = [one for one in connection.scalars(own) if one not in names and one not in there]
            outbox.add_again(connection, session, lost)
        if lost:
            found.append(session)
    remote.set_mark(mark.machine, mark.confirmed)
    return found
