"""The store at one moment: what a request has to know of it, read in one transaction."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Connection

from ssmd.sessions.checkpoint import Found, Ids, Scope, as_ids
from ssmd.sessions.match import Conversation
from ssmd.sessions.rows import checkpoints, sessions, turns
from ssmd.sessions.turn import SessionInfo, Turn
from ssmd.text.messages import Message


class Snapshot:
    """All that is read of one snapshot belongs together: what others write or remove meanwhile is not seen.

    Methods raise StoreError for rows that are not there or make no sense. What the database itself refuses becomes one
    where `Store.snapshot` ends: catch it around that.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def candidates(self, messages: Sequence[Message], session: str | None = None) -> list[Conversation]:
        """What match.match needs to know of the store for a request. Raises UnknownSession."""
        if session is not None:
            sessions.session_row(self._connection, session)
        return turns.read_echoed(self._connection, messages, session)

    def info(self, session_id: str) -> SessionInfo:
        """What a session is, without its sizes, which may have to be counted. Raises UnknownSession."""
        return sessions.read_info(self._connection, session_id)

    def path(self, turn_id: str) -> list[Turn]:
        """The turns from the root to this one. Raises UnknownSession."""
        return turns.read_path(self._connection, turn_id)

    def is_leaf(self, turn_id: str) -> bool:
        """Whether the turn is stored and nothing continues it."""
        return turns.is_leaf(self._connection, turn_id)

    def find(
        self, scope: Scope, ids: Sequence[int] | Ids, session: str | None = None, *, skip: Collection[int] = ()
    ) -> Found | None:
        """The deepest usable checkpoint for a prompt: its ids are a beginning of `ids` and leave one to be fed.

        Other builds of the lineage and layout count too. Imported checkpoints serve `session` only if they came with
        it. skip: ids of checkpoints to pass over, as those that could not be loaded.
        """
        return checkpoints.find(self._connection, scope, as_ids(ids), session, skip)
