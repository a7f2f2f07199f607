"""A snapshot of the store: the data that a request needs, read in one transaction."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, bindparam, literal, select

from ssmd.sessions.checkpoint import Scope, StoredCheckpoint, of_machine, prefix_keys
from ssmd.sessions.line import Line
from ssmd.sessions.match import Echo, continues
from ssmd.sessions.rows import replies, sessions, turns
from ssmd.sessions.rows.checkpoints import find
from ssmd.sessions.rows.conversations import Conversation, Entry, read_conversation, read_entries
from ssmd.sessions.rows.excerpts import read_answer, read_block
from ssmd.sessions.rows.paths import TurnPath
from ssmd.sessions.rows.schema import by, checkpoint, seen, turn_checkpoint
from ssmd.sessions.rows.schema import session as session_table
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.rows.turns import as_they_are, read_path, read_turn, turn_of
from ssmd.sessions.turn import EVERYBODY, Domain, SessionInfo, StoreError, Turn, UnknownSession, is_unicode
from ssmd.text.messages import Message

_MOST = 4096  # turns read at once
_t, _k = turn_table.c, checkpoint.c

_MAX_TRIED = 64  # stored conversations that are compared with a request
_MAX_FORKS = 1000  # forks with an inherited beginning that are searched, the last used ones first
_FEW, _MANY = 8, 500  # answers looked up at once, the last ones first: mostly the very last one matches
_LONG = re.compile("[0-9]{16}")


class Snapshot:
    """One view of the store: later writes and removals do not show in it.

    Methods raise StoreError for rows that are missing or invalid. SQLite's own errors become a StoreError at the end of
    `Store.snapshot`: catch it around that. domain: of the caller; rows that it does not see seem missing.
    """

    def __init__(self, connection: Connection, domain: Domain = EVERYBODY) -> None:
        self._connection = connection
        self._domain = domain

    def echoed(self, messages: Sequence[Message], session: str | None = None) -> EchoedTurn | None:
        """Find the stored conversation that a request continues. session: only in this session.

        Raises UnknownSession.
        """
        if session is not None:
            sessions.session_row(self._connection, session, self._domain)
        return read_echoed(self._connection, messages, session, self._domain)

    def info(self, session_id: str) -> SessionInfo:
        """Read a session's facts without its sizes, which may have to be counted. Raises UnknownSession."""
        return sessions.read_info(self._connection, session_id, self._domain)

    def heard(
        self, messages: Sequence[Message], turn: Turn
    ) -> tuple[Turn | None, int, Mapping[str, Sequence[Message]]]:
        """Read a request's copy of an altered turn that it echoes, as `read_heard`."""
        return read_heard(self._connection, messages, turn)

    def first(self, turn: Turn) -> Message:
        """Return the first message of a turn's conversation. Raises StoreError if it cannot be read."""
        root = turn if turn.parent is None else turns.read_turn(self._connection, turn.root)
        if not root.sound:
            raise StoreError(f"turn {root.id!r} was altered; see `ssmd session check`")
        return root.conversation[0]

    def above(self, turn: Turn) -> Turn | None:
        """Return the parent of a turn; None at the root, and if the reference to it was altered."""
        return turns.read_above(self._connection, turn)

    def turn(self, turn_id: str) -> Turn:
        """Read one turn. Raises UnknownSession."""
        return turns.read_turn(self._connection, turn_id)

    def said(self, turn_ids: Sequence[str]) -> Mapping[str, Sequence[Message]]:
        """Read only the messages of some turns, by id, each turn's answer last. Missing turns are left out."""
        return turns.read_said(self._connection, turn_ids)

    def block(self, turn_id: str, blocks: Mapping[str, Any], number: int) -> tuple[Message, ...]:
        """Read some messages of a long turn. blocks: of its facts."""
        return read_block(self._connection, turn_id, blocks, number)

    def answer(self, turn_id: str, blocks: Mapping[str, Any]) -> Message:
        """Read the answer of a long turn. blocks: of its facts."""
        return read_answer(self._connection, turn_id, blocks)

    def conversation(self, name: str) -> Conversation:
        """Read a conversation. Raises UnknownSession."""
        return read_conversation(self._connection, name, self._domain)

    def entries(self, one: Conversation, numbers: Sequence[int]) -> list[Entry]:
        """Read entries of a conversation, in the order of `numbers`. Those that do not exist are left out."""
        return read_entries(self._connection, one, numbers)

    def path(self, turn_id: str) -> list[Turn]:
        """Read the turns from the root to this one. Raises UnknownSession."""
        return turns.read_path(self._connection, turn_id)

    def places(self, turn_id: str) -> TurnPath:
        """Return the path from the root to a turn, whose turns are read as they are needed."""
        return TurnPath(self._connection, turn_id)

    def facts(self, turn_ids: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Return the facts that are kept with turns, by turn, for those that have some."""
        return replies.read_facts(self._connection, turn_ids)

    def receipt(self, turn_id: str) -> Mapping[str, Any] | None:
        """Return the facts of a request that was accepted and has no turn of this id yet; None without one."""
        return replies.read_receipt(self._connection, turn_id, self._domain)

    def is_leaf(self, turn_id: str) -> bool:
        """Return True if the turn is stored and no turn continues it."""
        return turns.is_leaf(self._connection, turn_id)

    def resume(
        self,
        scope: Scope,
        ids: Line,
        stem: str | None = None,
        session: str | None = None,
        *,
        skip: Collection[int] = (),
    ) -> tuple[StoredCheckpoint | None, Line, str | None]:
        """Find the deepest usable checkpoint for a prompt: its ids are a prefix of `ids` and leave one to be fed.

        Returns (checkpoint, line, stem): the line has all ids at hand that are to be fed, and they begin at the end of
        the turn `stem`. Without a checkpoint these are all ids. Other builds of the lineage and layout count too.
        Checkpoints of an import or of an unknown machine serve only the `session` that they came with. skip: ids of
        checkpoints to pass over, such as those that could not be loaded. Raises StoreError if stored ids that are
        needed were altered.
        """
        return resume(self._connection, scope, ids, stem, session, self._domain, skip)

    def lengthen(self, scope: Scope, found: StoredCheckpoint, ids: Line, cell: int) -> StoredCheckpoint:
        """Return a checkpoint with a longer one whose first rows serve too, as the function."""
        return lengthen(self._connection, scope, found, ids, cell, self._domain)

    def reach(self, ids: Line, stem: str | None, position: int) -> tuple[Line, str | None]:
        """Return the line with its ids from `position` on at hand, and the turn at whose end those begin (`resume`).

        Raises StoreError if stored ids that are needed were altered.
        """
        return reach(self._connection, ids, stem, position)


def _stems() -> Any:
    """Build the query for a turn and its chain of stems, at most `:most` turns, the deepest first."""
    first = select(_t.id, _t.stem, literal(1).label("n")).where(_t.id == bindparam("turn"))
    walk = first.cte("stems", recursive=True)
    walk = walk.union_all(
        select(_t.id, _t.stem, walk.c.n + 1).where(_t.id == walk.c.stem, walk.c.n < bindparam("most"))
    )
    return select(turn_table).join(walk, walk.c.id == _t.id).order_by(walk.c.n)


_STEMS = _stems()


def resume(
    connection: Connection,
    scope: Scope,
    ids: Line,
    stem: str | None,
    session: str | None,
    domain: Domain,
    skip: Collection[int],
) -> tuple[StoredCheckpoint | None, Line, str | None]:
    """Return (checkpoint, line, stem): the deepest checkpoint for a prompt, and the ids that are to be fed after it.

    stem: the turn at whose end the ids at hand begin; None at the beginning. Only stored ids that are to be fed are
    read. Without a checkpoint all ids are at hand. Raises StoreError if some of them were altered.
    """
    most = 1
    while True:
        found = find(connection, scope, ids, session, domain, skip)
        if found is not None or stem is None:
            return found, ids, stem
        ids, stem = _before(connection, ids, stem, most)
        most = min(4 * most, _MOST)


def reach(connection: Connection, ids: Line, stem: str | None, position: int) -> tuple[Line, str | None]:
    """Return (line, stem): the line with its ids from `position` on at hand; stem as in `resume`. Raises StoreError."""
    most = 1
    while stem is not None and ids.start > position:
        ids, stem = _before(connection, ids, stem, most)
        most = min(4 * most, _MOST)
    return ids, stem


_CHILDREN = 4  # checkpoints that are compared with a prompt beyond the deepest that fits
_LONGER = (
    select(_k.id, _k.position, _k.key)
    .where(
        *(_k.parent == bindparam("parent"), _k.position > bindparam("least")),
        _k.kind.in_(("system", "prefix", "user")),  # rows of a prompt: those of an answer were computed otherwise
        *(_k.build == bindparam("build"), _k.producer == bindparam("producer"), _k.origin == bindparam("origin")),
        seen(_k.owner),
    )
    .order_by(_k.last_used_at.desc(), _k.id.desc())
    .limit(_CHILDREN)
)
_ITS_TURN = (
    select(turn_table)
    .join(turn_checkpoint, turn_checkpoint.c.turn == _t.id)
    .where(turn_checkpoint.c.checkpoint == bindparam("checkpoint"), seen(_t.owner))
    .order_by(_t.seq)  # the first one: later ones may begin behind it
    .limit(1)
)


def lengthen(
    connection: Connection, scope: Scope, found: StoredCheckpoint, ids: Line, cell: int, domain: Domain
) -> StoredCheckpoint:
    """Return a checkpoint whose state is rows alone, with a longer one whose first rows serve the prompt too.

    Such rows end at a multiple of `cell`: up to there they have the bits of any prompt with these ids. The ids of a
    longer one are those of its turn, unless that was rendered again with others. Of those that grew from `found`, the
    _CHILDREN that were used last are compared.
    """
    at, last, origin = found.position, len(ids) - 1, found.origin or ""
    if found.seal is not None or (origin and not of_machine(origin)) or (last - at) < cell or at < ids.start:
        return found
    values = {"parent": found.id, "build": found.build, "producer": found.producer, "origin": origin}
    wanted, best = ids.since(at), found
    for row in connection.execute(_LONGER, {**values, "least": at + cell, **by(domain)}).all():
        with as_they_are(connection):
            turn_row = connection.execute(_ITS_TURN, {"checkpoint": row.id, **by(domain)}).one_or_none()
        turn = None if turn_row is None else turn_of(turn_row)
        if turn is None or not turn.sound or turn.lineage != scope.lineage:
            continue
        try:
            line = reach(connection, turn.ids, turn.stem, at)[0]
        except StoreError:  # ids above it were altered
            continue
        theirs = line.since(at)[: row.position - at]
        least = min(len(theirs), last - at)
        same = theirs[:least] == wanted[:least]
        end = at + (least if same.all() else int(same.argmin()))
        end -= end % cell
        if end > best.start and prefix_keys(scope.layout, scope.lineage, line, [row.position]) == [row.key]:
            best = replace(found, longer=(row.id, end))
    return best


def _before(connection: Connection, ids: Line, stem: str, most: int) -> tuple[Line, str | None]:
    """Return the line with the ids of up to `most` more stems at hand, and the stem before those."""
    with as_they_are(connection):
        rows = connection.execute(_STEMS, {"turn": stem, "most": most}).all()
    turns = [turn_of(row) for row in rows]
    if not turns:
        raise StoreError(f"there is no turn {stem!r} any more")
    start, before = ids.start, ids.before
    for turn in turns:
        if not turn.sound or len(turn.ids) != start or turn.ids.hash(start) != before:
            raise StoreError(f"the tokens of turn {turn.id!r} are not those that were written")
        start, before = turn.ids.start, turn.ids.before
    return ids.after([turn.ids for turn in reversed(turns)]), turns[-1].stem


@dataclass(frozen=True)
class EchoedTurn:
    """A stored turn that a request continues."""

    session: str
    turn: str
    length: int  # of its conversation, in messages
    stored: tuple[Message, ...] | None  # those messages; None if the request repeats them verbatim


def _queries() -> tuple[Any, Any]:
    """Build two queries: turns by `:chains` in their owners, best first; and those of `:turns` that forks inherited."""
    t, s = turn_table.c, session_table.c
    columns = select(t.id, t.seq, t.depth, t.root, t.length, t.chain, t.whole, s.id.label("session"), s.last_used_at)
    columns = columns.add_columns((s.head == t.id).label("is_head"), (s.imported != "").label("imported"))
    mine = seen(s.owner)
    chains: Any = bindparam("chains", expanding=True)
    order = (t.length.desc(), s.imported != "", s.last_used_at.desc(), (s.head == t.id).desc(), t.seq.desc())
    owned = columns.join(session_table, s.id == t.session).where(t.chain.in_(chains), seen(t.owner), mine)
    owned = owned.order_by(*order).limit(_MAX_TRIED)

    roots: Any = bindparam("roots", expanding=True)
    turns: Any = bindparam("turns", expanding=True)
    begun = select(s.id, s.base).where(s.root.in_(roots), mine)
    forks = begun.order_by(s.last_used_at.desc()).limit(_MAX_FORKS).subquery()
    ends = select(forks.c.base, t.id, t.parent, t.depth).join(forks, t.id == forks.c.base).distinct()
    walk = ends.cte("walk", recursive=True)  # once for all forks that begin at one turn, as far as needed
    walk = walk.union_all(
        select(walk.c.base, t.id, t.parent, t.depth).where(t.id == walk.c.parent, walk.c.depth > bindparam("least"))
    )
    inherited = columns.select_from(walk).join(turn_table, t.id == walk.c.id).join(forks, forks.c.base == walk.c.base)
    inherited = inherited.join(session_table, s.id == forks.c.id).where(t.id.in_(turns))
    return owned, inherited


_OWNED, _INHERITED = _queries()  # built once: putting a statement together takes longer than running it
_OF_ONE = _OWNED.where(session_table.c.id == bindparam("session"))
_ANYWHERE = select(turn_table.c.id, turn_table.c.depth, turn_table.c.root).where(
    turn_table.c.chain.in_(bindparam("chains", expanding=True))
)


def read_echoed(
    connection: Connection, messages: Sequence[Message], session: str | None, domain: Domain
) -> EchoedTurn | None:
    """Find the stored conversation that a request continues, among those that the domain sees.

    session: only in this session.
    """
    echo = Echo.of(messages)
    places = {chain.said: i for i, chain in enumerate(echo.chains)}
    for chains in _batches([chain.said for chain in echo.chains]):
        rows = [
            row
            for row in _rows(connection, chains, session, domain)
            if is_unicode(row.id)
            and is_unicode(row.session)
            and row.chain in places  # compared with the row, not only with the index
        ]
        # Only a few rows of equal chains differ from the echo, in reasoning that it changed.
        rows.sort(key=lambda r: (places[r.chain], not r.imported, _time(r), r.is_head, r.seq), reverse=True)
        for row in _verbatim_first(connection, rows, messages[: echo.lengths[places[rows[0].chain]]] if rows else ()):
            length = echo.lengths[places[row.chain]]
            if echo.chains[places[row.chain]].whole == row.whole:
                return EchoedTurn(row.session, row.id, length, None)
            path = read_path(connection, row.id)
            stored = tuple(m for turn in path for m in turn.conversation)
            if len(stored) != length or not all(turn.sound for turn in path):  # the chain proves the messages
                return EchoedTurn(row.session, row.id, length, tuple(messages[:length]))
            if continues(messages, stored):
                return EchoedTurn(row.session, row.id, length, stored)
    return None


def _verbatim_first(connection: Connection, rows: list[Any], said: Sequence[Message]) -> list[Any]:
    """Move rows to the front whose calls have the echo's arguments verbatim, among those with the first row's chain.

    Numbers of more digits than a double holds may have one chain though they differ.
    """
    alike = list(dict.fromkeys(row.id for row in rows if row.chain == rows[0].chain))
    asked = [call.arguments for m in said for call in m.tool_calls]
    if len(alike) < 2 or not any(map(_LONG.search, asked)):
        return rows
    for name in alike[:_FEW]:
        stored = [c.arguments for turn in read_path(connection, name) for m in turn.conversation for c in m.tool_calls]
        if stored == asked:
            return sorted(rows, key=lambda row: row.id != name)
    return rows


def read_heard(
    connection: Connection, messages: Sequence[Message], turn: Turn
) -> tuple[Turn | None, int, dict[str, Sequence[Message]]]:
    """Read a request's copy of an altered turn that it echoes, and of altered turns above: (turn, length, heard).

    heard: messages by turn id, ancestors first. If the messages cannot be assigned to turns, the turn returned is the
    first sound one above, and `heard` is empty; None if the request does not echo that one. length: messages of the
    returned turn's conversation.
    """
    echo = Echo.of(messages)
    lengths = {chain.said: length for chain, length in zip(echo.chains, echo.lengths, strict=True)}
    altered: dict[str, int] = {}
    at: Turn | None = turn
    while at is not None and (not at.sound or lengths.get(at.chain.said) != at.length):
        if at.sound or at.id in altered:  # the reference to a parent was altered
            return None, 0, {}
        altered[at.id] = lengths.get(at.chain.said, -1)
        try:
            at = None if at.parent is None else read_turn(connection, at.parent)
        except UnknownSession:
            return None, 0, {}
    end = first = 0 if at is None else at.length
    heard: dict[str, Sequence[Message]] = {}
    for name in reversed(altered):
        if altered[name] <= end:
            return at, first, {}
        heard[name] = messages[end : altered[name]]
        end = altered[name]
    return turn, end, heard


def _batches(chains: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Yield batches of chains, the last ones first."""
    end, most = len(chains), _FEW
    while end > 0:
        yield list(chains[max(0, end - most) : end])
        end, most = end - most, _MANY


def _rows(connection: Connection, chains: list[bytes], session: str | None, domain: Domain) -> list[Any]:
    with as_they_are(connection):
        given: dict[str, Any] = {"chains": chains} | by(domain)
        if session is None:
            owned = list(connection.execute(_OWNED, given))
            found: Sequence[Any] = owned
        else:
            owned = list(connection.execute(_OF_ONE, given | {"session": session}))
            found = connection.execute(_ANYWHERE, {"chains": chains}).all()
        if not found:
            return owned
        given = by(domain) | {
            "turns": [r.id for r in found],
            "roots": list({r.root for r in found if is_unicode(r.root)}),
        }
        given["least"] = min(r.depth if isinstance(r.depth, int) else 0 for r in found)
        inherited = connection.execute(_INHERITED, given).all()
    return owned + [row for row in inherited if session in (None, row.session)]


def _time(row: Any) -> int:
    return row.last_used_at if isinstance(row.last_used_at, int) else 0
