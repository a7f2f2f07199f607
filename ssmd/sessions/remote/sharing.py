"""Sharing of whole sessions: sent to a remote, fetched from it, or kept on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import func, select

from ssmd.sessions.remote.arrivals import fetch_path, receive
from ssmd.sessions.remote.body import read_body
from ssmd.sessions.remote.folder import FolderRemote
from ssmd.sessions.remote.postgres.address import is_address
from ssmd.sessions.remote.remote import InvalidTurn, Remote, RemoteError, TurnPlace, UnknownVersion
from ssmd.sessions.rows import outbox, tree
from ssmd.sessions.rows.schema import turn
from ssmd.sessions.rows.warm import WARM
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError, check_id


def open_remote(store: Store, setting: str) -> Remote:
    """Open the remote of the settings: a folder, or a database. Raises RemoteError.

    An empty one is made a remote if this store has shared nothing yet. Later it is one that is not mounted.
    """
    with store.reading() as connection:
        first = not outbox.names_of(connection, "shared", "behind")
    return open_at(setting, create=first)


def open_at(setting: str, *, create: bool) -> Remote:
    """Open the remote at a place. create: make an empty folder or database one. Raises RemoteError."""
    if is_address(setting):
        from ssmd.sessions.remote.postgres.postgres import PostgresRemote

        return PostgresRemote.open(setting, create=create)
    folder = Path(setting)
    if create and not folder.exists():
        raise RemoteError(
            f"there is no folder {folder}: make it with `mkdir -m 700 {folder}`, or mount it", lasting=True
        )
    return FolderRemote.open(folder, create=create)


@dataclass(frozen=True)
class Shareable:
    """A session that can be sent: its turns, and the bytes of their text and ids."""

    session: str
    turns: int
    nbytes: int


def shareable(store: Store, ids: Sequence[str] | None) -> list[Shareable]:
    """List the sessions that can be sent. ids: of these; None: of all but local ones. Warm beginnings are left out.

    Raises StoreError if one of `ids` is imported.
    """
    found = []
    for session in store.sessions() if ids is None else [store.session(one) for one in ids]:
        if session.info.imported is not None:
            if ids is not None:
                raise StoreError(f"session {session.id!r} was imported, and such sessions are not sent")
            continue
        with store.reading() as connection:
            if ids is None and outbox.standing(connection, session.id) == "local":
                continue
            size = select(func.count(), func.coalesce(func.sum(turn.c.nbytes), 0))
            size = size.where(tree.belongs(session.id), turn.c.finish != WARM)
            turns, nbytes = connection.execute(size).one()
        if not turns:  # a warm beginning
            continue
        found.append(Shareable(session.id, int(turns), int(nbytes)))
    return found


def share(store: Store, session: str) -> int:
    """Put all turns of a session into the outbox; later ones follow by themselves. Returns how many."""
    with store.writing() as connection:
        store.session_in(connection, session)
        return outbox.add_all(connection, session)


def discard_altered(store: Store, remote: Remote, session: str) -> int:
    """Remove the turns of a session from the remote that are altered there, and stored here. Returns how many.

    `publish` knows a damaged turn by its digest; a user of the remote can alter both, and then the signature is wrong.
    Raises RemoteError, StoreError.
    """
    here = {one.id for one in store.turns(session)}
    altered = list[TurnPlace]()
    for name in here.intersection(remote.turns(session)):
        place = TurnPlace(session, name)
        try:
            if (raw := remote.fetch(place)) is not None:
                read_body(raw, place)
        except UnknownVersion:
            continue
        except InvalidTurn:
            altered.append(place)
    for place in altered:
        remote.discard(place)
    return len(altered)


def keep_local(store: Store, session: str) -> None:
    """Send no turn of a session from now on."""
    with store.writing() as connection:
        store.session_in(connection, session)
        outbox.set_standing(connection, session, "local")
        outbox.drop_waiting(connection, session)


def pull_session(store: Store, remote: Remote, session: str, vocabularies: Mapping[str, int]) -> int:
    """Fetch the turns of a session that are not here, branches included. Returns how many were written.

    Raises RemoteError, InvalidTurn; StoreError if the remote has no such session.
    """
    check_id("session", session)
    names = remote.turns(session)
    if not names:
        raise StoreError(f"the remote has no session {session!r}: it was removed, or never sent")
    written, refused = 0, list[InvalidTurn]()
    for name in sorted(names):
        try:
            path = fetch_path(store, remote, TurnPlace(session, name))
            if path is None:
                raise InvalidTurn(f"the remote has not all turns above {name!r}")
            if path:
                written += len(receive(store, store.domain, path, vocabularies))
        except InvalidTurn as err:
            refused.append(err)
    if refused:
        raise InvalidTurn(f"{len(refused)} of {len(names)} turns were not taken, {written} were: {refused[0]}")
    return written
