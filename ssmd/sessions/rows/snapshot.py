"""The store at one moment: what a request has to know of it, read in one transaction."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import Connection

from ssmd.sessions.checkpoint import Found, Scope
from ssmd.sessions.domain import EVERYBODY, Domain
from ssmd.sessions.line import Line
from ssmd.sessions.rows import echoes, lines, sessions, turns
from ssmd.sessions.rows.echoes import Echoed
from ssmd.sessions.turn import SessionInfo, StoreError, Turn
from ssmd.text.messages import Message


class Snapshot:
    """All that is read of one snapshot belongs together: what others write or remove meanwhile is not seen.

    Methods raise StoreError for rows that are not there or make no sense. What the database itself refuses becomes one
    where `Store.snapshot` ends: catch it around that. domain: who looks; what that does not see is not there.
    """

    def __init__(self, connection: Connection, domain: Domain = EVERYBODY) -> None:
        self._connection = connection
        self._domain = domain

    def echoed(self, messages: Sequence[Message], session: str | None = None) -> Echoed | None:
        """The stored conversation that a request continues; with a `session` only one of that session's.

        Raises UnknownSession.
        """
        if session is not None:
            sessions.session_row(self._connection, session, self._domain)
        return echoes.read_echoed(self._connection, messages, session, self._domain)

    def info(self, session_id: str) -> SessionInfo:
        """What a session is, without its sizes, which may have to be counted. Raises UnknownSession."""
        return sessions.read_info(self._connection, session_id, self._domain)

    def heard(
        self, messages: Sequence[Message], turn: Turn
    ) -> tuple[Turn | None, int, Mapping[str, Sequence[Message]]]:
        """What a request says of an altered turn that it echoes: as echoes.read_heard."""
        return echoes.read_heard(self._connection, messages, turn)

    def first(self, turn: Turn) -> Message:
        """The first message of a turn's conversation. Raises StoreError if it cannot be read."""
        root = turn if turn.parent is None else turns.read_turn(self._connection, turn.root)
        if not root.sound:
            raise StoreError(f"turn {root.id!r} was altered; see `ssmd session check`")
        return root.conversation[0]

    def above(self, turn: Turn) -> Turn | None:
        """The turn above one; None at the root, and where what says which it is was altered."""
        return turns.read_above(self._connection, turn)

    def turn(self, turn_id: str) -> Turn:
        """One turn. Raises UnknownSession."""
        return turns.read_turn(self._connection, turn_id)

    def path(self, turn_id: str) -> list[Turn]:
        """The turns from the root to this one. Raises UnknownSession."""
        return turns.read_path(self._connection, turn_id)

    def is_leaf(self, turn_id: str) -> bool:
        """Whether the turn is stored and nothing continues it."""
        return turns.is_leaf(self._connection, turn_id)

    def resume(
        self,
        scope: Scope,
        ids: Line,
        stem: str | None = None,
        session: str | None = None,
        *,
        skip: Collection[int] = (),
    ) -> tuple[Found | None, Line, str | None]:
        """The deepest usable checkpoint for a prompt: its ids are a beginning of `ids` and leave one to be fed.

        With it come the line with all ids that are to be fed after it, and the turn at which those begin; without one,
        all ids. Other builds of the lineage and layout count too. Imported checkpoints serve `session` only if they
        came with it. skip: ids of checkpoints to pass over, as those that could not be loaded. Raises StoreError if
        stored ids that are needed were altered.
        """
        return lines.resume(self._connection, scope, ids, stem, session, self._domain, skip)

    def reach(self, ids: Line, stem: str | None, position: int) -> tuple[Line, str | None]:
        """The same line with its ids from `position` on at hand, and the turn at which those begin, as by `resume`.

        Raises StoreError if stored ids that are needed were altered.
        """
        return lines.reach(self._connection, ids, stem, position)
