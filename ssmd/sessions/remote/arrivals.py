"""Turns that come from a remote: a path of them is read, checked, and written into the store in one transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby

from sqlalchemy import Connection, select, update

from ssmd.sessions.match import Chain
from ssmd.sessions.remote.body import TurnBody, moment, new_turn, read_body
from ssmd.sessions.remote.remote import InvalidTurn, Remote, TurnPlace
from ssmd.sessions.rows import outbox, sessions
from ssmd.sessions.rows import turns as turn_rows
from ssmd.sessions.rows.schema import session as session_table
from ssmd.sessions.rows.schema import turn
from ssmd.sessions.rows.turns import read_turn, taken, to_micros
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Domain, NewTurn, SessionInfo, UnknownSession

MAX_PATH = 10_000  # turns that are fetched at once
MAX_PATH_BYTES = 256 << 20
_s = session_table.c
Arrival = tuple[str, TurnBody]  # the session that the turn belongs to here, and the turn


def fetch_path(store: Store, remote: Remote, place: TurnPlace) -> list[Arrival] | None:
    """Fetch the turns of a path that are not here, root first; None if the remote has not all of them.

    A turn whose session was removed belongs to the session that goes on from it. Raises RemoteError, InvalidTurn.
    """
    found: list[Arrival] = []
    seen: set[str] = set()
    nbytes = 0
    at: TurnPlace | None = place
    while at is not None:
        with store.reading() as connection:
            if _is_here(connection, at.turn):
                break
        if at.turn in seen or len(seen) == MAX_PATH:
            raise InvalidTurn(f"turn {place.turn!r} of the remote has no beginning")
        seen.add(at.turn)
        raw, session = remote.fetch(at), at.session
        if raw is None and found:
            session = found[-1][0]
            raw = remote.fetch(TurnPlace(session, at.turn))
        if raw is None:
            return None
        nbytes += len(raw)
        if nbytes > MAX_PATH_BYTES:
            raise InvalidTurn(f"the path of turn {place.turn!r} of the remote has more than {MAX_PATH_BYTES} bytes")
        body = read_body(raw, TurnPlace(session, at.turn))
        found.append((session, body))
        parent = body.turn.parent
        at = None if parent is None else TurnPlace(body.above or session, parent)
    return found[::-1]


def _is_here(connection: Connection, turn_id: str) -> bool:
    return connection.execute(select(turn.c.id).where(turn.c.id == turn_id)).first() is not None


def receive(store: Store, domain: Domain, path: Sequence[Arrival], vocabularies: Mapping[str, int]) -> list[str]:
    """Write fetched turns. Returns the ids of those that were not here.

    vocabularies: sizes by lineage; ids of other lineages are not taken. Nothing is written unless all of the path is
    valid. Raises InvalidTurn, StoreError.
    """
    known: dict[str, tuple[NewTurn, Chain]] = {}
    written: list[str] = []
    with store.writing() as connection:

        def above(turn_id: str | None, of: str) -> tuple[NewTurn | None, Chain]:
            if turn_id is None:
                return None, Chain()
            if turn_id not in known:
                try:
                    stored = read_turn(connection, turn_id)
                except UnknownSession as err:
                    raise InvalidTurn(f"turn {of!r} of the remote has a parent that is not there") from err
                if not stored.sound:
                    raise InvalidTurn(f"turn {turn_id!r} was altered here; see `ssmd session check`")
                known[turn_id] = stored, stored.chain
            return known[turn_id]

        for session, some in groupby(path, key=lambda one: one[0]):
            turns: list[NewTurn] = []
            bodies = [body for _, body in some]
            if len({(body.session.owner, moment(body.session.clock)) for body in bodies}) > 1:
                raise InvalidTurn(f"the turns of session {session!r} in the remote disagree on its key or its clock")
            for body in bodies:
                if _is_here(connection, body.turn.id):  # it came meanwhile
                    continue
                parent, chain = above(body.turn.parent, body.turn.id)
                stem, _ = above(body.turn.stem, body.turn.id)
                new = new_turn(body, session, parent, stem, vocabularies)
                chain = chain.then(new.conversation, parent.answer.tool_calls if parent is not None else ())
                if chain.said.hex() != body.chain:
                    raise InvalidTurn(f"turn {new.id!r} of the remote is not what its chain says: it was altered")
                known[new.id] = new, chain
                turns.append(new)
            if turns:
                _write(connection, domain, session, bodies[-1], turns)
                written += [one.id for one in turns]
        turn_rows.bound_text(connection, store.quota)
    return written


def _write(connection: Connection, domain: Domain, session: str, body: TurnBody, turns: Sequence[NewTurn]) -> None:
    """Write turns of one session, each after its parent, and the session if it is new."""
    owner = body.session.owner
    if not domain.has(owner):
        raise InvalidTurn(f"session {session!r} of the remote is of another key")
    now = outbox.standing(connection, session)
    if now in ("buried", "local"):
        raise InvalidTurn(f"session {session!r} of the remote is {now} here")
    there = connection.execute(select(_s.owner, _s.imported, _s.head, _s.turns).where(_s.id == session)).one_or_none()
    if there is None:
        if taken(connection, session, []):
            raise InvalidTurn(f"session {session!r} of the remote has the id of an import here")
        _insert_session(connection, session, body, turns)
    elif there.owner != owner or there.imported:
        raise InvalidTurn(f"session {session!r} of the remote is another one here")
    else:
        ahead = turns[0].parent == there.head  # else another branch is the current one here
        values = {"turns": there.turns + len(turns)} | ({"head": turns[-1].id} if ahead else {})
        connection.execute(update(session_table).where(_s.id == session).values(values))
    turn_rows.insert_turns(connection, turns, body.session.lineage, owner)
    if now is None:
        outbox.set_standing(connection, session, "shared")


def _insert_session(connection: Connection, session: str, body: TurnBody, turns: Sequence[NewTurn]) -> None:
    said = body.session
    info = SessionInfo(
        session, said.model, said.lineage, moment(said.clock), owner=said.owner, title=said.title or None
    )
    sessions.insert_session(connection, turns, info, head=turns[-1].id, now=to_micros(datetime.now(UTC)))
    parent = turns[0].parent
    if parent is not None:  # a fork: it begins with turns of another session
        above = read_turn(connection, parent)
        count = above.depth + 1 + len(turns)
        base = update(session_table).where(_s.id == session)
        connection.execute(base.values(base=parent, root=above.root, turns=count))
