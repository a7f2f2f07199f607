"""The outbox: what is to be sent to the remote, in the order of writing, and which sessions the remote may have.

A row is written in the transaction that writes or removes the turn. It goes when the remote has the turn, or the
tombstone. So a turn is sent at least once; the remote keeps it once, as its name is always the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from ssmd.sessions.rows import tree
from ssmd.sessions.rows.holding import batches
from ssmd.sessions.rows.schema import buried_turn, outbox, remote_mark, remote_session
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.turn import NewTurn, SessionInfo

MAX_WAITING = 100_000  # rows of the outbox: beyond it, conversations stay here until they are pushed
# shared: its turns are sent. behind: some were not, as while the outbox was full. local: none is sent any more.
# buried: it was removed, here or elsewhere, and never comes back.
Standing = Literal["shared", "behind", "local", "buried"]
_o, _r, _t, _b, _m = outbox.c, remote_session.c, turn_table.c, buried_turn.c, remote_mark.c
_STANDING = select(_r.standing).where(_r.id == bindparam("session"))
_FALL_BEHIND = update(remote_session).where(_r.id == bindparam("session"), _r.standing == "shared")
_FALL_BEHIND = _FALL_BEHIND.values(standing="behind")
_PARENT = select(_t.session).where(_t.id == bindparam("turn"))
_STANDINGS = (
    select(_r.standing)
    .select_from(turn_table.outerjoin(remote_session, _r.id == _t.session))
    .where(_t.id.in_(bindparam("turns", expanding=True)))
    .distinct()
)
_ENDS = select(func.min(_o.id), func.max(_o.id))
_WAITS = select(_o.id).where(_o.turn == bindparam("turn"), _o.buried.is_(False)).limit(1)


@dataclass(frozen=True)
class OutboxRow:
    """A turn to be sent, or a tombstone. turn: None if the whole session is buried."""

    id: int
    session: str
    turn: str | None
    buried: bool


def standing(connection: Connection, session_id: str) -> Standing | None:
    """Return how a session stands to the remote; None if it never had to do with one."""
    found = connection.execute(_STANDING, {"session": session_id}).scalar()
    return next((one for one in get_args(Standing) if one == found), None)


def standings(connection: Connection, turns: Sequence[str]) -> set[str | None]:
    """Return how the sessions of stored turns stand to the remote."""
    return set(connection.scalars(_STANDINGS, {"turns": turns}))


def set_standing(connection: Connection, session_id: str, now: Standing) -> None:
    """Store a session's standing with the remote."""
    connection.execute(delete(remote_session).where(_r.id == session_id))
    connection.execute(insert(remote_session).values(id=session_id, standing=now))


def fall_behind(connection: Connection, session_id: str) -> None:
    """Note that turns are written without a remote. If the session was shared, the next ones are of no use there."""
    connection.execute(_FALL_BEHIND, {"session": session_id})


def add_turns(connection: Connection, session: SessionInfo, turns: Sequence[NewTurn]) -> None:
    """Put new turns of a session into the outbox, if they are to be sent.

    They are if the remote can have all turns above them: the session is new, or shared, or a fork of a shared one.
    """
    if session.imported is not None:
        return
    now, parent = standing(connection, session.id), turns[0].parent
    if now is None and parent is not None:
        above = connection.execute(_PARENT, {"turn": parent}).scalar()
        if above is None or standing(connection, above) != "shared":
            return  # of a conversation that began before there was a remote
    elif now not in (None, "shared"):
        return
    if waiting(connection) + len(turns) > MAX_WAITING:
        if now is not None:
            set_standing(connection, session.id, "behind")
        return
    if now is None:
        connection.execute(insert(remote_session).values(id=session.id, standing="shared"))
    _add(connection, session.id, [turn.id for turn in turns])


def add_all(connection: Connection, session_id: str) -> int:
    """Put all turns of a session into the outbox, and share it from now on. Returns how many."""
    turns = select(_t.id).where(tree.belongs(session_id)).order_by(_t.seq)
    found = list(connection.scalars(turns))
    set_standing(connection, session_id, "shared")
    _add(connection, session_id, found)
    return len(found)


def _add(connection: Connection, session_id: str, turns: Sequence[str], *, buried: bool = False) -> None:
    if turns:
        rows = [{"session": session_id, "turn": turn, "buried": buried} for turn in turns]
        connection.execute(insert(outbox), rows)


def bury(connection: Connection, session_id: str, own: Sequence[str]) -> None:
    """Bury a session that is removed in this transaction, after its turns were handed over.

    own: its turns before that. Those that forks of it still need are sent again, as turns of the forks. A fork that
    was not shared is not shared by that: its own turns stay, and nothing of a session that was local is sent for it.
    """
    before, named = standing(connection, session_id), set(own)
    set_standing(connection, session_id, "buried")
    connection.execute(delete(outbox).where(_o.session == session_id))
    connection.execute(insert(outbox).values(session=session_id, turn=None, buried=True))
    for some in batches(own):
        moved = select(_t.id, _t.session).where(_t.id.in_(some), _t.session != session_id).order_by(_t.seq)
        for turn, heir in connection.execute(moved).all():
            if standing(connection, heir) is None and before != "local":
                its = set(connection.scalars(select(_t.id).where(_t.session == heir)))
                set_standing(connection, heir, "shared" if its <= named else "behind")
            if standing(connection, heir) in ("shared", "behind"):
                _add(connection, heir, [turn])


def bury_turns(connection: Connection, session_id: str, turns: Sequence[str]) -> None:
    """Bury turns that are removed in this transaction from a session that stays, if the remote may have them."""
    if turns and standing(connection, session_id) is not None:
        for some in batches(turns):
            connection.execute(delete(outbox).where(_o.turn.in_(some)))
            connection.execute(delete(buried_turn).where(_b.turn.in_(some)))
        connection.execute(insert(buried_turn), [{"turn": turn, "session": session_id} for turn in turns])
        _add(connection, session_id, turns, buried=True)


def buried_turns(connection: Connection) -> dict[str, str]:
    """Return the turns that were removed from sessions that stayed, and the session of each."""
    return {row.turn: row.session for row in connection.execute(select(_b.turn, _b.session))}


def add_again(connection: Connection, session_id: str, turns: Sequence[str]) -> None:
    """Put turns of a shared session into the outbox that the remote has lost, but for those that wait there."""
    if standing(connection, session_id) == "shared":
        _add(connection, session_id, [turn for turn in turns if not waits(connection, turn)])


@dataclass(frozen=True)
class Mark:
    """The count of this machine's publications that a remote has confirmed. machine: its name there."""

    remote: str
    machine: str
    confirmed: int


def read_mark(connection: Connection, remote: str) -> Mark | None:
    """Return the count that a remote has confirmed; None if nothing was sent to it."""
    row = connection.execute(select(_m.machine, _m.confirmed).where(_m.remote == remote)).one_or_none()
    return None if row is None else Mark(remote, row.machine, row.confirmed)


def new_mark(connection: Connection, remote: str) -> Mark:
    """Name this machine in a remote. Returns what it has confirmed, if another process did so meanwhile."""
    found = read_mark(connection, remote)
    if found is None:
        found = Mark(remote, secrets.token_hex(16), 0)
        connection.execute(insert(remote_mark).values(remote=remote, machine=found.machine, confirmed=0))
    return found


def set_mark(connection: Connection, mark: Mark) -> None:
    """Store what a remote has confirmed, unless more is stored."""
    mine = (_m.remote == mark.remote, _m.confirmed < mark.confirmed)
    connection.execute(update(remote_mark).where(*mine).values(confirmed=mark.confirmed))


def read(connection: Connection, most: int, *, tombstones: bool = False) -> list[OutboxRow]:
    """Read the oldest rows, at most so many. tombstones: those alone."""
    found = select(_o.id, _o.session, _o.turn, _o.buried).order_by(_o.id).limit(most)
    rows = connection.execute(found.where(_o.buried.is_(True)) if tombstones else found)
    return [OutboxRow(row.id, row.session, row.turn, row.buried) for row in rows]


def remove(connection: Connection, ids: Sequence[int]) -> None:
    """Remove rows: the remote has what they are for."""
    for some in batches(ids):
        connection.execute(delete(outbox).where(_o.id.in_(some)))


def drop_waiting(connection: Connection, session_id: str) -> None:
    """Remove the turns of a session that wait; its tombstones stay."""
    connection.execute(delete(outbox).where(_o.session == session_id, _o.buried.is_(False)))


def waiting(connection: Connection) -> int:
    """Return about how many rows wait: no fewer than there are, without counting them."""
    first, last = connection.execute(_ENDS).one()
    return 0 if first is None else int(last - first + 1)


def oldest(connection: Connection) -> int | None:
    """Return when the oldest turn that waits was written, in us since 1970; None if no turn waits."""
    found = select(func.min(_t.created_at)).where(_t.id.in_(select(_o.turn).where(_o.buried.is_(False))))
    return connection.execute(found).scalar()


def waits(connection: Connection, turn_id: str) -> bool:
    """Return True if a turn is still to be sent."""
    return connection.execute(_WAITS, {"turn": turn_id}).first() is not None


def leaves_among(connection: Connection, names: Sequence[str]) -> list[str]:
    """Return those of these names that are turns of shared sessions which nothing follows on."""
    below = _t.id.not_in(select(_t.parent).where(_t.parent.is_not(None)))
    shared = select(_r.id).where(_r.standing.in_(("shared", "behind")))
    found: list[str] = []
    for some in batches(names):
        found += connection.scalars(select(_t.id).where(_t.id.in_(some), below, _t.session.in_(shared)))
    return found


def names_of(connection: Connection, *standings: Standing) -> set[str]:
    """Return the sessions that stand so to the remote."""
    return set(connection.scalars(select(_r.id).where(_r.standing.in_(standings))))
